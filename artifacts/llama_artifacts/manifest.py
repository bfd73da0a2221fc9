"""The manifest: everything a runtime must know before it opens a program."""

from __future__ import annotations

import json
import logging
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from llama_artifacts.codec import decode, encode
from llama_artifacts.dtypes import from_name
from llama_artifacts.errors import CompatibilityError, ManifestError
from llama_artifacts.signature import Signature
from llama_artifacts.strict_json import json_type, parse_object, shown

FILE_NAME = "manifest.json"
WEIGHTS_NAME = "weights.safetensors"
TOKENIZER_NAME = "tokenizer.json"
CHAT_TEMPLATE_NAME = "chat_template.jinja"
SIGNATURE_NAME = "model.sig"
"""The one file that may lie beside the manifest without being listed: it signs the others."""
SCHEMA_MAJOR, SCHEMA_MINOR = 1, 0
CAPABILITY = "compute capability"
"""A key of `Program.requires`."""
MAX_MANIFEST_BYTES = 64 * 2**20

Format = Literal["pt2", "aoti", "onnx"]
FORMATS: tuple[Format, ...] = ("pt2", "aoti", "onnx")
Numerics = Literal["exact", "fast"]
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._<>+=,-]{0,199}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SCHEMA = re.compile(r"(0|[1-9][0-9]{0,5})\.(0|[1-9][0-9]{0,5})")
_HINT = "point at the folder that `llama-export build` wrote"
_log = logging.getLogger(__name__)


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
    the hub's `owner/name`; `revision` is the hub commit, else None. `license` is what the
    checkpoint says of itself, such as `apache-2.0`, else None.
    """

    kind: str
    name: str
    revision: str | None = None
    license: str | None = None


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

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if type(size) is int and size < 1:
                raise ValueError(f"expected `{name}` of at least 1, got {size}")


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
        requires: minimum or exact versions of what runs it, such as `{"torch": "2.13"}`; under
            `CAPABILITY` the least compute capability of the CUDA device.
        variant: dynamic dimensions of the entry that this program fixes, such as `{"Rows": 1}`;
            its signature has the number where the general program's has the dimension.
        numerics: how products with FP8 weights are computed: `exact`, as if they were stored in
            the compute dtype, or `fast`; None where no weight is FP8.
    """

    entry: str
    format: Format
    file: str
    dtype: str
    target: Target
    signature: Signature
    constants: tuple[str, ...]
    requires: dict[str, str]
    variant: dict[str, int] = field(default_factory=dict)
    numerics: Numerics | None = None

    def __post_init__(self) -> None:
        from_name(self.dtype)
        for name, size in self.variant.items():
            if size < 1 or name in (dim.name for dim in self.signature.dims):
                raise ValueError(f"`{self.entry}` does not fix {name} = {size} in its signature")

    @property
    def label(self) -> str:
        """The entry, and what the program fixes: `decode_paged:Rows=1`."""
        fixed = ",".join(f"{name}={size}" for name, size in sorted(self.variant.items()))
        return f"{self.entry}:{fixed}" if fixed else self.entry


@dataclass(frozen=True)
class Check:
    """One law that was checked: the figure found and the most it may be.

    `entry` and `format` are empty where the law is about more than one.
    """

    law: str
    entry: str
    format: Literal["", "pt2", "aoti", "onnx"]
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
        weights_header: SHA-256 of the weights file up to its data: names, dtypes, shapes and
            places. A runtime checks it, since native code trusts them; None without weights.
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
    weights_header: str | None = None

    def __post_init__(self) -> None:
        from_name(self.dtype)
        if self.weights == "copy" and self.weights_header is None:
            raise ValueError("`weights_header` is missing")
        if self.weights_header is not None and not _SHA256.fullmatch(self.weights_header):
            message = f"expected 64 hexadecimal digits, got {shown(self.weights_header)}"
            raise ValueError(f"`weights_header`: {message}")
        for name, size in (("max_seq", self.max_seq), ("batch", self.batch)):
            if size < 1:
                raise ValueError(f"expected `{name}` of at least 1, got {size}")
        if min(self.stop_tokens, default=0) < 0:
            raise ValueError(f"expected stop tokens of at least 0, got {min(self.stop_tokens)}")
        self._check_files()

    def _check_files(self) -> None:
        for name in self.files:
            if not _FILE_NAME.fullmatch(name) or name in (FILE_NAME, SIGNATURE_NAME):
                raise ValueError(f"expected a plain file name in `files`, got {shown(name)}")
        for program in self.programs:
            if program.file not in self.files:
                raise ValueError(f"program file {shown(program.file)} is not listed in `files`")
        general = {
            (program.entry, program.format) for program in self.programs if not program.variant
        }
        for program in self.programs:
            if program.variant and (program.entry, program.format) not in general:
                raise ValueError(
                    f"variant {shown(program.label)} in {program.format} has no general program"
                )
        for is_needed, name in (
            (self.weights == "copy", WEIGHTS_NAME),
            (self.tokenizer is not None, TOKENIZER_NAME),
            (self.has_chat_template, CHAT_TEMPLATE_NAME),
        ):
            if is_needed and name not in self.files:
                raise ValueError(f"`{name}` is not listed in `files`")

    def entries(self) -> tuple[str, ...]:
        """Names of the entries, each once, in the order of the programs."""
        return tuple(dict.fromkeys(program.entry for program in self.programs))


