"""From a recipe to a bundle: the whole pipeline as visible calls."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llama_artifacts import manifest as manifests
from llama_artifacts.bundle import check_space, describe, staging
from llama_artifacts.errors import BuildError, ChoiceError
from llama_artifacts.manifest import FORMATS, WEIGHTS_NAME, Format, Manifest, Model, Program
from llama_artifacts.strict_json import shown
from llama_export.checkpoint.config import RopeConfig
from llama_export.checkpoint.layout import parameter_count, scaled_modules
from llama_export.checkpoint.open import open_checkpoint
from llama_export.checkpoint.source import Checkpoint
from llama_export.entries import registry
from llama_export.entries.llama import MAX_PAGED_ROWS, MAX_PAGES
from llama_export.entries.registry import EntrySpec, Sizes
from llama_export.entries.variants import Variant
from llama_export.entries.variants import choose as choose_variants
from llama_export.lower.backend import Place, backend
from llama_export.model.fp8 import UNIT_MULTIPLE, fits_units
from llama_export.model.rope import inverse_frequencies
from llama_export.pack import WeightsPlan, plan_weights, write_weights
from llama_export.presets import find as find_preset
from llama_export.recipe import DEFAULT_MAX_SEQ, Recipe
from llama_export.report import Reporter
from llama_export.trace import Job, torch_dtype
from llama_export.vectors import write_vectors
from llama_export.verify import check_programs
from llama_runtime.machine import version
from llama_runtime.tokenizer import Tokenizer
from llama_runtime.weights import map_weights

MIN_MAX_SEQ = 8
PROGRAM_BYTES = 8 * 2**20
"""What one program is taken to need at most, for the check of free space."""
MAX_REASON_CHARS = 300

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


@dataclass(frozen=True)
class Draft:
    """One program to build: an entry in a format, perhaps with fixed dimensions."""

    spec: EntrySpec
    format: Format
    variant: Variant | None = None

    @property
    def stem(self) -> str:
        """How the file's name begins."""
        return self.spec.stem if self.variant is None else self.variant.stem(self.spec)

    @property
    def label(self) -> str:
        """The entry and what is fixed, for people."""
        return self.spec.name if self.variant is None else self.variant.label(self.spec)


def build(recipe: Recipe, *, reporter: Reporter | None = None) -> BuildResult:
    """Builds a bundle.

    The output appears when everything in it was written and every program that this machine can
    run was checked against the eager model; on any failure nothing appears.

    Raises:
        CheckpointError, TokenizerError: the model cannot be used.
        ChoiceError: a choice does not fit the checkpoint.
        BuildError: the choices contradict each other, or a program cannot be made or written.
        VerificationError: a program does not compute what it must.
    """
    reporter = reporter or Reporter()
    started = time.perf_counter()
    formats = _formats(recipe)
    specs = _specs(recipe)
    checkpoint = open_checkpoint(
        recipe.model, headers_only=recipe.weights == "none", num_layers=recipe.num_layers
    )
    fp8 = scaled_modules(checkpoint.tensors)
    _check_numerics(recipe, fp8)
    notes = (
        f"rope: {describe_rope(checkpoint.config.rope)}",
        *checkpoint.notes,
        *_fp8_notes(recipe, checkpoint, fp8),
    )
    for note in notes:
        reporter.note(note)
    _check_name(checkpoint)
    sizes = _sizes(recipe, checkpoint)
    drafts = _drafts(recipe, specs, formats, sizes)
    output = _output(recipe, checkpoint)
    for format in formats:
        with _known_failures(format, output):
            backend(format).check(recipe.device, recipe.isa)
    plan = plan_weights(checkpoint, compute=sizes.dtype, keeps_stored=recipe.dtype is None)
    weights_bytes = plan.num_bytes if recipe.weights == "copy" else 0
    check_space(output, weights_bytes + len(drafts) * PROGRAM_BYTES)
    assets = checkpoint.assets()
    with staging(output) as folder:
        _write_assets(assets, folder)
        place = _place(recipe, checkpoint, plan, folder, reporter)
        programs, times = [], []
        for draft in drafts:
            step = f"{draft.label} {draft.format}"
            with reporter.step(step), _known_failures(step, folder):
                program, spent = _lower(draft, sizes, plan, place)
            programs.append(program)
            times.append(spent)
        manifest = _manifest(recipe, checkpoint, sizes, plan, programs, folder)
        (folder / manifests.FILE_NAME).write_bytes(manifests.to_json(manifest))
        if recipe.weights == "copy":
            with reporter.step("test vectors"):
                names = write_vectors(folder, manifest)
            files = {**manifest.files, **{name: describe(folder / name) for name in names}}
            manifest = replace(manifest, files=files)
            (folder / manifests.FILE_NAME).write_bytes(manifests.to_json(manifest))
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
        notes=notes,
    )


