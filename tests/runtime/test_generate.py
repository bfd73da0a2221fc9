from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import llama_runtime
from llama_artifacts.errors import InputError, SessionError, TokenizerError
from llama_runtime import LoadedBundle
from tests.runtime.loading import FORMAT_NAMES, copied, greedy_tokens, random_tokens

Loaded = dict[str, LoadedBundle]
PROMPT = "Why is the sky blue?"


@pytest.fixture(scope="module")
def endless(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> LoadedBundle:
    """The tiny bundle without stop tokens."""
    folder = copied(tiny_bundle, tmp_path_factory.mktemp("endless") / "b", stop_tokens=())
    return llama_runtime.load(folder, format="onnx")


@pytest.fixture(scope="module")
def short(short_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> LoadedBundle:
    """15 positions and no stop tokens."""
    folder = copied(short_bundle, tmp_path_factory.mktemp("short") / "b", stop_tokens=())
    return llama_runtime.load(folder)


@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_greedy_is_the_likeliest_token_each_time(
    tiny_bundle: Path, tiny_checkpoint: Path, tmp_path: Path, format: Any
) -> None:
    bundle = llama_runtime.load(copied(tiny_bundle, tmp_path / "b", stop_tokens=()), format=format)
    prompt = random_tokens(21).tolist()
    stream = bundle.generate_tokens(prompt, max_new=60)
    assert list(stream) == stream.tokens == greedy_tokens(tiny_checkpoint, prompt, 60)
    assert stream.finish_reason == "length"
    assert stream.prompt_tokens == prompt


def test_a_prompt_and_new_tokens_past_the_capacity(
    short: LoadedBundle, tiny_checkpoint: Path
) -> None:
    """15 positions: ten of the prompt, five of new tokens, and one more that needs none."""
    prompt = random_tokens(10).tolist()
    stream = short.generate_tokens(prompt, max_new=50)
    assert list(stream) == greedy_tokens(tiny_checkpoint, prompt, 6)
    assert stream.finish_reason == "length"


def test_a_prompt_that_fills_the_capacity(short: LoadedBundle) -> None:
    stream = short.generate_tokens([1] * 15, max_new=50)
    assert len(list(stream)) == 1
    assert stream.finish_reason == "length"


def test_a_prompt_that_does_not_fit_is_refused_at_once(short: LoadedBundle) -> None:
    for call in (short.generate_tokens, short.generate):
        with pytest.raises(InputError, match="16 tokens do not fit: 0 \\+ 16 positions"):
            call([1] * 16)


@pytest.mark.parametrize("prompt", [[], [128], [-1], [1.5], ["a"], None, 7])
def test_a_refused_prompt(endless: LoadedBundle, prompt: Any) -> None:
    with pytest.raises(InputError):
        endless.generate_tokens(prompt)


@pytest.mark.parametrize(
    "options",
    [
        {"max_new": 0},
        {"max_new": -1},
        {"max_new": True},
        {"max_new": 1.5},
        {"temperature": -1.0},
        {"top_p": 2.0},
        {"min_p": -0.1},
        {"top_k": -1},
        {"seed": -1},
        {"stop": [""]},
        {"stop": "text"},
    ],
)
def test_a_refused_option_is_refused_at_once(
    endless: LoadedBundle, options: dict[str, Any]
) -> None:
    with pytest.raises(InputError):
        endless.generate(PROMPT, **options)


def test_a_seed_repeats_the_draws(endless: LoadedBundle) -> None:
    def draw(seed: int | None) -> list[int]:
        return list(endless.generate_tokens([1, 2, 3], max_new=40, temperature=2.0, seed=seed))

    assert draw(7) == draw(7)
    assert draw(7) != draw(8)
    assert draw(None) != draw(None)


def test_a_vanishing_temperature_is_greedy(endless: LoadedBundle) -> None:
    greedy = list(endless.generate_tokens([1, 2, 3], max_new=20))
    for options in ({"temperature": 1e-45}, {"temperature": 2.0, "top_k": 1}, {"top_p": 0.0}):
        assert list(endless.generate_tokens([1, 2, 3], max_new=20, **options)) == greedy


@pytest.mark.parametrize("index", [0, 5])
def test_a_stop_token_ends_the_stream_and_is_not_delivered(
    tiny_bundle: Path, endless: LoadedBundle, tmp_path: Path, index: int
) -> None:
    tokens = list(endless.generate_tokens([1, 2, 3], max_new=20))
    stop = tokens[index]
    folder = copied(tiny_bundle, tmp_path / "b", stop_tokens=(127, stop))
    bundle = llama_runtime.load(folder, format="onnx")
    stream = bundle.generate_tokens([1, 2, 3], max_new=20)
    assert list(stream) == stream.tokens == tokens[: tokens.index(stop)]
    assert stream.finish_reason == "stop"
    text = bundle.generate([1, 2, 3], max_new=20)
    assert "".join(text) == bundle.tokenizer.decode(stream.tokens)
    assert text.finish_reason == "stop"


def test_pieces_are_the_text_of_the_tokens(endless: LoadedBundle) -> None:
    for seed in range(8):
        text = endless.generate(PROMPT, max_new=50, temperature=1.5, seed=seed)
        pieces = list(text)
        assert "".join(pieces) == endless.tokenizer.decode(text.tokens)
        assert all(pieces)
        assert len(text.tokens) == 50
        assert text.finish_reason == "length"


def sampled_text(bundle: LoadedBundle, **options: Any) -> Any:
    return bundle.generate(PROMPT, max_new=60, temperature=1.0, seed=3, **options)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_stop_string_ends_the_text_before_it(endless: LoadedBundle, length: int) -> None:
    whole = "".join(sampled_text(endless))
    stop = whole[20 : 20 + length]
    text = sampled_text(endless, stop=[stop, "never there"])
    assert "".join(text) == whole[: whole.index(stop)]
    assert text.finish_reason == "stop"
    assert len(text.tokens) < 60


def test_a_stop_string_that_only_begins_is_delivered(endless: LoadedBundle) -> None:
    whole = "".join(sampled_text(endless))
    text = sampled_text(endless, stop=[whole[-2:] + "and more"])
    assert "".join(text) == whole
    assert text.finish_reason == "length"


def test_a_stop_string_of_the_prompt_does_not_match(endless: LoadedBundle) -> None:
    whole = "".join(sampled_text(endless))
    assert "sky blue" not in whole
    assert "".join(sampled_text(endless, stop=["sky blue"])) == whole


def test_a_prompt_as_text_as_messages_and_as_ids(endless: LoadedBundle) -> None:
    def tokens(prompt: Any, **options: Any) -> tuple[list[int], list[int]]:
        text = endless.generate(prompt, max_new=5, **options)
        list(text)
        return text.prompt_tokens, text.tokens

    messages = [{"role": "user", "content": PROMPT}]
    chat = endless.tokenizer.encode_chat(messages)
    assert tokens(PROMPT)[0] == chat
    assert tokens(PROMPT) == tokens(messages) == tokens(chat)
    assert tokens(PROMPT, chat=False)[0] == endless.tokenizer.encode(PROMPT) != chat
    system = [{"role": "system", "content": "Be brief."}, *messages]
    assert tokens(PROMPT, system="Be brief.") == tokens(messages, system="Be brief.")
    assert tokens(PROMPT, system="Be brief.") == tokens(system)


@pytest.mark.parametrize(
    ("prompt", "options", "where"),
    [
        (PROMPT, {"chat": False, "system": "s"}, "system"),
        ([1, 2], {"system": "s"}, "system"),
        ([1, 2], {"chat": True}, "chat"),
        ([{"role": "user", "content": "x"}], {"chat": False}, "chat"),
    ],
)
def test_an_option_without_effect_is_refused(
    endless: LoadedBundle, prompt: Any, options: dict[str, Any], where: str
) -> None:
    with pytest.raises(InputError) as caught:
        endless.generate(prompt, **options)
    assert caught.value.where == where


def test_nothing_is_lost_when_a_reader_stops_early(endless: LoadedBundle) -> None:
    expected = list(endless.generate_tokens([1, 2, 3], max_new=10))
    stream = endless.generate_tokens([1, 2, 3], max_new=10)
    assert next(stream) == expected[0]
    for token in stream:
        if token == expected[4] and len(stream.tokens) >= 5:
            break
    assert stream.tokens == expected[:5]
    assert stream.finish_reason is None
    iterator: Any = iter(stream)
    iterator.close()
    assert list(stream) == []
    assert stream.tokens == expected[:5]
    assert list(endless.generate_tokens([1, 2, 3], max_new=10)) == expected


def test_streams_take_turns(endless: LoadedBundle) -> None:
    prompts = ([1, 2, 3], [9, 8, 7, 6])
    alone = [list(endless.generate_tokens(prompt, max_new=12)) for prompt in prompts]
    streams = [endless.generate_tokens(prompt, max_new=12) for prompt in prompts]
    assert [list(row) for row in zip(*zip(*streams, strict=True), strict=True)] == alone


def test_a_step_that_fails_ends_the_stream_with_its_error(
    endless: LoadedBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = endless.generate_tokens([1, 2, 3], max_new=10)
    next(stream)

    def fail(*args: Any) -> Any:
        raise RuntimeError("boom")

    with monkeypatch.context() as patch:
        patch.setattr(endless.entry("decode")._program, "run", fail)
        with pytest.raises(RuntimeError, match="boom"):
            next(stream)
    assert stream.finish_reason is None
    assert len(stream.tokens) == 1
    assert len(list(endless.generate_tokens([1, 2, 3], max_new=10))) == 10


def test_a_broken_session_takes_no_prompt(endless: LoadedBundle) -> None:
    session = endless.session()
    session._is_broken = True
    with pytest.raises(SessionError, match="failed in the middle"):
        session.checked([1])


def test_a_bundle_without_a_tokenizer(tiny_bundle: Path, tmp_path: Path) -> None:
    folder = copied(
        tiny_bundle, tmp_path / "b", tokenizer=None, has_chat_template=False, stop_tokens=()
    )
    bundle = llama_runtime.load(folder, format="onnx")
    assert len(list(bundle.generate_tokens([1, 2], max_new=3))) == 3
    for prompt in (PROMPT, [1, 2]):
        with pytest.raises(TokenizerError, match="the bundle has no tokenizer"):
            bundle.generate(prompt)
