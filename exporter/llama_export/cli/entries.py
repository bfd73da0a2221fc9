"""`llama-export entries`: the entries, their signatures and states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from llama_artifacts.signature import show
from llama_export.cli import output
from llama_export.cli.options import Command, json_option

if TYPE_CHECKING:
    from llama_export.entries.registry import EntrySpec, Range, Tensor, Values

EXAMPLES = (
    ("Every entry:", "llama-export entries"),
    ("Their names:", "llama-export entries --json | jq -r '.entries[].name'"),
)
_LEGEND = (
    ("Batch, MaxSeq, PageSize", "fixed by `build --batch`, `--max-seq` and `--page-size`"),
    ("MaxRows, MaxPages", "fixed by `build --rows` and `--pages`"),
    ("Steps, MaxNew", "fixed by the name, as in generate<32>, or by `--steps` and `--max-new`"),
    ("V, H, T", "the vocabulary's size, the hidden width, the compute dtype"),
    ("other names", "dynamic: a call may choose any size in the range"),
    ("rows", "per layer a key and a value cache T [Batch, KvHeads, MaxSeq, HeadDim]"),
    ("pool", "per layer key and value pages T [PoolPages, KvHeads, PageSize, HeadDim]"),
)
_STATE_NAMES = {None: "none", "rows": "rows", "pool": "pool"}


@click.command(cls=Command, examples=EXAMPLES)
@json_option
def command(*, as_json: bool) -> None:
    """List the entries that can be built.

    An entry is one function of the model, such as `decode`: what it takes, which states it reads
    and writes in place, and what it returns. `build --entry NAME` builds it.

    Sizes that are known only when a model is built have names; a legend explains them.
    """
    from llama_export.entries import registry

    specs = registry.entries()
    if as_json:
        output.write_json({"entries": [_entry_dict(spec) for spec in specs]})
        return
    for spec in specs:
        output.write_title(spec.name)
        output.write(f"  {spec.summary}\n")
        output.write_table(_entry_rows(spec), indent=2)
        output.write("\n")
    output.write_title("Names")
    output.write_table(_LEGEND, indent=2)


def _entry_rows(spec: EntrySpec) -> list[tuple[str, ...]]:
    rows = [
        *(("input", *_tensor_row(tensor)) for tensor in spec.inputs),
        ("states", _STATE_NAMES.get(spec.states, str(spec.states)), "", "", ""),
        *(("output", *_tensor_row(tensor)) for tensor in spec.outputs),
        *(("dim", dim.name, "", "", _range(dim)) for dim in spec.dims),
    ]
    kinds = [row[0] for row in rows]
    return [
        (*("" if kind == before else kind,), *row[1:])
        for row, kind, before in zip(rows, kinds, ["", *kinds], strict=False)
    ]


def _tensor_row(tensor: Tensor) -> tuple[str, str, str, str]:
    values = "" if tensor.values is None else _values(tensor.name, tensor.values)
    return tensor.name, tensor.dtype, show(tensor.shape), values


def _values(name: str, values: Values) -> str:
    if values.span is None:
        return f"{values.min} to {_largest(values)}"
    return f"from 0; {name}+{values.span}-1 to {_largest(values)}"


def _largest(values: Values) -> str:
    size = str(values.size) if values.scale is None else f"{values.scale}*{values.size}"
    less = "" if values.less is None else f"-{values.less}"
    return f"{size}{less}{values.offset:+d}" if values.offset else f"{size}{less}"


def _range(dim: Range) -> str:
    text = f"1 to {dim.max:,}"
    return f"{text}, at most {_limit(dim)}" if dim.fits else text


def _limit(dim: Range) -> str | None:
    return dim.fits and f"{dim.fits}{f'{dim.offset:+d}' if dim.offset else ''}"


def _entry_dict(spec: EntrySpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "summary": spec.summary,
        "inputs": [_tensor_dict(tensor) for tensor in spec.inputs],
        "states": spec.states,
        "outputs": [_tensor_dict(tensor) for tensor in spec.outputs],
        "dims": [
            {
                "name": dim.name,
                "min": 1,
                "max": dim.max,
                "limit": _limit(dim),
            }
            for dim in spec.dims
        ],
    }


def _tensor_dict(tensor: Tensor) -> dict[str, Any]:
    values = tensor.values
    bounds = values and {"min": values.min, "max": _largest(values), "span": values.span}
    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "values": bounds,
    }
