"""Makes the programs of a build, one after the other or several at a time, or takes them from the cache."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from llama_artifacts.dtypes import from_torch
from llama_artifacts.manifest import Program
from llama_export.blueprint import Blueprint, Draft
from llama_export.cache import ProgramCache
from llama_export.checkpoint.layout import coded_modules
from llama_export.lower.backend import Lowered, Place, backend
from llama_export.lower.failures import known_failures
from llama_export.model.rope import inverse_frequencies
from llama_export.shards import part_of, shard
from llama_export.trace import Job, torch_dtype


@dataclass(frozen=True)
class Made:
    """A program that was made, and what it took.

    Attributes:
        program: its record in the manifest.
        label: the entry and what is fixed, for people.
        seconds: of tracing and lowering.
        bytes: of its file.
        is_cached: whether an earlier build made it.
    """

    program: Program
    label: str
    seconds: float
    bytes: int
    is_cached: bool


class Maker:
    """Makes programs of one blueprint in one folder."""

    def __init__(self, blueprint: Blueprint, folder: Path, cache: ProgramCache | None) -> None:
        recipe, config = blueprint.recipe, blueprint.checkpoint.config
        self._blueprint = blueprint
        self._cache = cache
        self._place = Place(
            recipe.device,
            recipe.isa,
            folder,
            blueprint.map_weights(folder) if blueprint.has_weights else None,
            inverse_frequencies(config.rope, config.head_dim),
            blueprint.plan.extents,
            recipe.numerics,
        )

    def take(self, draft: Draft) -> Made | None:
        """Copies one program from the cache into the folder; None where it has none.

        Raises:
            BuildError: it cannot be written.
        """
        if self._cache is None:
            return None
        with known_failures(_step(draft), self._place.folder):
            started = time.perf_counter()
            job = self.job(draft)
            lowered = self._cache.take(draft.format, job, self._place)
            if lowered is None:
                return None
            return self._made(draft, job, lowered, time.perf_counter() - started, True)

    def make(self, draft: Draft) -> Made:
        """Traces and lowers one program into the folder, and keeps it in the cache.

        Raises:
            BuildError: it cannot be made or written.
        """
        with known_failures(_step(draft), self._place.folder):
            started = time.perf_counter()
            job = self.job(draft)
            if self._cache is None:
                lowered = backend(draft.format).lower(job, self._place)
            else:
                lowered = self._cache.lower(draft.format, job, self._place)
            return self._made(draft, job, lowered, time.perf_counter() - started, False)

    def job(self, draft: Draft) -> Job:
        """What is to be traced for a program."""
        sizes, place = self._blueprint.sizes, self._place
        lowering = backend(draft.format)
        dtype = lowering.compute_dtype(sizes.dtype, place)
        variant = {} if draft.variant is None else dict(draft.variant.sizes)
        own = replace(sizes, dtype=dtype).shard(draft.shards)
        signature = draft.spec.signature(own, variant)
        form = lowering.formulation(torch_dtype(dtype), place, draft.shards)
        tensors, cuts = self._blueprint.plan.tensors, self._blueprint.cuts
        if draft.shards == 1:
            return Job(sizes.config, draft.spec, draft.stem, signature, form, tensors)
        return Job(
            shard(sizes.config, draft.shards),
            draft.spec,
            draft.stem,
            signature,
            form,
            part_of(tensors, cuts, draft.shards),
            frozenset(cuts),
        )

    def _made(
        self,
        draft: Draft,
        job: Job,
        lowered: Lowered,
        seconds: float,
        is_cached: bool,
    ) -> Made:
        coded = coded_modules(self._blueprint.plan.tensors).values()
        is_fp8 = any(codes.is_fp8 for codes in coded)
        program = Program(
            entry=draft.spec.name,
            format=draft.format,
            file=lowered.file,
            dtype=from_torch(job.form.dtype).name,
            target=lowered.target,
            signature=job.signature,
            constants=lowered.constants,
            requires=lowered.requires,
            variant={} if draft.variant is None else dict(draft.variant.sizes),
            numerics=self._place.numerics if is_fp8 else None,
            shards=draft.shards,
        )
        num_bytes = (self._place.folder / lowered.file).stat().st_size
        return Made(program, draft.label, seconds, num_bytes, is_cached)


def _step(draft: Draft) -> str:
    return f"{draft.label} {draft.format}"
