from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from onnx import TensorProto, helper, save_model

from llama_artifacts.bundle import open_bundle
from llama_artifacts.errors import IntegrityError
from llama_artifacts.signature import Signature
from llama_export.page.graph import Graph, to_dict
from llama_export.page.onnx_graph import read_onnx
from llama_export.page.pt2_graph import read_pt2
from tests.bundles import sample_signature
from tests.exporter.pages import (
    FLOAT,
    archive,
    before,
    graph_module,
    layer,
    layers,
    node,
    tensor,
    value,
)

DECODE, PREFILL = sample_signature(is_prefill=False), sample_signature(is_prefill=True)


def read(tmp_path: Path, content: bytes, signature: Signature = DECODE) -> Graph:
    path = tmp_path / "program.pt2"
    path.write_bytes(content)
    return read_pt2(path, signature)


def shown(graph: Graph) -> list[tuple[str, str]]:
    """Label and innermost module of each node that is shown."""
    nodes = to_dict(graph)["nodes"]
    return [(item["label"], (item["path"] or [""])[-1]) for item in nodes]


def test_equal_layers_are_shown_once(tmp_path: Path) -> None:
    found = to_dict(read(tmp_path, layers(30)))
    assert found["repeats"] == {"model.layers.0-29": 30}
    assert (found["num_ops"], found["num_checks"]) == (1 + 30 * 4, 30)
    assert shown(read(tmp_path, layers(30))) == [
        ("tokens", ""),
        ("pos", ""),
        ("aten.embedding", "model.embed_tokens"),
        ("aten.rsqrt", "model.layers.0-29.norm"),
        ("aten.index_put_", "model.layers.0-29"),
        ("aten.linear", "model.layers.0-29"),
        ("aten.add", "model.layers.0-29"),
        ("logits", ""),
    ]


def test_a_layer_that_differs_is_shown_on_its_own(tmp_path: Path) -> None:
    nodes = [item for number in range(4) for item in layer(number, before(number))]
    nodes[5 * 2 + 2]["target"] = "torch.ops.aten.index_copy_.default"
    found = to_dict(read(tmp_path, archive(graph_module(nodes, "sum_3"))))
    assert found["repeats"] == {"model.layers.0-1": 2}
    modules = list(dict.fromkeys(item["path"][0] for item in found["nodes"] if item["path"]))
    assert modules == ["model.layers.0-1", "model.layers.2", "model.layers.3"]


def test_what_reads_the_last_layer_reads_the_one_that_is_shown(tmp_path: Path) -> None:
    nodes = to_dict(read(tmp_path, layers(3)))["nodes"]
    assert nodes[-1]["label"] == "logits"
    assert [nodes[index]["label"] for index in nodes[-1]["sources"]] == ["aten.add"]


def test_a_state_is_read_after_what_wrote_it(tmp_path: Path) -> None:
    nodes = to_dict(read(tmp_path, layers(1)))["nodes"]
    add = next(item for item in nodes if item["label"] == "aten.add")
    assert [nodes[index]["label"] for index in add["sources"]] == ["aten.index_put_", "aten.linear"]
    assert add["states"] == ["cache.0.key"]


def test_weights_and_shapes_have_the_names_of_the_manifest(tmp_path: Path) -> None:
    nodes = to_dict(read(tmp_path, layers(2, "s27"), PREFILL))["nodes"]
    linear = next(item for item in nodes if item["label"] == "aten.linear")
    assert linear["weights"] == ["model.norm.weight"]
    assert linear["out"] == ["f32 [1, S, 4]"]
    assert nodes[0] == {
        "kind": "input",
        "label": "tokens",
        "path": [],
        "sources": [],
        "out": ["i32 [1, S]"],
    }


def test_sources_come_before_what_reads_them(short_bundle: Path) -> None:
    for program in open_bundle(short_bundle).manifest.programs:
        found = to_dict(read_pt2(short_bundle / program.file, program.signature))
        # The last layer of `prefill` goes on with the last token alone: it is like no other.
        folds = program.entry != "prefill"
        assert found["repeats"] == ({"model.layers.0-1": 2} if folds else {})
        assert not folds or len(found["nodes"]) < found["num_ops"]
        for index, item in enumerate(found["nodes"]):
            assert all(source < index for source in item["sources"]), item["label"]
            assert (
                item["sources"]
                or item["kind"] == "input"
                or "arange" in item["label"]
                or (item.get("weights") or item.get("states"))
            ), item
        weights = {name for item in found["nodes"] for name in item.get("weights", ())}
        shown = {name for name in program.constants if not folds or ".1." not in name}
        assert shown == weights


