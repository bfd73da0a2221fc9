"""Graphs in archives that would do harm, or are none."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.loading import program_file, refusal, sealed


class Payload:
    """Unpickled, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def pickled(path: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save(Payload(path), buffer)
    return buffer.getvalue()


Members = dict[str, bytes]


def plant_example_inputs(members: Members, trap: Path) -> Members:
    return {**members, "data/sample_inputs/model.pt": pickled(trap)}


def plant_weight(members: Members, trap: Path) -> Members:
    name = "data/weights/model_weights_config.json"
    config = json.loads(members[name])
    next(iter(config["config"].values()))["use_pickle"] = True
    return {**members, name: json.dumps(config).encode(), "data/weights/weight_0": pickled(trap)}


def plant_constant(members: Members, trap: Path) -> Members:
    name = "data/constants/model_constants_config.json"
    payload = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": False}
    config = {"config": {"c": {**payload, "tensor_meta": None}}}
    content = {name: json.dumps(config).encode()}
    return {**members, **content, "data/constants/opaque_obj_0": pickle.dumps(Payload(trap))}


def plant_legacy_weights(members: Members, trap: Path) -> Members:
    return {**members, "data/weights/model.pt": pickled(trap)}


def plant_native_code(members: Members, trap: Path) -> Members:
    return {**members, "data/aotinductor/model/x.wrapper.so": b"\x7fELF"}


def plant_call(members: Members, trap: Path) -> Members:
    graph = json.loads(members["models/model.json"])
    node = graph["graph_module"]["graph"]["nodes"][-1]
    node["target"] = "torch.serialization.os.mkdir"
    node["inputs"] = [{"name": "path", "arg": {"as_string": str(trap)}, "kind": 1}]
    return {**members, "models/model.json": json.dumps(graph).encode()}


def plant_file_access(members: Members, trap: Path) -> Members:
    graph = json.loads(members["models/model.json"])
    graph["graph_module"]["graph"]["nodes"][-1]["target"] = "torch.ops.aten.from_file.default"
    return {**members, "models/model.json": json.dumps(graph).encode()}


def plant_expression(members: Members, trap: Path) -> Members:
    text = members["models/model.json"].decode()
    code = f"__import__('os').mkdir('{trap}')"
    assert "Symbol('s27', positive=True, integer=True)" in text
    text = text.replace("Symbol('s27', positive=True, integer=True)", code)
    return {**members, "models/model.json": text.encode()}


def plant_name(members: Members, trap: Path) -> Members:
    text = members["models/model.json"].decode()
    code = f"tokens=__import__('os').mkdir('{trap}')"
    return {**members, "models/model.json": text.replace('"tokens"', f'"{code}"').encode()}


def plant_scalar_name(members: Members, trap: Path) -> Members:
    graph = json.loads(members["models/model.json"])
    code = f"x=__import__('os').mkdir('{trap}')"
    argument = {"as_sym_int": {"as_name": code}}
    graph["graph_module"]["graph"]["inputs"].append(argument)
    return {**members, "models/model.json": json.dumps(graph).encode()}


PLANTS = (
    plant_example_inputs,
    plant_weight,
    plant_constant,
    plant_legacy_weights,
    plant_native_code,
    plant_call,
    plant_file_access,
    plant_expression,
    plant_name,
    plant_scalar_name,
)


def members_of(path: Path) -> Members:
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        return {name.partition("/")[2]: archive.read(name) for name in names}


def write_members(path: Path, members: Members, top: str = "next_token/") -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(top + name, data)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_graph_that_would_run_code_is_refused_before_torch_reads_it(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[Members, Path], Members],
) -> None:
    path, trap = program_file(folder, "next_token", "pt2"), tmp_path / "trap"
    write_members(path, plant(members_of(path), trap))
    sealed(folder, path.name)

    calls: list[Any] = []
    monkeypatch.setattr(torch.export, "load", lambda *args, **options: calls.append(args))
    assert ": holds " in refusal(folder, "pt2")
    assert not calls
    assert not trap.exists()


def test_an_archive_of_the_old_kind_is_refused(folder: Path, tmp_path: Path) -> None:
    path, trap = program_file(folder, "next_token", "pt2"), tmp_path / "trap"
    parts = ("state_dict.pt", "constants.pt", "example_inputs.pt", "exported_program.json")
    members = {f"serialized_{part}": pickled(trap) for part in parts}
    write_members(path, {"version": b"8.1", **members}, top="")
    sealed(folder, path.name)
    assert "other members than a program's" in refusal(folder, "pt2")
    assert not trap.exists()


def test_two_members_of_one_name(folder: Path) -> None:
    path = program_file(folder, "next_token", "pt2")
    with zipfile.ZipFile(path, "a") as archive:
        name = next(name for name in archive.namelist() if name.endswith("/models/model.json"))
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr(name, b"{}")
    sealed(folder, path.name)
    assert "other members than a program's" in refusal(folder, "pt2")


def test_more_data_than_a_program_needs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama_runtime.programs.pt2_archive.MAX_ARCHIVE_BYTES", 1000)
    assert "more data than a program without weights" in refusal(folder, "pt2")


@pytest.mark.parametrize("name", ["models/model.json", "data/weights/model_weights_config.json"])
@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"config": 3}'])
def test_malformed_members(folder: Path, name: str, content: bytes) -> None:
    path = program_file(folder, "next_token", "pt2")
    write_members(path, {**members_of(path), name: content})
    sealed(folder, path.name)
    assert path.name in refusal(folder, "pt2")
