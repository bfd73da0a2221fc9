"""A Hugging Face checkpoint folder: config.json and safetensors, opened by header only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_artifacts.digests import describe
from llama_artifacts.dtypes import from_name
from llama_artifacts.errors import CheckpointError, TokenizerError
from llama_artifacts.manifest import File, Source
from llama_artifacts.strict_json import shown
from llama_export.checkpoint import hub
from llama_export.checkpoint.coded_layers import coded_layers
from llama_export.checkpoint.config import (
    HfConfig,
    LlamaConfig,
    check_hf_config,
    read_hf_config,
    token_ids,
)
from llama_export.checkpoint.files import (
    CONFIG,
    GENERATION_CONFIG,
    is_same,
    is_there,
    locate,
    read_json,
)
from llama_export.checkpoint.layout import (
    EMBEDDING,
    HEAD,
    SCALE,
    Codes,
    check_layout,
    expected_tensors,
    first_layers,
    linear_shapes,
)
from llama_export.checkpoint.model_card import read_license
from llama_export.checkpoint.packed import Packed
from llama_export.checkpoint.source import Stored, TensorInfo
from llama_export.checkpoint.tokenizer_files import check_tokenizer, tokenizer_assets

if TYPE_CHECKING:
    import torch

WEIGHT_DTYPES = ("bf16", "f16", "f32")
INV_FREQ = "rotary_emb.inv_freq"
MAX_INV_FREQ_ERROR = 1e-3
BUNDLE_MARK = "manifest.json"


@dataclass(eq=False)
class HfCheckpoint:
    """A folder that satisfies `Checkpoint`; tensors are memory maps of the files.

    A tensor from `read` is a private map: writing to it changes no file, and it stays valid as
    long as it is referenced. The files must not be truncated meanwhile.
    """

    name: str
    source: Source
    config: LlamaConfig
    dtype: str
    tensors: Mapping[str, TensorInfo]
    stop_tokens: tuple[int, ...]
    notes: tuple[str, ...]
    has_data: bool
    _folder: Path
    _stored: Mapping[str, Stored]
    _packed: Mapping[str, Packed] = field(default_factory=dict)
    _maps: dict[Path, torch.Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        headers_only: bool = False,
        num_layers: int | None = None,
        source: Source | None = None,
        name: str | None = None,
    ) -> HfCheckpoint:
        """Opens a folder and holds its config and tensor table against each other.

        Args:
            path: the folder.
            headers_only: accept safetensors files without their data; `read` then fails, unless
                all of it is there.
            num_layers: use only this many of the layers.
            source: where the folder came from; the folder itself where None.
            name: what to call the model; the folder's name where None.

        Raises:
            CheckpointError: not a checkpoint, damaged, or needs maths that the model lacks.
            TokenizerError: tokenizer or stop tokens contradict the vocabulary.
        """
        folder = _checked_folder(Path(path))
        values, notes = read_json(folder / CONFIG), list[str]()
        check_hf_config(values, where=folder / CONFIG)
        stored = locate(folder, headers_only=headers_only, notes=notes)
        hf = _read_config(values, stored, num_layers, where=folder / CONFIG)
        has_data = not headers_only or _are_whole(stored)
        stored, ignored = _without_inv_freq(_kept(stored, num_layers))
        config, stored = _resolve_head(hf.config, stored, not has_data, notes)
        layers = coded_layers(hf.scheme, config, stored, where=folder, has_data=has_data)
        check_layout(config, layers.tensors, where=folder, coded=layers.codes)
        names = expected_tensors(config, layers.codes)
        tensors = {name: layers.tensors[name] for name in names}
        notes += layers.notes
        notes += _inv_freq_notes(ignored, config, headers_only=not has_data)
        dtype = _compute_dtype(hf, _plain(config, layers.codes, tensors), notes, where=folder)
        notes += check_tokenizer(folder, config.vocab_size)
        stop_tokens = _stop_tokens(folder, values, config.vocab_size, notes)
        resolved = folder.resolve().name
        return cls(
            name=name or resolved,
            source=replace(source or Source("folder", resolved), license=read_license(folder)),
            config=config,
            dtype=dtype,
            tensors=tensors,
            stop_tokens=stop_tokens,
            notes=(*hf.notes, *notes),
            has_data=has_data,
            _folder=folder,
            _stored=stored,
            _packed=layers.packed,
        )

    def read(self, name: str) -> torch.Tensor:
        """One tensor as a private memory map, in its stored dtype; FP8's scales as one for each row.

        What packed weights become is made of them, and no map.

        Raises:
            CheckpointError: only headers are here, or a packed weight is not what its scheme says.
        """
        if name not in self.tensors:
            raise CheckpointError(f"no tensor {shown(name)}", where=self._folder)
        module, kind = name.rsplit(".", 1)
        if module in self._packed and kind != "bias":
            return self._unpacked(self._packed[module], kind)
        tensor = self._read(name)
        if name.endswith(SCALE):
            return tensor.reshape(-1, 1).expand(self.tensors[name].shape)
        return tensor

    def _unpacked(self, packed: Packed, kind: str) -> torch.Tensor:
        from llama_export.checkpoint.packed_int32 import PackedWeight

        parts = {part: self._read(name) for part, name in packed.names.items()}
        return PackedWeight(packed, parts, where=self._folder).read(kind)

    def _read(self, name: str) -> torch.Tensor:
        stored = self._stored[name]
        if not self.has_data:
            message = "opened by header only; the weights are not here"
            raise CheckpointError(message, where=f"{stored.path}#{name}")
        return _mapped(stored, self._map(stored.path, stored.tensor.end))

    def stored(self, name: str) -> Stored | None:
        """Where the tensor's bytes are, as `read` gives them, under this name; None: nowhere."""
        stored = self._stored.get(name)
        if stored is None or stored.name != name:
            return None
        return stored if stored.tensor.shape == self.tensors[name].shape else None

    def describe(self, path: Path) -> File:
        """Size and digest of a whole file that `stored` names, also where only its header is here.

        Raises:
            CheckpointError: the digest cannot be had.
        """
        if self.has_data:
            return describe(path)
        if self.source.kind != "hub" or self.source.revision is None:
            message = "cut off after its header: its digest cannot be had"
            raise CheckpointError(message, where=path, hint="get the whole file")
        return hub.describe(self.source.name, self.source.revision, path.name)

    def assets(self) -> dict[str, bytes]:
        """Tokenizer, template and config files that travel with the bundle, by file name."""
        return tokenizer_assets(self._folder)

    def _map(self, path: Path, end: int) -> torch.Tensor:
        import torch

        num_bytes = path.stat().st_size
        if num_bytes < end:
            message = f"file has shrunk: expected at least {end} bytes, got {num_bytes}"
            raise CheckpointError(message, where=path)
        if path not in self._maps:
            self._maps[path] = torch.from_file(
                str(path), shared=False, size=num_bytes, dtype=torch.uint8
            )
        return self._maps[path]


