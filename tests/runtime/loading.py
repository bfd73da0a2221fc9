"""What the tests of the runtime share: bundles made from others, and the oracle."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import llama_runtime
from llama_artifacts import manifest_file
from llama_artifacts.digests import describe
from llama_artifacts.errors import IntegrityError
from llama_artifacts.manifest import FILE_NAME, FORMATS, WEIGHTS_NAME, Format, Manifest, Program
from llama_artifacts.safetensors import read_header
from llama_runtime import Entry, LoadedBundle, States

FORMAT_NAMES = list(FORMATS)
each_format = pytest.mark.parametrize("format", FORMAT_NAMES)
POISON = 1e4
MAX_SEQ, BATCH, VOCAB_SIZE = 256, 2, 128
SCRATCH = MAX_SEQ - 1
LOGITS_ATOL = 1e-5
TOKENS = [[3, 4, 5], [6, 7, 8]]
Loaded = dict[str, LoadedBundle]
PROMPT = [[1, 5, 9, 33, 2, 17], [7, 7, 4, 3, 90, 6]]


@functools.cache
def reference(checkpoint: Path) -> transformers.LlamaForCausalLM:
    return transformers.LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def expected_logits(checkpoint: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [B, S, V] of tokens [B, S], the whole sequence at once."""
    with torch.no_grad():
        logits: torch.Tensor = reference(checkpoint)(tokens.long()).logits
    return logits


def greedy_tokens(checkpoint: Path, prompt: list[int], num_new: int) -> list[int]:
    """The likeliest token after the whole sequence so far, time and again."""
    tokens = list(prompt)
    for _ in range(num_new):
        tokens.append(int(expected_logits(checkpoint, torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


def random_tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, shape, generator=generator, dtype=torch.int32)


def poisoned(entry: Entry, **sizes: int) -> States:
    """New states, a large number wherever nothing was written."""
    states = entry.new_states(**sizes)
    for tensor in states.values():
        tensor.fill_(POISON)
    return states


def snapshot(states: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in states.items()}


def is_same(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> bool:
    return all(torch.equal(before[name], after[name]) for name in before)


def written(
    before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]
) -> dict[str, set[tuple[int, int]]]:
    """For each state, the (row, position) pairs that changed."""
    changed = {name: (before[name] != after[name]).any(-1).any(1) for name in before}
    return {
        name: {(int(row), int(position)) for row, position in mask.nonzero()}
        for name, mask in changed.items()
    }


def copied(bundle: Path, target: Path, **changes: Any) -> Path:
    """A copy of a bundle with some fields of its manifest changed."""
    shutil.copytree(bundle, target)
    rewrite(target, lambda manifest: dataclasses.replace(manifest, **changes))
    return target


def reduced(bundle: Path, target: Path, keeps: Callable[[Program], bool]) -> Path:
    """A copy of a bundle with some of its programs."""
    programs = tuple(p for p in manifest_file.read(bundle).programs if keeps(p))
    return copied(bundle, target, programs=programs)


def rewrite(bundle: Path, change: Callable[[Manifest], Manifest]) -> None:
    manifest = change(manifest_file.read(bundle))
    (bundle / FILE_NAME).write_bytes(manifest_file.to_json(manifest))


def rewrite_programs(bundle: Path, change: Callable[[Program], Program]) -> None:
    rewrite(bundle, lambda m: dataclasses.replace(m, programs=tuple(map(change, m.programs))))


def sealed(bundle: Path, name: str) -> None:
    """Makes the manifest agree with a file that was changed, as an attacker would."""
    files = {**manifest_file.read(bundle).files, name: describe(bundle / name)}
    rewrite(bundle, lambda manifest: dataclasses.replace(manifest, files=files))


def sealed_header(bundle: Path) -> None:
    """Makes the manifest agree with a changed header of the weights, as an attacker would."""
    path = bundle / WEIGHTS_NAME
    header = path.read_bytes()[: read_header(path).data_start]
    digest = hashlib.sha256(header).hexdigest()
    rewrite(
        bundle,
        lambda manifest: dataclasses.replace(manifest, weights_headers={WEIGHTS_NAME: digest}),
    )


def program_file(bundle: Path, entry: str, format: str) -> Path:
    for program in manifest_file.read(bundle).programs:
        if (program.entry, program.format) == (entry, format):
            return bundle / program.file
    raise KeyError(entry, format)


def logits(folder: Path, format: Format, entry: str = "next_token") -> torch.Tensor:
    result = llama_runtime.load(folder, format=format).entry(entry)(tokens=TOKENS)
    assert isinstance(result, torch.Tensor)
    return result


def refusal(folder: Path, format: Format, entry: str = "next_token") -> str:
    with pytest.raises(IntegrityError) as caught:
        llama_runtime.load(folder, format=format).entry(entry)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
