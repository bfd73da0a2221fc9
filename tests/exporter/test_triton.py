from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from google.protobuf import text_format

import llama_runtime
from llama_artifacts.bundle import open_bundle
from llama_artifacts.errors import ChoiceError, CompatibilityError, LlamaExportError
from llama_artifacts.manifest import Program, Target
from llama_artifacts.signature import Bounds, Dim, Signature, StateSpec, TensorSpec
from llama_export.triton.plan import Options, plan
from llama_export.triton.repository import write_repository
from tests.bundles import CONTENTS, sample_manifest, sample_program, write_sample

DEFAULTS = Options()
LOSS = Signature(
    inputs=(TensorSpec("tokens", "i32", ("P",)), TensorSpec("weights", "f32", ("P",))),
    states=(),
    outputs=(TensorSpec("loss", "f32", ()),),
    dims=(Dim("P", 1, 64),),
)
PAGED = Signature(
    inputs=(
        TensorSpec("tokens", "i32", ("Rows", 1), Bounds(0, 7)),
        TensorSpec("table", "i32", ("Rows", "Pages")),
    ),
    states=(StateSpec("pool.0.key", "bf16", ("PoolPages", 1, 16, 2)),),
    outputs=(TensorSpec("logits", "bf16", ("Rows", 8)),),
    dims=(Dim("Rows", 1, 4), Dim("Pages", 1, 8), Dim("PoolPages", 2, 512)),
)


def program(entry: str, signature: Signature, *, format: str = "onnx", **changes: Any) -> Program:
    """A program of the sample bundle's file of that format."""
    base = sample_program("decode", "pt2", f"decode.{'onnx' if format == 'onnx' else 'pt2'}")
    changes = {"entry": entry, "signature": signature, "format": format, **changes}
    return dataclasses.replace(base, **changes)


LOSS_ONNX = program("loss_packed", LOSS)
SESSION = (sample_program("prefill", "pt2", "prefill.pt2"), *sample_manifest().programs[1:2])


def model_config() -> Any:
    """Triton's published message; loaded alone, without the client around it."""
    package = importlib.util.find_spec("tritonclient")
    assert package is not None
    assert package.submodule_search_locations is not None
    path = Path(package.submodule_search_locations[0]) / "grpc" / "model_config_pb2.py"
    name = "triton_model_config_pb2"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def read_config(folder: Path) -> Any:
    text = (folder / "config.pbtxt").read_text()
    return text_format.Parse(text, model_config().ModelConfig())


def shapes(tensors: Any) -> dict[str, tuple[str, list[int]]]:
    types = model_config().DataType
    return {tensor.name: (types.Name(tensor.data_type), list(tensor.dims)) for tensor in tensors}


def written(tmp_path: Path, *programs: Program, options: Options = DEFAULTS) -> Path:
    bundle = write_sample(tmp_path / "bundle", programs=programs)
    write_repository(bundle, tmp_path / "models", options)
    return tmp_path / "models"


def test_an_entry_without_states_is_served_as_onnx_beside_its_weights(tmp_path: Path) -> None:
    models = written(tmp_path, LOSS_ONNX)
    config = read_config(models / "loss_packed")
    assert (config.name, config.backend, config.max_batch_size) == ("loss_packed", "onnxruntime", 0)
    assert shapes(config.input) == {"tokens": ("TYPE_INT32", [-1]), "weights": ("TYPE_FP32", [-1])}
    assert shapes(config.output) == {"loss": ("TYPE_FP32", [1])}
    assert config.output[0].HasField("reshape")
    assert list(config.output[0].reshape.shape) == []
    assert not config.HasField("sequence_batching")
    version = models / "loss_packed" / "1"
    assert sorted(path.name for path in version.iterdir()) == ["model.onnx", "weights.safetensors"]
    assert (version / "model.onnx").read_bytes() == CONTENTS["decode.onnx"]
    assert (version / "weights.safetensors").samefile(tmp_path / "bundle" / "weights.safetensors")


def test_entries_with_the_same_states_are_one_model(tmp_path: Path) -> None:
    models = written(tmp_path, *SESSION, options=Options(max_sequences=3, max_idle_s=7))
    assert [path.name for path in models.iterdir()] == ["rows"]
    config = read_config(models / "rows")
    assert config.backend == "python"
    assert shapes(config.input) == {
        "prefill.tokens": ("TYPE_INT32", [1, -1]),
        "prefill.pos": ("TYPE_INT32", [1]),
        "decode.tokens": ("TYPE_INT32", [1, 1]),
        "decode.pos": ("TYPE_INT32", [1]),
    }
    assert all(tensor.optional for tensor in config.input)
    assert shapes(config.output) == {
        "prefill.logits": ("TYPE_FP32", [1, 8]),
        "decode.logits": ("TYPE_FP32", [1, 8]),
    }
    batching = config.sequence_batching
    assert batching.oldest.max_candidate_sequences == 3
    assert batching.max_sequence_idle_microseconds == 7_000_000
    kinds = model_config().ModelSequenceBatching.Control.Kind
    assert {c.name: kinds.Name(c.control[0].kind) for c in batching.control_input} == {
        "START": "CONTROL_SEQUENCE_START",
        "END": "CONTROL_SEQUENCE_END",
        "CORRID": "CONTROL_SEQUENCE_CORRID",
    }
    open_bundle(models / "rows" / "1" / "bundle")


@pytest.mark.parametrize(("device", "kind"), [("cpu", "KIND_CPU"), ("cuda", "KIND_GPU")])
def test_the_target_decides_where_a_model_runs(tmp_path: Path, device: Any, kind: str) -> None:
    models = written(tmp_path, dataclasses.replace(LOSS_ONNX, target=Target(device)))
    (group,) = read_config(models / "loss_packed").instance_group
    assert model_config().ModelInstanceGroup.Kind.Name(group.kind) == kind


