"""`llama-export memory`: what a call of an entry needs, without weights and without a GPU."""

from __future__ import annotations

from typing import Any

import click

from llama_export.cli import output
from llama_export.cli.options import Command, json_option
from llama_export.cli.sizes import (
    batch_option,
    forecast_dict,
    length_option,
    program_options,
    question,
    show_forecast,
    tokens_option,
)

EXAMPLES = (
    ("A program of a bundle:", "llama-export memory smollm2-135m-instruct --entry prefill"),
    (
        "A model that is not here, sixteen rows of 8,192 positions on a GPU:",
        (
            "llama-export memory llama-3.1-8b-instruct --entry decode_paged --batch 16 --seq-len 8192"
            " --device cuda"
        ),
    ),
    (
        "The same on each of four GPUs:",
        (
            "llama-export memory llama-3.1-8b-instruct --entry decode_paged --batch 16 --seq-len 8192"
            " --device cuda --shards 4"
        ),
    ),
)


@click.command(cls=Command, examples=EXAMPLES)
@click.argument("bundle_or_model")
@program_options
@batch_option()
@length_option()
@tokens_option
@json_option
def command(
    *,
    bundle_or_model: str,
    batch: int | None,
    seq_len: int | None,
    tokens: int | None,
    as_json: bool,
    **program: Any,
) -> None:
    """Tell how much memory a call needs.

    BUNDLE_OR_MODEL is a bundle's folder, or a model as `build` takes it. A preset is known by its
    config alone.

    Weights, states and inputs are added up from their declarations (exact). Activations are the
    peak over the exported graph of the largest call that fills the rows (modelled): a tensor counts
    from where it is made to its last use, memory that views share once. The process itself comes
    from a measured constant (estimated). What is not known is listed, and is not in the sum.

    No weight is read and nothing is run.
    """
    asked = question(program)

    from llama_export.footprint.call import Asked
    from llama_export.footprint.forecast import forecast, open_subject

    with output.waiting("following the program"):
        subject = open_subject(bundle_or_model, asked)
        usual = subject.usual
        call = Asked(batch or usual.batch, seq_len or usual.seq_len, tokens)
        found = forecast(subject, call)
    if as_json:
        output.write_json(forecast_dict(found))
    else:
        show_forecast(found)
