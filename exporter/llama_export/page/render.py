"""The page itself.

Nothing of a bundle is trusted: text goes through the template's escaping, data is JSON in which no
tag can begin, and a content security policy lets only this page's own script and style run, by
their digests, and nothing be fetched.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jinja2

from llama_artifacts import summary
from llama_artifacts.bundle import Bundle, check_digest
from llama_artifacts.manifest import Check, Format, Manifest, Program
from llama_artifacts.signature import show
from llama_export.page import states, timings, weights
from llama_export.page.graph import to_dict
from llama_export.report import Reporter

_SCRIPTS = ("page.js", "treemap.js", "layout.js", "graph.js")
_PREFERENCE: tuple[Format, ...] = ("pt2", "onnx")
# What ends a script element, and the two separators that some parsers take for line ends.
_UNSAFE = {ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}


def render(bundle: Bundle, *, reporter: Reporter) -> str:
    """The whole page: the same bundle gives the same text.

    Raises:
        IntegrityError: a program, the weights' header or the timings are damaged.
        ManifestError: the timings break their format.
    """
    manifest = bundle.manifest
    with reporter.step("weights"):
        tensors = weights.read_weights(bundle)
    memory = states.state_memory(manifest)
    with reporter.step("graphs"):
        graphs = list(_graphs(bundle))
    data = {
        "weights": weights.to_list(tensors),
        "states": [_memory_dict(item) for item in memory],
        "graphs": graphs,
    }
    script = "\n".join(_asset(name) for name in _SCRIPTS)
    style = _asset("page.css")
    return (
        _environment()
        .get_template("page.html.jinja")
        .render(
            manifest=manifest,
            model=manifest.model,
            source=dict(summary.facts(bundle))["source"],
            facts=summary.facts(bundle)[2:],
            tiles=tuple(_tiles(bundle)),
            programs=_programs(manifest),
            interfaces=tuple(_interfaces(manifest)),
            memory=memory,
            lengths=states.LENGTHS,
            shares=weights.shares(tensors),
            weights_bytes=sum(tensor.num_bytes for tensor in tensors),
            checks=tuple(map(_check, manifest.checks)),
            timings=timings.read_timings(bundle),
            graphs=graphs,
            data=json.dumps(data, separators=(",", ":")).translate(_UNSAFE),
            script=script,
            style=style,
            policy=_policy(script, style),
        )
    )


def _policy(script: str, style: str) -> str:
    return (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)};"
        " img-src data:; base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _asset(name: str) -> str:
    folder = importlib.resources.files(__package__) / "assets"
    return (folder / name).read_text(encoding="utf-8")


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(bytes=summary.show_bytes, figure=_figure, shape=show)
    environment.globals["bounds"] = summary.show_bounds
    return environment


def _tiles(bundle: Bundle) -> Iterator[tuple[str, str, str]]:
    """The figures at the top: what, how much, and a remark."""
    manifest, model = bundle.manifest, bundle.manifest.model
    size = sum(file.bytes for file in manifest.files.values())
    passed = sum(check.figure <= check.limit for check in manifest.checks)
    formats = ", ".join(dict.fromkeys(program.format for program in manifest.programs))
    yield "Parameters", _count(model.num_parameters), f"{model.num_layers} layers"
    yield "Entries", f"{len(manifest.entries())}", f"{len(manifest.programs)} programs: {formats}"
    yield "On disk", summary.show_bytes(size), f"{len(manifest.files)} files"
    yield "Positions", f"{manifest.max_seq:,}", f"the last is scratch; batch {manifest.batch}"
    if manifest.checks:
        yield "Checks passed", f"{passed} of {len(manifest.checks)}", "laws with their figures"


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number}"


def _programs(manifest: Manifest) -> list[dict[str, Any]]:
    return [
        {
            "program": program,
            "target": summary.show_target(program.target),
            "bytes": manifest.files[program.file].bytes,
            "sha256": manifest.files[program.file].sha256,
            "requires": ", ".join(f"{name} {at}" for name, at in sorted(program.requires.items())),
        }
        for program in manifest.programs
    ]


def _interfaces(manifest: Manifest) -> Iterator[dict[str, Any]]:
    for interface in summary.interfaces(manifest):
        formats = dict.fromkeys(program.format for program in interface.programs)
        yield {
            "entry": interface.entry,
            "formats": ", ".join(formats),
            "signature": interface.signature,
            "groups": summary.group_states(interface.signature.states),
        }


@dataclass(frozen=True)
class _CheckRow:
    check: Check
    is_good: bool
    percent: float
    """How much of the limit was used, 0 to 100; of a limit of 0, none or all."""


def _check(check: Check) -> _CheckRow:
    is_good = check.figure <= check.limit
    share = check.figure / check.limit if check.limit > 0 else float(not is_good)
    return _CheckRow(check, is_good, round(100 * min(max(share, 0.0), 1.0), 1))


def _figure(number: float) -> str:
    return f"{number:.3g}"


def _memory_dict(memory: states.StateMemory) -> dict[str, Any]:
    return {
        "layout": memory.layout,
        "position_bytes": memory.position_bytes,
        "page_size": memory.page_size,
        "batch": memory.batch,
        "length": memory.length,
    }


def _graphs(bundle: Bundle) -> Iterator[dict[str, Any]]:
    """One graph an entry, from its portable program; native code has none to show."""
    for entry in bundle.manifest.entries():
        program = _readable(bundle.manifest, entry)
        if program is None:
            continue
        check_digest(bundle, program.file)
        yield {"entry": entry, "file": program.file, **to_dict(_read(bundle, program))}


def _readable(manifest: Manifest, entry: str) -> Program | None:
    found = {
        program.format: program
        for program in manifest.programs
        if program.entry == entry and not program.variant
    }
    return next((found[name] for name in _PREFERENCE if name in found), None)


def _read(bundle: Bundle, program: Program) -> Any:
    if program.format == "pt2":
        from llama_export.page.pt2_graph import read_pt2

        path, is_sharded = bundle.path(program.file), program.shards > 1
        return read_pt2(path, program.signature, is_sharded=is_sharded)
    from llama_export.page.onnx_graph import read_onnx

    return read_onnx(bundle.path(program.file), program.signature)