def _checked_folder(folder: Path) -> Path:
    if not folder.is_dir():
        raise CheckpointError("expected a checkpoint folder, found none", where=folder)
    if is_there(folder / BUNDLE_MARK):
        message = "expected a checkpoint, got a bundle that llama-export wrote"
        raise CheckpointError(message, where=folder, hint="name the checkpoint it was built from")
    if is_there(folder / CONFIG):
        return folder
    hint = "name the folder that holds config.json and the safetensors files"
    if is_there(folder / "adapter_config.json"):
        hint = "this is an adapter (LoRA); merge it into its base model first"
    raise CheckpointError(
        f"not a checkpoint: expected a {CONFIG}, found none", where=folder, hint=hint
    )


def _read_config(
    values: dict[str, Any], stored: Mapping[str, Stored], num_layers: int | None, *, where: Path
) -> HfConfig:
    shapes = {name: entry.tensor.shape for name, entry in stored.items()}
    hf = read_hf_config(values, where=where, shapes=shapes, num_layers=num_layers)
    if hf.config.num_layers > len(stored):  # before tensors are listed by layer
        message = f"config says {hf.config.num_layers} layers, checkpoint has {len(stored)} tensors"
        raise CheckpointError(message, where=f"{where}#num_hidden_layers")
    return hf


def _are_whole(stored: Mapping[str, Stored]) -> bool:
    ends: dict[Path, int] = {}
    for entry in stored.values():
        ends[entry.path] = max(ends.get(entry.path, 0), entry.tensor.end)
    return all(path.stat().st_size >= end for path, end in ends.items())


def _kept(stored: dict[str, Stored], num_layers: int | None) -> dict[str, Stored]:
    if num_layers is None:
        return stored
    return first_layers(stored, num_layers)


def _plain(
    config: LlamaConfig, codes: Mapping[str, Codes], tensors: Mapping[str, TensorInfo]
) -> dict[str, TensorInfo]:
    """The tensors without codes and what belongs to them."""
    shapes = linear_shapes(config)
    coded = {name for module in codes for name in codes[module].tensors(module, shapes[module])}
    return {name: info for name, info in tensors.items() if name not in coded}


def _mapped(stored: Stored, file: torch.Tensor) -> torch.Tensor:
    import torch

    tensor = stored.tensor
    row = from_name(tensor.dtype)
    data = file[tensor.start : tensor.end]
    if tensor.start % row.num_bytes:
        data = data.clone()  # a header of odd length leaves the data unaligned
    dtype: torch.dtype = getattr(torch, row.torch)
    return data.view(dtype).view(tensor.shape)


