"""What `memory` and `fit` share: the options that name a program, and how a forecast is shown."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from llama_artifacts.codec import encode
from llama_artifacts.manifest import FORMATS
from llama_artifacts.summary import show_bytes
from llama_export.cli import output
from llama_export.cli.options import (
    dtype_option,
    group_size_option,
    option,
    page_size_option,
    quantize_option,
)

if TYPE_CHECKING:
    from llama_export.footprint.figures import Forecast
    from llama_export.footprint.forecast import Question

F = TypeVar("F", bound=Callable[..., Any])

PROGRAM, CALL = "Program", "Call"
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(k|[KMGT]i?)?B?")
_UNITS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12} | {
    f"{unit}i": 1024**power for power, unit in enumerate("KMGT", start=1)
}


def byte_size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Callback of sizes such as `80GiB`, `24GB`, `1.5G` or a number of bytes."""
    if value is None:
        return None
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise click.BadParameter(
            f"expected a size such as 80GiB or 24GB, got {value!r}", ctx, param
        )
    return int(float(match[1]) * _UNITS[match[2] or ""])


_PROGRAM_OPTIONS = (
    option(
        "--entry",
        group=PROGRAM,
        default="decode",
        metavar="NAME",
        help="The entry that is called; the `entries` command lists them.",
    ),
    option(
        "--format",
        group=PROGRAM,
        type=click.Choice(FORMATS),
        show_default="pt2; of a bundle what its runtime takes",
        help="The format of the program. For aoti, Inductor plans the program, which takes a while.",
    ),
    option(
        "--device",
        group=PROGRAM,
        type=click.Choice(["cpu", "cuda"]),
        show_default="cpu; of a bundle its programs'",
        help="Where the program runs. No GPU is needed to ask.",
    ),
    dtype_option("The dtype of a model's weights and arithmetic.", group=PROGRAM),
    quantize_option("What a build makes of a model's matrices.", group=PROGRAM),
    group_size_option(group=PROGRAM),
    page_size_option(group=PROGRAM),
    option(
        "--shards",
        group=PROGRAM,
        type=click.IntRange(min=1),
        default=1,
        metavar="N",
        help="Devices that share the network as in tensor parallelism: query heads, key/value heads,"
        " inner width and vocabulary are divided. The figures are one device's.",
    ),
)
tokens_option = option(
    "--tokens",
    group=CALL,
    type=click.IntRange(min=1),
    metavar="N",
    show_default="as many as a call takes, up to the sequences' length",
    help="Most tokens that one call of a prefill takes, of a row or packed.",
)


def batch_option(**settings: Any) -> Callable[[F], F]:
    """`--batch`."""
    return option(
        "--batch",
        group=CALL,
        type=click.IntRange(min=1),
        metavar="N",
        show_default="1; of a bundle what its build fixed",
        help="Sequences of the call.",
        **settings,
    )


def length_option(**settings: Any) -> Callable[[F], F]:
    """`--seq-len`."""
    return option(
        "--seq-len",
        group=CALL,
        type=click.IntRange(min=2),
        metavar="N",
        show_default="as `build --max-seq`; of a bundle what its build fixed",
        help="Positions of each sequence's state, all filled (in rows the last is scratch); without"
        " a state, tokens of each sequence.",
        **settings,
    )


def program_options(function: F) -> F:
    """The options that name a program, as `entry`, `format`, `device`, and so on."""
    for decorate in reversed(_PROGRAM_OPTIONS):
        function = decorate(function)
    return function


def question(program: dict[str, Any]) -> Question:
    """The program that the options name; an unknown entry is refused before torch is imported.

    Raises:
        BuildError: no such entry.
    """
    from llama_export.entries import registry

    registry.find(program["entry"])

    from llama_export.footprint.forecast import Question

    return Question(**program)


def forecast_dict(forecast: Forecast) -> dict[str, Any]:
    """A forecast as JSON values; sizes in bytes."""
    return {**encode(forecast), "bytes": forecast.num_bytes}


def show_forecast(forecast: Forecast) -> None:
    """The figures as a table, their sum, and what is not known."""
    shards = f", one of {forecast.shards} shards" if forecast.shards > 1 else ""
    output.write_title(
        f"{forecast.name}: {forecast.entry} as {forecast.format} on {forecast.device}{shards}"
    )
    sizes = ", ".join(f"{name} {size:,}" for name, size in forecast.sizes.items())
    output.write(
        f"  batch {forecast.batch:,}, {forecast.seq_len:,} positions{sizes and f' ({sizes})'}\n\n"
    )
    rows: list[tuple[str, ...]] = [
        (figure.name, show_bytes(figure.bytes), figure.basis, figure.how)
        for figure in forecast.figures
    ]
    rows.append(("sum", show_bytes(forecast.num_bytes), "", ""))
    output.write_table(rows, columns=("part", "size", "basis", "from"), indent=2)
    output.write("\n")
    output.write_title("Not known, and not in the sum")
    for text in forecast.unknown:
        output.write(f"  {text}\n")
