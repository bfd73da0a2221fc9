"""The archive of an ExportedProgram, read without believing it.

`torch.export.load` unpickles what an archive asks it to, loads native code that lies beside the
graph, calls whatever function the graph names and evaluates its expressions as Python. So it is
given only a copy of the members that a weightless program needs, whose graph names nothing but
plain operators.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llama_artifacts.errors import IntegrityError

MAX_ARCHIVE_BYTES = 512 * 2**20
"""Of all members, unpacked: a program without weights takes a hundredth of it."""

_HINT = "build the bundle again"
_GRAPH = "models/model.json"
_WEIGHTS_CONFIG = "data/weights/model_weights_config.json"
_CONSTANTS_CONFIG = "data/constants/model_constants_config.json"
_EMPTY = ("data/sample_inputs/model.pt",)  # example inputs would be a pickle
_MEMBERS = re.compile(
    r"models/model\.json|archive_format|archive_version|byteorder|\.data/(version|serialization_id)"
    r"|data/weights/(model_weights_config\.json|weight_[0-9]+)"
    r"|data/constants/(model_constants_config\.json|tensor_[0-9]+)|data/sample_inputs/model\.pt"
)
_ARITHMETIC = "add|and_|eq|floordiv|ge|getitem|gt|le|lt|mod|mul|ne|neg|not_|or_|pow|sub|truediv"
_TARGETS = re.compile(
    r"torch\.ops\.aten\.(__(and|or|xor|lshift|rshift)__|_?[a-z][a-z0-9_]*)\.[A-Za-z][A-Za-z0-9_]*"
    rf"|torch\.ops\.higher_order\.(cond|while_loop)|_operator\.({_ARITHMETIC})"
    r"|torch\.sym_(float|int|ite|max|min|not)|math\.(ceil|floor|trunc)"
)
_FORBIDDEN = re.compile(r"torch\.ops\.aten\.from_file\..*")
_COLLECTIVES = re.compile(
    r"torch\.ops\._c10d_functional\."
    r"(all_reduce|all_gather_into_tensor|reduce_scatter_tensor|wait_tensor)\.default"
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|")
_PATH_NAME = re.compile(r"[A-Za-z0-9_.]+")
_EXPRESSION = re.compile(
    r"(?:'[a-z]+[0-9]+'|[A-Z][A-Za-z]*|[a-z]+=(?:True|False)|-?[0-9.]+|[(), ])*"
)
# Which strings of the graph become Python code when torch rebuilds it, and what they may be.
_CODE = {
    "name": _NAME,
    "as_name": _NAME,
    "expr_str": _EXPRESSION,
    "parameter_name": _PATH_NAME,
    "buffer_name": _PATH_NAME,
}


def read_archive(path: Path, *, is_sharded: bool = False) -> io.BytesIO:
    """A checked copy of the archive for `torch.export.load`.

    Args:
        path: the archive.
        is_sharded: whether its graph may call other processes.

    Raises:
        IntegrityError: not such an archive, or it holds more than a weightless program does.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = dict(_members(archive, path))
        _check_payloads(members[_WEIGHTS_CONFIG], path)
        _check_payloads(members[_CONSTANTS_CONFIG], path)
        _check_graph(json.loads(members[_GRAPH]), path, is_sharded)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, OSError) as cause:
        raise IntegrityError("not an ExportedProgram archive", where=path, hint=_HINT) from cause
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as cause:
        raise IntegrityError("not an ExportedProgram archive", where=path, hint=_HINT) from cause
    return _rewritten(members)


def _members(archive: zipfile.ZipFile, path: Path) -> Iterator[tuple[str, bytes]]:
    items = archive.infolist()
    if sum(item.file_size for item in items) > MAX_ARCHIVE_BYTES:
        raise _refused("more data than a program without weights", path)
    names = [item.filename.partition("/")[::2] for item in items]
    if len({folder for folder, _ in names}) != 1 or len(set(names)) != len(names):
        raise _refused("other members than a program's", path)
    for (_, name), item in zip(names, items, strict=True):
        if not _MEMBERS.fullmatch(name):
            raise _refused(f"`{name[:80]}`, which no program needs", path)
        if name in _EMPTY and item.file_size:
            raise _refused("pickled example inputs", path)
        yield name, archive.read(item)


def _check_payloads(config: bytes, path: Path) -> None:
    for payload in json.loads(config)["config"].values():
        if payload["use_pickle"] is not False:
            raise _refused("a pickled tensor", path)
        if not re.fullmatch(r"(weight|tensor)_[0-9]+", payload["path_name"]):
            raise _refused("a payload that is no tensor", path)


def _check_graph(value: Any, path: Path, is_sharded: bool) -> None:
    if isinstance(value, list):
        for item in value:
            _check_graph(item, path, is_sharded)
    elif isinstance(value, dict):
        target = value.get("target")
        is_collective = is_sharded and _COLLECTIVES.fullmatch(str(target))
        if "inputs" in value and "target" in value and not (is_collective or _is_plain(target)):
            raise _refused(f"a call of `{target!s:.80}`", path)
        for key, item in value.items():
            pattern = _CODE.get(key)
            if pattern is not None and isinstance(item, str) and not pattern.fullmatch(item):
                raise _refused(f"an odd `{key}`, `{item:.80}`", path)
            _check_graph(item, path, is_sharded)


def _is_plain(target: object) -> bool:
    is_known = isinstance(target, str) and _TARGETS.fullmatch(target) is not None
    return is_known and not _FORBIDDEN.fullmatch(str(target))


def _rewritten(members: dict[str, bytes]) -> io.BytesIO:
    """Another parser than this one could find other members in the same file, but not here."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members.items():
            archive.writestr(f"program/{name}", data)
    buffer.seek(0)
    return buffer


def _refused(what: str, path: Path) -> IntegrityError:
    return IntegrityError(f"holds {what}", where=path, hint=_HINT)
