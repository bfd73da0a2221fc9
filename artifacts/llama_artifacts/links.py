"""Symbolic links in a bundle: where they may lead."""

from __future__ import annotations

from pathlib import Path

LINK_HINT = "copy the bundle with its files in place of the links (cp -rL)"


def leads_out(path: Path) -> bool:
    """Whether a file of a bundle is a link to a file outside of its folder.

    The hub's cache is let through: there a folder `snapshots/<revision>` holds links into the
    `blobs` beside `snapshots`, which the same tool wrote under their digests.

    Raises:
        OSError: the link cannot be followed.
    """
    if not path.is_symlink():
        return False
    folder, target = path.parent.resolve(), path.resolve()
    if target.is_relative_to(folder):
        return False
    is_snapshot = folder.parent.name == "snapshots"
    return not (is_snapshot and target.parent == folder.parent.parent / "blobs")
