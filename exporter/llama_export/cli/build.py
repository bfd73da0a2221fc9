"""`llama-export build`: a checkpoint becomes a bundle."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llama_artifacts import manifest_file
from llama_artifacts.manifest import FORMATS
from llama_artifacts.places import CACHE_VARIABLE
from llama_artifacts.summary import show_bytes
from llama_export import presets
from llama_export.cli import output
from llama_export.cli.config import check_option, config_option
from llama_export.cli.diff import show_changes
from llama_export.cli.options import (
    Command,
    dtype_option,
    formats_option,
    group_size_option,
    json_option,
    option,
    page_size_option,
    quantize_option,
)
from llama_export.entries.registry import DEFAULT_MAX_NEW, DEFAULT_ROWS, DEFAULT_STEPS
from llama_export.recipe import DEFAULT_ENTRIES, DEFAULT_MAX_SEQ, Recipe

if TYPE_CHECKING:
    from llama_export.build import BuildResult

EXAMPLES = (
    ("A preset, everything at its default:", "llama-export build smollm2-135m-instruct"),
    (
        "A GGUF file, one format, room for 8,191 tokens:",
        "llama-export build ./model.gguf -o my-bundle --format aoti --max-seq 8192",
    ),
    (
        "Four-bit weights, in a third of the size:",
        "llama-export build owner/name -o small --quantize int4",
    ),
    (
        "A GGUF file's own integers, not rounded again:",
        "llama-export build ./model.gguf -o small --quantize stored",
    ),
    (
        "Whether the same comes out once more, byte for byte:",
        "llama-export build ./model.gguf --check my-bundle",
    ),
    (
        "Only the program of one step, without weights:",
        "llama-export build llama-3.1-8b-instruct --entry decode --format pt2 --weights none",
    ),
)
PROGRAMS, STATES = "What to build", "Sizes"
WHERE, SPEED = "Output and target", "Speed"


class BuildCommand(Command):
    """Adds the presets to the help."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Presets"):
            formatter.write_text(", ".join(sorted(presets.names())))
        super().format_epilog(ctx, formatter)


@click.command(cls=BuildCommand, examples=EXAMPLES)
@click.argument("model")
@config_option
@option(
    "--entry",
    "entries",
    group=PROGRAMS,
    multiple=True,
    metavar="NAME",
    default=DEFAULT_ENTRIES,
    help="An entry to build, or a group (all, serving, training, generation); repeat it for several. The"
    " `entries` command lists them.",
)
@formats_option(
    "A format to build every entry in; repeat it for several. pt2 is torch.export's portable"
    " program, aoti native code for this kind of machine (AOTInductor), onnx for ONNX Runtime.",
    group=PROGRAMS,
    default=FORMATS,
)
@option(
    "--variant",
    "variants",
    group=PROGRAMS,
    multiple=True,
    metavar="ENTRY:DIM=N",
    show_default="decode_paged:Rows=1 in aoti for the CPU, where decode_paged is built",
    help="A further program of an entry, with a dynamic dimension fixed; a runtime takes the most"
    " specific one that fits a call. Repeat it for several; `none` builds none.",
)
@dtype_option("The dtype of weights and arithmetic.", group=PROGRAMS)
@option(
    "--numerics",
    group=PROGRAMS,
    type=click.Choice(["exact", "fast"]),
    default="exact",
    help="How products with FP8 weights are computed: `exact` as if they were stored in the dtype"
    " of the arithmetic; `fast` scales after the sum and, on CUDA, rounds activations to FP8.",
)
@quantize_option(
    "Round the layers' weights to integers of eight or four bits with a scale for each group"
    " (`uint4`: and a minimum), and the embedding and the output head to eight; or keep the integers of a GGUF file of q8_0,"
    " q4_0, q4_1 or q4_k as they are (`stored`). Arithmetic stays in the dtype.",
    group=PROGRAMS,
)
@group_size_option(group=PROGRAMS)
@option(
    "--shards",
    group=PROGRAMS,
    type=click.IntRange(min=1),
    multiple=True,
    default=(1,),
    metavar="N",
    help="Build programs that N processes run together, each with its part of the weights and states"
    " (torchrun -m llama_runtime); repeat it for several numbers. The bundle's weights are the same"
    " for all of them. Not in onnx.",
)
@option(
    "--num-layers",
    group=PROGRAMS,
    type=click.IntRange(min=1),
    metavar="N",
    show_default="all",
    help="Use only the first N layers, to try things out.",
)
@option(
    "--max-seq",
    group=STATES,
    type=click.IntRange(min=8),
    metavar="N",
    show_default=f"the preset's, else the model's but at most {DEFAULT_MAX_SEQ:,}",
    help="Positions that a state holds. The last one is scratch; N-1 can be filled.",
)
@option(
    "--batch",
    group=STATES,
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    help="Rows of the states: sequences that one call advances.",
)
@page_size_option(group=STATES)
@option(
    "--rows",
    group=STATES,
    type=click.IntRange(min=1),
    default=DEFAULT_ROWS,
    metavar="N",
    help="Most rows of one call, in entries that keep a pool of pages.",
)
@option(
    "--pages",
    group=STATES,
    type=click.IntRange(min=1),
    metavar="N",
    show_default="what --max-seq positions fill",
    help="Most pages of a row, in entries that keep a pool of pages.",
)
@option(
    "--steps",
    group=STATES,
    type=click.IntRange(min=1),
    metavar="N",
    show_default=f"{DEFAULT_STEPS}, or what fits",
    help="Tokens that generate and sample give; generate<64> fixes them in the name.",
)
@option(
    "--max-new",
    group=STATES,
    type=click.IntRange(min=1),
    metavar="N",
    show_default=f"{DEFAULT_MAX_NEW}, or what fits",
    help="Most tokens that generate_until gives.",
)
@option(
    "--output",
    "-o",
    group=WHERE,
    type=click.Path(path_type=Path),
    metavar="DIR",
    show_default="the model's short name, here",
    help="The folder to write; it must not exist yet.",
)
@option(
    "--overwrite",
    "overwrites",
    group=WHERE,
    is_flag=True,
    show_default=False,
    help="Replace the bundle that is there, once the new one is whole and checked.",
)
@check_option
@option(
    "--weights",
    group=WHERE,
    type=click.Choice(["copy", "link", "reference", "none"]),
    default="copy",
    help="`copy` puts one copy of the weights into the bundle, for all its programs. `link` puts the"
    " checkpoint's own safetensors files there, as reflinks or hard links. `reference` names and"
    " pins them, and a runtime fetches them. `none` builds programs only and reads no weight.",
)
@option(
    "--device",
    group=WHERE,
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    help="Where the programs will run.",
)
@option(
    "--isa",
    group=WHERE,
    type=click.Choice(["avx2", "avx512"]),
    show_default="this machine's best",
    help="The instruction set of native CPU code.",
)
@option(
    "--jobs",
    "-j",
    group=SPEED,
    type=click.IntRange(min=1),
    metavar="N",
    show_default="what cores and free memory allow",
    help="Programs to make at the same time, each in a process of its own.",
)
@option(
    "--cache-dir",
    group=SPEED,
    type=click.Path(path_type=Path),
    metavar="DIR",
    show_default=f"{CACHE_VARIABLE}, else ~/.cache/llama-export",
    help="Where programs are kept: one that was made before, of the same things, is copied.",
)
@option(
    "--no-cache",
    group=SPEED,
    is_flag=True,
    show_default=False,
    help="Make every program, and keep none.",
)
@json_option
def command(
    *,
    model: str,
    as_json: bool,
    variants: tuple[str, ...],
    cache_dir: Path | None,
    no_cache: bool,
    checked: Path | None,
    **choices: Any,
) -> None:
    """Build a bundle from a checkpoint.

    MODEL is a checkpoint folder as on the Hugging Face hub (config.json and safetensors), a .gguf
    file, a hub repository as owner/name or owner/name@revision, or a preset (listed below). With
    --config or --check it may be left out where that names a hub repository.

    Programs are traced without the weights' data, so also a large model builds quickly. The bundle
    appears when it is whole: a build that fails or is stopped leaves nothing behind.

    Progress goes to stderr, the table of programs to stdout.
    """
    from llama_export.entries import registry

    recipe = Recipe(model, variants=variants or None, **choices)
    registry.expand(recipe.entries)
    if checked is not None:
        _check(recipe, checked, as_json=as_json)
        return

    from llama_export.build import build
    from llama_export.cache import ProgramCache

    cache = None if no_cache else ProgramCache(cache_dir)
    with output.reporter() as reporter:
        result = build(recipe, reporter=reporter, cache=cache)
    if as_json:
        output.write_json(_result_dict(result))
    else:
        _show(result)


