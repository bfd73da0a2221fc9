"""The Python backend's model, called as the server calls it."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from google.protobuf import json_format

import llama_runtime
from llama_export.triton.plan import Options
from llama_export.triton.repository import write_repository
from tests.exporter.test_triton import read_config

PROMPT = [1, 9, 33, 7]


class Tensor:
    def __init__(self, name: str, array: Any) -> None:
        self._name, self._array = name, np.asarray(array)

    @staticmethod
    def from_dlpack(name: str, capsule: Any) -> Tensor:
        return Tensor(name, torch.utils.dlpack.from_dlpack(capsule).numpy())

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Any:
        return self._array


class TritonError:
    INTERNAL, INVALID_ARG = 1, 3

    def __init__(self, message: str, code: int) -> None:
        self.message, self.code = message, code


class InferenceResponse:
    def __init__(self, output_tensors: Any, error: TritonError | None = None) -> None:
        self.outputs = {tensor.name(): tensor.as_numpy() for tensor in output_tensors}
        self.error = error


class TritonModelException(Exception):  # noqa: N818 - the server's name
    pass


@dataclasses.dataclass
class Request:
    """Inputs by name, as the sequence batcher hands them on."""

    tensors: Mapping[str, Any]

    def inputs(self) -> list[Tensor]:
        return [Tensor(name, array) for name, array in self.tensors.items()]


@pytest.fixture(scope="module")
def server() -> Iterator[None]:
    """What a model finds in the server."""
    module = types.ModuleType("triton_python_backend_utils")
    for kind in (Tensor, TritonError, InferenceResponse, TritonModelException):
        setattr(module, kind.__name__, kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)
        yield


@pytest.fixture(scope="module")
def repository(short_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("triton") / "models"
    write_repository(short_bundle, output, Options(max_sequences=2))
    return output


def started(folder: Path, **changes: str) -> Any:
    """The class of the generated model.py, initialized with the configuration."""
    spec = importlib.util.spec_from_file_location("model", folder / "1" / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = json_format.MessageToDict(read_config(folder), preserving_proto_field_name=True)
    model = module.TritonPythonModel()
    model.initialize(
        {
            "model_config": json.dumps(config),
            "model_instance_kind": "CPU",
            "model_instance_device_id": "0",
            **changes,
        }
    )
    return model


@pytest.fixture(scope="module")
def model(server: None, repository: Path) -> Any:
    return started(repository / "rows")


@pytest.fixture(scope="module")
def loaded(short_bundle: Path) -> llama_runtime.LoadedBundle:
    return llama_runtime.load(short_bundle)


def ask(
    model: Any,
    inputs: Mapping[str, Any],
    *,
    sequence: int = 1,
    start: bool = False,
    end: bool = False,
) -> InferenceResponse:
    controls = {
        "START": np.array([start]),
        "END": np.array([end]),
        "CORRID": np.array([sequence], np.uint64),
    }
    arrays = {name: np.asarray(value, np.int32) for name, value in inputs.items()}
    (response,) = model.execute([Request({**arrays, **controls})])
    assert isinstance(response, InferenceResponse)
    return response


def prefill(tokens: list[int], pos: int = 0) -> dict[str, Any]:
    return {"prefill.tokens": [tokens], "prefill.pos": [pos]}


def decode(token: int, pos: int) -> dict[str, Any]:
    return {"decode.tokens": [[token]], "decode.pos": [pos]}


def test_a_sequence_gives_the_logits_of_a_session(
    model: Any, loaded: llama_runtime.LoadedBundle
) -> None:
    session = loaded.session()
    response = ask(model, prefill(PROMPT), start=True)
    assert response.error is None
    np.testing.assert_array_equal(response.outputs["prefill.logits"], session.prefill(PROMPT))
    for pos, token in enumerate((33, 2, 81), start=len(PROMPT)):
        response = ask(model, decode(token, pos), end=pos == len(PROMPT) + 2)
        np.testing.assert_array_equal(response.outputs["decode.logits"], session.decode(token))


def test_sequences_that_alternate_do_not_mix(
    model: Any, loaded: llama_runtime.LoadedBundle
) -> None:
    expected = {}
    for sequence, prompt in ((1, PROMPT), (2**63 + 5, PROMPT[::-1])):
        session = loaded.session()
        session.prefill(prompt)
        expected[sequence] = session.decode(3)
        ask(model, prefill(prompt), sequence=sequence, start=True)
    for sequence, logits in expected.items():
        response = ask(model, decode(3, len(PROMPT)), sequence=sequence)
        np.testing.assert_array_equal(response.outputs["decode.logits"], logits)


def test_a_start_flag_begins_with_new_states(model: Any) -> None:
    first = ask(model, decode(5, 0), start=True)
    ask(model, decode(6, 1))
    again = ask(model, decode(5, 0), start=True)
    np.testing.assert_array_equal(first.outputs["decode.logits"], again.outputs["decode.logits"])


def test_an_ended_sequence_has_no_states(model: Any) -> None:
    ask(model, prefill(PROMPT), start=True, end=True)
    error = ask(model, decode(3, 4)).error
    assert error is not None
    assert error.code == TritonError.INVALID_ARG
    assert error.message == "sequence 1 has no states (begin it again, with the start flag)"


def test_the_sequence_unused_for_longest_makes_room(model: Any) -> None:
    for sequence in (1, 2):
        ask(model, prefill(PROMPT), sequence=sequence, start=True)
    ask(model, decode(3, 4), sequence=1)
    ask(model, prefill(PROMPT), sequence=3, start=True)
    assert ask(model, decode(3, 5), sequence=1).error is None
    assert ask(model, decode(3, 4), sequence=2).error is not None


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (decode(3, 15), "expected at most 14, got 15"),
        (decode(500, 4), "expected at most 127, got 500"),
        ({"decode.tokens": [[3]]}, "missing: pos"),
        ({"decode.pos": [4], "decode.tokens": [3]}, "expected shape"),
        ({**decode(3, 4), **prefill([3], 4)}, "got those of prefill and decode"),
        ({}, "expected the inputs of one entry of prefill, decode, got those of none"),
    ],
    ids=["position", "token", "missing", "shape", "two entries", "none"],
)
def test_a_refused_request_changes_nothing(
    model: Any, inputs: dict[str, Any], message: str
) -> None:
    ask(model, prefill(PROMPT), start=True)
    expected = ask(model, decode(3, 4)).outputs["decode.logits"]
    error = ask(model, inputs).error
    assert error is not None
    assert message in error.message
    assert error.code == TritonError.INVALID_ARG
    np.testing.assert_array_equal(ask(model, decode(3, 4)).outputs["decode.logits"], expected)


def test_a_step_that_fails_costs_the_sequence_its_states(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(model, prefill(PROMPT), start=True)

    def fail(*_: Any) -> None:
        raise RuntimeError("out of\nmemory")

    with monkeypatch.context() as patch:
        patch.setattr("llama_runtime.entry.Entry._fitting", fail)
        error = ask(model, decode(3, 4)).error
    assert error is not None
    assert (error.message, error.code) == ("out of memory", TritonError.INTERNAL)
    error = ask(model, decode(3, 4)).error
    assert error is not None
    assert "has no states" in error.message


def test_requests_of_one_batch_are_answered_in_order(model: Any) -> None:
    first = {"START": [True], "END": [False], "CORRID": np.array([7], np.uint64)}
    later = {**first, "START": [False]}
    requests = [
        Request({**first, **{k: np.asarray(v, np.int32) for k, v in prefill(PROMPT).items()}}),
        Request({**later, **{k: np.asarray(v, np.int32) for k, v in decode(3, 4).items()}}),
        Request({**later, **{k: np.asarray(v, np.int32) for k, v in decode(3, 99).items()}}),
    ]
    found = model.execute(
        [Request({k: np.asarray(v) for k, v in r.tensors.items()}) for r in requests]
    )
    assert [response.error is None for response in found] == [True, True, False]


def test_a_bundle_that_cannot_be_loaded(server: None, repository: Path) -> None:
    with pytest.raises(TritonModelException, match=r"cuda|CUDA"):
        started(repository / "rows", model_instance_kind="GPU", model_instance_device_id="7")


def test_finalize_frees_the_states(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "_sequences", model._sequences)
    ask(model, prefill(PROMPT), start=True)
    model.finalize()
    assert model._sequences is None
