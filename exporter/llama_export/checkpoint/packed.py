"""Holds packed integer tensors of a checkpoint against their scheme, and names what they become.

Shape letters: V out, H in, G groups of a row, P codes in an int32.

    gptq            qweight [H/P, V]        qzeros [G, V/P]             scales [G, V]       g_idx [H]
    awq             qweight [H, V/P]        qzeros [G, V/P]             scales [G, V]
    pack-quantized  weight_packed [V, H/P]  weight_zero_point [V/P, G]  weight_scale [V, G] weight_g_idx [H]
                    weight_shape [2]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from llama_artifacts.errors import CheckpointError
from llama_export.checkpoint.config import LlamaConfig
from llama_export.checkpoint.layout import (
    BLOCK,
    EIGHT_BITS,
    PACKED,
    Codes,
    linear_shapes,
    siblings,
)
from llama_export.checkpoint.schemes import PackedScheme
from llama_export.checkpoint.source import TensorInfo

CODES, ZEROS, SCALES, GROUPS, SHAPE = "codes", "zeros", "scales", "groups", "shape"
NAMES = {
    "gptq": {CODES: "qweight", ZEROS: "qzeros", SCALES: "scales", GROUPS: "g_idx"},
    "awq": {CODES: "qweight", ZEROS: "qzeros", SCALES: "scales"},
    "pack-quantized": {
        CODES: "weight_packed",
        ZEROS: "weight_zero_point",
        SCALES: "weight_scale",
        GROUPS: "weight_g_idx",
        SHAPE: "weight_shape",
    },
}
"""How the parts of a weight are called, after the name of its module."""

_DTYPES = {
    CODES: ("i32",),
    ZEROS: ("i32",),
    SCALES: ("f16", "bf16"),
    GROUPS: ("i32", "i64"),
    SHAPE: ("i32", "i64"),
}


@dataclass(frozen=True)
class Packed:
    """One weight that is stored packed.

    Attributes:
        scheme: of the checkpoint.
        codes: how it is kept in a bundle.
        names: the checkpoint's tensors that it is made of, by part.
    """

    scheme: PackedScheme
    codes: Codes
    names: Mapping[str, str]

    @property
    def is_ordered(self) -> bool:
        """Whether its columns are stored in another order than the input's features."""
        return self.scheme.is_ordered and self.codes.group_size is not None


def check_packed(
    scheme: PackedScheme,
    config: LlamaConfig,
    tensors: Mapping[str, TensorInfo],
    *,
    where: object,
) -> dict[str, Packed]:
    """Finds the parts of every weight that the scheme covers, by module.

    Of siblings in activation order, the first has the order of all of them.

    Raises:
        CheckpointError: names the tensor that is missing, or whose dtype, shape or place is not
            what the scheme says.
    """
    found: dict[str, Packed] = {}
    for module, shape in linear_shapes(config).items():
        if not _is_packed(scheme, module, tensors, where=where):
            continue
        names = _names(scheme, module, tensors, where=where)
        infos = {part: tensors[name] for part, name in names.items()}
        codes = _codes(scheme, shape, infos, name=names[CODES], where=where)
        for part, expected in _shapes(scheme, shape, codes).items():
            if part in names:
                _check(names[part], infos[part], _DTYPES[part], expected, where=where)
        has_order = scheme.is_ordered and not any(name in found for name in siblings(module))
        codes = replace(codes, has_order=has_order and codes.group_size is not None)
        found[module] = Packed(scheme, codes, names)
    return found


def packed_codes(scheme: PackedScheme, width: int, scale_dtype: str) -> Codes:
    """How a matrix of rows of that width becomes codes; scales with minima are f32, which holds both."""
    size = scheme.group_size
    has_groups = size is not None and size < width
    return Codes(
        PACKED if scheme.bits == 4 else EIGHT_BITS,
        size if has_groups else None,
        scale_dtype=scale_dtype if scheme.is_symmetric else "f32",
        has_min=not scheme.is_symmetric,
    )


def _is_packed(
    scheme: PackedScheme, module: str, tensors: Mapping[str, TensorInfo], *, where: object
) -> bool:
    plain, name = f"{module}.weight", f"{module}.{NAMES[scheme.form][CODES]}"
    is_stored, is_plain = name in tensors, plain in tensors
    if is_stored and is_plain:
        raise _error(plain, f"stored a second time, beside {name}", where)
    if scheme.covers(module):
        if is_plain:
            message = f"stored as {tensors[plain].dtype}, but quantization_config targets it"
            raise _error(plain, message, where)
        return True
    if is_stored:
        raise _error(name, "stored packed, but quantization_config leaves it out", where)
    return False


def _names(
    scheme: PackedScheme, module: str, tensors: Mapping[str, TensorInfo], *, where: object
) -> dict[str, str]:
    names = NAMES[scheme.form]
    optional = {GROUPS} if not scheme.is_ordered else set()
    if scheme.form == "pack-quantized" and scheme.is_symmetric:
        names = {part: name for part, name in names.items() if part != ZEROS}
    found = {part: f"{module}.{name}" for part, name in names.items()}
    for part, name in found.items():
        if name not in tensors and part not in optional:
            raise _error(name, f"missing, but quantization_config says {scheme.title}", where)
    return {part: name for part, name in found.items() if name in tensors}


def _codes(
    scheme: PackedScheme,
    shape: tuple[int, ...],
    infos: Mapping[str, TensorInfo],
    *,
    name: str,
    where: object,
) -> Codes:
    num_out, width = shape
    size = width if scheme.group_size is None else scheme.group_size
    if width % size:
        message = f"expected a width that groups of {size} divide, got {width}"
        raise _error(name, message, where)
    if width % BLOCK or size % BLOCK:
        message = f"expected groups that blocks of {BLOCK} codes divide, got groups of {size}"
        raise _error(name, f"{message} in rows of {width}", where)
    if scheme.form != "pack-quantized" and num_out % (32 // scheme.bits):
        message = f"expected rows that fill int32 of {32 // scheme.bits} codes, got {num_out}"
        raise _error(name, message, where)
    return packed_codes(scheme, width, infos[SCALES].dtype)


def _shapes(
    scheme: PackedScheme, shape: tuple[int, ...], codes: Codes
) -> dict[str, tuple[int, ...]]:
    (num_out, width), num_codes = shape, 32 // scheme.bits
    num_groups = codes.factor_shape(shape)[1]
    shapes: dict[str, tuple[int, ...]] = {GROUPS: (width,), SHAPE: (2,)}
    if scheme.form == "pack-quantized":
        shapes[CODES], shapes[SCALES] = (num_out, width // num_codes), (num_out, num_groups)
        shapes[ZEROS] = (-(-num_out // num_codes), num_groups)
        return shapes
    shapes[ZEROS], shapes[SCALES] = (num_groups, num_out // num_codes), (num_groups, num_out)
    shapes[CODES] = (width // num_codes, num_out)
    if scheme.form == "awq":
        shapes[CODES] = (width, num_out // num_codes)
    return shapes


def _check(
    name: str,
    info: TensorInfo,
    dtypes: tuple[str, ...],
    shape: tuple[int, ...],
    *,
    where: object,
) -> None:
    if info.dtype not in dtypes:
        message = f"expected dtype {' or '.join(dtypes)}, got {info.dtype}"
        raise _error(name, message, where)
    if info.shape != shape:
        raise _error(name, f"expected shape {list(shape)}, got {list(info.shape)}", where)


def _error(name: str, message: str, where: object) -> CheckpointError:
    return CheckpointError(message, where=f"{where}#{name}")
