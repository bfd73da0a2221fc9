"""The engines beside a bundle: files that are written for them, and engines that are not there."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import gguf
import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from llama_artifacts.bundle import open_bundle
from llama_artifacts.errors import CompatibilityError
from llama_export.bench.methods import PEERS, Setup, adapter
from llama_export.bench.peers import bundle as bundle_peer
from llama_export.bench.peers import gguf_file, library, matmul_nbits, openvino
from llama_export.checkpoint.config import RopeConfig
from llama_export.checkpoint.gguf import unpermute_rows
from llama_export.checkpoint.layout import EIGHT_BITS, PACKED, Codes
from llama_export.checkpoint.names import to_hf
from llama_export.model.integers import decode
from llama_export.model.rope import inverse_frequencies
from llama_export.quantize import quantize
from llama_runtime.places import find_weights
from llama_runtime.weights import bundle_weights
from tests.cli.synthetic import write_bundle

PACKAGES = {
    "llama.cpp": ("llama-cpp-python", "llama-cpp"),
    "onnxruntime-genai": ("onnxruntime-genai", "onnxruntime-genai"),
    "openvino": ("openvino-genai", "openvino"),
    "openvino-paged": ("openvino-genai", "openvino"),
    "ctranslate2": ("ctranslate2", "ctranslate2"),
}


@pytest.mark.parametrize("peer", PACKAGES)
def test_an_engine_that_is_not_installed(
    peer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "version", lambda package: None)
    package, extra = PACKAGES[peer]
    with pytest.raises(CompatibilityError, match=f"`{package}`, which is not installed") as got:
        adapter(peer).prepare(Setup(peer, tmp_path, tmp_path, 1, 8))
    assert got.value.hint == f"pip install 'llama-export[{extra}]'"


def test_every_peer_has_a_case() -> None:
    assert set(PEERS) == {*PACKAGES, "transformers", "transformers-compiled"}


def test_float32_weights_are_not_rounded_for_openvino(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "version", lambda package: "1")
    setup = Setup("openvino", write_bundle(tmp_path / "b", dtype="f32"), tmp_path, 1, 8)
    with pytest.raises(CompatibilityError, match="expected weights of bf16, f16, int8 or int4"):
        openvino.prepare(setup)


# The GGUF file


@pytest.mark.parametrize(
    ("config", "factors"),
    [
        (RopeConfig(100_000.0), None),
        (RopeConfig(10_000.0, "linear", 4.0), [4.0] * 32),
        (
            RopeConfig(10_000.0, "divisors", divisors=(1.0, 1.0, *[2.5] * 30)),
            [1.0, 1.0, *[2.5] * 30],
        ),
    ],
)
def test_rope_is_a_base_and_what_differs_from_it(
    config: RopeConfig, factors: list[float] | None
) -> None:
    base, found = gguf_file.rope(inverse_frequencies(config, 64).double().numpy())
    assert base == config.theta
    if factors is None:
        assert found is None
    else:
        np.testing.assert_allclose(found, factors, rtol=1e-5)


def test_scaled_frequencies_of_llama3_come_back() -> None:
    config = RopeConfig(500_000.0, "llama3", 8.0)
    expected = inverse_frequencies(config, 128).double().numpy()
    base, factors = gguf_file.rope(expected)
    assert (base, factors is None) == (500_000.0, False)
    np.testing.assert_allclose(base ** (-np.arange(64) / 64) / factors, expected, rtol=1e-5)


@pytest.mark.parametrize("group_size", [32, 64, None])
@pytest.mark.parametrize(("dtype", "kind"), [(EIGHT_BITS, "Q8_0"), (PACKED, "Q4_0")])
def test_codes_become_blocks_of_the_same_values(
    dtype: str, kind: str, group_size: int | None
) -> None:
    weight = torch.randn(6, 128, generator=torch.Generator().manual_seed(3))
    codes, scale = quantize(weight, Codes(dtype, group_size))
    array, found = gguf_file.blocks(codes, [scale], torch.float32, torch.float32)
    assert found.name == kind
    # float16 holds every bit of a bf16 scale of this size.
    expected = decode(codes, scale, None, torch.float32).numpy()
    np.testing.assert_array_equal(gguf.quants.dequantize(array, found), expected)


def test_codes_with_minima_are_those_of_q4_1() -> None:
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(256, (6, 64), generator=generator, dtype=torch.uint8)
    scale, minimum = (torch.randn(6, 4, generator=generator).half() for _ in range(2))
    array, found = gguf_file.blocks(codes, [scale, minimum], torch.float32, torch.float32)
    assert found.name == "Q4_1"
    expected = decode(codes, scale, minimum, torch.float32).numpy()
    np.testing.assert_array_equal(gguf.quants.dequantize(array, found), expected)


def test_rows_that_fill_no_blocks_are_decoded() -> None:
    weight = torch.randn(2, 24, generator=torch.Generator().manual_seed(3))
    codes, scale = quantize(weight, Codes(EIGHT_BITS, None))
    array, found = gguf_file.blocks(codes, [scale], torch.float32, torch.float32)
    assert found.name == "F32"
    np.testing.assert_array_equal(array, decode(codes, scale, None, torch.float32).numpy())


def test_bf16_keeps_its_bits() -> None:
    weight = torch.randn(2, 8).bfloat16()
    array, found = gguf_file.blocks(weight, [], torch.bfloat16, torch.bfloat16)
    assert found.name == "BF16"
    assert torch.equal(torch.from_numpy(array).view(torch.bfloat16), weight)


@pytest.mark.slow
def test_a_file_has_the_weights_of_the_bundle(tiny_bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    gguf_file.write_gguf(tiny_bundle, path)
    bundle = open_bundle(tiny_bundle)
    weights = bundle_weights(bundle.manifest, find_weights(bundle))
    model = bundle.manifest.model
    heads = {"attn_q": model.num_heads, "attn_k": model.num_kv_heads}
    reader = gguf.GGUFReader(path)
    for tensor in reader.tensors:
        array = tensor.data.reshape(tensor.shape[::-1])
        part = tensor.name.split(".")[-2]
        if part in heads:
            array = unpermute_rows(array, heads[part])
        expected = weights.pop(to_hf(tensor.name) or "")
        np.testing.assert_array_equal(array, expected.float().numpy())
    assert len(weights) == 1  # the rotary frequencies
    assert reader.fields["llama.rope.freq_base"].contents() == 10_000


# Codes in operators of ONNX Runtime


def coded(seed: int, rows: int, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    codes, scale = quantize(torch.randn(rows, 64, generator=generator), Codes(dtype, 32))
    return codes, scale


def operator(name: str, rows: int) -> tuple[onnx.NodeProto, list[onnx.TensorProto]]:
    """As the builder leaves it: with codes of its own, always of four bits."""
    names = [f"{name}.MatMul.weight_Q4", f"{name}.MatMul.weight_scales"]
    arrays = (np.zeros((rows, 2, 16), np.uint8), np.zeros((rows, 2), np.float32))
    sizes = {"K": 64, "N": rows, "bits": 4, "block_size": 32}
    node = onnx.helper.make_node(
        "MatMulNBits", ["x", *names], [name], domain="com.microsoft", **sizes
    )
    pairs = zip(arrays, names, strict=True)
    return node, [onnx.numpy_helper.from_array(array, part) for array, part in pairs]


def test_operators_get_the_codes_of_a_bundle(tmp_path: Path) -> None:
    prefix, layer = "model.layers.0.self_attn.", "model.layers.0.attn.qkv_proj"
    parts = {f"{prefix}{name}_proj": coded(len(name), 8, PACKED) for name in ("q", "k", "v")}
    # A tied head has the codes of the embedding, of eight bits.
    parts["model.embed_tokens"] = coded(7, 24, EIGHT_BITS)
    weights = {f"{module}.weight": codes for module, (codes, _) in parts.items()}
    weights |= {f"{module}.weight_scale": scale for module, (_, scale) in parts.items()}
    nodes, tensors = zip(*(operator(name, 24) for name in (layer, "lm_head")), strict=True)
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        nodes,
        "two products",
        [value("x", onnx.TensorProto.FLOAT, [1, 64])],
        [value(name, onnx.TensorProto.FLOAT, [1, 24]) for name in (layer, "lm_head")],
        [tensor for of_node in tensors for tensor in of_node],
    )
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    path = tmp_path / "model.onnx"
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    onnx.save_model(
        model, path, save_as_external_data=True, location="model.onnx.data", size_threshold=0
    )
    matmul_nbits.replace_codes(path, weights)
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(9))
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    found = session.run(None, {"x": x.numpy()})
    values = {name: decode(*part, None, torch.float32) for name, part in parts.items()}
    head = values.pop("model.embed_tokens")
    for actual, weight in zip(found, (torch.cat([*values.values()]), head), strict=True):
        torch.testing.assert_close(torch.from_numpy(actual), x @ weight.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("codes", "is_held"),
    [
        (Codes(PACKED, 32), True),
        (Codes(EIGHT_BITS, 64), True),
        (Codes(PACKED, 32, has_min=True), False),
        (Codes(PACKED, 128, has_order=True), False),
        (Codes(PACKED, 96), False),
        (Codes(EIGHT_BITS, None), False),
        (Codes("f8e4m3", 128), False),
    ],
)
def test_codes_that_operators_have(codes: Codes, is_held: bool) -> None:
    assert matmul_nbits.is_held(codes) is is_held


# Engines that are installed


def has(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


# The builder of onnxruntime-genai takes any layer as wide as the vocabulary for the head, which
# two of the tiny model's are; OpenVINO's reader knows no float32.
@pytest.mark.slow
@pytest.mark.parametrize(
    "peer",
    [
        pytest.param(
            peer, marks=pytest.mark.skipif(not has(PACKAGES[peer][0]), reason="not installed")
        )
        for peer in ("llama.cpp", "ctranslate2")
    ],
)
def test_an_engine_says_what_the_bundle_says(peer: str, tiny_bundle: Path, tmp_path: Path) -> None:
    setup = Setup(peer, tiny_bundle, tmp_path, 1, 16)
    own = bundle_peer.open(Setup("bundle", tiny_bundle, tmp_path, 1, 16, format="pt2"))
    adapter(peer).prepare(setup)
    other = adapter(peer).open(setup)
    for _ in range(2):  # nothing is left of the first text
        assert [*other.generate((5, 6, 7), 8)] == [*own.generate((5, 6, 7), 8)]
    logits = other.logits((5, 6))
    assert logits is not None
    # llama.cpp keeps keys and values in float16.
    torch.testing.assert_close(logits, own.logits((5, 6)), rtol=0, atol=1e-2)
