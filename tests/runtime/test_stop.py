from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_artifacts.errors import InputError
from llama_runtime.stop import StopTexts


def streamed(stops: Sequence[str], pieces: Sequence[str]) -> tuple[str, str | None]:
    stream = StopTexts(stops)
    text = "".join([stream.push(piece) for piece in pieces])
    return text + stream.finish(), stream.matched


def expected(stops: Sequence[str], text: str) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_a_stop_over_several_tokens_ends_the_text_before_it() -> None:
    pieces = ["The", " quick", " bro", "wn", " fo", "x", " jumps"]
    assert streamed(["own fox"], pieces) == ("The quick br", "own fox")


@pytest.mark.parametrize(
    ("stops", "text", "result"),
    [
        (["aab"], "aaab", ("a", "aab")),
        (["ab", "abc"], "xabc", ("x", "ab")),
        (["abc", "ab"], "xabc", ("x", "ab")),
        (["bc", "abc"], "xabc", ("x", "abc")),
        (["abcd", "bc"], "abcd", ("a", "bc")),
        (["abcd", "bc"], "abxd", ("abxd", None)),
        (["abab"], "abacabab", ("abac", "abab")),
        (["x", "x"], "axb", ("a", "x")),
        (["\n\n"], "one\ntwo\n\nthree", ("one\ntwo", "\n\n")),
        (["😀"], "a😀b", ("a", "😀")),
        ([], "all of it", ("all of it", None)),
        (["zz"], "", ("", None)),
    ],
)
def test_the_result_is_the_same_streamed_and_whole(
    stops: list[str], text: str, result: tuple[str, str | None]
) -> None:
    assert streamed(stops, [text]) == result
    assert streamed(stops, list(text)) == result


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.text("ab", max_size=5), max_size=8),
)
def test_any_stops_over_any_pieces(stops: list[str], pieces: list[str]) -> None:
    assert streamed(stops, pieces) == expected(stops, "".join(pieces))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.text("ab", max_size=5), max_size=8),
)
def test_only_the_longest_beginning_of_a_stop_is_held_back(
    stops: list[str], pieces: list[str]
) -> None:
    stream = StopTexts(stops)
    text, released = "", ""
    for piece in pieces:
        text += piece
        released += stream.push(piece)
        if stream.matched is not None:
            return
        beginnings = {stop[:num] for stop in stops for num in range(len(stop))}
        held = max((b for b in beginnings if text.endswith(b)), key=len, default="")
        assert released == text[: len(text) - len(held)]


def test_held_text_is_flushed_when_generation_ends_otherwise() -> None:
    stream = StopTexts(["as if"])
    assert stream.push("ple") == "ple"
    assert stream.push("as") == ""
    assert stream.finish() == "as"
    assert stream.finish() == ""


def test_nothing_comes_after_a_match() -> None:
    stream = StopTexts(["."])
    assert stream.push("One. Two.") == "One"
    assert stream.push("Three.") == ""
    assert stream.finish() == ""
    assert stream.matched == "."


def test_a_long_almost_match_is_linear() -> None:
    stop = "a" * 20_000 + "b"
    text = "a" * 40_000
    assert streamed([stop], [text]) == (text, None)


@pytest.mark.parametrize(
    ("stops", "where"), [([""], "stop[0]"), (["a", 3], "stop[1]"), ("END", "stop"), (None, "stop")]
)
def test_a_stop_that_is_no_string_is_refused(stops: list[str], where: str) -> None:
    with pytest.raises(InputError) as caught:
        StopTexts(stops)
    assert caught.value.where == where
    assert caught.value.hint
