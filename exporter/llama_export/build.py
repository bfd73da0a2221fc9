"""From a recipe to a bundle: the whole pipeline as visible calls."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from llama_artifacts import manifest as manifests
from llama_artifacts.bundle import check_space, describe, staging
from llama_artifacts.errors import BuildError
from llama_artifacts.manifest import WEIGHTS_NAME, Format, Manifest, Model, Program
from llama_export.checkpoint.config import RopeConfig
from llama_export.checkpoint.layout import parameter_count
from llama_export.checkpoint.open import open_checkpoint
from llama_export.checkpoint.source import Checkpoint
from llama_export.entries import registry
from llama_export.entries.registry import EntrySpec, Sizes
from llama_export.lower.backend import Place, backend
from llama_export.model.rope import inverse_frequencies
from llama_export.pack import WeightsPlan, plan_weights, write_weights
from llama_export.presets import find as find_preset
from llama_export.recipe import DEFAULT_MAX_SEQ, Recipe
from llama_export.report import Reporter
from llama_export.trace import Job, torch_dtype
from llama_export.verify import check_programs
from llama_runtime.machine import version
from llama_runtime.weights import map_weights

MIN_MAX_SEQ = 8
PROGRAM_BYTES = 32 * 2**20
"""What one program is taken to need at most, for the check of free space."""

_TOOLCHAIN = ("llama-export", "torch", "onnx", "onnxscript", "onnxruntime-gpu", "onnxruntime")


@dataclass(frozen=True)
class ProgramTime:
    """One program that was built: seconds of tracing and lowering, bytes of its file."""

    entry: str
    format: Format
    seconds: float
    bytes: int


@dataclass(frozen=True)
class BuildResult:
    """What a build made."""

    folder: Path
    bundle_bytes: int
    weights_bytes: int
    programs: tuple[ProgramTime, ...]
    seconds: float
    notes: tuple[str, ...]


def build(recipe: Recipe, *, reporter: Reporter | None = None) -> BuildResult:
    """Builds a bundle.

    The output appears when everything in it was written and every program that this machine can
    run was checked against the eager model; on any failure nothing appears.

    Raises:
        CheckpointError, TokenizerError: the model cannot be used.
        BuildError: the choices contradict each other, or a program cannot be made or written.
        VerificationError: a program does not compute what it must.
    """
    reporter = reporter or Reporter()
    started = time.perf_counter()
    specs = _specs(recipe)
    checkpoint = open_checkpoint(
        recipe.model, headers_only=recipe.weights == "none", num_layers=recipe.num_layers
    )
    for note in checkpoint.notes:
        reporter.note(note)
    sizes = _sizes(recipe, checkpoint)
    output = recipe.output if recipe.output is not None else Path(checkpoint.name)
    plan = plan_weights(checkpoint, compute=sizes.dtype, keeps_stored=recipe.dtype is None)
    weights_bytes = plan.num_bytes if recipe.weights == "copy" else 0
    num_programs = len(specs) * len(recipe.formats)
    check_space(output, weights_bytes + num_programs * PROGRAM_BYTES)
    with staging(output) as folder:
        place = _place(recipe, checkpoint, plan, folder, reporter)
        programs, times = [], []
        for spec in specs:
            for format in recipe.formats:
                with reporter.step(f"{spec.name} {format}"):
                    program, spent = _lower(spec, format, sizes, plan, place)
                programs.append(program)
                times.append(spent)
        manifest = _manifest(recipe, checkpoint, sizes, programs, folder)
        (folder / manifests.FILE_NAME).write_bytes(manifests.to_json(manifest))
        if recipe.weights == "copy":
            checks = check_programs(folder, reporter=reporter)
            manifest = replace(manifest, checks=checks)
            (folder / manifests.FILE_NAME).write_bytes(manifests.to_json(manifest))
        bundle_bytes = sum(path.stat().st_size for path in folder.iterdir())
    return BuildResult(
        folder=output,
        bundle_bytes=bundle_bytes,
        weights_bytes=weights_bytes,
        programs=tuple(times),
        seconds=time.perf_counter() - started,
        notes=tuple(checkpoint.notes),
    )


def _specs(recipe: Recipe) -> tuple[EntrySpec, ...]:
    if not recipe.entries or not recipe.formats:
        raise BuildError("nothing to build", hint="name at least one --entry and one --format")
    return tuple(registry.find(name) for name in dict.fromkeys(recipe.entries))


def _sizes(recipe: Recipe, checkpoint: Checkpoint) -> Sizes:
    config = checkpoint.config
    preset = find_preset(recipe.model)
    max_seq = recipe.max_seq or (preset.max_seq if preset else None)
    max_seq = max_seq or min(config.max_position, DEFAULT_MAX_SEQ)
    if not MIN_MAX_SEQ <= max_seq <= config.max_position:
        raise BuildError(
            f"expected --max-seq from {MIN_MAX_SEQ} to the model's {config.max_position}, "
            f"got {max_seq}"
        )
    if recipe.batch < 1:
        raise BuildError(f"expected --batch of at least 1, got {recipe.batch}")
    return Sizes(config, recipe.batch, max_seq, recipe.dtype or checkpoint.dtype)


def _place(
    recipe: Recipe, checkpoint: Checkpoint, plan: WeightsPlan, folder: Path, reporter: Reporter
) -> Place:
    weights = None
    if recipe.weights == "copy":
        with reporter.step("weights", plan.num_bytes) as advance:
            write_weights(folder / WEIGHTS_NAME, plan, checkpoint, advance=advance)
        weights = map_weights(folder / WEIGHTS_NAME)
    inv_freq = inverse_frequencies(checkpoint.config.rope, checkpoint.config.head_dim)
    return Place(recipe.device, recipe.isa, folder, weights, inv_freq, plan.offsets)


def _lower(
    spec: EntrySpec, format: Format, sizes: Sizes, plan: WeightsPlan, place: Place
) -> tuple[Program, ProgramTime]:
    started = time.perf_counter()
    lowering = backend(format)
    dtype = lowering.compute_dtype(sizes.dtype, place)
    signature = spec.signature(replace(sizes, dtype=dtype))
    form = lowering.formulation(torch_dtype(dtype), place)
    lowered = lowering.lower(Job(sizes.config, spec, signature, form, plan.tensors), place)
    program = Program(
        entry=spec.name,
        format=format,
        file=lowered.file,
        dtype=dtype,
        target=lowered.target,
        signature=signature,
        constants=lowered.constants,
        requires=lowered.requires,
    )
    num_bytes = (place.folder / lowered.file).stat().st_size
    return program, ProgramTime(spec.name, format, time.perf_counter() - started, num_bytes)


def _manifest(
    recipe: Recipe,
    checkpoint: Checkpoint,
    sizes: Sizes,
    programs: list[Program],
    folder: Path,
) -> Manifest:
    assets = checkpoint.assets()
    for name, data in assets.items():
        (folder / name).write_bytes(data)
    files = {path.name: describe(path) for path in sorted(folder.iterdir())}
    return Manifest(
        schema=f"{manifests.SCHEMA_MAJOR}.{manifests.SCHEMA_MINOR}",
        name=checkpoint.name,
        source=checkpoint.source,
        model=_model(checkpoint),
        dtype=sizes.dtype,
        max_seq=sizes.max_seq,
        batch=sizes.batch,
        weights=recipe.weights,
        tokenizer="tokenizers" if "tokenizer.json" in assets else None,
        has_chat_template="chat_template.jinja" in assets,
        stop_tokens=checkpoint.stop_tokens,
        toolchain=dict(_toolchain()),
        programs=tuple(programs),
        checks=(),
        files=files,
    )


def _model(checkpoint: Checkpoint) -> Model:
    config = checkpoint.config
    return Model(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope=describe_rope(config.rope),
        tie_word_embeddings=config.tie_word_embeddings,
        attention_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
        num_parameters=parameter_count(config),
    )


def describe_rope(rope: RopeConfig) -> str:
    """The rotary embedding in a few words, such as `llama3 theta=500000 factor=8`."""
    text = f"{rope.kind} theta={rope.theta:g}"
    if rope.kind in ("linear", "llama3"):
        text += f" factor={rope.factor:g}"
    if rope.kind == "llama3":
        text += (
            f" low={rope.low_freq_factor:g} high={rope.high_freq_factor:g}"
            f" original={rope.original_max_position}"
        )
    return text


def _toolchain() -> Iterator[tuple[str, str]]:
    found: Mapping[str, str | None] = {name: version(name) for name in _TOOLCHAIN}
    for name, release in found.items():
        if release is not None:
            yield name, release
