"""The generator against published vectors and against what JAX gives for the same keys."""

from __future__ import annotations

import pytest
import torch

from llama_export.model.threefry import MASK, bits, gumbel, split, threefry2x32


def words(*values: int) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = (torch.tensor(value) for value in values)
    return first, second


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((MASK, MASK), (MASK, MASK), (0x1CB996FC, 0xBB002BE7)),
        ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_known_answers_of_twenty_rounds(
    counter: tuple[int, int], key: tuple[int, int], expected: tuple[int, int]
) -> None:
    """From the authors' own list (Random123, kat_vectors)."""
    assert tuple(map(int, threefry2x32(words(*key), words(*counter)))) == expected


# jax 0.10.2: `jax.random.split(jax.random.PRNGKey(seed), 5)`, `jax.random.bits(key, (2, 3))`.
SPLITS = {
    0: [
        [1797259609, 2579123966],
        [928981903, 3453687069],
        [4146024105, 2718843009],
        [2467461003, 3840466878],
        [2285895361, 433833334],
    ],
    42: [
        [1832780943, 270669613],
        [64467757, 2916123636],
        [2465931498, 255383827],
        [3134548294, 894150801],
        [2954079971, 3276725750],
    ],
}
BITS = {
    0: [[4070199207, 4202968722, 1427181096], [2012915765, 2447653815, 710830403]],
    42: [[2098992034, 2919706841, 2646866425], [2409546199, 1935504149, 2516274904]],
}
# The bits of key number 2 of `jax.random.split(jax.random.PRNGKey(seed), 3)`.
BITS_OF_KEY_2 = {
    0: [[3875991361, 3918267949, 1464788624], [945284546, 2784756958, 2179847627]],
    42: [[2865777128, 3098761794, 544579079], [1521607940, 1808574863, 180706792]],
}
# `jax.random.gumbel(key, (4,), mode="low")`.
GUMBEL = {
    0: [2.923372507095337, 3.83261775970459, -0.09689324349164963, 0.2772570848464966],
    42: [0.3340933918952942, 0.952019453048706, 0.7255305647850037, 0.5481715202331543],
}


@pytest.mark.parametrize("seed", [0, 42])
def test_split_and_bits_are_those_of_jax(seed: int) -> None:
    key = words(0, seed)
    assert torch.stack(split(key, torch.arange(5)), -1).tolist() == SPLITS[seed]
    assert bits(key, (2, 3)).tolist() == BITS[seed]
    assert bits(split(key, torch.tensor(2)), (2, 3)).tolist() == BITS_OF_KEY_2[seed]


@pytest.mark.parametrize("seed", [0, 42])
def test_noise_is_that_of_jax_up_to_the_rounding_of_logarithms(seed: int) -> None:
    noise = gumbel(bits(words(0, seed), (1, 4)))
    torch.testing.assert_close(noise, torch.tensor([GUMBEL[seed]]), rtol=1e-6, atol=1e-6)


def test_the_extreme_bits_give_finite_noise() -> None:
    noise = gumbel(torch.tensor([0, 1 << 9, MASK]))
    assert noise.isfinite().all()
    assert noise.tolist() == sorted(noise.tolist())


def test_draws_follow_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    num_draws = 20_000
    noise = gumbel(bits(words(0, 7), (num_draws, 4)))
    counts = (logits + noise).argmax(-1).bincount(minlength=4)
    torch.testing.assert_close(counts / num_draws, logits.softmax(-1), atol=0.015, rtol=0)
