"""From a recipe to a bundle: the whole pipeline as visible calls."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from llama_artifacts import manifest as manifests
from llama_artifacts import manifest_file
from llama_artifacts.bundle import check_space, staging
from llama_artifacts.digests import describe
from llama_artifacts.manifest import WEIGHTS_NAME, File, Manifest, Model, Program
from llama_artifacts.safetensors import header_digest
from llama_export.blueprint import Blueprint, describe_rope, draw
from llama_export.cache import ProgramCache
from llama_export.checkpoint.layout import parameter_count
from llama_export.checkpoint.source import Checkpoint
from llama_export.pack import check_stored, link_file, write_weights
from llama_export.programs import Made
from llama_export.recipe import Recipe
from llama_export.report import Reporter
from llama_export.vectors import write_vectors
from llama_export.verify import check_programs
from llama_export.workers import make_all
from llama_runtime.machine import version
from llama_runtime.tokenizer import Tokenizer

PROGRAM_BYTES = 8 * 2**20
"""What one program is taken to need at most, for the check of free space."""

_TOOLCHAIN = ("llama-export", "torch", "onnx", "onnxscript", "onnxruntime-gpu", "onnxruntime")


@dataclass(frozen=True)
class BuildResult:
    """What a build made."""

    folder: Path
    bundle_bytes: int
    weights_bytes: int
    programs: tuple[Made, ...]
    seconds: float
    notes: tuple[str, ...]


def build(
    recipe: Recipe, *, reporter: Reporter | None = None, cache: ProgramCache | None = None
) -> BuildResult:
    """Builds a bundle.

    The output appears when everything in it was written and every program that this machine can
    run was checked against the eager model; on any failure nothing appears.

    Args:
        recipe: what to build.
        reporter: told about each step.
        cache: where programs are kept from build to build; None: every program is made.

    Raises:
        CheckpointError, TokenizerError: the model cannot be used.
        ChoiceError: a choice does not fit the checkpoint.
        BuildError: the choices contradict each other, or a program cannot be made or written.
        VerificationError: a program does not compute what it must.
    """
    reporter = reporter or Reporter()
    started = time.perf_counter()
    blueprint = draw(recipe)
    for note in blueprint.notes:
        reporter.note(note)
    output = blueprint.output
    own_bytes = 0 if recipe.weights == "none" else blueprint.plan.num_bytes
    check_space(output, own_bytes + len(blueprint.drafts) * PROGRAM_BYTES)
    with staging(output, overwrites=recipe.overwrites) as folder:
        _write_assets(blueprint.checkpoint.assets(), folder)
        written = _write_weights(blueprint, folder, reporter)
        made = make_all(blueprint, folder, reporter=reporter, cache=cache)
        manifest = _manifest(blueprint, [item.program for item in made], folder, written)
        _put(folder, manifest)
        if blueprint.has_weights:
            manifest = _prove(blueprint, manifest, folder, reporter)
        bundle_bytes = sum(path.stat().st_size for path in folder.iterdir())
    weights_bytes = sum(
        file.bytes for name, file in manifest.files.items() if name in manifest.weights_headers
    )
    seconds = time.perf_counter() - started
    return BuildResult(output, bundle_bytes, weights_bytes, made, seconds, blueprint.notes)


def _write_weights(blueprint: Blueprint, folder: Path, reporter: Reporter) -> dict[str, File]:
    """Puts the weights into the folder; returns what was hashed while it was written."""
    recipe, plan, checkpoint = blueprint.recipe, blueprint.plan, blueprint.checkpoint
    if recipe.weights == "none":
        return {}
    with reporter.step("weights", plan.num_bytes) as advance:
        own = write_weights(folder / WEIGHTS_NAME, plan, checkpoint, advance=advance)
        if checkpoint.has_data:
            check_stored(plan, checkpoint)
        if recipe.weights == "link":
            for name, path in plan.stored.items():
                link_file(path, folder / name)
    return {WEIGHTS_NAME: own}


def _prove(blueprint: Blueprint, manifest: Manifest, folder: Path, reporter: Reporter) -> Manifest:
    """Adds test vectors and the figures of the quick laws."""
    with reporter.step("test vectors"):
        names = write_vectors(folder, manifest, blueprint.map_weights(folder))
    files = {**manifest.files, **{name: describe(folder / name) for name in names}}
    manifest = replace(manifest, files=files)
    _put(folder, manifest)
    stored = next(iter(blueprint.plan.stored.values()), None)
    checks = check_programs(
        folder, reporter=reporter, weights_dir=None if stored is None else stored.parent
    )
    manifest = replace(manifest, checks=checks)
    _put(folder, manifest)
    return manifest


def _put(folder: Path, manifest: Manifest) -> None:
    (folder / manifests.FILE_NAME).write_bytes(manifest_file.to_json(manifest))


def _write_assets(assets: Mapping[str, bytes], folder: Path) -> None:
    """Writes what belongs to text, and uses it once: better refused now than when all is built."""
    for name, data in assets.items():
        (folder / name).write_bytes(data)
    if manifests.TOKENIZER_NAME in assets:
        tokenizer = Tokenizer.load(folder)
        if tokenizer.has_chat_template:
            tokenizer.encode_chat([{"role": "user", "content": "Hello"}])


def _manifest(
    blueprint: Blueprint, programs: list[Program], folder: Path, known: Mapping[str, File]
) -> Manifest:
    recipe, checkpoint, sizes = blueprint.recipe, blueprint.checkpoint, blueprint.sizes
    files = {path.name: known.get(path.name) or describe(path) for path in sorted(folder.iterdir())}
    return Manifest(
        schema=f"{manifests.SCHEMA_MAJOR}.{manifests.SCHEMA_MINOR}",
        name=checkpoint.name,
        source=checkpoint.source,
        model=_model(checkpoint),
        dtype=sizes.dtype,
        max_seq=sizes.max_seq,
        batch=sizes.batch,
        weights=recipe.weights,
        tokenizer="tokenizers" if manifests.TOKENIZER_NAME in files else None,
        has_chat_template=manifests.CHAT_TEMPLATE_NAME in files,
        stop_tokens=checkpoint.stop_tokens,
        toolchain=dict(_toolchain()),
        programs=tuple(programs),
        checks=(),
        files=files,
        weights_headers=_headers(blueprint),
        referenced=_referenced(blueprint),
        quantized=blueprint.plan.quantized,
        cuts=dict(blueprint.cuts),
    )


def _headers(blueprint: Blueprint) -> dict[str, str]:
    plan = blueprint.plan
    if blueprint.recipe.weights == "none":
        return {}
    own = {WEIGHTS_NAME: hashlib.sha256(plan.header).hexdigest()}
    return own | {name: header_digest(path) for name, path in plan.stored.items()}


def _referenced(blueprint: Blueprint) -> dict[str, File]:
    if blueprint.recipe.weights != "reference":
        return {}
    checkpoint = blueprint.checkpoint
    return {name: checkpoint.describe(path) for name, path in blueprint.plan.stored.items()}


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


def _toolchain() -> Iterator[tuple[str, str]]:
    found: Mapping[str, str | None] = {name: version(name) for name in _TOOLCHAIN}
    for name, release in found.items():
        if release is not None:
            yield name, release
