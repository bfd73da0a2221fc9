"""The manifest: everything a runtime must know before it opens a program."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from llama_artifacts.codec import decode, encode
from llama_artifacts.errors import CompatibilityError, ManifestError
from llama_artifacts.signature import Signature
from llama_artifacts.strict_json import parse_object, shown

FILE_NAME = "manifest.json"
WEIGHTS_NAME = "weights.safetensors"
SCHEMA_MAJOR, SCHEMA_MINOR = 1, 0
MAX_MANIFEST_BYTES = 64 * 2**20

Format = Literal["pt2", "aoti", "onnx"]
FORMATS: tuple[Format, ...] = ("pt2", "aoti", "onnx")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._<>+=,-]{0,199}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class File:
    """A file of the bundle, beside the manifest."""

    bytes: int
    sha256: str

    def __post_init__(self) -> None:
        if self.bytes < 0:
            raise ValueError(f"expected a size of at least 0, got {self.bytes}")
        if not _SHA256.fullmatch(self.sha256):
            raise ValueError(f"expected 64 hexadecimal digits, got {shown(self.sha256)}")


@dataclass(frozen=True)
class Source:
    """Where a checkpoint came from, without any path of the machine that built the bundle.

    `kind` is `folder`, `gguf` or `hub`; `name` is a file or folder name without its parents, or
    the hub's `owner/name`; `revision` is the hub commit, else None.
    """

    kind: str
    name: str
    revision: str | None = None


@dataclass(frozen=True)
class Model:
    """Sizes and switches of the network; `rope` describes the rotary embedding for people."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: str
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    num_parameters: int


@dataclass(frozen=True)
class Target:
    """The machine a program was made for.

    Attributes:
        device: `cpu` or `cuda`.
        machine: `x86_64`, `aarch64`, ... for native code, else None.
        isa: short name of the instruction set of native code, as in the file name, else None.
        cpu_flags: flags of /proc/cpuinfo that native code needs.
        capability: compute capability of native CUDA code, such as `9.0`, else None.
    """

    device: Literal["cpu", "cuda"]
    machine: str | None = None
    isa: str | None = None
    cpu_flags: tuple[str, ...] = ()
    capability: str | None = None


@dataclass(frozen=True)
class Program:
    """One program: an entry in one format for one target.

    Attributes:
        entry: the entry it computes.
        format: `pt2` (ExportedProgram), `aoti` (AOTInductor package) or `onnx`.
        file: the file in the bundle.
        dtype: the compute dtype.
        target: where it runs.
        signature: how it is called.
        constants: names of the weights it binds, in the order of `weights.safetensors`.
        requires: minimum or exact versions of what runs it, such as `{"torch": "2.13"}`.
    """

    entry: str
    format: Format
    file: str
    dtype: str
    target: Target
    signature: Signature
    constants: tuple[str, ...]
    requires: dict[str, str]


@dataclass(frozen=True)
class Check:
    """One law that was checked: the figure found and the most it may be."""

    law: str
    entry: str
    format: Format
    figure: float
    limit: float


@dataclass(frozen=True)
class Manifest:
    """The contract of a bundle; see the fields' types for theirs.

    Attributes:
        schema: version of this format, `major.minor`.
        name: short name of the model.
        toolchain: versions of what built the bundle, by package.
        weights: `copy` (the bundle holds them) or `none` (programs only; they cannot run).
        max_seq: positions a state holds; the last one is scratch.
        batch: rows of the `rows` states.
        tokenizer: `tokenizers` (a tokenizer.json) or None (token ids only).
        has_chat_template: whether `chat_template.jinja` is there.
        stop_tokens: any of these ends a generated text.
        files: every other file of the bundle, by name.
    """

    schema: str
    name: str
    source: Source
    model: Model
    dtype: str
    max_seq: int
    batch: int
    weights: Literal["copy", "none"]
    tokenizer: Literal["tokenizers"] | None
    has_chat_template: bool
    stop_tokens: tuple[int, ...]
    toolchain: dict[str, str]
    programs: tuple[Program, ...]
    checks: tuple[Check, ...]
    files: dict[str, File]

    def __post_init__(self) -> None:
        for name in self.files:
            if not _FILE_NAME.fullmatch(name) or name == FILE_NAME:
                raise ValueError(f"expected a plain file name in `files`, got {shown(name)}")
        for program in self.programs:
            if program.file not in self.files:
                raise ValueError(f"program file {shown(program.file)} is not listed in `files`")
        if self.weights == "copy" and WEIGHTS_NAME not in self.files:
            raise ValueError(f"`{WEIGHTS_NAME}` is not listed in `files`")
        if self.tokenizer and "tokenizer.json" not in self.files:
            raise ValueError("`tokenizer.json` is not listed in `files`")

    def entries(self) -> tuple[str, ...]:
        """Names of the entries, each once, in the order of the programs."""
        return tuple(dict.fromkeys(program.entry for program in self.programs))


def to_json(manifest: Manifest) -> bytes:
    """Canonical JSON: two spaces, sorted keys, UTF-8, a newline at the end."""
    text = json.dumps(encode(manifest), indent=2, sort_keys=True, ensure_ascii=False)
    return (text + "\n").encode()


def from_json(data: bytes, *, where: object) -> Manifest:
    """A manifest from its bytes, checked in full.

    Raises:
        CompatibilityError: written by another major version of the format.
        ManifestError: anything else that breaks the format, with the key path.
    """
    value = parse_object(data, where=where, error=ManifestError)
    _check_schema(value, where)
    return decode(Manifest, value, where=str(where))


def read(folder: Path) -> Manifest:
    """The manifest of a bundle's folder.

    Raises:
        ManifestError: there is none, it is too large, or it breaks the format.
    """
    path = folder / FILE_NAME
    hint = "point at the folder that `llama-export build` wrote"
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise ManifestError(f"expected at most {MAX_MANIFEST_BYTES} bytes", where=path)
        data = path.read_bytes()
    except FileNotFoundError as cause:
        found = "a folder without it" if folder.is_dir() else "no such folder"
        raise ManifestError(
            f"expected a `{FILE_NAME}`, found {found}", where=folder, hint=hint
        ) from cause
    except OSError as cause:
        raise ManifestError(f"cannot be read: {cause.strerror}", where=path, hint=hint) from cause
    return from_json(data, where=path)


def _check_schema(value: dict[str, Any], where: object) -> None:
    schema = value.get("schema")
    match = re.fullmatch(r"(\d{1,6})\.(\d{1,6})", schema) if isinstance(schema, str) else None
    if match is None:
        message = f"expected a version such as `{SCHEMA_MAJOR}.{SCHEMA_MINOR}`, got {shown(schema)}"
        raise ManifestError(message, where=f"{where}#schema")
    if int(match[1]) != SCHEMA_MAJOR:
        raise CompatibilityError(
            f"bundle format {schema} is not {SCHEMA_MAJOR}.x",
            where=f"{where}#schema",
            hint="use the version of llama-export that wrote it, or build it again",
        )
