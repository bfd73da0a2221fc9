"""How sizes, bounds and machines are shown to people, and tables of text."""

from __future__ import annotations

from dataclasses import dataclass

from llama_artifacts.manifest import Quantized, Target
from llama_artifacts.signature import Bounds

_UNITS = ("B", "kB", "MB", "GB", "TB")


@dataclass(frozen=True)
class Table:
    """Rows of text under column names."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def without(self, column: str) -> Table:
        """The table without a column that says nothing."""
        at = self.columns.index(column)
        columns, *rows = (row[:at] + row[at + 1 :] for row in (self.columns, *self.rows))
        return Table(self.title, columns, tuple(rows))


def show_bytes(num_bytes: int) -> str:
    """A size for people, such as `269.1 MB`; a kB is 1,000 bytes."""
    size = float(num_bytes)
    for unit in _UNITS:
        # 999.95 would be shown as 1000.0
        if size < 999.95 or unit == _UNITS[-1]:
            break
        size /= 1000
    return f"{num_bytes} B" if unit == "B" else f"{size:,.1f} {unit}"


def show_bounds(bounds: Bounds, name: str) -> str:
    """The values an input may hold, such as `0 to 2046`."""
    if bounds.span is not None:
        return f"from {bounds.min}; {name}+{bounds.span}-1 to {bounds.max}"
    if bounds.dim is None:
        return f"{bounds.min} to {bounds.max}"
    size = bounds.dim if bounds.scale == 1 else f"{bounds.scale}*{bounds.dim}"
    return f"{bounds.min} to {size}{f'{bounds.offset:+d}' if bounds.offset else ''}"


def show_target(target: Target) -> str:
    """The machine of a program, such as `cpu x86_64 avx512`."""
    capability = target.capability and f"sm {target.capability}"
    return " ".join(
        part for part in (target.device, target.machine, target.isa, capability) if part
    )


def show_quantized(quantized: Quantized) -> str:
    """What was done to the matrices, such as `int4 in groups of 32; embedding and head int8`."""
    size = quantized.group_size
    groups = "row by row" if size is None else f"in groups of {size}"
    rest = "" if quantized.kind == "int8" else "; embedding and head int8"
    return f"{quantized.kind} {groups}{rest}"
