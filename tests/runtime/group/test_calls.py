"""Calls as bytes, and back."""

from __future__ import annotations

import pytest
import torch

from llama_artifacts.signature import Bounds, Dim, Signature, StateSpec, TensorSpec
from llama_runtime.group import calls

SIGNATURE = Signature(
    inputs=(
        TensorSpec("tokens", "i32", ("Rows", 1), Bounds(0, 9)),
        TensorSpec("key", "i64", (2,)),
        TensorSpec("temperature", "f32", ()),
        TensorSpec("table", "i32", ("Rows", "Pages")),
    ),
    states=(StateSpec("k", "f32", ("Pool", 2)), StateSpec("v", "f32", ("Pool", 2))),
    outputs=(TensorSpec("logits", "f32", ("Rows", 4)),),
    dims=(Dim("Rows", 1, 8), Dim("Pages", 1, 8), Dim("Pool", 1, 64)),
)


@pytest.mark.parametrize(("rows", "pages"), [(1, 1), (3, 5), (8, 8)])
def test_a_call_comes_out_as_it_went_in(rows: int, pages: int) -> None:
    inputs = [
        torch.arange(rows, dtype=torch.int32)[:, None],
        torch.tensor([-(2**62), 7]),
        torch.tensor(0.3),
        torch.arange(rows * pages, dtype=torch.int32).reshape(pages, rows).T,  # not contiguous
    ]
    sizes = {"Rows": rows, "Pages": pages, "Pool": 9}
    payload = calls.pack(SIGNATURE, sizes, inputs)
    assert payload.dtype == torch.uint8
    found, found_sizes = calls.unpack(SIGNATURE, payload)
    assert found_sizes == sizes
    for before, after in zip(inputs, found, strict=True):
        assert (before.dtype, before.shape) == (after.dtype, after.shape)
        assert torch.equal(before, after)
        assert after.is_contiguous()
        assert after.data_ptr() % 16 == 0


def test_sizes_alone() -> None:
    payload = calls.pack(SIGNATURE, {"Pool": 12})
    assert calls.unpack_sizes(SIGNATURE, payload) == {"Pool": 12}
