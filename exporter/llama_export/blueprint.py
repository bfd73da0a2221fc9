"""What a build will make, decided and checked before anything is made."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from llama_artifacts.dtypes import BY_NAME
from llama_artifacts.errors import BuildError, ChoiceError
from llama_artifacts.manifest import (
    FORMATS,
    WEIGHTS_NAME,
    Cut,
    Format,
    Quantized,
    show_shards,
)
from llama_artifacts.strict_json import shown
from llama_export.checkpoint.config import RopeConfig
from llama_export.checkpoint.layout import coded_modules
from llama_export.checkpoint.open import open_checkpoint
from llama_export.checkpoint.source import Checkpoint
from llama_export.entries import registry
from llama_export.entries.llama import MAX_PAGED_ROWS, MAX_PAGES
from llama_export.entries.registry import EntrySpec, Sizes
from llama_export.entries.variants import Variant
from llama_export.entries.variants import choose as choose_variants
from llama_export.lower.backend import backend
from llama_export.lower.failures import known_failures
from llama_export.model.fp8 import UNIT_MULTIPLE, fits_units
from llama_export.pack import WeightsPlan, plan_weights
from llama_export.presets import find as find_preset
from llama_export.quantize import choose
from llama_export.recipe import DEFAULT_MAX_SEQ, Recipe
from llama_export.shards import cuts_of, part_of, shard
from llama_runtime.weights import map_weights

MIN_MAX_SEQ = 8
_CHANGES = {
    "int8": "makes others",
    "int4": "makes others",
    "uint4": "makes others",
    "stored": "lays them out anew",
}
"""What `--quantize` does to weights."""


@dataclass(frozen=True)
class Draft:
    """One program to build: an entry in a format, perhaps with fixed dimensions, for some processes."""

    spec: EntrySpec
    format: Format
    variant: Variant | None = None
    shards: int = 1

    @property
    def stem(self) -> str:
        """How the file's name begins: `decode.2-shards`."""
        stem = self.spec.stem if self.variant is None else self.variant.stem(self.spec)
        return stem if self.shards == 1 else f"{stem}.{self.shards}-shards"

    @property
    def label(self) -> str:
        """The entry, what is fixed and the number of processes, for people."""
        label = self.spec.name if self.variant is None else self.variant.label(self.spec)
        return show_shards(label, self.shards)


@dataclass(frozen=True)
class Blueprint:
    """Every decision of a build.

    Attributes:
        recipe: what was asked for.
        checkpoint: opened by header.
        sizes: what the build fixes.
        drafts: the programs.
        plan: where the weights will be.
        cuts: which of them programs of several processes bind in parts; empty where none is built.
        output: the folder to write.
        notes: remarks for people.
    """

    recipe: Recipe
    checkpoint: Checkpoint
    sizes: Sizes
    drafts: tuple[Draft, ...]
    plan: WeightsPlan
    cuts: Mapping[str, Cut]
    output: Path
    notes: tuple[str, ...]

    @property
    def has_weights(self) -> bool:
        """Whether programs can be run when they are made."""
        return self.recipe.weights != "none" and self.checkpoint.has_data

    def map_weights(self, folder: Path) -> dict[str, torch.Tensor]:
        """Every weight by name, from the bundle's own file in `folder` and the checkpoint's files."""
        weights: dict[str, torch.Tensor] = {}
        for path in self.plan.stored.values():
            weights |= map_weights(path)
        weights |= map_weights(folder / WEIGHTS_NAME)
        return {name: weights[name] for name in self.plan.tensors}


def draw(recipe: Recipe) -> Blueprint:
    """Decides what a recipe leaves open, and refuses what cannot be made.

    Raises:
        CheckpointError, TokenizerError: the model cannot be used.
        ChoiceError: a choice does not fit the checkpoint.
        BuildError: the choices contradict each other, or cannot be made here.
    """
    formats = _formats(recipe)
    specs = _specs(recipe)
    checkpoint = open_checkpoint(
        recipe.model,
        headers_only=recipe.weights in ("none", "reference"),
        num_layers=recipe.num_layers,
        keeps_codes=recipe.quantize == "stored",
    )
    coded = coded_modules(checkpoint.tensors)
    fp8 = {module for module, codes in coded.items() if codes.is_fp8}
    _check_numerics(recipe, fp8)
    quantized = _quantized(recipe, fp8, is_packed=len(coded) > len(fp8))
    _check_name(checkpoint)
    sizes = _sizes(recipe, checkpoint)
    drafts = _drafts(recipe, specs, formats, sizes)
    output = _output(recipe, checkpoint)
    for count in recipe.shards:
        shard(sizes.config, count)
    for format in formats:
        with known_failures(format, output):
            backend(format).check(recipe.device, recipe.isa)
    plan = plan_weights(
        checkpoint,
        compute=sizes.dtype,
        keeps_stored=recipe.dtype is None,
        in_place=recipe.weights in ("link", "reference"),
        quantized=quantized,
    )
    cuts = _cuts(recipe, sizes, plan)
    notes = (
        f"rope: {describe_rope(checkpoint.config.rope)}",
        *checkpoint.notes,
        *_fp8_notes(recipe, checkpoint, fp8),
        *_quantize_notes(recipe, checkpoint),
        *_weights_notes(recipe, checkpoint),
        *_shards_notes(recipe),
    )
    return Blueprint(recipe, checkpoint, sizes, drafts, plan, cuts, output, notes)


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
    for count, spec in itertools.product(dict.fromkeys(recipe.shards), named.values()):
        # ONNX has no operators between processes.
        able = [format for format in formats if format != "onnx" or count == 1]
        drafts += [Draft(spec, format, shards=count) for format in able]
        for variant in variants[spec.name]:
            spec.signature(sizes, variant.sizes)
            wanted = able if variant.formats is None else variant.formats
            drafts += [Draft(spec, format, variant, count) for format in able if format in wanted]
    return tuple(drafts)


