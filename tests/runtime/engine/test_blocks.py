from __future__ import annotations

import random

import pytest

from llama_runtime.engine import blocks
from llama_runtime.engine.blocks import PagePool, Prefix

PAGE_SIZE = 4


def filled(pool: PagePool, tokens: list[int]) -> list[int]:
    """Pages of a text that is computed whole, whatever of it was known."""
    known = pool.known(tokens)
    prefix = pool.hold(known)
    pages = known + pool.take(-(-len(tokens) // PAGE_SIZE) - len(known))
    for number in range(len(known), len(tokens) // PAGE_SIZE):
        place = slice(number * PAGE_SIZE, (number + 1) * PAGE_SIZE)
        prefix = pool.publish(pages[number], prefix, tokens[place])
    return pages


def text(num_tokens: int, start: int = 0) -> list[int]:
    return list(range(start, start + num_tokens))


@pytest.mark.parametrize(
    ("other", "num_known"),
    [
        (text(16), 3),  # the last token is computed in any case
        (text(17), 4),
        ([*text(15), 99, 7], 3),
        ([*text(4), *text(12, start=50)], 1),
        ([99, *text(16)], 0),
        (text(4), 0),
        ([*text(4, start=4), *text(8)], 0),  # the same page behind another beginning
        ([*text(4), *text(4, start=8), *text(4, start=12)], 1),
    ],
)
def test_what_is_known_of_a_text(other: list[int], num_known: int) -> None:
    pool = PagePool(20, PAGE_SIZE)
    pages = filled(pool, text(16))
    assert pool.known(other) == pages[:num_known]
    pool.release(pages)
    assert pool.known(other) == pages[:num_known]


def test_texts_whose_hashes_are_all_equal_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "chain_hash", lambda before, tokens: 7)
    pool = PagePool(40, PAGE_SIZE)
    texts = [text(9), [*text(4), *text(5, start=30)], text(9, start=60), text(9, start=4)]
    pages = [filled(pool, tokens) for tokens in texts]
    assert pages[1][0] == pages[0][0]
    for tokens, own in zip(texts, pages, strict=True):
        assert pool.known(tokens) == own[:2]
    assert pool.known([*text(4, start=60), *text(5, start=30)]) == pages[2][:1]
    assert len({page for own in pages for page in own}) == 11
    pool.check(pages)


def test_a_long_chain_is_compared_without_recursion() -> None:
    chains: list[Prefix | None] = [None, None]
    for number in range(5000):
        chains = [Prefix(chain, (number,)) for chain in chains]
    assert chains[0] == chains[1]
    assert chains[0] != Prefix(chains[1], (1,))
    assert chains[0] != "a prefix"


def test_hashes_are_those_of_any_process() -> None:
    assert hash(Prefix(None, (1, 2))) == hash((0, (1, 2)))


def test_the_page_unused_for_longest_goes_first() -> None:
    pool = PagePool(4, PAGE_SIZE)
    old, new = filled(pool, text(4, start=10)), filled(pool, text(4, start=20))
    pool.release(old)
    pool.release(new)
    assert pool.num_cached == 2
    pool.release(filled(pool, text(5, start=10)))  # used again, beside one free page
    assert pool.take(3)[-1] == new[0]
    assert pool.known(text(5, start=20)) == []
    assert pool.known(text(5, start=10)) == old


def test_the_end_of_a_text_goes_before_its_beginning() -> None:
    pool = PagePool(4, PAGE_SIZE)
    pages = filled(pool, text(16))
    pool.release(pages)
    pool.take(2)
    assert pool.known(text(16)) == pages[:2]


def test_a_page_that_two_texts_hold_stays_until_both_let_go() -> None:
    pool = PagePool(4, PAGE_SIZE)
    first = filled(pool, text(5))
    second = filled(pool, text(6))
    assert first[0] == second[0]
    pool.release(first)
    assert (pool.num_used, pool.num_cached) == (2, 0)
    pool.release(second)
    assert (pool.num_used, pool.num_cached) == (0, 1)


def test_of_two_texts_computed_at_once_one_stays_known() -> None:
    pool = PagePool(4, PAGE_SIZE)
    first, second = pool.take(1), pool.take(1)
    prefixes = [pool.publish(pages[0], None, text(4)) for pages in (first, second)]
    assert prefixes[0] is prefixes[1]
    pool.check([first, second])
    pool.release(second)
    assert pool.num_cached == 0
    assert pool.known(text(5)) == first


def test_discarded_pages_are_not_known_any_more() -> None:
    pool = PagePool(6, PAGE_SIZE)
    pages = filled(pool, text(10))
    other = filled(pool, text(9))
    assert pool.discard(other) == [other[2]]
    assert pool.known(text(10)) == []
    pool.check([pages])
    pool.release(pages)
    assert (pool.num_used, pool.num_cached) == (0, 0)


def test_a_pool_without_a_cache_keeps_nothing() -> None:
    pool = PagePool(4, PAGE_SIZE, has_prefix_cache=False)
    pool.release(filled(pool, text(8)))
    assert (pool.known(text(9)), pool.num_cached, pool.num_available) == ([], 0, 4)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("is_colliding", [False, True])
def test_every_page_is_accounted_for_in_long_runs(
    seed: int, is_colliding: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_colliding:
        monkeypatch.setattr(blocks, "chain_hash", lambda before, tokens: len(tokens) % 2)
    rng, pool = random.Random(seed), PagePool(24, PAGE_SIZE)
    held: list[list[int]] = []
    contents: dict[int, list[int]] = {}
    for _ in range(600):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 24))]
        num_pages = -(-len(tokens) // PAGE_SIZE)
        known = pool.known(tokens)
        for number, page in enumerate(known):
            assert contents[page] == tokens[: (number + 1) * PAGE_SIZE]
        if rng.random() < 0.6 and pool.num_to_take(num_pages, known) <= pool.num_available:
            pages = filled(pool, tokens)
            contents |= {
                page: tokens[: (number + 1) * PAGE_SIZE] for number, page in enumerate(pages)
            }
            held.append(pages)
        elif held:
            leave = pool.discard if rng.random() < 0.1 else pool.release
            leave(held.pop(rng.randrange(len(held))))
        pool.check(held)
    for pages in held:
        pool.release(pages)
    assert (pool.num_used, pool.num_available) == (0, 24)
