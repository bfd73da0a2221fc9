"""GPTQ, AWQ and packed compressed-tensors checkpoints: which are read, and as which values."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_artifacts.errors import CheckpointError
from llama_export.checkpoint.config import read_hf_config
from llama_export.checkpoint.hf import HfCheckpoint
from llama_export.checkpoint.layout import linear_shapes, order_of
from llama_export.checkpoint.schemes import PackedScheme
from llama_export.model import integers
from tests.tiny import tiny_config
from tests.tiny_packed import HEAD, O0, Q0, decoded, put, scheme, write_tiny_packed


def value(checkpoint: HfCheckpoint, name: str) -> torch.Tensor:
    """A tensor in float32, decoded and in the order of the input's features."""
    module, stored = name.removesuffix(".weight"), checkpoint.read(name)
    assert tuple(stored.shape) == checkpoint.tensors[name].shape
    if f"{module}.weight_scale" not in checkpoint.tensors:
        return stored.float()
    has_min = f"{module}.weight_min" in checkpoint.tensors
    minimum = checkpoint.read(f"{module}.weight_min") if has_min else None
    wide = integers.decode(
        stored, checkpoint.read(f"{module}.weight_scale"), minimum, torch.float32
    )
    order = order_of(module, checkpoint.tensors)
    if order is not None:
        wide[:, checkpoint.read(order).long()] = wide.clone()
    return wide


# --- values ---------------------------------------------------------------------------------------

CASES = [
    (form, bits, group_size, is_symmetric, is_ordered)
    for form, bits, group_size, is_symmetric, is_ordered in itertools.product(
        ("gptq", "gptq_v2", "awq", "pack-quantized"), (4, 8), (32, -1), (False, True), (False, True)
    )
    if not (form == "awq" and (bits == 8 or is_ordered))
    if not (is_ordered and group_size == -1)
    if bits == 4 or form != "gptq_v2"
]


@pytest.mark.parametrize(("form", "bits", "group_size", "is_symmetric", "is_ordered"), CASES)
def test_values_are_those_of_the_format_bit_for_bit(
    tmp_path: Path, form: str, bits: int, group_size: int, is_symmetric: bool, is_ordered: bool
) -> None:
    folder = write_tiny_packed(
        tmp_path,
        form,
        bits=bits,
        group_size=group_size,
        is_symmetric=is_symmetric,
        is_ordered=is_ordered,
        num_hidden_layers=1,
    )
    checkpoint = HfCheckpoint.open(folder)
    for name, wanted in decoded(folder).items():
        assert torch.equal(value(checkpoint, name), wanted)
    assert checkpoint.tensors[f"{Q0}.weight"].dtype == ("u8" if bits == 4 else "i8")
    assert (f"{Q0}.weight_min" in checkpoint.tensors) == (not is_symmetric)
    assert (f"{Q0}.weight_order" in checkpoint.tensors) == is_ordered
    assert checkpoint.tensors[f"{Q0}.weight_scale"].dtype == ("f16" if is_symmetric else "f32")


def test_columns_come_group_after_group_and_keep_their_order_within(tmp_path: Path) -> None:
    checkpoint = HfCheckpoint.open(write_tiny_packed(tmp_path, is_ordered=True))
    groups = checkpoint._read(f"{O0}.g_idx").tolist()
    expected = sorted(range(64), key=lambda column: groups[column])
    order = checkpoint.read(f"{O0}.weight_order")
    assert order.dtype == torch.int32
    assert order.tolist() == expected != list(range(64))


