"""A Llama checkpoint in one GGUF file, as llama.cpp's converter writes it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from llama_artifacts.digests import describe
from llama_artifacts.errors import CheckpointError
from llama_artifacts.manifest import File, Source
from llama_artifacts.strict_json import shown
from llama_export.checkpoint import gguf_codes
from llama_export.checkpoint.config import LlamaConfig
from llama_export.checkpoint.gguf_config import (
    ROPE_FREQS,
    check_architecture,
    check_divisors,
    head_dim,
    read_config,
)
from llama_export.checkpoint.gguf_header import GgufTensor, place, read_header
from llama_export.checkpoint.gguf_metadata import Metadata
from llama_export.checkpoint.gguf_tokenizer import GgufTokenizer, config_files, read_tokenizer
from llama_export.checkpoint.layout import check_layout, first_layers
from llama_export.checkpoint.model_card import as_license
from llama_export.checkpoint.names import to_hf
from llama_export.checkpoint.source import TensorInfo

if TYPE_CHECKING:
    import torch

Array: TypeAlias = "np.ndarray[Any, Any]"

PLAIN_TYPES = ("F32", "F16", "BF16")
QUANTISED_TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q6_K")
SUPPORTED_TYPES = PLAIN_TYPES + QUANTISED_TYPES


class GgufCheckpoint:
    """A `Checkpoint` over one GGUF file of architecture `llama`.

    Tensors have their Hugging Face names. llama.cpp's converter reorders the rows of the query and
    key projections for its way of rotating; `read` puts them back. Quantised tensors come out as
    float32, plain ones as stored and, where nothing has to move, mapped from the file. With
    `keeps_codes`, matrices of some types are codes with their factors (see `gguf_codes`) instead.
    """

    def __init__(
        self,
        path: Path,
        *,
        stored: Mapping[str, GgufTensor],
        config: LlamaConfig,
        tokenizer: GgufTokenizer | None,
        notes: tuple[str, ...],
        license: str | None = None,
        keeps_codes: bool = False,
    ) -> None:
        self.name = path.stem
        self.source = Source("gguf", path.name, license=license)
        self.config = config
        self.dtype = suggested_dtype(stored)
        kept = dict(gguf_codes.kept(stored)) if keeps_codes else {}
        self.tensors: Mapping[str, TensorInfo] = {**_infos(stored), **kept}
        self.stop_tokens: tuple[int, ...] = tokenizer.stop_tokens if tokenizer else ()
        self.notes = notes
        self._path = path
        self._stored = stored
        self._kept = kept
        self._tokenizer = tokenizer

    @classmethod
    def open(
        cls, path: Path | str, *, num_layers: int | None = None, keeps_codes: bool = False
    ) -> GgufCheckpoint:
        """Open by header only; with `num_layers`, as the model of its first layers.

        Raises:
            CheckpointError: the file is damaged, or holds what the model does not implement.
            TokenizerError: the tokenizer is of another kind, or contradicts itself or the model.
        """
        path = Path(path)
        header = read_header(path)
        metadata = Metadata(path, header.metadata)
        check_architecture(metadata)
        _check_types(header.tensors, where=path)
        divisors = _read_divisors(path, metadata, header.tensors)
        config, notes = read_config(metadata, header.tensors, divisors=divisors)
        stored = _by_hf_name(header.tensors, where=path)
        if num_layers is not None:
            config, stored, more = _shortened(config, stored, num_layers, where=path)
            notes += more
        check_layout(config, _infos(stored), where=path)
        tokenizer = read_tokenizer(metadata, config.vocab_size)
        notes += tokenizer.notes if tokenizer else ("the file holds no tokenizer",)
        notes += (gguf_codes.describe(stored),) if keeps_codes else ()
        return cls(
            path,
            stored=stored,
            config=config,
            tokenizer=tokenizer,
            notes=notes,
            license=as_license(metadata.values.get("general.license")),
            keeps_codes=keeps_codes,
        )

    def read(self, name: str) -> torch.Tensor:
        """One tensor whole: float32 where it is quantised and not kept, else as it is stored."""
        import torch

        if name not in self.tensors:
            hint = f"the file has {len(self._stored)} tensors, such as {next(iter(self._stored))}"
            raise CheckpointError("no such tensor", where=f"{self._path}#{name}", hint=hint)
        tensor = self._stored[gguf_codes.source_of(name)]
        is_kept = name in self._kept
        array = _read_rows(self._path, tensor) if is_kept else _read_array(self._path, tensor)
        num_heads = self._num_permuted_heads(name)
        if num_heads:
            array = unpermute_rows(array, num_heads)
        if is_kept:
            return torch.from_numpy(gguf_codes.take(array, tensor.type, name))
        result = torch.from_numpy(array)
        return result.view(torch.bfloat16) if tensor.type == "BF16" else result

    @property
    def has_data(self) -> bool:
        """Always: the file is opened whole."""
        return True

    def stored(self, name: str) -> None:
        """Nowhere: the file is no safetensors."""

    def describe(self, path: Path) -> File:
        """Size and digest of a file."""
        return describe(path)

    def assets(self) -> dict[str, bytes]:
        """Tokenizer, template and config files in the Hugging Face spelling, by file name."""
        return dict(self._assets)

    @cached_property
    def _assets(self) -> dict[str, bytes]:
        files = config_files(self.config, self.dtype, self._tokenizer)
        return files | (self._tokenizer.files() if self._tokenizer else {})

    def _num_permuted_heads(self, name: str) -> int:
        if ".self_attn.q_proj." in name:
            return self.config.num_heads
        return self.config.num_kv_heads if ".self_attn.k_proj." in name else 0


def suggested_dtype(stored: Mapping[str, GgufTensor]) -> str:
    """`f32` or `f16` where the matrices are all of that type, else `bf16`."""
    kinds = {tensor.type for tensor in stored.values()} - {"F32"}
    if not kinds:
        return "f32"
    return "f16" if kinds == {"F16"} else "bf16"


def unpermute_rows(array: Array, num_heads: int) -> Array:
    """Rows of each head from llama.cpp's order (pairs adjacent) to ours (halves apart)."""
    half = array.shape[0] // num_heads // 2
    pairs = array.reshape(num_heads, half, 2, *array.shape[1:])
    rows: Array = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)
    return rows


