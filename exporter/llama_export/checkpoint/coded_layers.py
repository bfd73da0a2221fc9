"""The linear layers of a Hugging Face checkpoint that are stored as codes, FP8 or packed integers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from llama_export.checkpoint.config import LlamaConfig
from llama_export.checkpoint.files import is_same, is_zero
from llama_export.checkpoint.fp8 import check_fp8, with_row_scales
from llama_export.checkpoint.layout import (
    FP8,
    Codes,
    expected_tensors,
    linear_shapes,
    siblings,
)
from llama_export.checkpoint.packed import GROUPS, Packed, check_packed
from llama_export.checkpoint.schemes import Fp8Scheme, PackedScheme
from llama_export.checkpoint.source import Stored, TensorInfo


@dataclass(frozen=True)
class CodedLayers:
    """What is known of a checkpoint's codes from its header.

    Attributes:
        codes: how the weight of each such layer is kept in a bundle, by the name of its module.
        tensors: all tensors of the checkpoint; packed weights are those that they become.
        packed: where those come from, by the name of the module.
        notes: remarks for people.
    """

    codes: Mapping[str, Codes]
    tensors: Mapping[str, TensorInfo]
    packed: Mapping[str, Packed] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def coded_layers(
    scheme: Fp8Scheme | PackedScheme | None,
    config: LlamaConfig,
    stored: Mapping[str, Stored],
    *,
    where: object,
    has_data: bool,
) -> CodedLayers:
    """Holds the tensors against the scheme of the config.

    Args:
        scheme: what config.json says; None: nothing is quantised.
        config: the network.
        stored: the checkpoint's tensors.
        where: the checkpoint, for messages.
        has_data: whether more than headers is here.

    Raises:
        CheckpointError: names the tensor that is not what the scheme says.
    """
    tensors = {
        name: TensorInfo(entry.tensor.dtype, entry.tensor.shape) for name, entry in stored.items()
    }
    if isinstance(scheme, PackedScheme):
        packed = check_packed(scheme, config, tensors, where=where)
        if has_data:
            packed = _with_own_orders(packed, stored)
        return _packed_layers(scheme, config, tensors, packed, stored if has_data else None)
    fp8 = check_fp8(scheme, config, tensors, where=where)
    note = f"{len(fp8)} linear layers are FP8 (E4M3) and stay so in the bundle"
    return CodedLayers(
        dict.fromkeys(fp8, FP8),
        with_row_scales(config, tensors, fp8),
        notes=(note,) if fp8 else (),
    )


def _packed_layers(
    scheme: PackedScheme,
    config: LlamaConfig,
    tensors: dict[str, TensorInfo],
    packed: dict[str, Packed],
    stored: Mapping[str, Stored] | None,
) -> CodedLayers:
    notes = [f"{len(packed)} linear layers are {scheme.title}, and stay so in the bundle"]
    biases = _zero_biases(config, tensors, packed, stored)
    if biases:
        notes.append(f"ignored {len(biases)} biases of zeros, which the model does not have")
    taken = {name for weight in packed.values() for name in weight.names.values()}
    kept = {name: tensors[name] for name in tensors.keys() - taken - biases}
    shapes = linear_shapes(config)
    for module, weight in packed.items():
        kept |= weight.codes.tensors(module, shapes[module])
    codes = {module: weight.codes for module, weight in packed.items()}
    return CodedLayers(codes, kept, packed, tuple(notes))


def _with_own_orders(
    packed: Mapping[str, Packed], stored: Mapping[str, Stored]
) -> dict[str, Packed]:
    """Orders stored for each of the siblings of a layer that differ in them; else the first has it."""
    found = dict(packed)
    for module in packed:
        alike = [packed[name] for name in siblings(module) if name in packed]
        orders = [stored[weight.names[GROUPS]] for weight in alike if weight.is_ordered]
        if not all(is_same(orders[0], order) for order in orders):
            codes = replace(packed[module].codes, has_order=True)
            found[module] = replace(packed[module], codes=codes)
    return found


def _zero_biases(
    config: LlamaConfig,
    tensors: Mapping[str, TensorInfo],
    packed: Mapping[str, Packed],
    stored: Mapping[str, Stored] | None,
) -> set[str]:
    """Biases that older tools add to every layer that they quantise; others are left to be refused."""
    biases = {f"{module}.bias" for module in packed} & tensors.keys()
    biases -= expected_tensors(config).keys()
    return {name for name in biases if stored is None or is_zero(stored[name])}
