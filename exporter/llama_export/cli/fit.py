"""`llama-export fit`: the largest batch or context that a device's memory holds."""

from __future__ import annotations

from typing import Any, Literal

import click

from llama_artifacts.summary import show_bytes
from llama_export.cli import output
from llama_export.cli.options import Command, json_option, option
from llama_export.cli.sizes import (
    batch_option,
    byte_size,
    forecast_dict,
    length_option,
    program_options,
    question,
    show_forecast,
    tokens_option,
)

EXAMPLES = (
    (
        "How many rows of 8,192 positions a GPU serves:",
        (
            "llama-export fit llama-3.1-8b-instruct --entry decode_paged --device cuda --seq-len 8192"
            " --device-memory 80GiB --reserve 2GiB --maximize batch"
        ),
    ),
    (
        "How long a text two GPUs hold, a prompt in chunks of 512:",
        (
            "llama-export fit llama-3.1-8b-instruct --entry prefill --device cuda --shards 2 --batch 1"
            " --tokens 512 --device-memory 24GB --maximize context"
        ),
    ),
)
SEARCH = "Search"


@click.command(cls=Command, examples=EXAMPLES)
@click.argument("bundle_or_model")
@option(
    "--device-memory",
    group=SEARCH,
    callback=byte_size,
    required=True,
    metavar="SIZE",
    help="The memory of one device, such as 80GiB or 24GB.",
)
@option(
    "--reserve",
    group=SEARCH,
    callback=byte_size,
    default="0",
    metavar="SIZE",
    help="Memory to leave free for what is not known, such as a CUDA context.",
)
@option(
    "--maximize",
    group=SEARCH,
    type=click.Choice(["batch", "context"]),
    required=True,
    help="What to make as large as possible; the other stays as it is given.",
)
@program_options
@batch_option()
@length_option()
@tokens_option
@json_option
def command(
    *,
    bundle_or_model: str,
    device_memory: int,
    reserve: int,
    maximize: Literal["batch", "context"],
    batch: int | None,
    seq_len: int | None,
    tokens: int | None,
    as_json: bool,
    **program: Any,
) -> None:
    """Find the largest batch or context that fits.

    BUNDLE_OR_MODEL is a bundle's folder, or a model as `build` takes it. The figures are those of
    the `memory` command; the search ends at the memory, at the model's positions or at a range that
    the entry declares, and says which. What is not known is in no figure: leave room with --reserve.

    No weight is read and nothing is run.
    """
    if (batch if maximize == "batch" else seq_len) is not None:
        given = "--batch" if maximize == "batch" else "--seq-len"
        raise click.UsageError(f"{given} is what --maximize {maximize} looks for")
    if reserve >= device_memory:
        raise click.UsageError("--reserve must leave some of --device-memory")
    asked = question(program)

    from llama_export.footprint.call import Asked
    from llama_export.footprint.forecast import open_subject
    from llama_export.footprint.search import largest_fit

    with output.waiting("searching"):
        subject = open_subject(bundle_or_model, asked)
        usual = subject.usual
        call = Asked(batch or usual.batch, seq_len or usual.seq_len, tokens)
        found = largest_fit(subject, call, maximize, device_memory - reserve)
    if as_json:
        output.write_json(
            {
                maximize: found.value,
                "limit": found.limit,
                "device_memory": device_memory,
                "reserve": reserve,
                "forecast": forecast_dict(found.forecast),
            }
        )
        return
    left = f", {show_bytes(reserve)} left free" if reserve else ""
    output.write_title(f"{maximize} {found.value:,} fits into {show_bytes(device_memory)}{left}")
    output.write(f"  no more: {found.limit}\n\n")
    show_forecast(found.forecast)
