"""Program files: what lies in them, what does not, and what refuses to be made."""

from __future__ import annotations

import io
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor

from llama_artifacts.errors import BuildError
from llama_artifacts.manifest import Program
from llama_artifacts.manifest_file import read
from llama_export import trace as tracing
from llama_export.lower import aoti
from llama_export.lower.archive import write_archive
from llama_export.lower.backend import Place, backend
from llama_export.lower.onnx import (
    CONTRIB,
    CONTRIB_ONNXRUNTIME,
    IR_VERSION,
    MIN_ONNXRUNTIME,
    OPSET,
)
from llama_export.model.llama import Llama
from llama_export.pack import Extent
from llama_runtime.machine import X86_ISAS, architecture, cpu_flags
from llama_runtime.weights import map_weights
from tests.exporter.test_trace import job

PICKLE = b"\x80"  # every pickle since protocol 2 begins so
ENTRIES = ("forward", "next_token", "prefill", "decode", "decode_rows")
X86 = pytest.mark.skipif(architecture() != "x86_64", reason="about x86-64 instruction sets")


def program(bundle: Path, entry: str, format: str) -> Program:
    return next(p for p in read(bundle).programs if (p.entry, p.format) == (entry, format))


def members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return {item.filename: archive.read(item) for item in archive.infolist()}


def parts(bundle: Path) -> Iterator[tuple[str, bytes]]:
    """Every file of the bundle, and every member of its archives."""
    for path in bundle.iterdir():
        yield path.name, path.read_bytes()
        if zipfile.is_zipfile(path):
            for name, data in members(path).items():
                yield f"{path.name}/{name}", data


def test_an_onnx_state_is_written_directly(tiny_bundle: Path) -> None:
    """Anything between a state and what writes it would copy the whole state at every call."""
    for entry, writer in (
        *(("prefill", "ScatterND"), ("decode_rows", "ScatterND")),
        ("decode", "GroupQueryAttention"),
    ):
        graph = onnx.load(tiny_bundle / f"{entry}.onnx", load_external_data=False).graph
        for output in graph.output:
            if output.name.startswith("state."):
                (made,) = [node for node in graph.node if output.name in node.output]
                assert made.op_type == writer
                assert output.name.removesuffix(".next") in made.input


def test_no_part_of_a_bundle_is_a_pickle(tiny_bundle: Path) -> None:
    for name, data in parts(tiny_bundle):
        assert not data.startswith(PICKLE), name
        assert not name.endswith((".pkl", ".pickle", ".py")), name
        is_nested = data.startswith(b"PK") and "/" in name
        assert not is_nested, name  # what torch.save writes


def test_only_the_weights_file_holds_weights(tiny_bundle: Path) -> None:
    weights = map_weights(tiny_bundle / "weights.safetensors")
    needles = [weights[name].numpy().tobytes()[:64] for name in weights]
    for name, data in parts(tiny_bundle):
        if name != "weights.safetensors":
            assert not any(needle in data for needle in needles[:-1]), name


def test_no_program_tells_where_the_exporter_lay(tiny_bundle: Path) -> None:
    folder = str(Path(aoti.__file__).parents[1]).encode()
    for name, data in parts(tiny_bundle):
        assert folder not in data, name


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_pt2_archive_holds_no_example_inputs(tiny_bundle: Path, entry: str) -> None:
    found = members(tiny_bundle / program(tiny_bundle, entry, "pt2").file)
    assert not any("sample_inputs" in name and data for name, data in found.items())
    data = [item for name, item in found.items() if "/data/" in name and not name.endswith(".json")]
    assert not any(data)


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_aoti_archive_holds_code_without_source_or_constants(
    tiny_bundle: Path, entry: str
) -> None:
    found = members(tiny_bundle / program(tiny_bundle, entry, "aoti").file)
    assert any(name.endswith(".so") for name in found)
    assert not [name for name in found if name.endswith((".cpp", ".o", ".h", ".bin"))]


@X86
def test_the_targets_flags_are_names_of_this_cpus_features(tiny_bundle: Path) -> None:
    target = program(tiny_bundle, "decode", "aoti").target
    assert set(target.cpu_flags) <= cpu_flags()
    assert target.isa is not None
    assert set(X86_ISAS[target.isa][2]) <= set(target.cpu_flags)
    assert target.machine == architecture()
    assert target.device == "cpu"


@X86
@pytest.mark.parametrize("isa", ["avx2", "avx512"])
def test_an_isa_that_this_cpu_lacks_is_refused(monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    flags = frozenset(X86_ISAS[isa][2]) - {"fma"}
    monkeypatch.setattr(aoti, "cpu_flags", lambda: flags)
    with pytest.raises(BuildError, match=f"--isa {isa} cannot be built here.*lacks fma"):
        backend("aoti").check("cpu", isa)


@X86
def test_a_cpu_without_avx2_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aoti, "cpu_flags", lambda: frozenset({"sse4_2"}))
    with pytest.raises(BuildError, match="AVX2"):
        backend("aoti").check("cpu", None)


def test_an_x86_isa_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aoti, "architecture", lambda: "aarch64")
    with pytest.raises(BuildError, match="x86-64, this machine is aarch64"):
        backend("aoti").check("cpu", "avx2")
    backend("aoti").check("cpu", None)


