"""Variants: further programs of an entry in which some dynamic dimensions are fixed.

A runtime takes the most specific program that fits a call. Nothing here imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llama_artifacts.errors import BuildError
from llama_artifacts.manifest import Format
from llama_artifacts.strict_json import shown
from llama_export.entries import registry
from llama_export.entries.registry import EntrySpec

NONE = "none"
_SIZE = re.compile(r"([A-Za-z]+)=([1-9][0-9]{0,8})")


@dataclass(frozen=True)
class Variant:
    """What one variant fixes, and in which formats it is built (None: in all).

    Attributes:
        entry: the entry's name as `registry.find` takes it.
        sizes: by dimension.
        formats: the formats that gain from it.
        device: the device that gains from it; None: any.
    """

    entry: str
    sizes: Mapping[str, int]
    formats: tuple[Format, ...] | None = None
    device: str | None = None

    def stem(self, spec: EntrySpec) -> str:
        """How the program's file name begins: `decode_paged.Rows=1`."""
        return f"{spec.stem}.{self._shown()}"

    def label(self, spec: EntrySpec) -> str:
        """The entry and what is fixed, as it is written in a recipe."""
        return f"{spec.name}:{self._shown()}"

    def _shown(self) -> str:
        return ",".join(f"{name}={size}" for name, size in sorted(self.sizes.items()))


# A step of one row is read at the speed of memory only where its products are fused.
DEFAULTS = (Variant("decode_paged", {"Rows": 1}, ("aoti",), "cpu"),)


def choose(
    texts: Sequence[str] | None, specs: Sequence[EntrySpec], device: str
) -> dict[str, tuple[Variant, ...]]:
    """The variants of each entry that is built, by the entry's name.

    Args:
        texts: such as `decode_paged:Rows=1`; `none` alone for no variant; None: the defaults.
        specs: the entries that are built.
        device: `cpu` or `cuda`.

    Raises:
        BuildError: a text is malformed, or its entry is not built.
    """
    if texts is None:
        wanted = [variant for variant in DEFAULTS if variant.device in (None, device)]
    else:
        wanted = [] if tuple(texts) == (NONE,) else [parse(text) for text in texts]
    chosen: dict[str, tuple[Variant, ...]] = {spec.name: () for spec in specs}
    for variant in wanted:
        method = registry.find(variant.entry).method
        fitting = [s.name for s in specs if variant.entry == s.name or method == s.method]
        if not fitting and texts is not None:
            raise BuildError(
                f"a variant of `{variant.entry}`, which is not built",
                hint=f"add --entry {variant.entry}",
            )
        for name in fitting:
            if variant not in chosen[name]:
                chosen[name] += (variant,)
    return chosen


def parse(text: str) -> Variant:
    """A variant from its text, `ENTRY:DIM=N` or `ENTRY:DIM=N,DIM=N`.

    Raises:
        BuildError: it is not of that form, or there is no such entry.
    """
    entry, _, sizes = text.partition(":")
    matches = [_SIZE.fullmatch(part) for part in sizes.split(",")]
    found = {match[1]: int(match[2]) for match in matches if match}
    if len(found) != len(matches):
        raise BuildError(
            f"expected a variant such as decode_paged:Rows=1, got {shown(text)}",
            hint="ENTRY:DIMENSION=N, several dimensions with commas between them",
        )
    registry.find(entry)
    return Variant(entry, found)
