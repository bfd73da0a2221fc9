"""The roofline as a picture: where steps and prompts sit below what the machine allows.

Roofline model: Williams, Waterman and Patterson, "Roofline: an insightful visual performance model
for multicore architectures", 2009. Attainable operations per second are the least of the peak and
of bandwidth x operations per byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llama_artifacts.errors import BuildError, InputError
from llama_artifacts.extras import needs
from llama_export.page.timings import Machine, Timings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH, _HEIGHT, _DPI = 8.0, 5.0, 150


@dataclass(frozen=True)
class Point:
    """Operations per byte, and operations per second reached."""

    label: str
    intensity: float
    flop_s: float


def points(timings: Timings, *, step_flops: int, dtype: str) -> list[Point]:
    """A point for each method that has a figure of the workload.

    A prompt reads the weights once, as a step does.

    Args:
        timings: of `decode` or `prefill`.
        step_flops: operations of one step.
        dtype: the compute dtype, whose products limit a prompt.
    """
    workload, machine = timings.workload, timings.machine
    if workload is None or machine is None or not workload.step_bytes:
        return []
    peak = machine.f32_flop_s if dtype == "f32" else machine.bf16_flop_s
    if workload.name == "decode":
        intensity = step_flops / workload.step_bytes
        limit = intensity * machine.read_bytes_s
    else:
        intensity = (workload.prompt_flops or 0) / workload.step_bytes
        limit = peak
    found = []
    for row in timings.rows:
        if row.roofline_share is not None:
            label = f"{row.method}: {row.roofline_share:.0%} of the limit"
            found.append(Point(label, intensity, row.roofline_share * limit))
    return found


def write_plot(timings: Timings, path: Path, *, step_flops: int, dtype: str) -> None:
    """Draws the roofs and the points, in the format that the file's name ends with.

    Raises:
        CompatibilityError: matplotlib is not installed.
        InputError: the workload has no roofline (`load`, `serve`).
        BuildError: the file cannot be written.
    """
    found = points(timings, step_flops=step_flops, dtype=dtype)
    machine = timings.machine
    if not found or machine is None:
        raise InputError(
            "expected the workload decode or prefill for a roofline, got another",
            where=path,
            hint="leave --plot out",
        )
    with needs("bench"):
        from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
    axes = figure.add_subplot()
    _draw_roofs(axes, machine, found)
    for number, point in enumerate(found):
        color = f"C{number + 2}"
        axes.plot(point.intensity, point.flop_s, "o", color=color, label=point.label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations per byte")
    axes.set_ylabel("operations per second")
    axes.set_title(
        f"{timings.workload.name if timings.workload else ''} on {machine.cpu}, "
        f"threads: {machine.threads}"
    )
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(loc="lower right")
    try:
        figure.savefig(path, dpi=_DPI)
    except OSError as cause:
        raise BuildError(f"cannot be written: {cause.strerror or cause}", where=path) from cause


def check_library() -> None:
    """Before anything is measured: is there something to draw with?

    Raises:
        CompatibilityError: matplotlib is not installed.
    """
    with needs("bench"):
        import matplotlib  # noqa: F401 - only whether it is there


def _draw_roofs(axes: Axes, machine: Machine, found: list[Point]) -> None:
    """Two roofs: both rise with the read bandwidth, and end at the peak of their dtype."""
    peaks = {"bf16": machine.bf16_flop_s, "f32": machine.f32_flop_s}
    ridges = [peak / machine.read_bytes_s for peak in peaks.values()]
    low = min(*ridges, *(point.intensity for point in found)) / 4
    high = max(*ridges, *(point.intensity for point in found)) * 4
    for number, (dtype, peak) in enumerate(peaks.items()):
        ridge = peak / machine.read_bytes_s
        label = f"{dtype} products, {peak / 1e9:,.0f} GFLOP/s"
        xs, ys = [low, ridge, high], [low * machine.read_bytes_s, peak, peak]
        axes.plot(xs, ys, color=f"C{number}", label=label)
    axes.plot([], [], " ", label=f"reads {machine.read_bytes_s / 1e9:,.1f} GB/s")
