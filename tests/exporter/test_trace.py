"""Tracing: what the graph must be, and that a model that breaks the promise is refused."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.export.passes import move_to_device_pass

from llama_artifacts.errors import BuildError
from llama_export import trace as tracing
from llama_export.checkpoint.config import config_from_hf
from llama_export.checkpoint.layout import expected_tensors
from llama_export.checkpoint.source import TensorInfo
from llama_export.entries import registry
from llama_export.entries.llama import MAX_ROWS
from llama_export.entries.registry import DEFAULT_ROWS, Sizes
from llama_export.model.formulation import Formulation
from llama_export.model.llama import INV_FREQ, Llama
from llama_export.presets import find as find_preset
from llama_export.trace import Job, trace
from tests.tiny import tiny_config

ENTRIES = tuple(spec.name for spec in registry.entries())
USUAL = ("forward", "prefill", "step_paged", "loss_packed")
"""One entry of each kind, where each of the others would be traced for as long again."""
CPU = Formulation(torch.float32, reads_positions=True)
CUDA = Formulation(torch.float32, reads_positions=False)
COMPILED = Formulation(torch.float32, reads_positions=True, max_fused_rows=3)
MAX_8B_BYTES = 3 * 2**30


def job(
    entry: str,
    form: Formulation = CPU,
    *,
    batch: int = 2,
    max_seq: int = 64,
    max_rows: int = DEFAULT_ROWS,
    variant: dict[str, int] | None = None,
    **overrides: Any,
) -> Job:
    config = config_from_hf(tiny_config(**overrides), where="config.json")
    weights = {name: TensorInfo("f32", shape) for name, shape in expected_tensors(config).items()}
    weights[INV_FREQ] = TensorInfo("f32", (config.head_dim // 2,))
    sizes = Sizes(config, batch, max_seq, "f32", max_rows=max_rows)
    spec = registry.find(entry).sized(sizes)
    signature = spec.signature(sizes, variant)
    return Job(config, spec, spec.stem, signature, form, weights)


@functools.cache
def traced(entry: str, form: Formulation) -> tuple[Job, ExportedProgram]:
    """Traced once for several tests, which only look at it."""
    made = job(entry, form)
    return made, trace(made)


@pytest.mark.parametrize(
    ("entry", "form"),
    [
        *(
            (e, CPU) if e in USUAL else pytest.param(e, CPU, marks=pytest.mark.slow)
            for e in ENTRIES
        ),
        ("prefill", CUDA),
        ("prefill", COMPILED),
    ],
)
def test_every_promised_dimension_is_a_symbol_over_its_whole_range(
    entry: str, form: Formulation
) -> None:
    made, program = traced(entry, form)
    ranges = {(r.lower, r.upper) for r in program.range_constraints.values()}
    assert {(dim.min, dim.max) for dim in made.signature.dims} <= ranges
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    inputs = placeholders[len(made.weights) :][: len(made.signature.inputs)]
    for node, spec in zip(inputs, made.signature.inputs, strict=True):
        for size, declared in zip(node.meta["val"].shape, spec.shape, strict=True):
            assert isinstance(size, torch.SymInt) == isinstance(declared, str)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entry", "fixed"),
    [
        (name, dim) if name in USUAL else pytest.param(name, dim, marks=pytest.mark.long)
        for name, dim in ((spec.name, dim.name) for spec in registry.entries() for dim in spec.dims)
    ],
)
def test_a_variant_fixes_a_dimension_and_leaves_the_others_dynamic(entry: str, fixed: str) -> None:
    made = job(entry, variant={fixed: 1})
    assert fixed not in {dim.name for dim in made.signature.dims}
    assert len(made.signature.dims) == len(job(entry).signature.dims) - 1
    trace(made)  # which checks every size of the graph against the signature


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_graph_names_no_device_but_the_cpu_and_hides_no_constant(entry: str) -> None:
    made, program = traced(entry, CPU)
    for graph in (module.graph for module in program.graph_module.modules()):
        for node in graph.nodes:
            if node.op == "get_attr":  # the body of a loop, never a tensor
                assert isinstance(
                    getattr(graph.owning_module, str(node.target)), torch.fx.GraphModule
                )
            for argument in (*node.args, *node.kwargs.values()):
                if isinstance(argument, torch.device):
                    assert argument == torch.device("cpu")
    specs = program.graph_signature.input_specs
    bound = [spec for spec in specs if spec.kind != InputKind.USER_INPUT]
    assert {spec.target for spec in bound} == set(made.weights)
    assert {spec.kind for spec in bound} == {InputKind.PARAMETER, InputKind.BUFFER}
    assert not program.constants


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["prefill", "step_paged", "sample<8>", "generate_until<8>"])
def test_a_program_moves_whole_to_another_device(entry: str) -> None:
    """As for a GPU when it is loaded: no tensor stays behind, nor one made in the body of a loop."""
    moved = move_to_device_pass(trace(job(entry, CUDA)), "meta")
    graphs = [m.graph for m in moved.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    assert len(graphs) == (3 if "<" in entry else 1)
    for node in (node for graph in graphs for node in graph.nodes):
        devices = [argument for argument in node.args if isinstance(argument, torch.device)]
        if "device" in node.kwargs:
            devices.append(node.kwargs["device"])
        values = node.meta.get("val")
        values = values if isinstance(values, (tuple, list)) else [values]
        devices += [value.device for value in values if isinstance(value, Tensor)]
        assert {str(device) for device in devices} <= {"meta"}, node


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["prefill", "decode", "decode_rows", "generate<8>"])
def test_a_program_for_cuda_graphs_reads_no_number_back(entry: str) -> None:
    for form, num_read in ((CPU, 1), (CUDA, 0)):
        names = map(str, trace(job(entry, form)).range_constraints)
        assert sum(name.startswith("u") for name in names) == num_read


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2, 3, 5, 7])
def test_sizes_that_equal_an_example_size_do_not_confuse(batch: int) -> None:
    trace(job("prefill", batch=batch, max_seq=8))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [2, 3, 4, 5])
@pytest.mark.parametrize(
    "entry",
    [
        "decode_paged",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("prefill_paged", "step_paged")),
    ],
)
def test_few_rows_are_dynamic_too(entry: str, rows: int) -> None:
    """The only example size of two rows is their most, and torch then gives each input a symbol."""
    trace(job(entry, max_rows=rows))


@pytest.mark.slow
def test_sizes_of_one_are_traced() -> None:
    overrides = {"num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1}
    for entry in ENTRIES:
        trace(job(entry, batch=1, **overrides))


def test_states_come_back_where_a_format_has_no_mutation() -> None:
    made = job("decode")
    plain, threaded = trace(made), trace(made, returns_states=True)
    assert len(plain.graph_signature.user_outputs) == 1
    assert len(threaded.graph_signature.user_outputs) == 1 + len(made.signature.states)


def test_the_default_dtype_of_the_process_does_not_matter() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        trace(job("prefill"))
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_range_too_small_to_be_dynamic_is_refused() -> None:
    with pytest.raises(BuildError, match="too small a range"):
        trace(job("prefill", max_seq=2))


# --- models that break the promise ----------------------------------------------------------------


def broken(monkeypatch: pytest.MonkeyPatch, name: str, method: Callable[..., Any]) -> None:
    kind = type("Broken", (Llama,), {name: method})
    monkeypatch.setattr(tracing, "Llama", kind)


def refused(made: Job, *, returns_states: bool = False) -> str:
    with pytest.raises(BuildError) as caught:
        trace(made, returns_states=returns_states)
    assert str(caught.value).startswith(f"{made.spec.name}: ")
    assert "\n" not in str(caught.value)
    assert caught.value.hint
    return str(caught.value)


def test_a_size_that_is_baked_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Llama, tokens: Tensor) -> Tensor:
        return Llama.forward(self, tokens.reshape(tokens.shape[0], int(tokens.shape[1])))

    broken(monkeypatch, "forward", forward)
    refused(job("forward"))


def test_a_branch_on_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Llama, tokens: Tensor) -> Tensor:
        return Llama.forward(self, tokens) * (2 if tokens.shape[1] > 6 else 1)

    broken(monkeypatch, "forward", forward)
    refused(job("forward"))


def test_a_tensor_of_the_model_that_is_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Llama, tokens: Tensor) -> Tensor:
        return Llama.forward(self, tokens) * torch.tensor([1.0, 2.0] * 64)

    broken(monkeypatch, "forward", forward)
    assert "hides in the graph" in refused(job("forward"))


def test_a_parameter_that_the_checkpoint_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    made = job("forward")
    weights = {name: info for name, info in made.weights.items() if name != "model.norm.weight"}
    with pytest.raises((BuildError, RuntimeError), match=r"model\.norm\.weight"):
        trace(replace(made, weights=weights))


def test_a_state_that_is_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(self: Llama, tokens: Tensor, pos: Tensor, states: Sequence[Any]) -> Tensor:
        copies = [(keys.clone(), values) for keys, values in states]
        return Llama.decode(self, tokens, pos, copies)

    broken(monkeypatch, "decode", decode)
    assert "never written" in refused(job("decode"))
    assert "never written" in refused(job("decode"), returns_states=True)


def test_a_state_that_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(self: Llama, tokens: Tensor, pos: Tensor, states: Sequence[Any]) -> Tensor:
        return Llama.forward(self, tokens)[:, -1]

    broken(monkeypatch, "decode", decode)
    assert "never written" in refused(job("decode"))


@pytest.mark.parametrize(
    "change",
    [
        lambda logits: logits.bfloat16(),
        lambda logits: logits[0],
        lambda logits: logits[:, :, :-1],
        lambda logits: logits.transpose(0, 1),
        lambda logits: (logits, logits.sum()),
        lambda logits: logits[:, :4],
    ],
    ids=["dtype", "rank", "size", "order of dimensions", "number", "fixed size"],
)
def test_an_output_that_is_not_as_declared(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], Any]
) -> None:
    def forward(self: Llama, tokens: Tensor) -> Any:
        return change(Llama.forward(self, tokens))

    broken(monkeypatch, "forward", forward)
    refused(job("forward", max_seq=MAX_ROWS + 1))  # then both dimensions have one range


def test_an_output_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Llama, tokens: Tensor) -> Any:
        return ()

    broken(monkeypatch, "forward", forward)
    assert "gives 0 tensors" in refused(job("forward"))


# --- a large model --------------------------------------------------------------------------------


def write_8b_headers(folder: Path) -> Path:
    preset = find_preset("llama-3.1-8b-instruct")
    assert preset is not None
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(preset.config))
    header: dict[str, Any] = {}
    end = 0
    config = config_from_hf(preset.config, where="config.json")
    for name, shape in expected_tensors(config).items():
        start, end = end, end + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    return folder


@pytest.mark.slow
def test_8_billion_parameters_are_traced_without_their_memory(tmp_path: Path) -> None:
    folder = write_8b_headers(tmp_path / "8b")
    code = """if True:
        import sys
        from pathlib import Path
        from llama_export.bench.worker import peak_bytes
        from llama_export.build import build
        from llama_export.recipe import Recipe
        result = build(Recipe(sys.argv[1], Path(sys.argv[2]), ("decode",), ("pt2",),
                              max_seq=8192, weights="none"))
        print(peak_bytes(), result.bundle_bytes)
    """
    command = [sys.executable, "-c", code, str(folder), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    peak, bundle_bytes = map(int, done.stdout.split())
    assert peak < MAX_8B_BYTES
    assert bundle_bytes < 8 * 2**20
