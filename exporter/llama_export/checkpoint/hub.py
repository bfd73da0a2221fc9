"""A hub repository as a local folder: only the files needed, at a pinned commit.

Everything goes through huggingface_hub, so its cache, offline mode, endpoint and tokens hold.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from llama_artifacts.errors import CheckpointError, LlamaExportError
from llama_artifacts.manifest import File
from llama_artifacts.places import cache_folder
from llama_artifacts.safetensors import LENGTH_BYTES, MAX_HEADER_BYTES
from llama_artifacts.strict_json import shown
from llama_export.checkpoint.config import check_hf_config
from llama_export.checkpoint.files import CONFIG, INDEX, SINGLE, read_index, read_json, shards
from llama_export.checkpoint.model_card import MODEL_CARD
from llama_export.checkpoint.tokenizer_files import COPIED

SMALL_FILES = (*COPIED, INDEX, MODEL_CARD)
HEADER_BLOCK = 2**17
"""Bytes of one request for a header; few headers are longer."""

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Snapshot:
    """A repository's files at one commit; `revision` is the commit's hash."""

    folder: Path
    revision: str


def fetch(repository: str, *, revision: str | None = None, headers_only: bool = False) -> Snapshot:
    """Brings a repository's config, tokenizer and weights into the local cache.

    The config is read before any weight is fetched, so that an unsupported model costs nothing.
    With `headers_only`, weights that are not in the cache are fetched as headers without data.

    Raises:
        CheckpointError: the hub refuses, cannot be reached, or has no such checkpoint.
    """
    place = repository if revision is None else f"{repository}@{revision}"
    with hub_errors(repository, place):
        from huggingface_hub import snapshot_download

        folder = Path(
            snapshot_download(repository, revision=revision, allow_patterns=list(SMALL_FILES))
        )
        snapshot = Snapshot(folder, folder.name)
        names = _weight_files(folder, place)
        if all((folder / name).exists() for name in names):
            return snapshot
        if headers_only:
            return Snapshot(_headers_folder(repository, snapshot, names), snapshot.revision)
        snapshot_download(repository, revision=snapshot.revision, allow_patterns=names)
    return snapshot


def _weight_files(folder: Path, place: str) -> list[str]:
    if not (folder / CONFIG).exists():
        message = f"not a checkpoint: the repository has no {CONFIG}"
        raise CheckpointError(message, where=place, hint="choose a repository in safetensors form")
    check_hf_config(read_json(folder / CONFIG), where=folder / CONFIG)
    if (folder / INDEX).exists() and not (folder / SINGLE).exists():
        return shards(read_index(folder / INDEX)[0])
    return [SINGLE]


def describe(repository: str, revision: str, name: str) -> File:
    """Size and digest of a file of the hub, as the hub tells them.

    Raises:
        CheckpointError: the hub cannot be reached, or tells no SHA-256 of it.
    """
    place = f"{repository}@{revision}"
    with hub_errors(repository, place):
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        found = get_hf_file_metadata(hf_hub_url(repository, name, revision=revision))
    if found.size is None or not _SHA256.fullmatch(found.etag or ""):
        message = f"the hub tells no SHA-256 of {name}"
        raise CheckpointError(message, where=place, hint="download the checkpoint, and name it")
    return File(found.size, str(found.etag))


# --- headers without data -------------------------------------------------------------------------


def _headers_folder(repository: str, snapshot: Snapshot, names: Sequence[str]) -> Path:
    """A folder of our own cache with the small files and each weight file cut after its header."""
    target = cache_folder() / "headers" / repository.replace("/", "--") / snapshot.revision
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        staged = Path(scratch) / "headers"
        staged.mkdir()
        for name in SMALL_FILES:
            if (snapshot.folder / name).exists():
                shutil.copyfile(snapshot.folder / name, staged / name)
        for name in names:
            (staged / name).write_bytes(_remote_header(repository, snapshot.revision, name))
        if not target.is_dir():  # another process may have been faster
            staged.rename(target)
    return target


def _remote_header(repository: str, revision: str, name: str) -> bytes:
    """The first bytes of a remote file, up to its data."""
    from huggingface_hub import HfFileSystem

    path = f"{repository}/{name}"
    with HfFileSystem().open(path, "rb", revision=revision, block_size=HEADER_BLOCK) as file:
        prefix = file.read(LENGTH_BYTES)
        num_bytes = int.from_bytes(prefix, "little")
        if num_bytes > MAX_HEADER_BYTES:
            message = f"expected a header of at most {MAX_HEADER_BYTES} bytes, got {num_bytes}"
            raise CheckpointError(message, where=path, hint="this is not a safetensors file")
        return bytes(prefix + file.read(num_bytes))


# --- errors ---------------------------------------------------------------------------------------


@contextmanager
def hub_errors(
    repository: str, place: str, *, error: type[LlamaExportError] = CheckpointError
) -> Iterator[None]:
    """Turns every known failure of the hub into one line with a hint."""
    from huggingface_hub import errors

    # The transport's own base class depends on the version of huggingface_hub.
    bases = errors.HfHubHTTPError.__bases__
    transport = tuple(base for base in bases if issubclass(base, Exception))
    known: tuple[type[Exception], ...] = (
        errors.HfHubHTTPError,
        errors.EntryNotFoundError,
        errors.HFValidationError,
        errors.SafetensorsParsingError,
        errors.NotASafetensorsRepoError,
        OSError,
    )
    try:
        yield
    except (*known, *transport) as cause:
        message, hint = _explain(cause, repository)
        raise error(message, where=place, hint=hint) from cause


def _explain(cause: Exception, repository: str) -> tuple[str, str]:
    from huggingface_hub import errors

    url = f"https://huggingface.co/{repository}"
    if isinstance(cause, errors.GatedRepoError):
        return (
            "the repository is gated and this account has no access",
            f"accept its licence at {url}, then log in with `hf auth login` or set HF_TOKEN",
        )
    if isinstance(cause, errors.RepositoryNotFoundError):
        return (
            "the hub has no such repository, or it is private",
            "check the spelling; for a private one log in with `hf auth login` or set HF_TOKEN",
        )
    if isinstance(cause, errors.RevisionNotFoundError):
        return "the repository has no such revision", f"look at {url}/commits/main"
    if isinstance(cause, errors.RemoteEntryNotFoundError):
        return (
            f"the repository has no safetensors weights ({_first_line(cause)})",
            "choose a repository in safetensors form",
        )
    if isinstance(cause, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)):
        return (
            "not in the local cache, and the hub cannot be reached",
            "check the network and HF_HUB_OFFLINE, or name a local folder or .gguf file",
        )
    if isinstance(cause, errors.HFValidationError):
        return f"not a repository name: {_first_line(cause)}", "expected owner/name"
    if isinstance(cause, (errors.SafetensorsParsingError, errors.NotASafetensorsRepoError)):
        return f"damaged weights: {_first_line(cause)}", "report it to the repository's owner"
    return f"the hub request failed: {_first_line(cause)}", "check the network and try again"


def _first_line(cause: Exception) -> str:
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return shown(lines[0] if lines else type(cause).__name__)
