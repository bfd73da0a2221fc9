"""FP8 bundles in every format against transformers with the decoded weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from transformers import LlamaConfig as ReferenceConfig
from transformers import LlamaForCausalLM

import llama_runtime
from llama_artifacts.errors import ChoiceError, CompatibilityError
from llama_artifacts.manifest import Program
from llama_artifacts.manifest_file import read
from llama_export.build import build
from llama_export.cache import ProgramCache
from llama_export.recipe import Recipe
from llama_export.report import Reporter
from llama_export.verify import verify
from llama_runtime import compat
from llama_runtime.programs.base import Loading
from llama_runtime.programs.pt2 import Pt2Program
from llama_runtime.weights import map_weights
from tests.cli.running import invoke
from tests.tiny import write_tiny
from tests.tiny_fp8 import decoded, scheme, write_tiny_fp8

pytestmark = pytest.mark.slow  # it builds bundles of its own

NUM_TOKENS, MAX_SEQ = 200, 256
BATCH = 2
CASES = [
    ("exact", "pt2", "forward"),
    ("exact", "pt2", "prefill"),
    ("exact", "pt2", "decode"),
    ("exact", "onnx", "forward"),
    ("exact", "onnx", "prefill"),
    ("exact", "onnx", "decode"),
    pytest.param("exact", "aoti", "prefill", marks=pytest.mark.long),
    ("exact", "aoti", "decode"),
    ("fast", "aoti", "decode"),
]


class Notes(Reporter):
    """Keeps what a build remarks."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything FP8 but one layer's query projection; the head, too."""
    ignored = "model.layers.0.self_attn.q_proj"
    return write_tiny_fp8(
        tmp_path_factory.mktemp("fp8") / "tiny",
        is_fp8=lambda module: module != ignored,
        quantization=scheme([ignored]),
    )


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(128, (BATCH, NUM_TOKENS), generator=generator, dtype=torch.int32)


@pytest.fixture(scope="module")
def expected(checkpoint: Path, tokens: torch.Tensor) -> torch.Tensor:
    values = json.loads((checkpoint / "config.json").read_text())
    del values["quantization_config"]
    model = LlamaForCausalLM(ReferenceConfig(**values, attn_implementation="eager")).eval()
    found = model.load_state_dict(decoded(checkpoint))
    assert not found.missing_keys
    with torch.no_grad():
        return model(tokens.long()).logits