def _cuts(recipe: Recipe, sizes: Sizes, plan: WeightsPlan) -> dict[str, Cut]:
    """What processes bind in parts.

    Raises:
        BuildError: the weights do not divide.
    """
    counts = [count for count in recipe.shards if count > 1]
    cuts = cuts_of(sizes.config, plan.tensors) if counts else {}
    for count in counts:
        part_of(plan.tensors, cuts, count)
    return cuts


def _formats(recipe: Recipe) -> tuple[Format, ...]:
    for name in recipe.formats:
        if name not in FORMATS:
            hint = f"known formats: {', '.join(FORMATS)}"
            raise BuildError(f"unknown format {shown(name)}", hint=hint)
    _check_shards(recipe)
    if recipe.isa is not None and (recipe.device != "cpu" or "aoti" not in recipe.formats):
        raise BuildError(
            f"--isa {recipe.isa} is for aoti programs for the CPU, none of which is built",
            hint="leave --isa out, or add --format aoti",
        )
    is_whole = 1 in recipe.shards
    return tuple(name for name in dict.fromkeys(recipe.formats) if is_whole or name != "onnx")


def _check_shards(recipe: Recipe) -> None:
    for count in recipe.shards:
        if count < 1:
            raise BuildError(f"expected --shards of at least 1, got {count}")
    if not recipe.shards:
        raise BuildError("nothing to build", hint="name at least one --shards")
    is_default = set(recipe.formats) == set(FORMATS)
    if "onnx" in recipe.formats and not is_default and 1 not in recipe.shards:
        raise ChoiceError(
            f"ONNX has no operators between processes, got --shards {min(recipe.shards)}",
            hint="leave --format onnx out, or add --shards 1",
        )


def _shards_notes(recipe: Recipe) -> Iterator[str]:
    if "onnx" in recipe.formats and max(recipe.shards) > 1:
        some = "for 1 shard alone" if 1 in recipe.shards else "not built"
        yield f"ONNX has no operators between processes: onnx is {some}"


def _check_numerics(recipe: Recipe, fp8: Collection[str]) -> None:
    if recipe.numerics == "fast" and not fp8:
        raise ChoiceError(
            "--numerics fast is for FP8 weights, and the checkpoint has none",
            hint="leave --numerics out",
        )


def _quantized(recipe: Recipe, fp8: Collection[str], *, is_packed: bool) -> Quantized | None:
    quantized = choose(recipe.quantize, recipe.group_size, is_fp8=bool(fp8), is_packed=is_packed)
    if recipe.quantize is not None and recipe.weights in ("link", "reference"):
        raise ChoiceError(
            f"--weights {recipe.weights} uses weights as they are stored,"
            f" --quantize {recipe.quantize} {_CHANGES[recipe.quantize]}",
            hint="use --weights copy",
        )
    return quantized


def _quantize_notes(recipe: Recipe, checkpoint: Checkpoint) -> Iterator[str]:
    if recipe.quantize in (None, "stored"):
        return
    kinds = {info.dtype for info in checkpoint.tensors.values()} - set(BY_NAME)
    if kinds:
        yield (
            f"the checkpoint's {', '.join(sorted(kinds))} weights are rounded a second time, to"
            f" {recipe.quantize}"
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


def _weights_notes(recipe: Recipe, checkpoint: Checkpoint) -> Iterator[str]:
    if recipe.weights == "reference" and not checkpoint.has_data:
        yield "only headers of the weights are here: the programs are not run, and not checked"


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
        page_size=recipe.page_size,
        max_rows=recipe.rows,
        max_pages=recipe.pages,
        steps=recipe.steps,
        max_new=recipe.max_new,
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
