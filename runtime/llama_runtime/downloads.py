"""Files of the Hugging Face hub, each at a pinned commit; what a broken download had is kept.

huggingface_hub goes on within a process, but removes the part that arrived when the process fails.
Here it stays, and the next call, in this process or another, asks for the rest alone. The whole is
compared before it gets its name, so that a part of something else costs one more download at most.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llama_artifacts.errors import IntegrityError

Check = Callable[[Path], None]
"""Raises IntegrityError for a file of other content than expected."""

_PLAIN_TAG = re.compile(r"[\w-]{1,128}", re.ASCII)


@dataclass(frozen=True)
class Remote:
    """A file of a hub repository: `revision` is a commit's hash, `num_bytes` its pinned size."""

    repository: str
    revision: str
    name: str
    num_bytes: int

    @property
    def place(self) -> str:
        """Where it is, for people."""
        return f"{self.repository}@{self.revision}/{self.name}"

    @property
    def url(self) -> str:
        from huggingface_hub import hf_hub_url

        return hf_hub_url(self.repository, self.name, revision=self.revision)

    @property
    def can_resume(self) -> bool:
        """Whether the hub sends so large a file over plain HTTP, which alone knows ranges."""
        from huggingface_hub import constants

        return self.num_bytes <= constants.MAX_HTTP_DOWNLOAD_SIZE


def fetch_cached(remote: Remote, check: Check) -> Path:
    """The path of a file in huggingface_hub's cache; it is downloaded if it is not there.

    The part that arrived is kept where the library's older versions kept theirs,
    `blobs/TAG.incomplete`, under the library's own lock. A file that was there already is not
    compared.

    Raises:
        IntegrityError: what was downloaded has another size or content.
        Exception: those of huggingface_hub, its transport and the file system.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, try_to_load_from_cache

    where = (remote.repository, remote.name)
    found = try_to_load_from_cache(*where, revision=remote.revision)
    if not isinstance(found, str) and remote.can_resume:
        tag = get_hf_file_metadata(remote.url).etag
        if tag is not None and _PLAIN_TAG.fullmatch(tag):
            _fetch_blob(remote, tag, check)
    return Path(hf_hub_download(*where, revision=remote.revision))  # finds the blob, and names it


def _fetch_blob(remote: Remote, tag: str, check: Check) -> None:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    cache = Path(constants.HF_HUB_CACHE)
    folder = repo_folder_name(repo_id=remote.repository, repo_type="model")
    blob = cache / folder / "blobs" / tag
    lock = cache / ".locks" / folder / f"{tag}.lock"
    for path in (blob, lock):
        path.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if not blob.exists():
            partial = blob.with_name(f"{tag}.incomplete")
            complete(remote, partial, check)
            partial.replace(blob)


def complete(remote: Remote, partial: Path, check: Check) -> None:
    """Downloads what `partial` lacks, all if it is not there, and compares the whole.

    A part that turns out to be of something else is thrown away, and all is downloaded once.

    Raises:
        IntegrityError: the hub has another size, or what it sent another content; then `partial`
            is gone.
        Exception: those of huggingface_hub, its transport and the file system; then `partial`
            holds what arrived.
    """
    from huggingface_hub import get_hf_file_metadata

    num_bytes = get_hf_file_metadata(remote.url).size
    if num_bytes not in (None, remote.num_bytes):
        message = f"expected {remote.num_bytes:,} bytes, the hub has {num_bytes:,}"
        raise IntegrityError(message, where=remote.place)
    while True:
        has_resumed = _download_rest(remote, partial)
        try:
            check(partial)
        except IntegrityError:
            partial.unlink(missing_ok=True)
            if not has_resumed:
                raise
        else:
            return


def _download_rest(remote: Remote, partial: Path) -> bool:
    """Whether there was a part already.

    Bytes are written at their places rather than appended: where a file system's locks do nothing,
    two processes write the same.
    """
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    partial.touch()
    with partial.open("r+b") as file:
        start = file.seek(0, os.SEEK_END)
        if start > remote.num_bytes:  # no part of this file
            file.truncate(0)
            start = file.seek(0)
        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}  # ranges count these bytes
        http_get(
            remote.url,
            file,
            resume_size=start,
            headers=headers,
            expected_size=remote.num_bytes,
            displayed_filename=remote.name,
        )
        file.flush()
        os.fsync(file.fileno())  # what was compared is remembered, also after a crash
    return start > 0
