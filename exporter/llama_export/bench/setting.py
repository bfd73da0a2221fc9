"""What is to be measured, checked against the bundle."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llama_artifacts.bundle import Bundle, open_bundle
from llama_artifacts.errors import CompatibilityError, InputError
from llama_artifacts.manifest import Format, Manifest, Program
from llama_runtime.places import find_weights

WorkloadName = Literal["decode", "prefill", "load", "serve", "build"]
SEED = 20
PROMPT_LEN = {"decode": 512, "prefill": 512, "load": 16, "serve": 128, "build": 1}
NEW_TOKENS = {"decode": 128, "prefill": 1, "load": 1, "serve": 32, "build": 1}
"""Of the workloads where nobody says otherwise and the bundle has the room."""
REQUESTS, CONCURRENCY, ALONE = 32, 4, 16
"""Of `serve`. One at a time, 16 requests take seconds where hundreds of them take minutes."""

_STEP = {"serve": "decode_paged"}


@dataclass(frozen=True)
class Setting:
    """One measurement.

    Attributes:
        bundle: opened, without its programs.
        places: where each of its weights files is.
        name: of the workload.
        step: the program of a decode step.
        prompt_len: tokens of the prompt; the most of a prompt of `serve`.
        new_tokens: tokens after it.
        runs: how often each method does it.
        threads: CPU threads of each method.
        formats: of the bundle; None stands for the best that fits.
        peers: names of `methods.PEERS`.
        requests: of `serve`.
        concurrency: of `serve`: most requests in flight.
        alone: of `serve`: how many of the requests, the first ones, are served one at a time too.
        weights_dir: the checkpoint's folder, for a bundle that refers to its weights.
        beside: other bundles of the same model, which take part like peers.
    """

    bundle: Bundle
    places: Mapping[str, Path]
    name: WorkloadName
    step: Program
    prompt_len: int
    new_tokens: int
    runs: int
    threads: int
    formats: tuple[Format | None, ...] = (None,)
    peers: tuple[str, ...] = ()
    requests: int = 0
    concurrency: int = 1
    alone: int = 0
    weights_dir: Path | None = None
    beside: tuple[Path, ...] = ()

    @property
    def manifest(self) -> Manifest:
        return self.bundle.manifest

    def prompt(self) -> tuple[int, ...]:
        """Token ids, the same every time; no stop token, since a text would end there."""
        return self._tokens(random.Random(SEED), self.prompt_len)

    def prompts(self) -> list[tuple[int, ...]]:
        """A prompt for each request, of a random length from a quarter of `prompt_len` up."""
        source = random.Random(SEED)
        shortest = max(1, self.prompt_len // 4)
        lengths = [source.randint(shortest, self.prompt_len) for _ in range(self.requests)]
        return [self._tokens(source, length) for length in lengths]

    def _tokens(self, source: random.Random, count: int) -> tuple[int, ...]:
        stops = set(self.manifest.stop_tokens)
        known = [token for token in range(self.manifest.model.vocab_size) if token not in stops]
        return tuple(source.choices(known, k=count))


def make_setting(
    folder: Path,
    name: WorkloadName,
    *,
    runs: int,
    threads: int,
    prompt_len: int | None = None,
    new_tokens: int | None = None,
    formats: tuple[Format, ...] = (),
    peers: tuple[str, ...] = (),
    requests: int | None = None,
    concurrency: int | None = None,
    alone: int | None = None,
    weights_dir: Path | None = None,
    beside: tuple[Path, ...] = (),
) -> Setting:
    """Opens a bundle and fills in what was not said.

    Raises:
        ManifestError, IntegrityError: the bundle is damaged.
        CompatibilityError: it lacks the entries of the workload, or a bundle beside it is of
            another model or batch, or has too few positions.
        InputError: prompt and new tokens need more positions than it has, or the requests in
            flight more rows.
    """
    bundle = open_bundle(folder)
    places = find_weights(bundle, weights_dir=weights_dir)
    prompt_len, new_tokens = _lengths(bundle.manifest, name, prompt_len, new_tokens)
    for other in beside:
        _check_beside(bundle.manifest, open_bundle(other), prompt_len + new_tokens)
    step = _step(bundle, name)
    serving = _serving(step, requests, concurrency, alone) if name == "serve" else {}
    return Setting(
        bundle=bundle,
        places=places,
        name=name,
        step=step,
        prompt_len=prompt_len,
        new_tokens=new_tokens,
        runs=runs,
        threads=threads,
        formats=formats or (None,),
        peers=peers,
        weights_dir=weights_dir,
        beside=beside,
        **serving,
    )


def _step(bundle: Bundle, name: WorkloadName) -> Program:
    entry = _STEP.get(name, "decode")
    for program in bundle.manifest.programs:
        if program.entry == entry and not program.variant and program.shards == 1:
            return program
    raise CompatibilityError(
        f"expected the entry `{entry}` for the workload {name}, the bundle has none",
        where=bundle.folder,
        hint=f"build it with --entry {'serving' if entry == 'decode_paged' else 'decode'}",
    )


def _serving(
    step: Program, requests: int | None, concurrency: int | None, alone: int | None
) -> dict[str, int]:
    """What was asked for; else the usual, or what there are rows and requests for."""
    size = next(spec.shape[0] for spec in step.signature.inputs if spec.name == "table")
    num_rows = size if isinstance(size, int) else step.signature.dim(size).max
    requests = REQUESTS if requests is None else requests
    if concurrency is None:
        concurrency = min(CONCURRENCY, num_rows)
    if concurrency > num_rows:
        raise InputError(
            f"expected at most {num_rows} requests in flight, got {concurrency}",
            where="concurrency",
            hint="lower it, or build with a larger --rows",
        )
    alone = min(ALONE if alone is None else alone, requests)
    return {"requests": requests, "concurrency": concurrency, "alone": alone}


def _check_beside(manifest: Manifest, other: Bundle, positions: int) -> None:
    """Refuses a bundle whose figures would say nothing about the first one's."""
    found = other.manifest
    for what, expected, got in (
        ("the same model", manifest.model, found.model),
        (f"the batch {manifest.batch}", manifest.batch, found.batch),
    ):
        if expected != got:
            raise CompatibilityError(
                f"expected {what}, got another",
                where=other.folder,
                hint="build both from one checkpoint with one --batch",
            )
    if found.max_seq < positions:
        raise CompatibilityError(
            f"expected room for {positions} positions, got {found.max_seq}",
            where=other.folder,
            hint="measure fewer tokens, or build it with a larger --max-seq",
        )


def _lengths(
    manifest: Manifest, name: WorkloadName, prompt_len: int | None, new_tokens: int | None
) -> tuple[int, int]:
    """What was asked for; else the usual, halved to what there is room for."""
    capacity = manifest.max_seq - 1  # the last position is scratch
    wanted = NEW_TOKENS[name] if new_tokens is None else new_tokens
    if prompt_len is None:
        prompt_len = max(1, min(PROMPT_LEN[name], (capacity + 1) // 2))
    if new_tokens is None:
        wanted = max(1, min(wanted, capacity - prompt_len + 1))
    # The last new token needs no position of its own.
    if prompt_len + wanted - 1 > capacity:
        raise InputError(
            f"expected at most {capacity} positions, got {prompt_len} + {wanted - 1}",
            where="prompt-len, new-tokens",
            hint="measure fewer tokens, or build with a larger --max-seq",
        )
    return prompt_len, wanted
