from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from llama_artifacts.errors import InputError
from llama_artifacts.signature import StateSpec
from llama_runtime import LoadedBundle, States
from llama_runtime.states import LARGE_BYTES

CPU = torch.device("cpu")
SHAPE = (2, 1, 8, 4)
SPECS = tuple(StateSpec(f"cache.0.{part}", "f32", SHAPE) for part in ("key", "value"))


def tensors() -> dict[str, torch.Tensor]:
    return {spec.name: torch.zeros(SHAPE) for spec in SPECS}


def test_new_states_are_zero_and_in_order() -> None:
    states = States.zeros(SPECS, CPU)
    assert list(states) == ["cache.0.key", "cache.0.value"]
    assert len(states) == 2
    assert not any(tensor.any() for tensor in states.values())
    assert [tensor.data_ptr() for tensor in states.tensors()] == [
        states[spec.name].data_ptr() for spec in SPECS
    ]


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "f8e4m3"])
def test_states_of_every_cache_dtype(dtype: str) -> None:
    states = States.zeros((StateSpec("cache.0.key", dtype, SHAPE),), CPU)
    states.zero_()
    assert states["cache.0.key"].nbytes == StateSpec("cache.0.key", dtype, SHAPE).num_bytes


def test_zeroing_keeps_the_memory() -> None:
    states = States.zeros(SPECS, CPU)
    pointers = [tensor.data_ptr() for tensor in states.values()]
    states["cache.0.key"].fill_(3)
    states.zero_()
    assert not states["cache.0.key"].any()
    assert [tensor.data_ptr() for tensor in states.values()] == pointers


def test_the_mapping_cannot_be_changed() -> None:
    states: Any = States.zeros(SPECS, CPU)
    with pytest.raises(TypeError):
        states["cache.0.key"] = torch.zeros(SHAPE)


KEY, VALUE = "cache.0.key", "cache.0.value"
WHOLE = torch.zeros(2, 2, 8, 4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: {KEY: t[KEY]}, "missing: cache.0.value; unknown: none"),
        (lambda t: {**t, "cache.1.key": t[KEY]}, "missing: none; unknown: cache.1.key"),
        (lambda t: {}, "missing: cache.0.key and 1 more"),
        (lambda t: list(t.values()), "states: expected states by name, got a list"),
        (lambda t: {**t, KEY: t[KEY].bfloat16()}, "cache.0.key: expected f32 [2, 1, 8, 4] "),
        (lambda t: {**t, KEY: t[KEY].double()}, "got f64"),
        (lambda t: {**t, KEY: t[KEY][:, :, :7].contiguous()}, "got shape [2, 1, 7, 4]"),
        (lambda t: {**t, KEY: torch.zeros(2, 1, 9, 4)}, "got shape [2, 1, 9, 4]"),
        (lambda t: {**t, KEY: t[KEY][0]}, "got shape [1, 8, 4]"),
        (lambda t: {**t, KEY: torch.zeros(2, 1, 4, 8).mT}, "got strides (32, 32, 1, 8)"),
        (lambda t: {**t, KEY: torch.zeros(1, 1, 8, 4).expand(SHAPE)}, "got strides (0, "),
        (lambda t: {**t, KEY: WHOLE[:, :1]}, "got strides (64, "),
        (lambda t: {**t, KEY: t[KEY].to("meta")}, "got one on meta"),
        (lambda t: {**t, KEY: t[KEY].to_sparse()}, "got layout torch.sparse_coo"),
        (lambda t: {**t, KEY: t[KEY].numpy()}, "got a ndarray"),
        (lambda t: {**t, VALUE: t[KEY]}, "shares memory with `cache.0."),
        (
            lambda t: {
                KEY: WHOLE.view(-1)[:64].view(SHAPE),
                VALUE: WHOLE.view(-1)[32:96].view(SHAPE),
            },
            "cache.0.value: shares memory with `cache.0.key`",
        ),
    ],
)
def test_tensors_that_a_program_would_misread(
    change: Callable[[dict[str, torch.Tensor]], Any], words: str
) -> None:
    with pytest.raises(InputError) as caught:
        States(SPECS, change(tensors()), CPU)
    assert words in str(caught.value)


def test_neighbours_in_one_buffer_are_apart() -> None:
    flat = torch.zeros(128)
    States(SPECS, {KEY: flat[:64].view(SHAPE), VALUE: flat[64:].view(SHAPE)}, CPU)


def test_no_specs_and_a_tensor() -> None:
    with pytest.raises(InputError, match=r"unknown: cache\.0\.key"):
        States((), {KEY: torch.zeros(SHAPE)}, CPU)


def test_a_set_of_another_bundle_is_checked_anew(tiny_loaded: dict[str, LoadedBundle]) -> None:
    decode = tiny_loaded["onnx"].entry("decode")
    with pytest.raises(InputError, match=r"missing: cache\.1\.key and 1 more; unknown: none"):
        decode(States.zeros(SPECS, CPU), tokens=[[1], [2]], pos=0)


def test_a_set_on_another_device_is_checked_anew(tiny_loaded: dict[str, LoadedBundle]) -> None:
    decode = tiny_loaded["onnx"].entry("decode")
    elsewhere = States.zeros(decode.signature.states, torch.device("meta"))
    with pytest.raises(InputError, match=r"cache\.0\.key: .* on cpu, got one on meta"):
        decode(elsewhere, tokens=[[1], [2]], pos=0)


def test_formats_with_equal_states_share_a_set(tiny_loaded: dict[str, LoadedBundle]) -> None:
    prefill, decode = tiny_loaded["aoti"].entry("prefill"), tiny_loaded["onnx"].entry("decode")
    states = prefill.new_states()
    prefill(states, tokens=[[1, 2], [3, 4]], pos=0)
    logits = decode(states, tokens=[[5], [6]], pos=2)
    alone = tiny_loaded["pt2"].entry("next_token")(tokens=[[1, 2, 5], [3, 4, 6]])
    assert isinstance(logits, torch.Tensor)
    assert isinstance(alone, torch.Tensor)
    torch.testing.assert_close(logits, alone, atol=1e-5, rtol=0)


def test_large_states_are_zero_and_their_own() -> None:
    """They lie in memory that the system is asked for, whatever it makes of the wish."""
    spec = StateSpec("state.large", "bf16", (LARGE_BYTES // 16, 8))
    one, other = (States.zeros((spec,), CPU)["state.large"] for _ in range(2))
    assert one.shape == (LARGE_BYTES // 16, 8)
    assert one.is_contiguous()
    assert not one.any()
    one.fill_(1)
    assert not other.any()
