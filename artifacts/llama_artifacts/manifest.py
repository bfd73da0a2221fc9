"""The manifest: everything a runtime must know before it opens a program."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from llama_artifacts.dtypes import DTypeName
from llama_artifacts.limits import (
    Count,
    DimName,
    EntryName,
    FileName,
    Matches,
    Sha256,
    Size,
    check_fields,
)
from llama_artifacts.signature import Signature
from llama_artifacts.strict_json import shown

FILE_NAME = "manifest.json"
WEIGHTS_NAME = "weights.safetensors"
VECTORS_SUFFIX = ".vectors.safetensors"
TOKENIZER_NAME = "tokenizer.json"
CHAT_TEMPLATE_NAME = "chat_template.jinja"
SIGNATURE_NAME = "model.sig"
"""A detached signature of the whole bundle; the one file that no manifest lists, since it is newer."""
SCHEMA_MAJOR, SCHEMA_MINOR = 1, 0
CAPABILITY = "compute capability"
"""A key of `Program.requires`."""
BLOCK_BYTES = 64 * 2**20
"""A longer file has a digest for each block of so many bytes; the last block may be shorter."""

Format = Literal["pt2", "aoti", "onnx"]
FORMATS: tuple[Format, ...] = ("pt2", "aoti", "onnx")
Numerics = Literal["exact", "fast"]
WeightsMode = Literal["copy", "link", "reference", "none"]
IntegerKind = Literal["int8", "int4", "uint4"]
VERSION_PART = r"(0|[1-9][0-9]{0,5})"
"""A part of a version, as a pattern."""
SchemaVersion = Annotated[
    str, Matches(rf"{SCHEMA_MAJOR}\.{VERSION_PART}", f"a version of format {SCHEMA_MAJOR}")
]


@dataclass(frozen=True)
class File:
    """A file of the bundle, beside the manifest.

    Attributes:
        bytes: its size.
        sha256: the digest of the whole.
        blocks: the digests of its blocks of `BLOCK_BYTES`, in order; none for a file of at most one
            block, or where nobody knew them.
    """

    bytes: Size
    sha256: Sha256
    blocks: tuple[Sha256, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        count = -(-self.bytes // BLOCK_BYTES) if self.bytes > BLOCK_BYTES else 0
        if self.blocks and len(self.blocks) != count:
            raise ValueError(
                f"expected {count} block digests for {self.bytes:,} bytes, got {len(self.blocks)}"
            )


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

    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_layers: Count
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    rms_norm_eps: float
    rope: str
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    num_parameters: Count

    def __post_init__(self) -> None:
        check_fields(self)


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
        shards: how many processes run it together, each with its part of the weights and of the
            states (see `Cut`). The signature is that of one of them: states are its own, inputs and
            outputs are whole and the same for all.
    """

    entry: EntryName
    format: Format
    file: FileName
    dtype: DTypeName
    target: Target
    signature: Signature
    constants: tuple[str, ...]
    requires: dict[str, str]
    variant: dict[DimName, Count] = field(default_factory=dict)
    numerics: Numerics | None = None
    shards: Count = 1

    def __post_init__(self) -> None:
        check_fields(self)
        for name, size in self.variant.items():
            if name in (dim.name for dim in self.signature.dims):
                raise ValueError(f"`{self.entry}` does not fix {name} = {size} in its signature")

    @property
    def label(self) -> str:
        """The entry, and what the program fixes: `decode_paged:Rows=1`."""
        fixed = ",".join(f"{name}={size}" for name, size in sorted(self.variant.items()))
        return f"{self.entry}:{fixed}" if fixed else self.entry

    @property
    def title(self) -> str:
        """The label, and how many processes run it if several: `decode of 2 shards`."""
        return show_shards(self.label, self.shards)


@dataclass(frozen=True)
class Cut:
    """Which part of a stored tensor each of N processes binds: number r of N equal parts, in order.

    Attributes:
        tensor: the name of the stored tensor.
        axis: `rows` are parts of its first axis, `columns` of its second.
    """

    tensor: str
    axis: Literal["rows", "columns"]


