"""Bundles whose portable programs are hand-made archives: enough to be shown, not to be run."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bundles import CONTENTS, write_sample

FLOAT, INT = 7, 4
NAMES = ("tokens", "pos", "states_0", "states_1")


def tensor(name: str) -> dict[str, Any]:
    return {"as_tensor": {"name": name}}


def value(dtype: int, *sizes: int | str) -> dict[str, Any]:
    """A tensor's description; a string is a dynamic size's symbol."""
    return {
        "dtype": dtype,
        "sizes": [
            {"as_int": size}
            if isinstance(size, int)
            else {"as_expr": {"expr_str": f"Symbol('{size}', positive=True, integer=True)"}}
            for size in sizes
        ],
    }


def node(target: str, reads: Sequence[str], gives: str, *modules: str) -> dict[str, Any]:
    """A call of `torch.ops.aten.<target>` within modules, outermost first."""
    stack = ";".join(f"L__self__{name},{name},some.Class" for name in ("", *modules))
    return {
        "target": f"torch.ops.aten.{target}",
        "inputs": [{"name": "x", "arg": tensor(name), "kind": 1} for name in reads],
        "outputs": [tensor(gives)] if gives else [],
        "metadata": {"nn_module_stack": stack},
    }


def layer(number: int, reads: str, module: str = "model.layers") -> list[dict[str, Any]]:
    """A norm, an in-place write of a state and a product with a weight."""
    own = f"{module}.{number}"
    return [
        node("rsqrt.default", [reads], f"norm_{number}", own, f"{own}.norm"),
        node("_assert_tensor_metadata.default", [f"norm_{number}"], "", own),
        node("index_put_.default", ["states_0", f"norm_{number}"], f"put_{number}", own),
        node("linear.default", [f"norm_{number}", "p_weight"], f"out_{number}", own),
        node("add.Tensor", [f"out_{number}", "states_0"], f"sum_{number}", own),
    ]


def before(number: int) -> str:
    """What a layer reads: the sum of the one before it."""
    return f"sum_{number - 1}" if number else "start"


def graph_module(nodes: Sequence[dict[str, Any]], result: str, length: int | str = 1) -> Any:
    """A program with the inputs and states of the sample bundles, and one weight."""
    values = {
        "tokens": value(INT, 1, length),
        "pos": value(INT),
        "states_0": value(FLOAT, 1, 1, 16, 2),
        "states_1": value(FLOAT, 1, 1, 16, 2),
    }
    for item in nodes:
        for given in item["outputs"]:
            values[given["as_tensor"]["name"]] = value(FLOAT, 1, length, 4)
    parameter = {"arg": {"name": "p_weight"}, "parameter_name": "model.norm.weight"}
    specs = [{"parameter": parameter}, *({"user_input": {"arg": tensor(name)}} for name in NAMES)]
    results = [{"user_output": {"arg": tensor(result)}}]
    return {
        "graph": {"nodes": list(nodes), "tensor_values": values},
        "signature": {"input_specs": specs, "output_specs": results},
    }


def archive(module: Any) -> bytes:
    """The archive of an ExportedProgram with that graph."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as members:
        members.writestr("archive/models/model.json", json.dumps({"graph_module": module}))
        for name in ("weights/model_weights", "constants/model_constants"):
            members.writestr(f"archive/data/{name}_config.json", '{"config": {}}')
    return buffer.getvalue()


def layers(count: int, length: int | str = 1) -> bytes:
    """A program of equal layers."""
    nodes = [node("embedding.default", ["tokens"], "start", "model.embed_tokens")]
    for number in range(count):
        nodes += layer(number, before(number))
    return archive(graph_module(nodes, f"sum_{count - 1}", length))


def write_shown(folder: Path, *, contents: Any = None, **changes: Any) -> Path:
    """The sample bundle with graphs to show: `prefill` and `decode` of three equal layers."""
    programs = {"decode.pt2": layers(3), "prefill.pt2": layers(3, "s27")}
    return write_sample(folder, contents={**CONTENTS, **programs, **(contents or {})}, **changes)
