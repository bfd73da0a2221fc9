"""Entries of a bundle as one model of the Triton Inference Server's Python backend.

The configuration's parameters say what is offered: `entries`, a JSON list of names; `format`, or
none for the fastest that fits the server; `sizes`, a JSON object with the sizes of the states'
dynamic dimensions.

Entries with states share them: a sequence (Triton's correlation id) has one set, zero at its
start, which every request of it reads and writes. Inputs and outputs carry the entry's name then
(`decode.tokens`), and a request runs the entry whose inputs it brings; a position is an input, as
in every call. An entry without states is a model of its own, with the manifest's names.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_artifacts.errors import InputError, LlamaExportError, SessionError
from llama_artifacts.manifest import Format, file_stem
from llama_runtime.entry import Entry
from llama_runtime.loader import load
from llama_runtime.states import States

if TYPE_CHECKING:
    import torch

START, END, CORRELATION_ID = "START", "END", "CORRID"
_CONTROLS = (START, END, CORRELATION_ID)


class Sequences:
    """The states of each sequence.

    Triton keeps `capacity` sequences at the same time and tells of an end, but not of one that
    it dropped after idling. So when a further one starts, the one unused for longest is gone.
    """

    def __init__(self, entry: Entry, sizes: Mapping[str, int], capacity: int) -> None:
        self._entry = entry
        self._sizes = sizes
        self._capacity = capacity
        self._states: OrderedDict[int, States] = OrderedDict()

    def __len__(self) -> int:
        return len(self._states)

    def states(self, sequence: int, *, is_start: bool) -> States:
        """The states of a sequence; new ones, all zero, at its start.

        Raises:
            SessionError: the sequence has not started, was dropped, or one of its calls failed.
        """
        if is_start:
            self.end(sequence)
            while len(self._states) >= self._capacity:
                self._states.popitem(last=False)
            self._states[sequence] = self._entry.new_states(**self._sizes)
        elif sequence not in self._states:
            message = f"sequence {sequence} has no states"
            raise SessionError(message, hint="begin it again, with the start flag")
        self._states.move_to_end(sequence)
        return self._states[sequence]

    def end(self, sequence: int) -> None:
        """Frees the states of a sequence, if it has any."""
        self._states.pop(sequence, None)


class TritonModel:
    """What Triton's Python backend calls; the generated `model.py` names the bundle.

    A request that is refused for its inputs changes nothing. One that fails while a program runs
    may have written a part of its step, so its sequence loses its states.

    Attributes:
        bundle: the bundle's folder.
    """

    bundle: Path
    _sequences: Sequences | None = None

    def initialize(self, args: Mapping[str, str]) -> None:
        """Loads the entries on the instance's device.

        Raises:
            TritonModelException: the bundle cannot be loaded here.
        """
        import triton_python_backend_utils as pb_utils

        self._pb = pb_utils
        config = json.loads(args["model_config"])
        device = "cpu"
        if args["model_instance_kind"] == "GPU":
            device = f"cuda:{args['model_instance_device_id']}"
        try:
            self._load(config, device)
        except LlamaExportError as error:
            raise pb_utils.TritonModelException(_line(error)) from error

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """One response for each request: its outputs, or an error."""
        return [self._respond(request) for request in requests]

    def finalize(self) -> None:
        """Frees the states of all sequences."""
        self._sequences = None

    def _load(self, config: Mapping[str, Any], device: str) -> None:
        parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
        format: Format | None = parameters.get("format")
        loaded = load(self.bundle, device=device, format=format)
        entries = [loaded.entry(name) for name in json.loads(parameters["entries"])]
        first = entries[0]
        if first.signature.states:
            _check_same_states(entries)
            batching = config["sequence_batching"]
            capacity = int(batching["oldest"]["max_candidate_sequences"])
            self._sequences = Sequences(first, json.loads(parameters["sizes"]), capacity)
        # An input's or output's name in Triton begins so.
        self._entries = {
            f"{file_stem(entry.name)}." if first.signature.states else "": entry
            for entry in entries
        }

    def _respond(self, request: Any) -> Any:
        pb = self._pb
        given = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        try:
            outputs = self._run(given)
        except LlamaExportError as error:
            is_callers = isinstance(error, (InputError, SessionError))
            code = pb.TritonError.INVALID_ARG if is_callers else pb.TritonError.INTERNAL
            return pb.InferenceResponse([], error=pb.TritonError(_line(error), code))
        except RuntimeError as error:  # torch's, such as too little memory
            line = _line(error)
            failure = pb.TritonError(line, pb.TritonError.INTERNAL)
            return pb.InferenceResponse([], error=failure)
        tensors = [
            pb.Tensor.from_dlpack(name, tensor.reshape(tensor.shape or (1,)).__dlpack__())
            for name, tensor in outputs.items()
        ]
        return pb.InferenceResponse(tensors)

    def _run(self, given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        inputs = {name: array for name, array in given.items() if name not in _CONTROLS}
        prefix, entry = self._chosen(list(inputs))
        call = {
            name.removeprefix(prefix): _unwrapped(entry, name.removeprefix(prefix), array)
            for name, array in inputs.items()
        }
        outputs = (
            entry.run(None, call) if self._sequences is None else self._step(entry, call, given)
        )
        names = [f"{prefix}{spec.name}" for spec in entry.signature.outputs]
        return dict(zip(names, outputs, strict=True))

    def _step(
        self, entry: Entry, call: Mapping[str, Any], given: Mapping[str, Any]
    ) -> list[torch.Tensor]:
        assert self._sequences is not None
        start, end, sequence = (given[name].reshape(-1)[0].item() for name in _CONTROLS)
        states = self._sequences.states(sequence, is_start=bool(start))
        is_over = True  # until the step is done: it may have written a part
        try:
            outputs = entry.run(states, call)
            is_over = bool(end)
        except InputError:
            is_over = bool(end)
            raise
        finally:
            if is_over:
                self._sequences.end(sequence)
        return outputs

    def _chosen(self, names: Sequence[str]) -> tuple[str, Entry]:
        """The entry whose inputs these are, and how its names begin."""
        found = [
            (prefix, entry)
            for prefix, entry in self._entries.items()
            if any(name.startswith(prefix) for name in names)
        ]
        if len(found) != 1:
            offered = ", ".join(entry.name for entry in self._entries.values())
            got = " and ".join(entry.name for _, entry in found) or "none"
            message = f"expected the inputs of one entry of {offered}, got those of {got}"
            raise InputError(message, where="inputs")
        return found[0]


def _unwrapped(entry: Entry, name: str, array: Any) -> Any:
    """Triton has no scalars: they come as one element."""
    shapes = {spec.name: spec.shape for spec in entry.signature.inputs}
    is_scalar = shapes.get(name) == () and array.shape == (1,)
    return array.reshape(()) if is_scalar else array


def _check_same_states(entries: Sequence[Entry]) -> None:
    first = entries[0]
    for entry in entries[1:]:
        if entry.signature.states != first.signature.states:
            raise SessionError(
                f"`{first.name}` in {first.format} and `{entry.name}` in {entry.format} "
                "keep different states",
                hint="write the repository again with --format",
            )


def _line(error: Exception) -> str:
    hint = getattr(error, "hint", None)
    text = f"{error} ({hint})" if hint else str(error)
    return " ".join(text.split())