def test_a_pool_has_as_many_pages_as_a_call_can_name(tmp_path: Path) -> None:
    models = written(tmp_path, program("decode_paged", PAGED, format="pt2"))
    config = read_config(models / "pool")
    assert json.loads(config.parameters["sizes"].string_value) == {"PoolPages": 4 * 8 + 1}
    assert shapes(config.output) == {"decode_paged.logits": ("TYPE_BF16", [-1, 8])}


def test_a_pool_of_a_chosen_size() -> None:
    manifest = sample_manifest(programs=(program("decode_paged", PAGED, format="pt2"),))
    (model,) = plan(manifest, Options(pool_pages=100))
    assert model.sizes == {"PoolPages": 100}
    assert model.state_bytes == 100 * 16 * 2 * 2
    with pytest.raises(ChoiceError, match="expected a pool of 2 to 512 pages, got 513"):
        plan(manifest, Options(pool_pages=513))


def test_what_the_onnxruntime_backend_lacks_goes_through_python() -> None:
    outputs = (TensorSpec("loss", "bf16", ()),)
    narrow = program("loss_packed", dataclasses.replace(LOSS, outputs=outputs))
    (model,) = plan(sample_manifest(programs=(narrow,)), Options())
    assert (model.name, model.backend, model.states) == ("loss_packed", "python", ())


def test_a_dtype_that_triton_lacks() -> None:
    outputs = (TensorSpec("loss", "f8e4m3", ()),)
    odd = program("loss_packed", dataclasses.replace(LOSS, outputs=outputs))
    with pytest.raises(CompatibilityError, match="expected a dtype that Triton has, got f8e4m3"):
        plan(sample_manifest(programs=(odd,)), Options())


def test_states_of_another_kind_are_another_model() -> None:
    states = (StateSpec("cache.0.key", "bf16", (1, 1, 16, 2)),)
    other = dataclasses.replace(SESSION[1].signature, states=states)
    programs = (*SESSION, program("decode_rows", other, format="pt2"))
    models = plan(sample_manifest(programs=programs), Options())
    assert [(model.name, len(model.programs)) for model in models] == [("rows", 2), ("rows-2", 1)]


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"programs": ()}, Options(), "holds no program"),
        ({}, Options(device="cuda"), "expected programs for cuda, got cpu"),
        ({}, Options(format="aoti"), "expected `prefill` in format aoti, got pt2"),
        (
            {"programs": (SESSION[0], dataclasses.replace(SESSION[1], target=Target("cuda")))},
            Options(),
            "expected one device, the bundle has programs for cpu and cuda",
        ),
    ],
    ids=["no program", "another device", "another format", "two devices"],
)
def test_what_cannot_be_served(changes: Any, options: Options, message: str) -> None:
    with pytest.raises(LlamaExportError, match=message):
        plan(sample_manifest(**changes), options)


def test_a_bundle_without_weights_is_refused(tmp_path: Path) -> None:
    contents = {name: data for name, data in CONTENTS.items() if name != "weights.safetensors"}
    bundle = write_sample(tmp_path / "b", contents=contents, weights="none", weights_headers={})
    with pytest.raises(CompatibilityError, match="expected a bundle with its weights"):
        write_repository(bundle, tmp_path / "models", Options())
    assert not (tmp_path / "models").exists()


def test_a_damaged_program_is_not_served(tmp_path: Path) -> None:
    bundle = write_sample(tmp_path / "bundle", programs=(LOSS_ONNX,))
    (bundle / "decode.onnx").write_bytes(CONTENTS["decode.onnx"][::-1])
    with pytest.raises(LlamaExportError, match=r"decode\.onnx: damaged"):
        write_repository(bundle, tmp_path / "models", Options())
    assert not (tmp_path / "models").exists()


def test_an_existing_folder_is_kept(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    with pytest.raises(LlamaExportError, match="the output exists"):
        written(tmp_path, LOSS_ONNX)
    assert not list((tmp_path / "models").iterdir())


def test_without_links_the_weights_are_copied_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, link = tmp_path / "bundle", os.link
    original = write_sample(source, programs=(LOSS_ONNX, *SESSION))

    def link_within_the_output(target: str, path: str) -> None:
        if source.resolve() in Path(target).parents:
            raise OSError("another file system")
        link(target, path)

    monkeypatch.setattr("llama_export.triton.repository.os.link", link_within_the_output)
    found = write_repository(original, tmp_path / "models", Options())
    first = tmp_path / "models" / "loss_packed" / "1" / "weights.safetensors"
    assert first.read_bytes() == CONTENTS["weights.safetensors"]
    assert first.samefile(tmp_path / "models/rows/1/bundle/weights.safetensors")
    listed = sum(file.bytes for file in open_bundle(original).manifest.files.values())
    assert found.copied_bytes == listed + (original / "manifest.json").stat().st_size


def test_onnx_programs_run_where_triton_looks_for_them(tiny_bundle: Path, tmp_path: Path) -> None:
    write_repository(tiny_bundle, tmp_path / "models", Options())
    config = read_config(tmp_path / "models" / "forward")
    path = tmp_path / "models" / "forward" / "1" / "model.onnx"
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    tokens = torch.tensor([[1, 5, 9]], dtype=torch.int32)
    (found,) = session.run([config.output[0].name], {config.input[0].name: tokens.numpy()})
    expected = llama_runtime.load(tiny_bundle, format="onnx").entry("forward")(tokens=tokens)
    assert torch.equal(torch.from_numpy(found), expected)