def file_stem(entry: str) -> str:
    """How the names of an entry's files begin: `generate-32` for `generate<32>`."""
    return entry.replace("<", "-").removesuffix(">")


def vectors_name(entry: str) -> str:
    """The file with an entry's test vectors."""
    return f"{file_stem(entry)}.vectors.safetensors"


def to_json(manifest: Manifest) -> bytes:
    """Canonical JSON: two spaces, sorted keys, UTF-8, a newline at the end.

    Raises:
        ManifestError: a value could not be read back, such as a figure that is not finite.
    """
    value = encode(manifest)
    decode(Manifest, value, where=FILE_NAME)
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def from_json(data: bytes, *, where: object) -> Manifest:
    """A manifest from its bytes, checked in full.

    Unknown keys are refused, except in a newer minor version of the format: there they are
    ignored with a warning in the log.

    Raises:
        CompatibilityError: written by another major version of the format.
        ManifestError: anything else that breaks the format, with the key path.
    """
    value = parse_object(data, where=where, error=ManifestError)
    if not _is_newer(value.get("schema"), where):
        return decode(Manifest, value, where=str(where))
    ignored: list[str] = []
    manifest = decode(Manifest, value, where=str(where), ignored=ignored)
    _log.warning(
        "%s: bundle format %s is newer than %d.%d; ignored keys: %s",
        *(where, manifest.schema, SCHEMA_MAJOR, SCHEMA_MINOR, ", ".join(ignored) or "none"),
    )
    return manifest


def read(folder: Path) -> Manifest:
    """The manifest of a bundle's folder.

    Raises:
        CompatibilityError: it was written by another major version of the format.
        ManifestError: there is none, it is too large, or it breaks the format.
    """
    path = folder / FILE_NAME
    try:
        data = _read_bytes(path)
    except (FileNotFoundError, NotADirectoryError) as cause:
        if folder.is_dir():
            found = "a folder without it"
        else:
            found = "a file" if folder.exists() else "no such folder"
        raise ManifestError(
            f"expected a `{FILE_NAME}`, found {found}", where=folder, hint=_HINT
        ) from cause
    except OSError as cause:
        raise ManifestError(f"cannot be read: {cause.strerror}", where=path, hint=_HINT) from cause
    return from_json(data, where=path)


def _read_bytes(path: Path) -> bytes:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ManifestError("expected a plain file", where=path, hint=_HINT)
    if status.st_size > MAX_MANIFEST_BYTES:
        message = f"expected at most {MAX_MANIFEST_BYTES:,} bytes, got {status.st_size:,}"
        raise ManifestError(message, where=path, hint=_HINT)
    return path.read_bytes()


def _is_newer(schema: object, where: object) -> bool:
    match = _SCHEMA.fullmatch(schema) if isinstance(schema, str) else None
    if match is None:
        got = shown(schema) if isinstance(schema, str) else json_type(schema)
        message = f"expected a version such as `{SCHEMA_MAJOR}.{SCHEMA_MINOR}`, got {got}"
        raise ManifestError(message, where=f"{where}#schema")
    if int(match[1]) != SCHEMA_MAJOR:
        raise CompatibilityError(
            f"bundle format {schema} is not {SCHEMA_MAJOR}.x",
            where=f"{where}#schema",
            hint="use the version of llama-export that wrote it, or build it again",
        )
    return int(match[2]) > SCHEMA_MINOR
