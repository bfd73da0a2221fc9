"""A bundle's weights as a GGUF file, for engines that read that format.

Values are those of the bundle: matrices have its dtype, and codes of eight and four bits become
blocks of Q8_0 and Q4_0, or Q4_1 where they have minima, with the same codes; scales and minima are
rounded to the blocks' float16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from llama_artifacts.bundle import open_bundle
from llama_artifacts.dtypes import from_name
from llama_artifacts.errors import CompatibilityError
from llama_artifacts.manifest import Manifest
from llama_export.checkpoint.layout import BLOCK, FACTORS, HEAD, ORDER
from llama_export.checkpoint.names import to_gguf
from llama_export.laws.oracle import network_weights
from llama_export.model.integers import decode
from llama_export.model.llama import INV_FREQ
from llama_runtime.places import find_weights
from llama_runtime.weights import bundle_weights

Array = np.ndarray[Any, np.dtype[Any]]
Types = gguf.GGMLQuantizationType
Blocks = tuple[Array, gguf.GGMLQuantizationType]
"""Bytes [rows, bytes of a row], or float32 and float16 as they are, and what they are called."""

NO_VOCABULARY = "no_vocab"
"""The tokenizer of a file that is asked for token ids only."""
_FILE_TYPES = {
    None: gguf.LlamaFileType.MOSTLY_F16,
    "int8": gguf.LlamaFileType.MOSTLY_Q8_0,
    "int4": gguf.LlamaFileType.MOSTLY_Q4_0,
    "uint4": gguf.LlamaFileType.MOSTLY_Q4_1,
}
"""By how weights are rounded. Only OpenVINO looks at it, and knows no type for bf16."""
_TYPES = {
    (torch.int8, 1): Types.Q8_0,
    (torch.uint8, 1): Types.Q4_0,
    (torch.uint8, 2): Types.Q4_1,
}
"""Of blocks, by the dtype of codes and the number of their factors."""
ROPE_FREQS = "rope_freqs.weight"
_ROPE_TOLERANCE = 1e-5


def write_gguf(
    folder: Path, path: Path, *, dtype: torch.dtype | None = None, weights_dir: Path | None = None
) -> None:
    """Writes the weights of a bundle, and nothing of its tokenizer.

    Args:
        folder: the bundle.
        path: the file.
        dtype: of matrices that are no integers; None: that of the bundle.
        weights_dir: the checkpoint's folder, for a bundle that refers to its weights.

    Raises:
        IntegrityError: the weights are not those of the bundle.
        CompatibilityError: the bundle has no weights.
    """
    bundle = open_bundle(folder)
    places = find_weights(bundle, weights_dir=weights_dir)
    weights = network_weights(bundle_weights(bundle.manifest, places), bundle.manifest)
    compute: torch.dtype = getattr(torch, from_name(bundle.manifest.dtype).torch)
    if any(name.endswith(ORDER) for name in weights):
        message = "expected columns in the order of their features, got an activation order"
        raise CompatibilityError(message, where=folder, hint="leave this peer out")
    writer = gguf.GGUFWriter(path, "llama")
    _add_sizes(writer, bundle.manifest)
    base, factors = rope(weights[INV_FREQ].double().numpy())
    writer.add_rope_freq_base(base)
    if factors is not None:
        writer.add_tensor(ROPE_FREQS, factors)
    for name, weight in weights.items():
        # All but the rotary frequencies, scales, and a head that is the embedding once more.
        translated = to_gguf(name)
        if translated is None or (name == HEAD and bundle.manifest.model.tie_word_embeddings):
            continue
        order = _row_order(name, bundle.manifest)
        module = name.removesuffix(".weight")
        found = [weights[module + ending] for ending in FACTORS if module + ending in weights]
        ordered = [order(part) if len(part) == len(weight) else part for part in found]
        array, kind = blocks(order(weight), ordered, compute, dtype or compute)
        writer.add_tensor(translated, array, raw_dtype=kind)
    _finish(writer)


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: gguf.GGUFWriter, manifest: Manifest) -> None:
    model = manifest.model
    writer.add_tokenizer_model(NO_VOCABULARY)
    kind = None if manifest.quantized is None else manifest.quantized.kind
    writer.add_file_type(_FILE_TYPES[kind])
    writer.add_vocab_size(model.vocab_size)
    writer.add_context_length(manifest.max_seq)
    writer.add_embedding_length(model.hidden_size)
    writer.add_block_count(model.num_layers)
    writer.add_feed_forward_length(model.intermediate_size)
    writer.add_head_count(model.num_heads)
    writer.add_head_count_kv(model.num_kv_heads)
    writer.add_key_length(model.head_dim)
    writer.add_value_length(model.head_dim)
    writer.add_layer_norm_rms_eps(model.rms_norm_eps)
    writer.add_rope_dimension_count(model.head_dim)


def rope(inv_freq: Array) -> tuple[float, Array | None]:
    """The base, by the two shortest waves, which no scaling treats differently; and the rest.

    Args:
        inv_freq: inverse frequencies, float64 [D/2], of a head of D values.

    Returns:
        The base, and by what the file's frequencies are divided, float32 [D/2]; None: by 1.
    """
    half = len(inv_freq)
    base = float(f"{(inv_freq[0] / inv_freq[1]) ** half:.5g}") if half > 1 else 1.0
    factors = base ** (-np.arange(half) / half) / inv_freq
    is_plain = np.abs(factors - 1).max() <= _ROPE_TOLERANCE
    return base, None if is_plain else factors.astype(np.float32)


def _row_order(name: str, manifest: Manifest) -> Callable[[torch.Tensor], torch.Tensor]:
    """Rows of queries and keys from our order (halves of a head apart) to pairs side by side."""
    heads = {"q_proj": manifest.model.num_heads, "k_proj": manifest.model.num_kv_heads}
    count = next((heads[part] for part in name.split(".") if part in heads), 0)
    if not count:
        return lambda tensor: tensor
    return lambda tensor: tensor.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)


def blocks(
    weight: torch.Tensor,
    factors: Sequence[torch.Tensor],
    compute: torch.dtype,
    dtype: torch.dtype,
) -> Blocks:
    """A weight as the file holds it: vectors in float32, matrices in a dtype or as their codes.

    Args:
        weight: stored in the bundle, [V] or [V, H], of four bits [V, H / 2].
        factors: scales of its codes, [V, G], and then perhaps minima; empty: it is none.
        compute: to which codes of FP8, and rows that fill no blocks, are decoded.
        dtype: of matrices that are no integers.
    """
    if weight.dim() == 1:
        return weight.float().numpy(), Types.F32
    kind = _TYPES.get((weight.dtype, len(factors)))
    if kind is not None:
        num_bytes = BLOCK // 2 if weight.dtype == torch.uint8 else BLOCK
        if weight.shape[1] % num_bytes == 0:
            return _codes(weight, factors, num_bytes), kind
    if factors:
        minimum = factors[1] if len(factors) > 1 else None
        weight = decode(weight, factors[0], minimum, compute)
    weight = weight.to(dtype).contiguous()
    if dtype == torch.bfloat16:
        return weight.view(torch.uint8).numpy(), Types.BF16
    return weight.numpy(), Types.F16 if dtype == torch.float16 else Types.F32


def _codes(codes: torch.Tensor, factors: Sequence[torch.Tensor], num_bytes: int) -> Array:
    """Blocks of so many bytes of 32 codes, each after its own factors."""
    parts = codes.contiguous().view(torch.uint8).unflatten(1, (-1, num_bytes))
    size = parts.shape[1] // factors[0].shape[1]
    spread = [factor.repeat_interleave(size, dim=1).half() for factor in factors]
    heads = torch.stack(spread, dim=-1).view(torch.uint8)
    array: Array = torch.cat((heads, parts), dim=-1).flatten(1).numpy()
    return array