# --- the output head ------------------------------------------------------------------------------


def _resolve_head(
    config: LlamaConfig, stored: dict[str, Stored], headers_only: bool, notes: list[str]
) -> tuple[LlamaConfig, dict[str, Stored]]:
    """Ties the head, or unties it where a different one is stored; never drops a different head."""
    if not config.tie_word_embeddings or HEAD not in stored:
        return config, stored
    rest = {name: entry for name, entry in stored.items() if name != HEAD}
    if EMBEDDING not in stored:
        notes.append(f"no {EMBEDDING}: {HEAD} serves as both (tie_word_embeddings is true)")
        return config, {EMBEDDING: stored[HEAD], **rest}
    if headers_only:
        notes.append(
            f"{HEAD} is stored although tie_word_embeddings is true: kept as it is, untied"
        )
        return replace(config, tie_word_embeddings=False), stored
    if is_same(stored[HEAD], stored[EMBEDDING]):
        return config, rest
    notes.append(
        f"{HEAD} differs from {EMBEDDING} although tie_word_embeddings is true: used untied"
    )
    return replace(config, tie_word_embeddings=False), stored


# --- rotary tables that old checkpoints carry -----------------------------------------------------


def _without_inv_freq(
    stored: dict[str, Stored],
) -> tuple[dict[str, Stored], dict[str, Stored]]:
    ignored = {name: entry for name, entry in stored.items() if name.endswith(INV_FREQ)}
    return {name: entry for name, entry in stored.items() if name not in ignored}, ignored


def _inv_freq_notes(
    ignored: Mapping[str, Stored], config: LlamaConfig, *, headers_only: bool
) -> list[str]:
    if not ignored:
        return []
    notes = [f"ignored {len(ignored)} stored {INV_FREQ} tensors; the table follows the config"]
    if headers_only:
        return notes
    from llama_export.model.rope import inverse_frequencies

    expected = inverse_frequencies(config.rope, config.head_dim).double()
    for name, entry in ignored.items():
        error = _relative_error(entry, expected)
        if error > MAX_INV_FREQ_ERROR:
            notes.append(
                f"warning: stored {shown(name)} differs from the config's rope by {error:.2g}"
            )
    return notes


def _relative_error(entry: Stored, expected: torch.Tensor) -> float:
    import torch

    tensor = entry.tensor
    if tensor.shape != tuple(expected.shape) or tensor.dtype not in (*WEIGHT_DTYPES, "f64"):
        return float("inf")
    with entry.path.open("rb") as file:
        file.seek(tensor.start)
        data = bytearray(file.read(tensor.end - tensor.start))
    dtype: torch.dtype = getattr(torch, from_name(tensor.dtype).torch)
    values = torch.frombuffer(data, dtype=dtype).double()
    return ((values - expected).abs() / expected).max().item()


# --- dtype and stop tokens ------------------------------------------------------------------------


def _compute_dtype(
    hf: HfConfig, plain: Mapping[str, TensorInfo], notes: list[str], *, where: Path
) -> str:
    """The stored dtype of the embedding; what the config says only earns a remark."""
    for name, info in plain.items():
        if info.dtype not in WEIGHT_DTYPES:
            message = f"dtype {info.dtype} is not supported (supported: {', '.join(WEIGHT_DTYPES)})"
            raise CheckpointError(message, where=f"{where}#{name}")
    counts = Counter(info.dtype for info in plain.values())
    dtype = plain[EMBEDDING].dtype
    if len(counts) > 1:
        listed = ", ".join(f"{counts[key]} of {key}" for key in sorted(counts))
        notes.append(f"stored dtypes are mixed ({listed}): each is kept, {dtype} is computed in")
    if hf.dtype is not None and hf.dtype != dtype:
        notes.append(f"config says {hf.dtype}, the tensors are {dtype}: the stored dtype wins")
    return dtype


def _stop_tokens(
    folder: Path, config: Mapping[str, Any], vocab_size: int, notes: list[str]
) -> tuple[int, ...]:
    """The union of the end-of-sequence ids of config.json and generation_config.json."""
    places = [(folder / CONFIG, config)]
    if is_there(folder / GENERATION_CONFIG):
        places.append((folder / GENERATION_CONFIG, read_json(folder / GENERATION_CONFIG)))
    found: set[int] = set()
    for path, values in places:
        where = f"{path}#eos_token_id"
        for token in token_ids(values.get("eos_token_id"), where=where):
            if token >= vocab_size:
                message = f"stop token {token} is outside the vocabulary of {vocab_size}"
                raise TokenizerError(message, where=where)
            found.add(token)
    if not found:
        notes.append("no stop token: generation ends only at its length limit")
    return tuple(sorted(found))
