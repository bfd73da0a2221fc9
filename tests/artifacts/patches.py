"""Carries out the steps of `malformed.json`, which damage a bundle, one kind after the other.

A step is an object with `do` and, mostly, `file`:

- `patch`: RFC 6902 operations (add, remove, replace) on a file's JSON, which is written with `, ` and
  `: ` between items; on `weights.safetensors`, on its header, whose length is set again.
- `substitute`: the first `find` in the file becomes `with`.
- `write`: the file becomes `text`, or the bytes of `hex`, `repeat` times.
- `resize`: the file is cut, or extended with zeros, to `bytes`.
- `delete`, `folder` (in place of the file), `link` (a symbolic one, `to`).
- `reseal`: the manifest lists every file, and the weights' header, as they are now.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from llama_artifacts.manifest import FILE_NAME, WEIGHTS_NAME

Json = Any


def write_base(folder: Path, base: dict[str, dict[str, str]]) -> Path:
    """Writes the files of the base, each given as `text` or `hex`."""
    folder.mkdir()
    for name, content in base.items():
        (folder / name).write_bytes(_content(content))
    return folder


def apply(folder: Path, step: dict[str, Json]) -> None:
    """Carries out one step."""
    path = folder / step.get("file", FILE_NAME)
    match step["do"]:
        case "patch":
            _patch_file(path, step["patch"])
        case "substitute":
            old, new = step["find"].encode(), step["with"].encode()
            data = path.read_bytes()
            assert old in data
            path.write_bytes(data.replace(old, new, 1))
        case "write":
            path.write_bytes(_content(step) * step.get("repeat", 1))
        case "resize":
            with path.open("r+b") as file:
                file.truncate(step["bytes"])
        case "delete":
            path.unlink()
        case "folder":
            path.unlink()
            path.mkdir()
        case "link":
            path.unlink()
            path.symlink_to(step["to"])
        case "reseal":
            reseal(folder)
        case other:
            raise AssertionError(f"unknown step {other}")


def reseal(folder: Path) -> None:
    """Lists every file, and the weights' header, as they are now."""
    value = json.loads((folder / FILE_NAME).read_bytes())
    for name, file in value["files"].items():
        data = (folder / name).read_bytes()
        file.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        if name == WEIGHTS_NAME:
            end = 8 + int.from_bytes(data[:8], "little")
            value["weights_headers"] = {name: hashlib.sha256(data[:end]).hexdigest()}
    (folder / FILE_NAME).write_text(json.dumps(value))


def patched(value: Json, operations: list[dict[str, Json]]) -> Json:
    """The JSON value after RFC 6902 operations, which change it in place."""
    for operation in operations:
        *parents, last = [
            key.replace("~1", "/").replace("~0", "~") for key in operation["path"].split("/")[1:]
        ]
        node = value
        for key in parents:
            node = node[int(key)] if isinstance(node, list) else node[key]
        _operate(node, last, operation)
    return value


def _operate(node: Json, key: str, operation: dict[str, Json]) -> None:
    kind = operation["op"]
    if isinstance(node, list):
        index = len(node) if key == "-" else int(key)
        if kind == "add":
            node.insert(index, operation["value"])
        elif kind == "replace":
            node[index] = operation["value"]
        else:
            del node[index]
    elif kind == "remove":
        del node[key]
    else:
        if kind == "replace" and key not in node:
            raise KeyError(key)
        node[key] = operation["value"]


def _patch_file(path: Path, operations: list[dict[str, Json]]) -> None:
    data = path.read_bytes()
    if path.name != WEIGHTS_NAME:
        path.write_text(json.dumps(patched(json.loads(data), operations)))
        return
    end = 8 + int.from_bytes(data[:8], "little")
    text = json.dumps(patched(json.loads(data[8:end]), operations)).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


def _content(content: dict[str, str]) -> bytes:
    return bytes.fromhex(content["hex"]) if "hex" in content else content["text"].encode()
