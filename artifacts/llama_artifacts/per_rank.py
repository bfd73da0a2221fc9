"""What each of several processes holds and sends that run programs together, from a manifest.

A process is called a rank. All figures are those of one rank; ranks are alike.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from llama_artifacts.dtypes import DTypeName, from_name
from llama_artifacts.manifest import Manifest, Program

EMBEDDING = "model.embed_tokens.weight"

Kind = Literal["all_reduce", "all_gather", "reduce_scatter"]


@dataclass(frozen=True)
class Collective:
    """Exchanges of one kind and shape in a call.

    Attributes:
        kind: `all_reduce` (every rank gets the sum, or the largest), `all_gather` (every rank gets
            all parts) or `reduce_scatter` (every rank gets its part of the largest).
        count: how many there are in a call, at most where the call may end early.
        dtype: of the elements.
        shape: of the whole that a rank has in the end, or for `reduce_scatter` in the beginning. A
            size is a number, a dimension of the call, or a sum of them such as `P+Rows`.
    """

    kind: Kind
    count: int
    dtype: DTypeName
    shape: tuple[int | str, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them, with every size that is no number taken as 1."""
        fixed = [size for size in self.shape if isinstance(size, int)]
        return self.count * math.prod(fixed) * from_name(self.dtype).num_bytes


@dataclass(frozen=True)
class RankWeights:
    """The weights of a rank.

    Attributes:
        bound: bytes of everything that programs bind, each byte of a file once.
        copied: how many of them are copies, since columns do not lie together in a file.
        embedding: how many of them are the embedding, which every rank has whole.
    """

    bound: int
    copied: int
    embedding: int


def stored_name(manifest: Manifest, program: Program, constant: str) -> str:
    """The tensor that a program's constant is, or is a part of."""
    cut = manifest.cuts.get(constant) if program.shards > 1 else None
    return constant if cut is None else cut.tensor


def rank_weights(
    manifest: Manifest, tensor_bytes: Mapping[str, int], num_shards: int
) -> RankWeights:
    """What the programs of so many shards bind in one rank, all of them together.

    Args:
        manifest: of the bundle.
        tensor_bytes: the size of every stored tensor.
        num_shards: of the programs.
    """
    programs = [program for program in manifest.programs if program.shards == num_shards]
    bound = {name for program in programs for name in program.constants}
    cuts = {manifest.cuts[name] for name in bound if num_shards > 1 and name in manifest.cuts}
    whole = {name for name in bound if num_shards == 1 or name not in manifest.cuts}
    copied = sum(tensor_bytes[c.tensor] for c in cuts if c.axis == "columns") // num_shards
    # Rows of a tensor that is bound whole are no more bytes.
    rows = {c.tensor for c in cuts if c.axis == "rows"} - whole
    mapped = sum(tensor_bytes[name] for name in rows) // num_shards
    total = sum(tensor_bytes[name] for name in whole) + mapped + copied
    return RankWeights(total, copied, tensor_bytes[EMBEDDING] if EMBEDDING in whole else 0)


def collectives(manifest: Manifest, program: Program) -> tuple[Collective, ...]:
    """The collectives of one call of a program; none of a program of one shard.

    Each layer sums the stream twice, after the attention's and the feed-forward's output, in
    float32 so that a sum is rounded once; the last layer sums what is asked for. The head gathers
    its logits (Shoeybi et al. 2019, arXiv:1909.08053, section 3).
    """
    if program.shards == 1:
        return ()
    num_steps = _num_steps(program)
    tokens, asked = _tokens(program), _asked(program)
    layers = Counter({tokens: manifest.model.num_layers - 1})
    layers[asked] += 1
    sums = [
        Collective("all_reduce", 2 * count * num_steps, "f32", (*of, manifest.model.hidden_size))
        for of, count in layers.items()
        if count
    ]
    return (*sums, *_of_the_head(manifest, program, num_steps))


def _of_the_head(manifest: Manifest, program: Program, num_steps: int) -> Iterator[Collective]:
    """What follows the layers: logits are gathered, log-probabilities summed from parts."""
    output = program.signature.outputs[0]
    if output.name == "logits":
        yield Collective("all_gather", 1, program.dtype, output.shape)
    elif output.name == "tokens":
        shape = (output.shape[0], manifest.model.vocab_size)
        yield Collective("all_gather", num_steps, program.dtype, shape)
    elif output.name in ("loss", "log_probs"):
        tokens = _tokens(program)
        yield Collective("all_reduce", 1, "f32", tokens)  # the largest logit
        # By its number a rank knows which targets are in its part of the vocabulary.
        yield Collective("reduce_scatter", 1, "i64", (program.shards,))
        yield Collective("all_reduce", 1, "f32", (2, *tokens))  # exponentials, the target's logit


def _num_steps(program: Program) -> int:
    """How often a call runs the layers, at most."""
    output = program.signature.outputs[0]
    size = output.shape[1] if output.name == "tokens" else 1
    assert isinstance(size, int)
    return size


def _tokens(program: Program) -> tuple[int | str, ...]:
    """The axes of the stream of a call, the hidden width aside."""
    shapes = {spec.name: spec.shape for spec in program.signature.inputs}
    tokens = shapes["tokens"] if "tokens" in shapes else shapes["token"]
    if "step_tokens" in shapes:
        return (f"{tokens[0]}+{shapes['step_tokens'][0]}",)
    return tokens[:1] if "table" in shapes else tokens


def _asked(program: Program) -> tuple[int | str, ...]:
    """The same axes where the last layer is done with its attention: of logits, those of its rows."""
    tokens, output = _tokens(program), program.signature.outputs[0]
    if output.name != "logits" or len(output.shape) > 2:
        return tokens
    return (output.shape[0], 1) if len(tokens) > 1 else (output.shape[0],)