@dataclass(frozen=True)
class Quantized:
    """What a build made of the checkpoint's matrices: integer codes with scales.

    Attributes:
        kind: codes of the layers, `uint4` with a minimum beside each scale; those of the embedding
            and the output head are int8 in any case.
        group_size: values of a row that share a scale; None: the whole row.
    """

    kind: IntegerKind
    group_size: Count | None = None

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Check:
    """One law that was checked: the figure found and the most it may be.

    `entry` and `format` are empty where the law is about more than one; `shards` is that of the
    program.
    """

    law: str
    entry: str
    format: Literal["", "pt2", "aoti", "onnx"]
    figure: float
    limit: float
    shards: Count = 1

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Manifest:
    """The contract of a bundle; see the fields' types for theirs.

    Attributes:
        schema: version of this format, `major.minor`.
        name: short name of the model.
        toolchain: versions of what built the bundle, by package.
        weights: `copy` (the bundle holds them in one file of its own), `link` (in the
            checkpoint's files, untouched), `reference` (in the checkpoint's files, which are
            elsewhere) or `none` (programs only; they cannot run).
        weights_headers: for each safetensors file with weights, the SHA-256 of its bytes up to the
            data: names, dtypes, shapes and places. A runtime checks them, since native code
            trusts them. Of a tensor in two files, the one in `weights.safetensors` counts.
        referenced: size and digest of the files with weights that are not in the bundle.
        quantized: what the build made of the checkpoint's matrices; None: they are as stored, or
            converted to another dtype.
        cuts: which constants of the programs of several shards are parts of a tensor, by the name
            under which they are bound; every other constant is whole. Empty where no program has
            several shards.
        max_seq: positions a state holds; the last one is scratch.
        batch: rows of the `rows` states.
        tokenizer: `tokenizers` (a tokenizer.json) or None (token ids only).
        has_chat_template: whether `chat_template.jinja` is there.
        stop_tokens: any of these ends a generated text.
        files: every other file of the bundle, by name.
    """

    schema: SchemaVersion
    name: str
    source: Source
    model: Model
    dtype: DTypeName
    max_seq: Count
    batch: Count
    weights: WeightsMode
    tokenizer: Literal["tokenizers"] | None
    has_chat_template: bool
    stop_tokens: tuple[Size, ...]
    toolchain: dict[str, str]
    programs: tuple[Program, ...]
    checks: tuple[Check, ...]
    files: dict[FileName, File]
    weights_headers: dict[FileName, Sha256]
    referenced: dict[FileName, File] = field(default_factory=dict)
    quantized: Quantized | None = None
    cuts: dict[str, Cut] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_files()
        self._check_programs()
        self._check_weights()

    def _check_files(self) -> None:
        for key, names in (("files", self.files), ("referenced", self.referenced)):
            for name in (FILE_NAME, SIGNATURE_NAME):
                if name in names:
                    raise ValueError(f"`{name}` is listed in `{key}`, which is made before it")
        for program in self.programs:
            if program.file not in self.files:
                raise ValueError(f"program file {shown(program.file)} is not listed in `files`")
        for is_needed, name in (
            (self.tokenizer is not None, TOKENIZER_NAME),
            (self.has_chat_template, CHAT_TEMPLATE_NAME),
        ):
            if is_needed and name not in self.files:
                raise ValueError(f"`{name}` is not listed in `files`")

    def _check_programs(self) -> None:
        kinds = [(program.entry, program.format, program.shards) for program in self.programs]
        general = {
            kind for program, kind in zip(self.programs, kinds, strict=True) if not program.variant
        }
        for program, kind in zip(self.programs, kinds, strict=True):
            if program.variant and kind not in general:
                raise ValueError(
                    f"variant {shown(program.title)} in {program.format} has no general program"
                )
        if bool(self.cuts) != any(program.shards > 1 for program in self.programs):
            got = "there is none" if self.cuts else "`cuts` is empty"
            raise ValueError(f"`cuts` are for programs of several shards, but {got}")

    def _check_weights(self) -> None:
        held, elsewhere = set(self.weights_headers), set(self.referenced)
        if both := sorted(elsewhere & set(self.files)):
            raise ValueError(f"{shown(both[0])} is in `files` and in `referenced`")
        if odd := sorted(elsewhere - held) or sorted(held - elsewhere - set(self.files)):
            where = "`weights_headers`" if odd[0] in elsewhere else "`files`"
            raise ValueError(f"weights file {shown(odd[0])} is not listed in {where}")
        is_right = {
            "copy": held == {WEIGHTS_NAME} and not elsewhere,
            "link": bool(held) and not elsewhere,
            "reference": bool(elsewhere),
            "none": not held and not elsewhere,
        }
        if not is_right[self.weights]:
            listed = ", ".join(map(shown, sorted(held))) or "none"
            raise ValueError(f"weights `{self.weights}` cannot have these weights files: {listed}")

    def entries(self) -> tuple[str, ...]:
        """Names of the entries, each once, in the order of the programs."""
        return tuple(dict.fromkeys(program.entry for program in self.programs))

    def shard_counts(self) -> tuple[int, ...]:
        """For how many processes there are programs, ascending."""
        return tuple(sorted({program.shards for program in self.programs}))


def show_shards(label: str, num_shards: int) -> str:
    """A program's label with its number of shards, if there are several."""
    return label if num_shards == 1 else f"{label} of {num_shards} shards"


def file_stem(entry: str) -> str:
    """How the names of an entry's files begin: `generate-32` for `generate<32>`."""
    return entry.replace("<", "-").removesuffix(">")


def vectors_name(entry: str) -> str:
    """The file with an entry's test vectors."""
    return file_stem(entry) + VECTORS_SUFFIX
