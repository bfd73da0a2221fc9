from __future__ import annotations

import pytest

from llama_artifacts import errors
from llama_artifacts.errors import InputError, LlamaExportError

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type)
    and issubclass(kind, LlamaExportError)
    and kind is not LlamaExportError
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_hint_where_its_raiser_knows_none(kind: type[LlamaExportError]) -> None:
    assert kind("what").hint
    assert kind("what", hint="do this").hint == "do this"


def test_a_message_is_one_line_with_its_place() -> None:
    assert str(InputError("one\n two", where="a.json#b")) == "a.json#b: one two"
