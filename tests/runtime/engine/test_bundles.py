"""The engine on real programs against transformers, which sees each text alone and whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import llama_runtime
from llama_artifacts.manifest import FORMATS, Format
from llama_runtime import LoadedBundle, SamplingParams
from llama_runtime.engine import Engine, Output, Request
from tests.runtime.engine.fakes import finish, tokens_of
from tests.runtime.loading import POISON, expected_logits, random_tokens, reduced

pytestmark = pytest.mark.slow  # the bundle takes minutes to build

ATOL = 1e-4
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 60)


@pytest.fixture(scope="module", params=FORMATS)
def bundle(request: pytest.FixtureRequest, tiny_packed_bundle: Path) -> LoadedBundle:
    format: Format = request.param
    return llama_runtime.load(tiny_packed_bundle, format=format)


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    """Of several lengths, some with a common beginning."""
    tokens = random_tokens(60).tolist()
    others = random_tokens(len(LENGTHS), 60, seed=2).tolist()
    return [
        tuple((tokens[:16] + other[16:])[:length] if number % 2 else other[:length])
        for number, (other, length) in enumerate(zip(others, LENGTHS, strict=True))
    ]


def poisoned(engine: Engine) -> Engine:
    """Shows a read of what was never written; scratch holds what padding writes there."""
    for tensor in engine._programs._states.values():
        tensor.fill_(POISON)
    return engine


def check_against_the_whole(
    checkpoint: Path, prompt: tuple[int, ...], outputs: list[Output]
) -> None:
    """Each token is the likeliest after all before it, with the log-probability that it has."""
    tokens = tokens_of(outputs)
    logits = expected_logits(checkpoint, torch.tensor([[*prompt, *tokens]]))[0]
    log_probs = logits[len(prompt) - 1 : -1].log_softmax(-1)
    assert tokens == log_probs.argmax(-1).tolist()
    given = torch.tensor([output.logprob for output in outputs])
    torch.testing.assert_close(given, log_probs.amax(-1), atol=ATOL, rtol=0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rows": 1},
        {"token_budget": 7},
        {"pages": 9, "rows": 5},
        {"pages": 30, "has_prefix_cache": False},
    ],
    ids=str,
)
def test_many_texts_are_those_of_the_whole_model(
    bundle: LoadedBundle,
    prompts: list[tuple[int, ...]],
    tiny_checkpoint: Path,
    options: dict[str, int],
) -> None:
    engine = poisoned(Engine(bundle, **{"pages": 40, **options}))  # type: ignore[arg-type]
    for number, prompt in enumerate(prompts):
        engine.add(Request(str(number), prompt, SamplingParams(), 12, num_logprobs=0))
    outputs = finish(engine)
    for number, prompt in enumerate(prompts):
        check_against_the_whole(tiny_checkpoint, prompt, outputs[str(number)])


def test_a_known_beginning_changes_nothing(bundle: LoadedBundle, tiny_checkpoint: Path) -> None:
    first = tuple(random_tokens(32, seed=5).tolist())
    engine = poisoned(Engine(bundle, pages=20))
    for name, prompt, num_hit in (
        ("a", first, 0),
        ("again", first, 16),
        ("last differs", (*first[:31], (first[31] + 1) % 128), 16),
        ("longer", (*first, *first[:9]), 32),
    ):
        before = engine.stats.prefix_hit_tokens
        engine.add(Request(name, prompt, SamplingParams(), 8, num_logprobs=0))
        check_against_the_whole(tiny_checkpoint, prompt, finish(engine)[name])
        assert engine.stats.prefix_hit_tokens - before == num_hit


def test_other_content_beside_a_text_changes_no_bit(bundle: LoadedBundle) -> None:
    own = tuple(random_tokens(20, seed=6).tolist())
    runs = []
    for seed in (7, 8):
        engine = poisoned(Engine(bundle, pages=20, has_prefix_cache=False))
        engine.add(Request("own", own, SamplingParams(), 10, num_logprobs=128))
        beside = tuple(random_tokens(25, seed=seed).tolist())
        engine.add(Request("beside", beside, SamplingParams(), 10))
        runs.append(finish(engine)["own"])
    assert runs[0] == runs[1]


def test_a_seed_gives_the_text_that_a_session_gives(
    bundle: LoadedBundle, tiny_bundle: Path, prompts: list[tuple[int, ...]]
) -> None:
    session = llama_runtime.load(tiny_bundle, format="pt2")
    engine = Engine(bundle, pages=40)
    for number, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.8, top_p=0.95, seed=number)
        engine.add(Request(str(number), prompt, params, 10, frozenset({2})))
    outputs = finish(engine)
    for number, prompt in enumerate(prompts):
        stream = session.generate_tokens(
            prompt, max_new=10, temperature=0.8, top_p=0.95, seed=number
        )
        assert tokens_of(outputs[str(number)]) == list(stream)
        assert outputs[str(number)][-1].finish_reason == stream.finish_reason


def test_a_bundle_without_the_mixed_entry(
    tiny_packed_bundle: Path,
    tmp_path: Path,
    tiny_checkpoint: Path,
    prompts: list[tuple[int, ...]],
) -> None:
    folder = reduced(tiny_packed_bundle, tmp_path / "b", lambda p: p.entry != "step_paged")
    engine = poisoned(Engine(llama_runtime.load(folder, format="pt2"), pages=20, token_budget=16))
    for number, prompt in enumerate(prompts):
        engine.add(Request(str(number), prompt, SamplingParams(), 8, num_logprobs=0))
    outputs = finish(engine)
    for number, prompt in enumerate(prompts):
        check_against_the_whole(tiny_checkpoint, prompt, outputs[str(number)])