def _specs(recipe: Recipe) -> tuple[EntrySpec, ...]:
    if not recipe.entries or not recipe.formats:
        raise BuildError("nothing to build", hint="name at least one --entry and one --format")
    return registry.expand(recipe.entries)


def _drafts(
    recipe: Recipe, specs: Sequence[EntrySpec], formats: Sequence[Format], sizes: Sizes
) -> tuple[Draft, ...]:
    """Every program of the build; one that cannot be declared is refused before any is made."""
    named = {spec.name: spec for spec in (spec.sized(sizes) for spec in specs)}
    variants = choose_variants(recipe.variants, tuple(named.values()), recipe.device)
    drafts = []
    for spec in named.values():
        drafts += [Draft(spec, format) for format in formats]
        for variant in variants[spec.name]:
            spec.signature(sizes, variant.sizes)
            wanted = formats if variant.formats is None else variant.formats
            drafts += [Draft(spec, format, variant) for format in formats if format in wanted]
    return tuple(drafts)


def _formats(recipe: Recipe) -> tuple[Format, ...]:
    for name in recipe.formats:
        if name not in FORMATS:
            hint = f"known formats: {', '.join(FORMATS)}"
            raise BuildError(f"unknown format {shown(name)}", hint=hint)
    if recipe.isa is not None and (recipe.device != "cpu" or "aoti" not in recipe.formats):
        raise BuildError(
            f"--isa {recipe.isa} is for aoti programs for the CPU, none of which is built",
            hint="leave --isa out, or add --format aoti",
        )
    return tuple(dict.fromkeys(recipe.formats))


def _check_numerics(recipe: Recipe, fp8: Collection[str]) -> None:
    if recipe.numerics == "fast" and not fp8:
        raise ChoiceError(
            "--numerics fast is for FP8 weights, and the checkpoint has none",
            hint="leave --numerics out",
        )


def _fp8_notes(recipe: Recipe, checkpoint: Checkpoint, fp8: Collection[str]) -> Iterator[str]:
    if fp8 and recipe.dtype is not None:
        yield f"FP8 weights stay FP8; --dtype {recipe.dtype} is that of the rest and of arithmetic"
    if recipe.numerics == "fast" and recipe.device == "cuda":
        odd = [name for name in sorted(fp8) if not fits_units(_weight_shape(checkpoint, name))]
        if odd:
            yield (
                f"{len(odd)} FP8 layers have sizes that are no multiples of {UNIT_MULTIPLE}, such as"
                f" `{odd[0]}` {list(_weight_shape(checkpoint, odd[0]))}: computed as with exact"
            )


def _weight_shape(checkpoint: Checkpoint, module: str) -> tuple[int, ...]:
    return checkpoint.tensors[f"{module}.weight"].shape


def _check_name(checkpoint: Checkpoint) -> None:
    # The manifest takes no other text; better told now than when everything is built.
    source = checkpoint.source
    for text in (checkpoint.name, source.name, source.revision or ""):
        if not text.isprintable():
            raise BuildError(
                f"expected a model's name of printable characters, got {shown(text)}",
                hint="rename the folder or file",
            )


def _output(recipe: Recipe, checkpoint: Checkpoint) -> Path:
    if recipe.output is not None:
        return recipe.output
    output, model = Path(checkpoint.name), Path(recipe.model)
    if output.exists() and model.exists() and output.samefile(model):
        raise BuildError(
            "the bundle would have the checkpoint's own name",
            where=output,
            hint="choose another folder with -o",
        )
    return output