def loop(reads: list[str], gives: str, body: list[dict[str, Any]], result: str) -> dict[str, Any]:
    """A loop over one value: its inner graph calls the value `arg` and the weight `w`."""
    graph = {
        "inputs": [tensor("arg"), tensor("w")],
        "outputs": [tensor(result)],
        "nodes": body,
        "tensor_values": {result: value(FLOAT, 1, 4)},
    }
    inner = {"name": "", "arg": {"as_graph": {"name": "body_0", "graph": graph}}, "kind": 1}
    call = node("add.Tensor", reads, gives)
    return {
        **call,
        "target": "torch.ops.higher_order.while_loop",
        "inputs": [inner, *call["inputs"]],
    }


def test_a_loop_shows_the_graph_that_it_runs(tmp_path: Path) -> None:
    body = [
        node("linear.default", ["arg", "w"], "again", "_export_root", "_export_root.lm_head"),
        node("add.Tensor", ["again", "arg"], "result", "_export_root"),
    ]
    nodes = [
        node("embedding.default", ["tokens"], "again"),
        loop(["again", "p_weight"], "last", body, "result"),
    ]
    found = to_dict(read(tmp_path, archive(graph_module(nodes, "last"))))["nodes"]
    assert [(item["label"], item["path"]) for item in found[2:-1]] == [
        ("aten.embedding", []),
        ("aten.linear", ["body_0", "body_0.lm_head"]),
        ("aten.add", ["body_0"]),
        ("higher_order.while_loop", []),
    ]
    assert [item["sources"] for item in found[2:]] == [[0], [2], [2, 3], [2, 4], [5]]
    assert found[3]["weights"] == found[5]["weights"] == ["model.norm.weight"]


@pytest.mark.parametrize(
    "module",
    [
        {},
        {"graph": {"nodes": [], "tensor_values": {}}, "signature": {"input_specs": []}},
        graph_module([node("add.Tensor", ["tokens"], "sum")], "sum")
        | {"signature": {"input_specs": [], "output_specs": []}},
    ],
    ids=["empty", "no outputs", "no inputs"],
)
def test_a_graph_that_is_not_the_signature_s(tmp_path: Path, module: Any) -> None:
    with pytest.raises(IntegrityError, match=r"program\.pt2: its graph cannot be read"):
        read(tmp_path, archive(module))


def test_a_graph_that_calls_anything_else_is_refused(tmp_path: Path) -> None:
    nodes = [{**node("add.Tensor", ["tokens"], "sum"), "target": "os.system"}]
    with pytest.raises(IntegrityError, match=r"holds a call of `os\.system`"):
        read(tmp_path, archive(graph_module(nodes, "sum")))


def write_onnx(path: Path, output: str = "logits") -> Path:
    """Two layers of a product with a weight that is outside."""
    weights = []
    for number in range(2):
        tensor = TensorProto(name=f"model.layers.{number}.mlp.up_proj.weight", dims=[4, 4])
        tensor.data_type, tensor.data_location = TensorProto.FLOAT, TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="weights.safetensors")
        weights.append(tensor)
    nodes = [
        helper.make_node("Cast", ["tokens"], ["x"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["x", weights[0].name], ["y"]),
        helper.make_node("Add", ["y", "state.cache.0.key"], ["z"]),
        helper.make_node("MatMul", ["z", weights[1].name], ["a"]),
        helper.make_node("Cast", [weights[0].name], ["tied"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["a", "tied"], [output]),
    ]
    inputs = [helper.make_tensor_value_info("tokens", TensorProto.INT32, [1, 4])]
    outputs = [helper.make_tensor_value_info(output, TensorProto.FLOAT, [1, "S"])]
    graph = helper.make_graph(nodes, "g", inputs, outputs, initializer=weights)
    save_model(helper.make_model(graph), str(path))
    return path


def test_onnx_operators_belong_where_their_weights_do(tmp_path: Path) -> None:
    found = to_dict(read_onnx(write_onnx(tmp_path / "a.onnx"), DECODE))
    assert [(item["label"], item["path"]) for item in found["nodes"][2:]] == [
        ("Cast", []),
        ("MatMul", ["model.layers.0", "model.layers.0.mlp.up_proj"]),
        ("Add", ["model.layers.0"]),
        ("MatMul", ["model.layers.1", "model.layers.1.mlp.up_proj"]),
        ("Cast", []),
        ("MatMul", ["model.layers.1"]),
        ("logits", []),
    ]
    assert found["nodes"][4]["states"] == ["cache.0.key"]
    assert found["nodes"][7]["out"] == ["f32 [1, S]"]


@pytest.mark.parametrize("content", [b"no model", b""], ids=["text", "empty"])
def test_a_file_that_is_no_onnx_model(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.onnx").write_bytes(content)
    with pytest.raises(IntegrityError, match=r"a\.onnx: "):
        read_onnx(tmp_path / "a.onnx", DECODE)


def test_an_onnx_model_without_the_output(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="expected the output `logits`, got none"):
        read_onnx(write_onnx(tmp_path / "a.onnx", "other"), DECODE)
