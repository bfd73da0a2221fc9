from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
import torch

from llama_artifacts import dtypes
from llama_artifacts.dtypes import DTYPES, DType
from llama_artifacts.errors import ManifestError

LOOKUPS: dict[str, Callable[[str], DType]] = {
    "name": dtypes.from_name,
    "safetensors": dtypes.from_safetensors,
    "torch": dtypes.from_torch,
    "onnx": dtypes.from_onnx,
    "numpy": dtypes.from_numpy,
}


@pytest.mark.parametrize("row", DTYPES, ids=lambda row: row.name)
@pytest.mark.parametrize("column", LOOKUPS)
def test_every_spelling_leads_back_to_its_row(row: DType, column: str) -> None:
    spelling = getattr(row, column)
    if spelling is not None:
        assert LOOKUPS[column](spelling) is row


@pytest.mark.parametrize("column", LOOKUPS)
def test_no_spelling_stands_for_two_rows(column: str) -> None:
    spellings = [getattr(row, column) for row in DTYPES if getattr(row, column) is not None]
    assert len(set(spellings)) == len(spellings)


@pytest.mark.parametrize("row", DTYPES, ids=lambda row: row.name)
def test_sizes_and_names_are_those_of_the_libraries(row: DType) -> None:
    torch_dtype = getattr(torch, row.torch)
    assert dtypes.from_torch(torch_dtype) is row
    assert torch_dtype.itemsize == row.num_bytes
    assert isinstance(getattr(onnx.TensorProto, row.onnx), int)
    if row.numpy is not None:
        assert np.dtype(row.numpy).itemsize == row.num_bytes


@pytest.mark.parametrize("column", LOOKUPS)
def test_unknown_spelling_is_named_with_the_known_ones(column: str) -> None:
    with pytest.raises(ManifestError, match="unknown dtype `q17`") as caught:
        LOOKUPS[column]("q17")
    assert "known dtypes: " in (caught.value.hint or "")
