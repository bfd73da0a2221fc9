"""What a bundle says, beside what the reference says: greedy continuations of a few prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Literal

import llama_runtime
from llama_artifacts.bundle import open_bundle, put_file
from llama_artifacts.codec import encode
from llama_artifacts.errors import InputError, LlamaExportError
from llama_artifacts.manifest import Format, Manifest
from llama_export import presets
from llama_export.reference import Reference
from llama_export.report import Reporter
from llama_runtime import LoadedBundle

FILE_NAME = "samples.json"
NUM_NEW = 32
"""New tokens of a sample at most."""

Kind = Literal["plain", "chat"]


@dataclass(frozen=True)
class Sample:
    """One prompt, continued greedily by the bundle and by the reference.

    Attributes:
        kind: `plain` text, or a user's message in the `chat` template.
        prompt: the text.
        text: the bundle's continuation.
        reference_text: the reference's.
        tokens: the bundle's new ids; a stop token ends them and is not among them.
        reference_tokens: the reference's.
        num_agreeing: how many tokens at the beginning are the same.
        format: of the bundle's program that decoded.
    """

    kind: Kind
    prompt: str
    text: str
    reference_text: str
    tokens: tuple[int, ...]
    reference_tokens: tuple[int, ...]
    num_agreeing: int
    format: Format


def write_samples(
    folder: Path,
    reference: Reference,
    *,
    reporter: Reporter,
    formats: Sequence[Format] | None = None,
    weights_dir: Path | None = None,
) -> tuple[Sample, ...]:
    """Samples the bundle and the reference, and keeps the result in the bundle.

    The prompts are those of the bundle's preset, else a few of any model. `samples.json` is listed
    in the manifest, so that its digest is checked with the others.

    Args:
        folder: the bundle.
        reference: over the same weights.
        reporter: told about each sample, and why there is none.
        formats: the first of these is sampled; None: for each entry the fastest that fits.
        weights_dir: the checkpoint's folder, for a bundle that refers to its weights.

    Returns:
        The samples; none where the bundle cannot generate text.

    Raises:
        BuildError: the bundle cannot be written.
    """
    loaded = _loaded(folder, reporter, formats[0] if formats else None, weights_dir)
    if loaded is None:
        return ()
    samples = tuple(_samples(loaded, reference, reporter))
    if samples:
        table = {
            "max_new": NUM_NEW,
            "reference": f"transformers {reference.version}, float32",
            "samples": encode(samples),
        }
        text = json.dumps(table, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        put_file(folder, FILE_NAME, text.encode())
    return samples


def _loaded(
    folder: Path, reporter: Reporter, format: Format | None, weights_dir: Path | None
) -> LoadedBundle | None:
    """The bundle, ready to generate text, or None with a note."""
    manifest = open_bundle(folder).manifest
    if lacking := {"prefill", "decode"} - set(manifest.entries()):
        reporter.note(f"no samples: the bundle has no entry `{min(lacking)}`")
        return None
    if manifest.tokenizer is None:
        reporter.note("no samples: the bundle has no tokenizer")
        return None
    targets = {p.target.device for p in manifest.programs if p.entry == "decode"}
    device = "cpu" if "cpu" in targets else "cuda"
    try:
        loaded = llama_runtime.load(folder, device=device, format=format, weights_dir=weights_dir)
        loaded.session()
    except LlamaExportError as error:  # no program that this machine can run, mostly
        reporter.note(f"no samples: {error}")
        return None
    return loaded


def _samples(loaded: LoadedBundle, reference: Reference, reporter: Reporter) -> Iterator[Sample]:
    for number, (kind, prompt) in enumerate(_prompts(loaded.manifest)):
        with reporter.step(f"sample {number + 1}"):
            try:
                yield _sample(loaded, reference, kind, prompt)
            except InputError as error:
                reporter.note(f"no sample of {prompt[:40]!r}: {error}")


def _prompts(manifest: Manifest) -> Iterator[tuple[Kind, str]]:
    source = manifest.source
    preset = presets.find_source(manifest.name, source.name if source.kind == "hub" else None)
    plain = preset.plain_prompts if preset else presets.DEFAULT_PLAIN_PROMPTS
    chat = preset.chat_prompts if preset else presets.DEFAULT_CHAT_PROMPTS
    yield from (("plain", prompt) for prompt in plain)
    if manifest.has_chat_template:
        yield from (("chat", prompt) for prompt in chat)


def _sample(loaded: LoadedBundle, reference: Reference, kind: Kind, prompt: str) -> Sample:
    generation = loaded.generate(prompt, max_new=NUM_NEW, chat=kind == "chat")
    text = "".join(generation)
    tokens, ids = generation.tokens, generation.prompt_tokens
    # The last new token needs no position, and the last position is scratch.
    max_new = min(NUM_NEW, loaded.manifest.max_seq - len(ids))
    expected = reference.greedy(ids, max_new=max_new, stop_tokens=loaded.manifest.stop_tokens)
    agreeing = takewhile(lambda pair: pair[0] == pair[1], zip(tokens, expected, strict=False))
    return Sample(
        kind=kind,
        prompt=prompt,
        text=text,
        reference_text=loaded.tokenizer.decode(expected),
        tokens=tuple(tokens),
        reference_tokens=tuple(expected),
        num_agreeing=sum(1 for _ in agreeing),
        format=loaded.entry("decode").format,
    )