def _sizes(recipe: Recipe, checkpoint: Checkpoint) -> Sizes:
    config = checkpoint.config
    max_seq = recipe.max_seq
    if max_seq is None:
        # A folder of a preset's name is not that preset.
        preset = find_preset(recipe.model) if checkpoint.source.kind == "hub" else None
        max_seq = min(config.max_position, preset.max_seq if preset else DEFAULT_MAX_SEQ)
    if not MIN_MAX_SEQ <= max_seq <= config.max_position:
        raise BuildError(
            f"expected --max-seq from {MIN_MAX_SEQ} to the model's {config.max_position}, "
            f"got {max_seq}"
        )
    if recipe.batch < 1:
        raise BuildError(f"expected --batch of at least 1, got {recipe.batch}")
    if not 1 <= recipe.page_size <= max_seq:
        raise BuildError(f"expected --page-size from 1 to {max_seq}, got {recipe.page_size}")
    if not 1 <= recipe.rows <= MAX_PAGED_ROWS:
        raise BuildError(f"expected --rows from 1 to {MAX_PAGED_ROWS}, got {recipe.rows}")
    most_pages = min(MAX_PAGES, -(-config.max_position // recipe.page_size))
    if recipe.pages is not None and not 1 <= recipe.pages <= most_pages:
        raise BuildError(
            f"expected --pages from 1 to {most_pages}, which hold the model's "
            f"{config.max_position} positions, got {recipe.pages}"
        )
    for option, count in (("--steps", recipe.steps), ("--max-new", recipe.max_new)):
        if count is not None and not 1 <= count <= max_seq - 1:
            raise BuildError(f"expected {option} from 1 to {max_seq - 1}, got {count}")
    return Sizes(
        config,
        recipe.batch,
        max_seq,
        recipe.dtype or checkpoint.dtype,
        page_len=recipe.page_size,
        max_rows=recipe.rows,
        max_pages=recipe.pages,
        steps=recipe.steps,
        max_new=recipe.max_new,
    )


def _place(
    recipe: Recipe, checkpoint: Checkpoint, plan: WeightsPlan, folder: Path, reporter: Reporter
) -> Place:
    weights = None
    if recipe.weights == "copy":
        with reporter.step("weights", plan.num_bytes) as advance:
            write_weights(folder / WEIGHTS_NAME, plan, checkpoint, advance=advance)
        weights = map_weights(folder / WEIGHTS_NAME)
    inv_freq = inverse_frequencies(checkpoint.config.rope, checkpoint.config.head_dim)
    return Place(
        recipe.device, recipe.isa, folder, weights, inv_freq, plan.offsets, recipe.numerics
    )


def _write_assets(assets: Mapping[str, bytes], folder: Path) -> None:
    """Writes what belongs to text, and uses it once: better refused now than when all is built."""
    for name, data in assets.items():
        (folder / name).write_bytes(data)
    if manifests.TOKENIZER_NAME in assets:
        tokenizer = Tokenizer.load(folder)
        if tokenizer.has_chat_template:
            tokenizer.encode_chat([{"role": "user", "content": "Hello"}])


def _lower(
    draft: Draft, sizes: Sizes, plan: WeightsPlan, place: Place
) -> tuple[Program, ProgramTime]:
    started = time.perf_counter()
    spec, format = draft.spec, draft.format
    lowering = backend(format)
    dtype = lowering.compute_dtype(sizes.dtype, place)
    variant = {} if draft.variant is None else dict(draft.variant.sizes)
    signature = spec.signature(replace(sizes, dtype=dtype), variant)
    form = lowering.formulation(torch_dtype(dtype), place)
    job = Job(sizes.config, spec, draft.stem, signature, form, plan.tensors)
    lowered = lowering.lower(job, place)
    program = Program(
        entry=spec.name,
        format=format,
        file=lowered.file,
        dtype=dtype,
        target=lowered.target,
        signature=signature,
        constants=lowered.constants,
        requires=lowered.requires,
        variant=variant,
        numerics=place.numerics if scaled_modules(plan.tensors) else None,
    )
    num_bytes = (place.folder / lowered.file).stat().st_size
    return program, ProgramTime(draft.label, format, time.perf_counter() - started, num_bytes)


@contextlib.contextmanager
def _known_failures(step: str, folder: Path) -> Iterator[None]:
    """What compilers and writers of archives raise for a full disk and the like, as one line."""
    try:
        yield
    except OSError as cause:
        name = cause.filename
        inside = isinstance(name, str) and Path(name).absolute().is_relative_to(folder.absolute())
        if inside or cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise  # the output folder's own error, which `staging` tells
        raise _cannot_be_made(step, cause) from cause
    except (RuntimeError, subprocess.SubprocessError) as cause:
        raise _cannot_be_made(step, cause) from cause


def _cannot_be_made(step: str, cause: Exception) -> BuildError:
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    telling = [line for line in lines if "error:" in line or "No space" in line]
    reason = (*telling, *lines, type(cause).__name__)[0]
    return BuildError(
        f"cannot be made: {reason[:MAX_REASON_CHARS]}",
        where=step,
        hint="is there space in the output folder and in TMPDIR? LLAMA_EXPORT_DEBUG=1 tells more",
    )


def _manifest(
    recipe: Recipe,
    checkpoint: Checkpoint,
    sizes: Sizes,
    plan: WeightsPlan,
    programs: list[Program],
    folder: Path,
) -> Manifest:
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
        tokenizer="tokenizers" if manifests.TOKENIZER_NAME in files else None,
        has_chat_template=manifests.CHAT_TEMPLATE_NAME in files,
        stop_tokens=checkpoint.stop_tokens,
        toolchain=dict(_toolchain()),
        programs=tuple(programs),
        checks=(),
        files=files,
        weights_header=hashlib.sha256(plan.header).hexdigest()
        if recipe.weights == "copy"
        else None,
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
