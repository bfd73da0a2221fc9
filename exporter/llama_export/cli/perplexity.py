"""`llama-export perplexity`: how well bundles predict a text, side by side."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llama_artifacts.codec import encode
from llama_artifacts.errors import InputError
from llama_artifacts.manifest import FORMATS, Format
from llama_export.cli import output
from llama_export.cli.options import Command, json_option, option, weights_dir_option

if TYPE_CHECKING:
    from llama_export.perplexity import Perplexity

EXAMPLES = (
    ("One bundle:", "llama-export perplexity smollm2-135m --text book.txt"),
    (
        "What a narrower dtype costs, on the same windows:",
        "llama-export perplexity smollm2-f32 smollm2-bf16 --text book.txt --window 512",
    ),
    ("A text from a pipe:", "zcat book.gz | llama-export perplexity smollm2-135m --text -"),
)
WINDOWS, PROGRAM = "Windows", "Program"
STDIN = "-"
COLUMNS = ("bundle", "format", "dtype", "tokens", "nll/token", "perplexity", "bits/byte", "change")


@click.command(cls=Command, examples=EXAMPLES)
@click.argument("bundles", nargs=-1, required=True, type=click.Path(path_type=Path))
@option(
    "--text",
    required=True,
    metavar="FILE",
    help="The text to predict, in UTF-8; `-` reads it from stdin.",
)
@option(
    "--window",
    group=WINDOWS,
    type=click.IntRange(min=2),
    metavar="N",
    show_default="1,024, or what all bundles take",
    help="Tokens of a window.",
)
@option(
    "--stride",
    group=WINDOWS,
    type=click.IntRange(min=1),
    metavar="N",
    show_default="half the window",
    help="Tokens from one window to the next, fewer than the window has. After the first window,"
    " each token is scored with at least window - stride tokens before it.",
)
@option(
    "--format",
    group=PROGRAM,
    type=click.Choice(FORMATS),
    show_default="the best that fits this machine",
    help="The format to run.",
)
@option(
    "--device",
    group=PROGRAM,
    default="cpu",
    metavar="DEVICE",
    help="`cpu`, `cuda`, or one GPU such as `cuda:1`.",
)
@weights_dir_option
@json_option
def command(
    *,
    bundles: tuple[Path, ...],
    text: str,
    window: int | None,
    stride: int | None,
    format: Format | None,
    device: str,
    weights_dir: Path | None,
    as_json: bool,
) -> None:
    """Measure how well bundles predict a text.

    BUNDLES are folders that `llama-export build` wrote, with the entry `log_probs_packed`.

    Each token is scored once, in overlapping windows that are packed into few calls. A row shows
    the tokens scored, the mean negative log-likelihood of one (in nats), the perplexity, which
    compares models of one tokenizer, and the bits per byte of the text, which compare any. The
    change is that of the perplexity against the first bundle's, where both saw the same tokens.
    """
    from llama_export.perplexity import perplexities

    content = _read(text)
    with output.reporter() as reporter:
        results = perplexities(
            bundles,
            content,
            window=window,
            stride=stride,
            format=format,
            device=device,
            weights_dir=weights_dir,
            reporter=reporter,
        )
    if as_json:
        rows = [
            {"bundle": str(bundle), **encode(result)}
            for bundle, result in zip(bundles, results, strict=True)
        ]
        output.write_json({"text_bytes": len(content.encode()), "bundles": rows})
    else:
        _show(bundles, results)


def _read(text: str) -> str:
    place = "stdin" if text == STDIN else text
    hint = "give a text file in UTF-8, or `-` for stdin"
    try:
        data = sys.stdin.buffer.read() if text == STDIN else Path(text).read_bytes()
        return data.decode()
    except OSError as cause:
        raise InputError(f"cannot be read: {cause.strerror}", where=place, hint=hint) from cause
    except UnicodeDecodeError as cause:
        message = f"expected UTF-8 text, got a bad byte at {cause.start:,}"
        raise InputError(message, where=place, hint=hint) from cause


def _show(bundles: Sequence[Path], results: Sequence[Perplexity]) -> None:
    rows = []
    for bundle, result in zip(bundles, results, strict=True):
        rows.append(
            (
                str(bundle),
                result.format,
                result.dtype,
                f"{result.num_tokens:,}",
                f"{result.nll:.4f}",
                f"{result.perplexity:.4f}",
                f"{result.bits_per_byte:.4f}",
                "-" if result.change is None else f"{result.change:+.3%}",
            )
        )
    output.write_table(rows, columns=COLUMNS)
    output.write(f"\nwindows of {results[0].window:,} tokens, every {results[0].stride:,}\n")
