"""Every law: its name, what it says, and what it applies to.

The law `<name>` is checked by the function `check` of the module `llama_export.laws.<name>`, which
is imported when it is first needed: nothing here imports torch.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from llama_artifacts.errors import VerificationError
from llama_artifacts.strict_json import shown

_STATELESS = ("forward", "next_token", "loss_packed", "log_probs_packed", "hidden_packed")
_FILLING = ("prefill", "prefill_slots", "prefill_packed", "prefill_paged")
_STEPPING = ("decode", "decode_rows", "decode_paged")
_MIXED = ("step_packed", "step_paged")
_GENERATING = ("generate", "sample", "generate_until")
_WITH_STATES = (*_FILLING, *_STEPPING, *_MIXED)
_PAGED = ("prefill_paged", "decode_paged", "step_paged")
_ALL = (*_STATELESS, *_WITH_STATES)


@dataclass(frozen=True)
class Law:
    """One law.

    Attributes:
        name: what users call it; also its module.
        summary: what it says, in one line.
        entries: the entries it applies to, `generate` standing for every `generate<N>`.
        scope: whether it is checked once for each program, each entry, or the bundle.
        is_quick: whether a build checks it.
        takes_shards: whether it is checked of programs that several processes run together.
    """

    name: str
    summary: str
    entries: tuple[str, ...] = ()
    scope: Literal["program", "entry", "bundle"] = "program"
    is_quick: bool = False
    takes_shards: bool = False

    def applies(self, entry: str) -> bool:
        """Whether the law says something of programs of this entry."""
        return kind(entry) in self.entries

    def load(self) -> Callable[..., Any]:
        """The function that checks it."""
        check: Callable[..., Any] = importlib.import_module(f"llama_export.laws.{self.name}").check
        return check


LAWS = (
    Law("layout", "the weights are the network's, and every program's", (), "bundle", True),
    Law(
        "parity",
        "as the eager float32 model",
        (*_ALL, *_GENERATING),
        is_quick=True,
        takes_shards=True,
    ),
    Law(
        "causal",
        "another token changes nothing before it, exactly",
        tuple(name for name in _ALL if name != "next_token"),
    ),
    Law("gqa", "query heads read the key/value head of their group", (*_ALL, *_GENERATING)),
    Law(
        "room",
        "positions past the capacity are refused, and nothing wraps",
        (*_ALL, *_GENERATING),
        is_quick=True,
        takes_shards=True,
    ),
    Law(
        "chain",
        "a prefill, then steps = steps alone = the whole sequence",
        _FILLING,
        takes_shards=True,
    ),
    Law(
        "chunks",
        "a prompt in chunks = the prompt whole",
        ("prefill", "prefill_paged", "step_paged"),
    ),
    Law("pages", "other pages, or more of them, change nothing", _PAGED),
    Law(
        "rows",
        "another row's content changes nothing, bit for bit",
        (*(name for name in _ALL if name != "loss_packed"), *_GENERATING),
    ),
    Law(
        "scratch",
        "a call writes the positions it names; padding and idle rows, scratch",
        (*_WITH_STATES, *_GENERATING),
        is_quick=True,
        takes_shards=True,
    ),
    Law(
        "packed",
        "a packed prompt = the prompt alone",
        (
            *("prefill_slots", "prefill_packed", "step_packed", "prefill_paged", "step_paged"),
            *("loss_packed", "log_probs_packed", "hidden_packed"),
        ),
    ),
    Law("steps", "generating = decode and argmax, step by step", ("generate", "generate_until")),
    Law("keys", "one key, one text; another key, another", ("sample",)),
    Law(
        "formats",
        "all formats agree, and several shards with one",
        (*_ALL, *_GENERATING),
        "entry",
        takes_shards=True,
    ),
)

NAMES = tuple(law.name for law in LAWS)


def kind(entry: str) -> str:
    """The entry's name without its size: `generate` of `generate<32>`."""
    return entry.partition("<")[0]


def find(names: Sequence[str]) -> tuple[Law, ...]:
    """The laws of these names, in the order of the documentation.

    Raises:
        VerificationError: there is no law of a name; the nearest is suggested.
    """
    for name in names:
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"laws: {', '.join(NAMES)}"
            raise VerificationError(f"unknown law {shown(name)}", hint=hint)
    return tuple(law for law in LAWS if law.name in names)
