"""The one table of dtypes: how a manifest, safetensors, torch, ONNX and numpy spell each of them.

Everything that translates a dtype name goes through this table, in either direction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from llama_artifacts.errors import ManifestError


@dataclass(frozen=True)
class DType:
    """One element type and its spellings.

    Attributes:
        name: the manifest's spelling, such as `bf16`.
        num_bytes: bytes of one element.
        safetensors: the spelling in a safetensors header.
        torch: the attribute of the `torch` module.
        onnx: the name in ONNX's `TensorProto.DataType`.
        numpy: numpy's own dtype name, or None where numpy has none.
    """

    name: str
    num_bytes: int
    safetensors: str
    torch: str
    onnx: str
    numpy: str | None


DTYPES: tuple[DType, ...] = (
    DType("f64", 8, "F64", "float64", "DOUBLE", "float64"),
    DType("f32", 4, "F32", "float32", "FLOAT", "float32"),
    DType("f16", 2, "F16", "float16", "FLOAT16", "float16"),
    DType("bf16", 2, "BF16", "bfloat16", "BFLOAT16", None),
    DType("f8e4m3", 1, "F8_E4M3", "float8_e4m3fn", "FLOAT8E4M3FN", None),
    DType("f8e5m2", 1, "F8_E5M2", "float8_e5m2", "FLOAT8E5M2", None),
    DType("i64", 8, "I64", "int64", "INT64", "int64"),
    DType("i32", 4, "I32", "int32", "INT32", "int32"),
    DType("i16", 2, "I16", "int16", "INT16", "int16"),
    DType("i8", 1, "I8", "int8", "INT8", "int8"),
    DType("u8", 1, "U8", "uint8", "UINT8", "uint8"),
    DType("bool", 1, "BOOL", "bool", "BOOL", "bool"),
)

BY_NAME: dict[str, DType] = {row.name: row for row in DTYPES}
BY_SAFETENSORS: dict[str, DType] = {row.safetensors: row for row in DTYPES}
BY_TORCH: dict[str, DType] = {row.torch: row for row in DTYPES}
BY_ONNX: dict[str, DType] = {row.onnx: row for row in DTYPES}
BY_NUMPY: dict[str, DType] = {row.numpy: row for row in DTYPES if row.numpy is not None}


class _KnownDType:
    """The limit of fields that name a dtype."""

    def complaint(self, value: str) -> str | None:
        return None if value in BY_NAME else f"unknown dtype `{value}`"

    def schema(self) -> dict[str, Any]:
        return {"enum": list(BY_NAME)}


DTypeName = Annotated[str, _KnownDType()]
"""The manifest's spelling of a dtype."""


def from_name(name: str, *, where: object = None) -> DType:
    """The row of a manifest's dtype name."""
    return _lookup(BY_NAME, name, where=where)


def from_safetensors(spelling: str, *, where: object = None) -> DType:
    """The row of a safetensors spelling, such as `BF16`."""
    return _lookup(BY_SAFETENSORS, spelling, where=where)


def from_torch(dtype: object, *, where: object = None) -> DType:
    """The row of a `torch.dtype`, or of its name with or without `torch.`."""
    return _lookup(BY_TORCH, str(dtype).removeprefix("torch."), where=where)


def from_onnx(spelling: str, *, where: object = None) -> DType:
    """The row of a `TensorProto.DataType` name, such as `BFLOAT16`."""
    return _lookup(BY_ONNX, spelling, where=where)


def from_numpy(spelling: str, *, where: object = None) -> DType:
    """The row of a numpy dtype name, such as `float32`."""
    return _lookup(BY_NUMPY, spelling, where=where)


def _lookup(table: dict[str, DType], spelling: str, *, where: object) -> DType:
    row = table.get(spelling)
    if row is None:
        raise ManifestError(
            f"unknown dtype `{spelling}`", where=where, hint=f"known dtypes: {', '.join(table)}"
        )
    return row