def _check(recipe: Recipe, bundle: Path, *, as_json: bool) -> None:
    from llama_export.rebuild import differences

    with output.reporter() as reporter:
        changes = differences(recipe, bundle, reporter=reporter)
    show_changes(changes, (bundle, "built again"), as_json=as_json)


def _result_dict(result: BuildResult) -> dict[str, Any]:
    return {
        "folder": str(result.folder),
        "bytes": result.bundle_bytes,
        "weights_bytes": result.weights_bytes,
        "seconds": result.seconds,
        "programs": [
            {
                "entry": made.label,
                "format": made.program.format,
                "seconds": made.seconds,
                "bytes": made.bytes,
                "is_cached": made.is_cached,
            }
            for made in result.programs
        ],
        "notes": list(result.notes),
    }


def _show(result: BuildResult) -> None:
    rows = [
        (
            made.label,
            made.program.format,
            "cached" if made.is_cached else f"{made.seconds:.1f} s",
            show_bytes(made.bytes),
        )
        for made in result.programs
    ]
    output.write_table(rows, columns=("entry", "format", "time", "size"))
    output.write("\n")
    output.write_title(f"{result.folder}")
    size, weights = show_bytes(result.bundle_bytes), show_bytes(result.weights_bytes)
    output.write(f"  {size}, of which weights {weights}; built in {result.seconds:.1f} s\n")
    output.write("\n")
    output.write_title("Next")
    for line in _next_commands(result.folder):
        output.write(f"  {line}\n")


def _next_commands(folder: Path) -> list[str]:
    manifest = manifest_file.read(folder)
    path = shlex.quote(str(folder))
    if path.startswith("-"):
        path = f"./{path}"
    commands = [f"llama-export inspect {path}"]
    if manifest.weights == "none":
        return commands
    commands.append(f"llama-export verify {path}")
    if {"prefill", "decode"} & set(manifest.entries()):
        prompt = '-p "Why is the sky blue?"' if manifest.tokenizer else '--tokens "1 2 3"'
        device = "" if manifest.programs[0].target.device == "cpu" else " --device cuda"
        commands.append(f"llama-export run {path}{device} {prompt}")
    return commands
