"""Bundles to and from the Hugging Face hub, through huggingface_hub.

Its endpoint, tokens, proxies and offline mode hold. A repository holds the bundle's files at its
root; other files in it, such as a README.md, are left alone and do not travel.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from llama_artifacts import manifest_file
from llama_artifacts.bundle import (
    Bundle,
    check_space,
    open_bundle,
    staging,
)
from llama_artifacts.digests import difference
from llama_artifacts.errors import CheckpointError, IntegrityError, ManifestError, TransferError
from llama_artifacts.integrity import check_whole
from llama_artifacts.manifest import FILE_NAME, SIGNATURE_NAME, File, Manifest
from llama_artifacts.signing import Verifier, open_signed
from llama_artifacts.strict_json import shown
from llama_export.checkpoint.hub import hub_errors
from llama_export.checkpoint.open import parse_repository
from llama_runtime.downloads import Remote, complete

STALE_PATTERNS = ("*.pt2", "*.onnx", "*.safetensors", SIGNATURE_NAME)
"""What belongs to a bundle, and is removed from the repository where the new one lacks it."""


@dataclass(frozen=True)
class Transfer:
    """What was pushed or pulled: where, at which commit, and how much."""

    repository: str
    revision: str
    folder: Path
    files: int
    bytes: int


def push(
    folder: Path,
    repository: str,
    *,
    revision: str | None = None,
    is_private: bool = False,
    message: str | None = None,
) -> Transfer:
    """Puts a whole bundle into a repository, in one commit; makes the repository if need be.

    Args:
        folder: the bundle.
        repository: `owner/name`.
        revision: a branch, made if need be; None: the main one.
        is_private: make the repository private, and refuse one that is there and is not.
        message: of the commit; None: the bundle's name.

    Raises:
        ManifestError, CompatibilityError, IntegrityError: the bundle is not whole.
        TransferError: the hub refuses, or cannot be reached.
    """
    name, pinned = _parsed(repository)
    if pinned is not None:
        raise TransferError(
            "expected owner/name without a revision", where=repository, hint="use --revision BRANCH"
        )
    bundle = check_whole(folder)
    names = _names(bundle)
    with hub_errors(name, repository, error=TransferError):
        from huggingface_hub import HfApi

        api = HfApi()
        api.create_repo(name, private=is_private, exist_ok=True)
        if is_private and not api.model_info(name).private:
            raise TransferError(
                "expected a private repository, but it is there already and public",
                where=repository,
                hint="make it private on the hub, or leave --private out",
            )
        if revision is not None:
            api.create_branch(name, branch=revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=name,
            folder_path=folder,
            revision=revision,
            commit_message=message or f"Bundle {bundle.manifest.name}",
            allow_patterns=list(names),
            delete_patterns=list(STALE_PATTERNS),
        )
    num_bytes = sum((folder / file).stat().st_size for file in names)
    return Transfer(name, commit.oid, folder, len(names), num_bytes)


def pull(
    repository: str, output: Path | None = None, *, verifier: Verifier | None = None
) -> Transfer:
    """Gets a bundle: every file of one commit, checked before the folder appears.

    A connection that breaks is resumed where it was, a few times. What was fetched stays beside the
    output when the network or the process dies, and the next pull into the same output asks for
    the rest alone. A file that turns out damaged is fetched anew.

    Args:
        repository: `owner/name`, or `owner/name@revision` for a branch, tag or commit.
        output: the folder to write; None: the repository's name, in the current folder.
        verifier: whose signature the bundle must carry.

    Raises:
        TransferError: the hub refuses or cannot be reached, or the repository holds no bundle.
        SignatureError: it is not signed as `verifier` says.
        ManifestError, CompatibilityError, IntegrityError: it is not whole.
        BuildError: the output exists, or cannot be written.
    """
    name, revision = _parsed(repository)
    target = output or Path(name.rpartition("/")[2])
    with staging(target) as folder:
        partial = target.with_name(f".{target.name}.pull")
        with hub_errors(name, repository, error=TransferError):
            from huggingface_hub import HfApi

            api = HfApi()
            info = api.model_info(name, revision=revision)
            commit = str(info.sha)
            there = {sibling.rfilename for sibling in info.siblings or ()}
            manifest = _fetch_manifest(name, commit, partial, there, place=repository)
            check_space(target, _missing_bytes(manifest, partial))
            for file in sorted(manifest.files.keys() & there):
                _fetch(name, commit, file, manifest.files[file], partial)
            if SIGNATURE_NAME in there:
                api.hf_hub_download(name, SIGNATURE_NAME, revision=commit, local_dir=partial)
        open_bundle(partial)
        names = {*manifest.files, FILE_NAME, SIGNATURE_NAME} & there
        for file in names:
            (partial / file).rename(folder / file)
        if verifier is not None:
            open_signed(folder, verifier)
        num_bytes = sum((folder / file).stat().st_size for file in names)
    shutil.rmtree(partial, ignore_errors=True)
    return Transfer(name, commit, target, len(names), num_bytes)


def _fetch_manifest(
    name: str, commit: str, partial: Path, there: set[str], *, place: str
) -> Manifest:
    from huggingface_hub import HfApi

    if FILE_NAME not in there:
        hint = "`llama-export push` puts a bundle there"
        raise TransferError(f"not a bundle: it has no `{FILE_NAME}`", where=place, hint=hint)
    HfApi().hf_hub_download(name, FILE_NAME, revision=commit, local_dir=partial)
    try:
        return manifest_file.read(partial)
    except ManifestError:
        (partial / FILE_NAME).unlink()
        raise


def _missing_bytes(manifest: Manifest, partial: Path) -> int:
    paths = {partial / name: _part(partial, file) for name, file in manifest.files.items()}
    there = sum(path.stat().st_size for pair in paths.items() for path in pair if path.exists())
    return sum(file.bytes for file in manifest.files.values()) - there


def _fetch(repository: str, commit: str, name: str, file: File, partial: Path) -> None:
    """Puts a file of the bundle into `partial`, unless a pull before left the very same there."""
    from huggingface_hub import hf_hub_download

    path, part = partial / name, _part(partial, file)
    if path.exists() and difference(path, file) is not None:
        path.unlink()  # of another commit
    if path.exists():
        return
    remote = Remote(repository, commit, name, file.bytes)
    if remote.can_resume:
        complete(remote, part, lambda part: _check(part, file, where=remote.place))
        part.rename(path)
    else:
        hf_hub_download(repository, name, revision=commit, local_dir=partial)
        _check(path, file, where=remote.place)


def _part(partial: Path, file: File) -> Path:
    """What there is of a file so far; named by its content, which another commit may change."""
    return partial / f".{file.sha256}.part"


def _check(path: Path, file: File, *, where: str) -> None:
    if (found := difference(path, file)) is not None:
        hint = "pull it again; if that does not help, its owner must push it again"
        raise IntegrityError(f"damaged: {found}", where=where, hint=hint)


def _names(bundle: Bundle) -> tuple[str, ...]:
    """Every file of a whole bundle."""
    names = (FILE_NAME, *bundle.manifest.files)
    return (*names, SIGNATURE_NAME) if bundle.path(SIGNATURE_NAME).exists() else names


def _parsed(repository: str) -> tuple[str, str | None]:
    try:
        return parse_repository(repository)
    except CheckpointError as cause:
        message = f"expected owner/name, got {shown(repository)}"
        raise TransferError(message, hint="a repository of the Hugging Face hub") from cause
