"""Models known by a short name: repository, pinned revision, files, defaults and prompts.

Each preset is one JSON file in `preset_data`; this module only reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from llama_artifacts.errors import CheckpointError
from llama_artifacts.strict_json import parse_object

DATA = "preset_data"
SUFFIX = ".json"

DEFAULT_PLAIN_PROMPTS = ("The capital of France is", "Once upon a time,")
DEFAULT_CHAT_PROMPTS = ("Why is the sky blue?", "Name three rivers of Europe.")
"""For models that are no preset."""


@dataclass(frozen=True)
class Preset:
    """One known model.

    Attributes:
        name: what a user types.
        repository: `owner/name` on the hub.
        revision: the pinned commit.
        files: the weight files of that commit.
        dtype: the dtype to build with.
        max_seq: the capacity to build with.
        num_parameters: a tied head counts once.
        config: what the repository's config.json says of the architecture.
        plain_prompts: to be continued as they stand.
        chat_prompts: questions of a user; empty for a model that does not chat.
    """

    name: str
    repository: str
    revision: str
    files: tuple[str, ...]
    dtype: str
    max_seq: int
    num_parameters: int
    config: dict[str, Any]
    plain_prompts: tuple[str, ...]
    chat_prompts: tuple[str, ...]


def names() -> tuple[str, ...]:
    """Every preset's name, sorted."""
    return tuple(_all())


def find(name: str) -> Preset | None:
    """The preset of that name, or None."""
    return _all().get(name)


def find_source(name: str, repository: str | None) -> Preset | None:
    """The preset that a bundle was built from, or None.

    Args:
        name: the model's; that of a file may have a suffix, as in `SmolLM2-135M.Q4_1`.
        repository: `owner/name` on the hub, if it came from there.
    """
    short = name.lower()
    for preset in _all().values():
        is_named = short == preset.name or short.startswith(f"{preset.name}.")
        if repository == preset.repository or (repository is None and is_named):
            return preset
    return None


@cache
def _all() -> dict[str, Preset]:
    folder = resources.files("llama_export").joinpath(DATA)
    files = sorted(
        (entry for entry in folder.iterdir() if entry.name.endswith(SUFFIX)),
        key=lambda entry: entry.name,
    )
    return {file.name.removesuffix(SUFFIX): _preset(file.name, file.read_bytes()) for file in files}


def _preset(file: str, data: bytes) -> Preset:
    values = parse_object(data, where=f"{DATA}/{file}", error=CheckpointError)
    prompts = values["prompts"]
    return Preset(
        name=file.removesuffix(SUFFIX),
        repository=values["repository"],
        revision=values["revision"],
        files=tuple(values["files"]),
        dtype=values["defaults"]["dtype"],
        max_seq=values["defaults"]["max_seq"],
        num_parameters=values["num_parameters"],
        config=values["config"],
        plain_prompts=tuple(prompts["plain"]),
        chat_prompts=tuple(prompts["chat"]),
    )
