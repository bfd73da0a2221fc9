from __future__ import annotations

from collections.abc import Sequence

import pytest

from llama_artifacts.errors import InputError
from llama_runtime.engine import Output
from llama_runtime.server.text import Choice, Piece
from llama_runtime.tokenizer import Tokenizer


def outputs(tokens: Sequence[int], end: str) -> list[Output]:
    """One output a token; the last one ends the text, or a stop token does."""
    found = [Output("r", token, -0.5) for token in tokens]
    if end == "stop":
        return [*found, Output("r", finish_reason="stop")]
    return [*found[:-1], Output("r", tokens[-1], -0.5, finish_reason="length")]


def pieces(choice: Choice, given: Sequence[Output]) -> list[Piece]:
    found: list[Piece] = []
    for output in given:
        piece = choice.push(output)
        found += [] if piece is None else [piece]
        if choice.finish_reason is not None:
            break
    return found


def text_of(found: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in found)


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("said", "stops", "text", "reason"),
    [
        ("The quick brown fox jumps", ["own fox"], "The quick br", "stop"),
        ("aaab", ["aab"], "a", "stop"),
        ("say </s", ["</s>"], "say </s", "length"),
        ("abcabd", ["abd"], "abc", "stop"),
        ("one two three", ["two th", "two"], "one ", "stop"),
        ("end", ["end"], "", "stop"),
        ("😀 smile", ["😀"], "", "stop"),
        ("nothing here", ["x", "y"], "nothing here", "length"),
    ],
)
def test_text_ends_before_the_first_stop_string(
    tokenizer: Tokenizer, said: str, stops: list[str], text: str, reason: str
) -> None:
    choice = Choice(0, tokenizer, stops)
    found = pieces(choice, outputs(ids(tokenizer, said), "length"))
    assert text_of(found) == text
    assert choice.finish_reason == found[-1].finish_reason == reason
    assert [piece.finish_reason for piece in found[:-1]] == [None] * (len(found) - 1)


def test_what_may_be_a_stop_string_is_held_back_and_no_more(tokenizer: Tokenizer) -> None:
    choice = Choice(0, tokenizer, ["abc"])
    found = pieces(choice, outputs(ids(tokenizer, "xabxab"), "stop"))
    assert [piece.text for piece in found] == ["x", "abx", "ab"]
    assert found[-1].finish_reason == "stop"


def test_held_text_comes_at_a_stop_token(tokenizer: Tokenizer) -> None:
    choice = Choice(0, tokenizer, ["please!"])
    assert text_of(pieces(choice, outputs(ids(tokenizer, "pleas"), "stop"))) == "pleas"


def test_a_character_comes_whole(tokenizer: Tokenizer) -> None:
    choice = Choice(0, tokenizer, ())
    found = pieces(choice, outputs(ids(tokenizer, "a😀ď"), "stop"))
    assert [piece.text for piece in found] == ["a", "😀", "ď", ""]


def test_a_character_that_is_cut_comes_as_decoding_gives_it(tokenizer: Tokenizer) -> None:
    cut = ids(tokenizer, "a😀")[:-1]
    choice = Choice(0, tokenizer, ())
    found = pieces(choice, outputs(cut, "length"))
    assert [piece.text for piece in found] == ["a", "\ufffd"]
    assert text_of(found) == tokenizer.decode(cut)


def test_every_token_is_told_once_with_the_text_it_belongs_to(tokenizer: Tokenizer) -> None:
    tokens = ids(tokenizer, "ab😀c")
    choice = Choice(0, tokenizer, ["bx"])
    found = pieces(choice, outputs(tokens, "stop"))
    assert [token.id for piece in found for token in piece.tokens] == tokens
    assert [len(piece.tokens) for piece in found] == [1, 5, 1, 0]
    assert [token.offset for piece in found for token in piece.tokens] == [0, 1, 2, 2, 2, 2, 3]


def test_tokens_that_a_stop_string_cut_off_are_counted_and_not_told(tokenizer: Tokenizer) -> None:
    choice = Choice(0, tokenizer, ["cd"])
    found = pieces(choice, outputs(ids(tokenizer, "abcde"), "length"))
    assert text_of(found) == "ab"
    assert [tokenizer.decode([token.id]) for piece in found for token in piece.tokens] == ["a", "b"]
    assert choice.num_tokens == 4


@pytest.mark.parametrize(("end", "num_tokens"), [("length", 3), ("stop", 4)])
def test_the_stop_token_is_counted(tokenizer: Tokenizer, end: str, num_tokens: int) -> None:
    choice = Choice(0, tokenizer, ())
    pieces(choice, outputs(ids(tokenizer, "abc"), end))
    assert choice.num_tokens == num_tokens


def test_without_a_tokenizer_there_are_tokens_alone() -> None:
    found = pieces(Choice(3, None, ()), outputs([7, 8], "stop"))
    assert text_of(found) == ""
    assert [[token.id for token in piece.tokens] for piece in found] == [[7], [8], []]
    assert {piece.index for piece in found} == {3}


def test_a_failure_of_the_engine_is_raised(tokenizer: Tokenizer) -> None:
    choice = Choice(0, tokenizer, ())
    with pytest.raises(InputError, match="finite"):
        choice.push(Output("r", finish_reason="error", error=InputError("not finite")))
