"""How the next token is chosen from the logits. B rows, V vocabulary, K candidates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llama_artifacts.errors import InputError

if TYPE_CHECKING:
    import torch

GREEDY_BELOW = 1e-5
"""A lower temperature means greedy: dividing by it would overflow."""

_MAX_TEMPERATURE = 1e30  # beyond it all tokens are equally likely in float32 anyway
_NUM_LIKELY = 1024  # top_p seldom needs more tokens than these
_SEED_RANGE = 1 << 64
_ROW_STRIDE = 0x9E3779B97F4A7C15  # spreads the seeds of the rows over the whole range


@dataclass(frozen=True)
class SamplingParams:
    """How to choose a token; the default is greedy.

    The filters apply in the order temperature, `top_k`, `top_p`, `min_p`.

    Attributes:
        temperature: divides the logits; below `GREEDY_BELOW` the likeliest token is taken.
        top_k: keeps the k likeliest tokens; 0 keeps all.
        top_p: keeps the likeliest tokens until their probabilities reach this sum; 0 keeps one.
        min_p: keeps tokens that have at least this share of the likeliest one's probability.
        seed: makes the draws repeatable; None draws a fresh seed.

    Raises:
        InputError: a field has the wrong type or is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, math.inf)
        _check_int("top_k", self.top_k, None)
        _check_number("top_p", self.top_p, 1.0)
        _check_number("min_p", self.min_p, 1.0)
        if self.seed is not None:
            _check_int("seed", self.seed, _SEED_RANGE - 1)

    @property
    def is_greedy(self) -> bool:
        """Whether only the likeliest token can be chosen."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1 or self.top_p == 0.0


class Sampler:
    """Chooses tokens; row r of every call draws from a generator of its own.

    So a row gives the same tokens whatever the number of rows beside it, and row 0 of a batch
    gives those of the same seed alone. Not safe to share between threads.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self._base_seed = params.seed
        self._generators: list[torch.Generator] = []

    def sample(self, logits: torch.Tensor) -> list[int]:
        """Returns one token per row of `logits` ([V] is one row, [B,V] is B rows).

        Raises:
            InputError: the logits have another shape, are not floating point, or a row has no
                finite maximum (a NaN, +inf, or -inf everywhere). Nothing was drawn.
        """
        rows = _checked_rows(logits)
        if self.params.is_greedy:
            return [int(token) for token in rows.argmax(dim=-1).tolist()]
        return [self._sample_row(row, index) for index, row in enumerate(rows)]

    def _sample_row(self, logits: torch.Tensor, row: int) -> int:
        probs, tokens = _candidates(logits, self.params)
        pick = _pick(probs, self._uniform(row))
        return pick if tokens is None else int(tokens[pick])

    def _uniform(self, row: int) -> torch.Tensor:
        """The next number in [0, 1) of the row's generator, in float64."""
        import torch

        while len(self._generators) <= row:
            self._generators.append(self._new_generator(len(self._generators)))
        return torch.rand(1, generator=self._generators[row], dtype=torch.float64)

    def _new_generator(self, row: int) -> torch.Generator:
        import torch

        generator = torch.Generator()
        if self._base_seed is None:
            self._base_seed = generator.seed()
        return generator.manual_seed((self._base_seed + row * _ROW_STRIDE) % _SEED_RANGE)


def _candidates(
    logits: torch.Tensor, params: SamplingParams
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The probabilities [K] of the tokens that may be chosen and their ids (None: 0 to V-1).

    What a filter removes has probability 0; the rest need not sum to 1.
    """
    # With the maximum at 0 nothing overflows upwards.
    scaled = (logits - logits.amax()) / min(params.temperature, _MAX_TEMPERATURE)
    probs, tokens = scaled.softmax(dim=-1), None
    if params.top_k > 0:
        probs, tokens = probs.topk(min(params.top_k, len(probs)))
    if params.top_p < 1.0:
        if tokens is None:
            probs, tokens = _best_first(probs, params.top_p)
            wanted = params.top_p
        else:
            wanted = params.top_p * float(probs.double().sum())
        sums_before = probs.double().cumsum(dim=-1) - probs
        probs = probs.masked_fill(sums_before >= wanted, 0.0)
    if params.min_p > 0.0:
        probs = probs.masked_fill(probs < params.min_p * probs.amax(), 0.0)
    return probs, tokens


def _best_first(probs: torch.Tensor, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest tokens, at least as many as `top_p` needs: sorting all costs far more."""
    best, tokens = probs.topk(min(_NUM_LIKELY, len(probs)))
    if float(best.double().sum()) >= top_p:
        return best, tokens
    return probs.sort(dim=-1, descending=True, stable=True)


def _pick(probs: torch.Tensor, uniform: torch.Tensor) -> int:
    """The index at which the running sum passes the share `uniform` [1] of the whole sum."""
    import torch

    sums = probs.double().cumsum(dim=-1)
    total = sums[-1:]
    # Rounding must not reach the whole sum, past the last token that has any probability.
    below_total = torch.nextafter(total, torch.zeros_like(total))
    wanted = torch.minimum(uniform.to(sums.device) * total, below_total)
    return int(torch.searchsorted(sums, wanted, right=True))


def _checked_rows(logits: torch.Tensor) -> torch.Tensor:
    """The logits as float32 [B,V]."""
    import torch

    if logits.ndim not in (1, 2) or logits.shape[-1] == 0:
        raise _refused("logits", "shape [V] or [B,V]", list(logits.shape))
    if not logits.is_floating_point():
        raise _refused("logits", "floating point", logits.dtype)
    rows = logits.detach().float().reshape(-1, logits.shape[-1])
    best = rows.amax(dim=-1)
    is_bad = ~torch.isfinite(best)
    if bool(is_bad.any()):
        row = int(is_bad.nonzero()[0])
        raise _refused(f"logits[{row}]", "a finite maximum", float(best[row]))
    return rows


def _check_number(name: str, value: object, high: float) -> None:
    expected = "a finite number from 0" if high == math.inf else f"a number from 0 to {high:g}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _refused(name, expected, value)
    if not math.isfinite(value) or not 0 <= value <= high:
        raise _refused(name, expected, value)


def _check_int(name: str, value: object, high: int | None) -> None:
    expected = "a whole number from 0" if high is None else f"a whole number from 0 to {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise _refused(name, expected, value)
    if value < 0 or (high is not None and value > high):
        raise _refused(name, expected, value)


_HINTS = {
    "temperature": "0 is greedy, 1 samples from the model's own distribution",
    "top_k": "0 keeps every token",
    "top_p": "1 keeps every token",
    "min_p": "0 keeps every token",
    "seed": "leave it out for a fresh one",
    "logits": "sample from the logits that an entry returned",
}


def _refused(name: str, expected: str, got: object) -> InputError:
    shown = repr(got)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return InputError(
        f"expected {expected}, got {shown}", where=name, hint=_HINTS[name.split("[")[0]]
    )
