"""The bundle's weights: a file in an order that programs can bind without copies, or the checkpoint's."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llama_artifacts.digests import hashing
from llama_artifacts.dtypes import from_name
from llama_artifacts.errors import BuildError, ChoiceError
from llama_artifacts.manifest import VECTORS_SUFFIX, WEIGHTS_NAME, File, Quantized
from llama_export.checkpoint.layout import (
    E4M3,
    EIGHT_BITS,
    FACTORS,
    ORDER,
    PACKED,
    coded_modules,
)
from llama_export.checkpoint.source import Checkpoint, Stored, TensorInfo
from llama_export.model.llama import INV_FREQ
from llama_export.model.rope import inverse_frequencies
from llama_export.quantize import codes_of, quantize, quantized_tensors
from llama_export.trace import torch_dtype

if TYPE_CHECKING:
    import torch

ALIGNMENT = 64
"""Every tensor whose size is a multiple of this many bytes starts at a multiple of it."""

_LARGE_PAGE = 1 << 21

# Weights that a step reads together lie together, then their scales and minima.
_LAYER_ORDER = (
    ("input_layernorm",),
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("post_attention_layernorm",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
_PLACES = {
    module: (group, place)
    for group, modules in enumerate(_LAYER_ORDER)
    for place, module in enumerate(modules)
}
_PARTS = {ending: place for place, ending in enumerate((*FACTORS, ORDER), 1)}
"""Where what belongs to codes comes after the weights of their group."""
_FICLONE = 0x40049409
"""Of ioctl_ficlone(2): the files share their blocks until one of them is written to."""
_MAX_F16 = 65504.0
_NAN_CODE = 0x7F
"""Of E4M3, without its sign."""


@dataclass(frozen=True)
class Extent:
    """Where a tensor's bytes are: in which file, from which byte, how many."""

    file: str
    start: int
    num_bytes: int


@dataclass(frozen=True)
class WeightsPlan:
    """Which tensors the weights are, and where.

    Attributes:
        tensors: dtype and shape by name, in the order of the bundle's own file.
        extents: where each of them is.
        header: the own file's first bytes, up to the data.
        num_bytes: size of the whole own file.
        stored: the checkpoint's files that are used as they are, by name.
        quantized: what is made of the matrices.
    """

    tensors: Mapping[str, TensorInfo]
    extents: Mapping[str, Extent]
    header: bytes
    num_bytes: int
    stored: Mapping[str, Path]
    quantized: Quantized | None = None