def test_no_compiler_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"g\+\+"):
        backend("aoti").check("cpu", None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_aoti_for_cuda_without_a_device_is_refused() -> None:
    with pytest.raises(BuildError, match="CUDA"):
        backend("aoti").check("cuda", None)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(BuildError, match="unknown format"):
        backend("tflite")  # type: ignore[arg-type]


# --- ONNX -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_onnx_program_has_the_declared_versions_and_names(tiny_bundle: Path, entry: str) -> None:
    record = program(tiny_bundle, entry, "onnx")
    model = onnx.load(tiny_bundle / record.file, load_external_data=False)
    assert model.ir_version == IR_VERSION
    own = [(CONTRIB, 1)] if entry == "decode" else []
    assert [(item.domain, item.version) for item in model.opset_import] == [("", OPSET), *own]
    assert not model.functions
    assert not model.metadata_props
    states = [f"state.{spec.name}" for spec in record.signature.states]
    inputs = [spec.name for spec in record.signature.inputs] + states
    assert [value.name for value in model.graph.input] == inputs
    outputs = [spec.name for spec in record.signature.outputs] + [f"{s}.next" for s in states]
    assert [value.name for value in model.graph.output] == outputs
    assert not any(node.metadata_props or node.doc_string for node in model.graph.node)


def test_the_versions_of_an_onnx_program_are_the_lowest_that_suffice(tiny_bundle: Path) -> None:
    """No operator is as its opset changed it later, and one is as this opset changed it."""
    records = [program(tiny_bundle, entry, "onnx") for entry in ENTRIES]
    since = set()
    for record in records:
        for node in onnx.load(tiny_bundle / record.file, load_external_data=False).graph.node:
            if node.domain == CONTRIB:
                continue
            since.add(onnx.defs.get_schema(node.op_type, OPSET, node.domain).since_version)
            # It aligns few queries to the first of many keys, and on each provider in its own way.
            assert node.op_type != "Attention"
        needed = CONTRIB_ONNXRUNTIME if record.entry == "decode" else MIN_ONNXRUNTIME
        assert record.requires == {"onnxruntime": needed}
    assert max(since) == OPSET
    opset = onnx.helper.make_opsetid("", OPSET)
    assert onnx.helper.find_min_ir_version_for([opset]) == IR_VERSION


@pytest.mark.slow
def test_an_input_whose_content_nothing_reads_stays_in_the_interface(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def method(self: Llama, tokens: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
        return Llama.hidden_packed(self, tokens, positions, torch.zeros_like(positions))

    monkeypatch.setattr(tracing, "Llama", type("Careless", (Llama,), {"hidden_packed": method}))
    model = lowered("hidden_packed", tmp_path)
    readers = {node.op_type for node in model.graph.node if "segments" in node.input}
    assert readers <= {"Shape"}
    assert [value.name for value in model.graph.input] == ["tokens", "positions", "segments"]


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["prefill_packed", "prefill_slots"])
def test_no_transpose_moves_no_axis(tmp_path: Path, entry: str) -> None:
    """A product of such a transpose fails in ONNX Runtime up to 1.26 at least."""
    nodes = lowered(entry, tmp_path).graph.node
    orders = [list(node.attribute[0].ints) for node in nodes if node.op_type == "Transpose"]
    assert orders
    assert all(order != sorted(order) for order in orders)


def lowered(entry: str, folder: Path) -> onnx.ModelProto:
    """The entry as ONNX, its weights left where no file is."""
    made = job(entry)
    extents = {
        name: Extent("weights.safetensors", 0, 4 * torch.Size(info.shape).numel())
        for name, info in made.weights.items()
    }
    place = Place("cpu", None, folder, None, torch.empty(0), extents)
    return onnx.load(folder / backend("onnx").lower(made, place).file, load_external_data=False)


@pytest.mark.parametrize("entry", ENTRIES)
def test_onnx_weights_are_places_in_the_bundles_weights_file(tiny_bundle: Path, entry: str) -> None:
    record = program(tiny_bundle, entry, "onnx")
    model = onnx.load(tiny_bundle / record.file, load_external_data=False)
    weights = map_weights(tiny_bundle / "weights.safetensors")
    data = (tiny_bundle / "weights.safetensors").read_bytes()
    external = [t for t in model.graph.initializer if t.external_data]
    assert {tensor.name for tensor in external} == set(record.constants) == set(weights)
    for tensor in external:
        place = {item.key: item.value for item in tensor.external_data}
        assert place["location"] == "weights.safetensors"
        start, length = int(place["offset"]), int(place["length"])
        expected = weights[tensor.name].contiguous().numpy().tobytes()
        assert data[start : start + length] == expected
        assert tuple(tensor.dims) == weights[tensor.name].shape
    for tensor in model.graph.initializer:
        assert tensor.external_data or len(tensor.raw_data) < 256


def test_an_onnx_program_passes_the_checker_and_opens_from_elsewhere_under_another_name(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "a copy ä"
    copy.mkdir()
    shutil.copy(tiny_bundle / "weights.safetensors", copy)
    shutil.copy(tiny_bundle / "decode.onnx", copy / "renamed.onnx")
    monkeypatch.chdir("/")
    onnx.checker.check_model(copy / "renamed.onnx", full_check=True)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    onnxruntime.InferenceSession(copy / "renamed.onnx", options, ["CPUExecutionProvider"])


# --- archives, and the same bytes twice -----------------------------------------------------------


def test_an_archive_is_written_without_what_differs_from_build_to_build(tmp_path: Path) -> None:
    archive, path = io.BytesIO(), tmp_path / "a.pt2"
    with zipfile.ZipFile(archive, "w") as made:
        made.writestr("m/data/model.wrapper.cpp", b"int main() {}")
        made.writestr("m/data/model.json", b"{}" * 100)
        made.writestr("m/.data/serialization_id", b"1234567890")
    write_archive(path, archive)
    expected = {"m/data/model.json": b"{}" * 100, "m/.data/serialization_id": b"0" * 10}
    assert members(path) == expected
    with zipfile.ZipFile(path) as written:
        assert {item.date_time for item in written.infolist()} == {(1980, 1, 1, 0, 0, 0)}