@pytest.fixture(scope="module")
def portable(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(checkpoint, tmp_path_factory, ("forward", "prefill", "decode"), ("pt2", "onnx"))


@pytest.fixture(scope="module")
def native_decode(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(checkpoint, tmp_path_factory, ("decode",), ("aoti",))


@pytest.fixture(scope="module")
def native_prefill(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(checkpoint, tmp_path_factory, ("prefill",), ("aoti",))


@pytest.fixture(scope="module")
def bare(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that was compiled without the weights."""
    choices: dict[str, Any] = {"numerics": "fast", "weights": "none"}
    return make(checkpoint, tmp_path_factory, ("decode",), ("aoti",), **choices)


@pytest.fixture(scope="module")
def fast(checkpoint: Path, bare: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same program, over the weights."""
    made = make(checkpoint, tmp_path_factory, ("decode",), ("aoti",), numerics="fast")
    (first,), (second,) = (read(folder).programs for folder in (bare, made))
    assert (made / second.file).read_bytes() == (bare / first.file).read_bytes()
    return made


def make(
    checkpoint: Path,
    factory: pytest.TempPathFactory,
    entries: tuple[str, ...],
    formats: Any,
    **choices: Any,
) -> Path:
    output = factory.mktemp("bundle") / "tiny"
    sizes: dict[str, Any] = {"max_seq": MAX_SEQ, "batch": BATCH}
    recipe = Recipe(str(checkpoint), output, entries, formats, **sizes, **choices)
    return build(recipe, cache=ProgramCache()).folder


@pytest.mark.parametrize(("numerics", "format", "entry"), CASES)
def test_logits_are_those_of_the_decoded_weights(
    request: pytest.FixtureRequest,
    tokens: torch.Tensor,
    expected: torch.Tensor,
    numerics: str,
    format: Any,
    entry: str,
) -> None:
    name = "portable" if format != "aoti" else "fast" if numerics == "fast" else f"native_{entry}"
    folder = request.getfixturevalue(name)
    called = llama_runtime.load(folder, format=format).entry(entry)
    if entry == "forward":
        actual, wanted = called(tokens=tokens), expected
    elif entry == "prefill":
        states = called.new_states()
        parts = [(0, 150), (150, 151), (151, NUM_TOKENS)]
        found = [called(states, tokens=tokens[:, a:b].contiguous(), pos=a) for a, b in parts]
        actual, wanted = torch.stack(found, 1), expected[:, [149, 150, 199]]
    else:
        states = called.new_states()
        steps = tokens.split(1, dim=1)
        found = [
            called(states, tokens=step.contiguous(), pos=pos) for pos, step in enumerate(steps)
        ]
        actual, wanted = torch.stack(found, 1), expected
    torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-5)


def test_onnx_weights_are_fp8_data_of_the_weights_file(portable: Path) -> None:
    model = onnx.load(portable / "decode.onnx", load_external_data=False)
    weights = map_weights(portable / "weights.safetensors")
    kinds = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    fp8 = [name for name, tensor in weights.items() if tensor.dtype == torch.float8_e4m3fn]
    assert len(fp8) == 14
    for name in fp8:
        assert kinds[name] == onnx.TensorProto.FLOAT8E4M3FN
        assert kinds[f"{name}_scale"] == onnx.TensorProto.BFLOAT16


def test_verify_knows_the_weights(portable: Path) -> None:
    results = verify(portable, formats=("pt2",))
    assert [result.law for result in results].count("parity") == 3
    assert all(result.passed for result in results)


def test_the_manifest_records_how_products_are_computed(portable: Path, short_bundle: Path) -> None:
    assert {program.numerics for program in read(portable).programs} == {"exact"}
    assert {program.numerics for program in read(short_bundle).programs} == {None}
    assert "FP8" in invoke("inspect", portable).stdout
    assert "exact" in invoke("inspect", portable).stdout
    assert "FP8" not in invoke("inspect", short_bundle).stdout


def recipe(checkpoint: Path, output: Path, **choices: Any) -> Recipe:
    given: dict[str, Any] = {"formats": ("pt2",), "entries": ("decode",), "max_seq": 16, **choices}
    return Recipe(str(checkpoint), output, **given)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_dtype_is_that_of_the_rest(checkpoint: Path, tmp_path: Path, dtype: Any) -> None:
    notes = Notes()
    folder = build(recipe(checkpoint, tmp_path / "b", dtype=dtype), reporter=notes).folder
    assert any(f"FP8 weights stay FP8; --dtype {dtype}" in text for text in notes.texts)
    weights = map_weights(folder / "weights.safetensors")
    assert weights["model.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
    kind = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
    assert weights["model.embed_tokens.weight"].dtype == kind
    assert read(folder).programs[0].dtype == dtype


def test_fast_without_fp8_weights_is_wrong_usage(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "m", has_tokenizer=False)
    with pytest.raises(ChoiceError, match="for FP8 weights, and the checkpoint has none"):
        build(recipe(folder, tmp_path / "b", numerics="fast"))
    result = invoke("build", folder, "-o", tmp_path / "b", "--numerics", "fast")
    assert result.exit_code == 2
    assert not (tmp_path / "b").exists()


def test_another_scheme_ends_with_status_1_and_writes_nothing(tmp_path: Path) -> None:
    folder = write_tiny(
        tmp_path / "m", has_tokenizer=False, quantization_config={"quant_method": "hqq"}
    )
    result = invoke("build", folder, "-o", tmp_path / "b")
    assert result.exit_code == 1
    assert "quant_method 'hqq' is not supported; supported: " in result.stderr
    assert not (tmp_path / "b").exists()


def test_programs_can_be_compiled_without_the_weights(bare: Path) -> None:
    (program,) = read(bare).programs
    assert sum(name.endswith("weight_scale") for name in program.constants) == 14


# --- for CUDA, without a device -------------------------------------------------------------------


@pytest.fixture(scope="module")
def cuda_program(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Program:
    output = tmp_path_factory.mktemp("cuda") / "b"
    choices: dict[str, Any] = {"device": "cuda", "numerics": "fast", "weights": "none"}
    folder = build(recipe(checkpoint, output, **choices)).folder
    (program,) = read(folder).programs
    return program


@pytest.mark.parametrize(
    ("capability", "message"),
    [
        ((7, 5), "needs compute capability 8.9 .* this device has 7.5"),
        ((8, 6), "needs compute capability 8.9 .* this device has 8.6"),
        ((8, 9), None),
        ((9, 0), None),
        ((12, 0), None),
    ],
)
def test_a_device_without_fp8_units_is_refused_with_both_numbers(
    monkeypatch: pytest.MonkeyPatch,
    cuda_program: Program,
    capability: tuple[int, int],
    message: str | None,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert (cuda_program.numerics, cuda_program.requires["compute capability"]) == ("fast", "8.9")
    if message is None:
        compat.check(cuda_program, device="cuda", allow_native=True)
        return
    with pytest.raises(CompatibilityError, match=message):
        compat.check(cuda_program, device="cuda", allow_native=True)


def test_a_program_for_fp8_units_computes_nearly_the_same(
    checkpoint: Path, tokens: torch.Tensor, expected: torch.Tensor, tmp_path: Path
) -> None:
    """CPUs have no such units, but torch computes what they would."""
    choices: dict[str, Any] = {
        "device": "cuda",
        "numerics": "fast",
        "entries": ("forward",),
        "max_seq": MAX_SEQ,
    }
    folder = build(recipe(checkpoint, tmp_path / "b", **choices)).folder
    (record,) = read(folder).programs
    weights = map_weights(folder / "weights.safetensors")
    program = Pt2Program(
        Loading(folder / record.file, record, weights, torch.device("cpu"), threads=None)
    )
    (actual,) = program.run([tokens], [], {})
    error = (actual - expected).norm() / expected.norm()
    assert 1e-3 < error < 0.1
    (other,) = program.run([torch.cat((tokens[:1], tokens[1:].flip(1)))], [], {})
    assert torch.equal(actual[0], other[0])
    assert not torch.equal(actual[1], other[1])


def test_layers_that_units_do_not_take_are_told(tmp_path: Path) -> None:
    notes, folder = Notes(), write_tiny_fp8(tmp_path / "m", intermediate_size=136)
    choices: dict[str, Any] = {"device": "cuda", "numerics": "fast", "weights": "none"}
    build(recipe(folder, tmp_path / "b", **choices), reporter=notes)
    (told,) = [text for text in notes.texts if "multiples of 16" in text]
    assert told.startswith("6 FP8 layers")
    assert "computed as with exact" in told