def plan_weights(
    checkpoint: Checkpoint,
    *,
    compute: str,
    keeps_stored: bool,
    in_place: bool = False,
    quantized: Quantized | None = None,
) -> WeightsPlan:
    """Lays out the weights of a checkpoint.

    Args:
        checkpoint: opened by header.
        compute: the compute dtype, which quantised tensors take.
        keeps_stored: a tensor that is stored unquantised keeps its dtype; else all take `compute`.
            Codes and what belongs to them stay as they are in any case.
        in_place: use tensors where they are; the own file holds only what is computed.
        quantized: what to make of the matrices; not with `in_place`.

    Raises:
        ChoiceError: `in_place`, but the weights have to be converted; or a matrix cannot be
            quantised so.
    """
    kept = ("f32", "f16", "bf16") if keeps_stored else ()
    codes = {f"{module}.weight" for module in coded_modules(checkpoint.tensors)}
    tensors = {
        name: info
        if info.dtype in kept or name in codes or name.endswith((*FACTORS, ORDER))
        else TensorInfo(compute, info.shape)
        for name, info in checkpoint.tensors.items()
    }
    if quantized is not None:
        tensors = quantized_tensors(tensors, quantized)
    stored = _used_in_place(checkpoint, tensors) if in_place else {}
    tensors[INV_FREQ] = TensorInfo("f32", (checkpoint.config.head_dim // 2,))
    ordered = dict(sorted(tensors.items(), key=lambda item: _sort_key(*item)))
    own = {name: info for name, info in ordered.items() if name not in stored}
    sizes = {name: _num_bytes(info) for name, info in own.items()}
    header, start = _header(own, sizes)
    extents, end = {}, start
    for name, size in sizes.items():
        extents[name] = Extent(WEIGHTS_NAME, end, size)
        end += size
    for name, entry in stored.items():
        place = entry.tensor
        extents[name] = Extent(entry.path.name, place.start, place.end - place.start)
    files = {entry.path.name: entry.path for entry in stored.values()}
    return WeightsPlan(ordered, extents, header, end, files, quantized)


def _used_in_place(checkpoint: Checkpoint, tensors: Mapping[str, TensorInfo]) -> dict[str, Stored]:
    """The tensors that are stored as they will be bound.

    Few others are left: scales that are spread over rows, an embedding under the head's name.
    """
    stored: dict[str, Stored] = {}
    for name, info in tensors.items():
        entry = checkpoint.stored(name)
        is_packed = entry is None and info.dtype in (EIGHT_BITS, PACKED)
        is_stored = info.dtype == checkpoint.tensors[name].dtype and not is_packed
        if not is_stored or checkpoint.source.kind == "gguf":
            how = "packed into int32" if is_packed else f"as {checkpoint.tensors[name].dtype}"
            raise ChoiceError(
                f"`{name}` is stored {how} and has to be converted",
                hint="only --weights copy converts; or take a safetensors checkpoint without --dtype",
            )
        if entry is not None:
            stored[name] = entry
    for file in {entry.path.name for entry in stored.values()}:
        if file == WEIGHTS_NAME or file.endswith(VECTORS_SUFFIX):
            raise ChoiceError(
                f"the checkpoint's file `{file}` has the name of a file of the bundle",
                hint="use --weights copy, or rename it",
            )
    return stored


def write_weights(
    path: Path, plan: WeightsPlan, checkpoint: Checkpoint, *, advance: Callable[[int], None]
) -> File:
    """Writes the bundle's own file, one tensor in memory at a time.

    Returns:
        Its size and digests, which are computed on the way.

    Raises:
        BuildError: a value does not fit float16, or an FP8 weight holds NaN.
    """
    with _in_large_pages(path) as write_on, hashing() as hasher:

        def write(data: bytes) -> None:
            write_on(data)
            hasher.update(data)

        write(plan.header)
        values = _Values(plan, checkpoint)
        for name, info in plan.tensors.items():
            if plan.extents[name].file != WEIGHTS_NAME:
                continue
            tensor = values.read(name)
            converted = tensor.to(torch_dtype(info.dtype)).contiguous()
            if info.dtype == "f16" and tensor.dtype != converted.dtype:
                _check_f16(name, tensor)
            if info.dtype == E4M3:
                _check_codes(name, converted)
            write(converted.reshape(-1).view(torch_dtype("u8")).numpy().tobytes())
            advance(plan.extents[name].num_bytes)
        return hasher.file()


@contextlib.contextmanager
def _in_large_pages(path: Path) -> Iterator[Callable[[bytes], None]]:
    """Writes a new file in steps of a large page of memory (2 MiB).

    Linux keeps what is written so in large pages, and maps those whole for whoever loads the file:
    reading weights is up to a fifth faster than in pages of 4 KiB.
    """
    kept = bytearray()
    with path.open("xb", buffering=0) as file:

        def write(data: bytes) -> None:
            view = memoryview(data)
            while view:
                room = _LARGE_PAGE - len(kept)
                kept.extend(view[:room])
                view = view[room:]
                if len(kept) == _LARGE_PAGE:
                    _write_all(file, bytes(kept))
                    kept.clear()

        yield write
        _write_all(file, bytes(kept))


def _write_all(file: io.FileIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def check_stored(plan: WeightsPlan, checkpoint: Checkpoint) -> None:
    """Looks through FP8 weights that are used where they are.

    Raises:
        BuildError: one holds NaN.
    """
    for name, info in plan.tensors.items():
        if info.dtype == E4M3 and plan.extents[name].file != WEIGHTS_NAME:
            _check_codes(name, checkpoint.read(name))


def link_file(source: Path, target: Path) -> None:
    """Makes `target` the same file as `source` without copying its data: a reflink or a hard link.

    Raises:
        BuildError: the file systems differ, or cannot do either.
    """
    source = source.resolve()
    try:
        with source.open("rb") as old, target.open("xb") as new:
            fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
    except OSError:
        target.unlink(missing_ok=True)
    else:
        return
    try:
        target.hardlink_to(source)
    except OSError as cause:
        raise BuildError(
            f"cannot be linked into the bundle: {cause.strerror}",
            where=source,
            hint="put the bundle on the checkpoint's file system with -o, or use --weights copy",
        ) from cause


class _Values:
    """What is written, one tensor in memory at a time; of quantised ones the small factors stay."""

    def __init__(self, plan: WeightsPlan, checkpoint: Checkpoint) -> None:
        self._quantized, self._checkpoint = plan.quantized, checkpoint
        self._factors: dict[str, torch.Tensor] = {}

    def read(self, name: str) -> torch.Tensor:
        """The values of a tensor of the plan."""
        checkpoint = self._checkpoint
        if name == INV_FREQ:
            return inverse_frequencies(checkpoint.config.rope, checkpoint.config.head_dim)
        if self._quantized is None:
            return checkpoint.read(name)
        module, _, part = name.rpartition(".")
        if f".{part}" in FACTORS:
            if name not in self._factors:  # of a size that puts it before its weight
                self.read(f"{module}.weight")
            return self._factors.pop(name)
        codes = codes_of(name, checkpoint.tensors[name], self._quantized)
        if codes is None:
            return checkpoint.read(name)
        values, *factors = quantize(checkpoint.read(name), codes)
        self._factors |= {
            module + ending: each for ending, each in zip(FACTORS, factors, strict=False)
        }
        return values


def _check_f16(name: str, tensor: torch.Tensor) -> None:
    largest = float(tensor.abs().max())
    if not largest <= _MAX_F16:
        raise BuildError(
            f"`{name}` holds {largest:g}, float16 ends at {_MAX_F16:g}",
            hint="use --dtype bf16 or f32",
        )


def _check_codes(name: str, codes: torch.Tensor) -> None:
    """Refuses NaN, which compiled programs would take for the 480 that its code would stand for."""
    if int((codes.view(torch_dtype("u8")) & _NAN_CODE).max()) == _NAN_CODE:
        message = f"`{name}` holds NaN among its FP8 weights"
        raise BuildError(message, hint="quantise the checkpoint again, or get it again")


def _num_bytes(info: TensorInfo) -> int:
    return math.prod(info.shape) * from_name(info.dtype).num_bytes


def _sort_key(name: str, info: TensorInfo) -> tuple[int, int, int, int, int, int, str]:
    # Odd sizes go last, the least divisible of all at the very end, so that the others stay aligned.
    size = _num_bytes(info)
    odd = 0 if size % ALIGNMENT == 0 else ALIGNMENT - (size & -size)
    parts = name.split(".")
    if parts[:2] != ["model", "layers"]:
        return (odd, 0 if "embed" in name else 2, 0, 0, 0, 0, name)
    group, place = _PLACES[".".join(parts[3:-1])]
    if parts[-1] == "bias":  # after all weights of the layer
        group += len(_LAYER_ORDER)
    return (odd, 1, int(parts[2]), group, _PARTS.get(f".{parts[-1]}", 0), place, name)


def _header(tensors: Mapping[str, TensorInfo], sizes: Mapping[str, int]) -> tuple[bytes, int]:
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, info in tensors.items():
        table[name] = {
            "dtype": from_name(info.dtype).safetensors,
            "shape": list(info.shape),
            "data_offsets": [end, end + sizes[name]],
        }
        end += sizes[name]
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return header, len(header)