def test_siblings_share_an_order_and_keep_their_own_where_they_differ(tmp_path: Path) -> None:
    def orders(folder: Path) -> set[str]:
        found = HfCheckpoint.open(folder, num_layers=1).tensors
        return {name.split(".")[-2] for name in found if name.endswith("_order")}

    shared = write_tiny_packed(tmp_path / "a", is_ordered=True)
    assert orders(shared) == {"q_proj", "o_proj", "gate_proj", "down_proj"}
    part = write_tiny_packed(
        tmp_path / "b",
        is_ordered=True,
        order_seed=lambda module: module if "attn" in module else module.rsplit(".", 1)[0],
    )
    assert orders(part) == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"}
    for name, wanted in decoded(part).items():
        if ".0." in name:
            assert torch.equal(value(HfCheckpoint.open(part), name), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_of_either_half_precision_are_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = write_tiny_packed(
        tmp_path, "pack-quantized", is_symmetric=True, scale_dtype=dtype, num_hidden_layers=1
    )
    checkpoint = HfCheckpoint.open(folder)
    assert checkpoint.read(f"{Q0}.weight_scale").dtype == dtype
    assert torch.equal(value(checkpoint, f"{Q0}.weight"), decoded(folder)[f"{Q0}.weight"])


def test_zeros_of_0_borrow_from_their_neighbours_as_gptqmodel_stores_them(tmp_path: Path) -> None:
    zeros = torch.tensor([0, 5, 0, 15, 1, 0, 9, 3], dtype=torch.int64)
    word = int(sum(int(zero) << 4 * place for place, zero in enumerate(zeros)))
    stored = (word - 0x11111111) % 2**32

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{Q0}.qzeros"][:, 0] = stored - (2**32 if stored >= 2**31 else 0)

    by_model = {"meta": {"quantizer": ["gptqmodel:5.0"]}}
    folder = write_tiny_packed(tmp_path / "a", change=change, quantization=by_model)
    checkpoint = HfCheckpoint.open(folder)
    scale = checkpoint.read(f"{Q0}.weight_scale")[:8]
    minimum = checkpoint.read(f"{Q0}.weight_min")[:8]
    assert torch.equal(minimum, -zeros[:, None] * scale)
    other = HfCheckpoint.open(write_tiny_packed(tmp_path / "b", change=change))
    with pytest.raises(CheckpointError, match=r"zeros of -1 .* ambiguous"):
        other.read(f"{Q0}.weight_min")


def test_biases_of_zeros_are_ignored_and_others_refused(tmp_path: Path) -> None:
    zero = write_tiny_packed(tmp_path / "a", change=put(f"{Q0}.bias", torch.zeros(64).half()))
    checkpoint = HfCheckpoint.open(zero)
    assert f"{Q0}.bias" not in checkpoint.tensors
    assert any("ignored 1 biases of zeros" in note for note in checkpoint.notes)
    one = write_tiny_packed(tmp_path / "b", change=put(f"{Q0}.bias", torch.ones(64).half()))
    with pytest.raises(CheckpointError, match="unused tensor"):
        HfCheckpoint.open(one)
    kept = write_tiny_packed(
        tmp_path / "c",
        attention_bias=True,
        is_packed=lambda module: module.endswith(("q_proj", "down_proj")),
        quantization={"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.down_proj"]]},
    )
    opened = HfCheckpoint.open(kept)
    assert torch.equal(opened.read(f"{Q0}.bias").float(), decoded(kept)[f"{Q0}.bias"])


# --- schemes --------------------------------------------------------------------------------------

LINEARS = set(linear_shapes(read_hf_config(tiny_config(), where="c").config))


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        (scheme("gptq"), LINEARS - {HEAD}),
        (scheme("gptq", lm_head=True), LINEARS),
        (
            scheme("gptq", modules_in_block_to_quantize=[["self_attn.q_proj"], ["mlp.up_proj"]]),
            {name for name in LINEARS if name.endswith(("q_proj", "up_proj"))},
        ),
        (scheme("awq"), LINEARS - {HEAD}),
        (
            scheme("awq", modules_to_not_convert=["self_attn"]),
            {name for name in LINEARS if ".mlp." in name},
        ),
        (scheme("pack-quantized"), LINEARS - {HEAD}),
        (scheme("pack-quantized", ignore=["re:.*mlp.*", O0]), LINEARS - {O0} - {
            name for name in LINEARS if ".mlp." in name
        }),
    ],
)  # fmt: skip
def test_schemes_name_the_layers(quantization: dict[str, Any], expected: set[str]) -> None:
    found = read_hf_config(tiny_config(quantization_config=quantization), where="c").scheme
    assert isinstance(found, PackedScheme)
    assert {name for name in LINEARS if found.covers(name)} == expected


def test_columns_of_static_groups_and_of_whole_rows_have_no_order() -> None:
    def is_ordered(**changes: Any) -> bool:
        config = tiny_config(quantization_config=scheme("gptq", is_ordered=True, **changes))
        found = read_hf_config(config, where="c").scheme
        assert isinstance(found, PackedScheme)
        return found.is_ordered

    assert is_ordered()
    assert not is_ordered(static_groups=True)
    assert not is_ordered(meta={"static_groups": True})
    assert not is_ordered(group_size=-1)