def _check_types(tensors: Mapping[str, GgufTensor], *, where: Path) -> None:
    for tensor in tensors.values():
        if tensor.type not in SUPPORTED_TYPES:
            raise CheckpointError(
                f"type {tensor.type} is not supported",
                where=place(where, tensor.name),
                hint=f"use a file of the types {', '.join(SUPPORTED_TYPES)}",
            )


def _by_hf_name(tensors: Mapping[str, GgufTensor], *, where: Path) -> dict[str, GgufTensor]:
    stored = {}
    for tensor in tensors.values():
        if tensor.name == ROPE_FREQS:
            continue
        name = to_hf(tensor.name)
        if name is None:
            message = f"unused tensor: {shown(tensor.name)} has no place in a Llama network"
            hint = "the file holds another model than its metadata says"
            raise CheckpointError(message, where=where, hint=hint)
        stored[name] = tensor
    return stored


def _infos(stored: Mapping[str, GgufTensor]) -> dict[str, TensorInfo]:
    return {name: TensorInfo(item.type.lower(), item.shape) for name, item in stored.items()}


def _shortened(
    config: LlamaConfig, stored: dict[str, GgufTensor], num_layers: int, *, where: Path
) -> tuple[LlamaConfig, dict[str, GgufTensor], tuple[str, ...]]:
    if not 1 <= num_layers <= config.num_layers:
        message = f"expected 1 to {config.num_layers} layers, got {num_layers}"
        raise CheckpointError(message, where=where, hint="correct --num-layers")
    if num_layers == config.num_layers:
        return config, stored, ()
    check_layout(config, _infos(stored), where=where)
    kept = first_layers(_infos(stored), num_layers)
    note = f"the first {num_layers} of {config.num_layers} layers"
    config = dataclasses.replace(config, num_layers=num_layers)
    return config, {name: stored[name] for name in kept}, (note,)


def _read_divisors(
    path: Path, metadata: Metadata, tensors: Mapping[str, GgufTensor]
) -> tuple[float, ...]:
    if ROPE_FREQS not in tensors:
        return ()
    check_divisors(tensors[ROPE_FREQS], head_dim(metadata), where=path)
    divisors = tuple(float(value) for value in _read_array(path, tensors[ROPE_FREQS]))
    if not all(math.isfinite(value) and value > 0 for value in divisors):
        raise CheckpointError(
            "expected divisors above zero", where=f"{path}#{ROPE_FREQS}", hint="convert it again"
        )
    return divisors


def _read_array(path: Path, tensor: GgufTensor) -> Array:
    """The tensor as numbers; bfloat16, which numpy lacks, as its bits in int16."""
    plain = {"F32": np.float32, "F16": np.float16, "BF16": np.int16}
    rows = _read_rows(path, tensor)
    if tensor.type in plain:
        values = rows.view(plain[tensor.type]).reshape(tensor.shape)
        return np.require(np.asarray(values), requirements="A")
    return _dequantised(rows, tensor)


def _read_rows(path: Path, tensor: GgufTensor) -> Array:
    """The tensor's bytes [..., bytes of a row], mapped from the file."""
    try:
        # Copy on write: torch wants memory that it may write to, and the file must not change.
        raw = np.memmap(path, np.uint8, "c", offset=tensor.offset, shape=(tensor.num_bytes,))
    except (OSError, ValueError) as error:
        where, hint = place(path, tensor.name), "the file was moved or cut since it was opened"
        raise CheckpointError(f"cannot be read: {error}", where=where, hint=hint) from error
    return np.asarray(raw).reshape(*tensor.shape[:-1], -1)


def _dequantised(rows: Array, tensor: GgufTensor) -> Array:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    with np.errstate(all="ignore"):
        values = dequantize(rows, GGMLQuantizationType[tensor.type])
    return np.asarray(values, dtype=np.float32).reshape(tensor.shape)
