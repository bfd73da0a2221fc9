"""How the next token is chosen from the logits. B rows, V vocabulary, K candidates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from llama_artifacts.errors import InputError

if TYPE_CHECKING:
    import torch

GREEDY_BELOW = 1e-5
"""A lower temperature means greedy: dividing by it would overflow."""

_MAX_TEMPERATURE = 1e30  # beyond it all tokens are equally likely in float32 anyway
_MAX_SHIFT = 1e6  # of a logit; more would only risk an overflow
_REPETITION = (0.01, 100.0)
_NUM_LIKELY = (64, 1024)  # top_p seldom needs more tokens than these
_SEED_RANGE = 1 << 64
_ROW_STRIDE = 0x9E3779B97F4A7C15  # spreads the seeds of the rows over the whole range


@dataclass(frozen=True)
class SamplingParams:
    """How to choose a token; the default is greedy.

    The logits are first changed by the penalties, then by `logit_bias`; the filters apply after
    that in the order temperature, `top_k`, `top_p`, `min_p`.

    Attributes:
        temperature: divides the logits; below `GREEDY_BELOW` the likeliest token is taken.
        top_k: keeps the k likeliest tokens; 0 keeps all.
        top_p: keeps the likeliest tokens until their probabilities reach this sum; 0 keeps one.
        min_p: keeps tokens that have at least this share of the likeliest one's probability.
        seed: makes the draws repeatable; None draws a fresh seed.
        repetition_penalty: divides positive logits of tokens of the prompt or the new text, and
            multiplies negative ones (Keskar et al. 2019); 1 changes nothing.
        presence_penalty: is subtracted from the logits of tokens that the new text has.
        frequency_penalty: is subtracted once for each time that the new text has the token.
        logit_bias: is added to the logits of these token ids.

    Raises:
        InputError: a field has the wrong type or is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0.0, math.inf)
        _check_int("top_k", self.top_k, None)
        _check_number("top_p", self.top_p, 0.0, 1.0)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_int("seed", self.seed, _SEED_RANGE - 1)
        _check_number("repetition_penalty", self.repetition_penalty, *_REPETITION)
        _check_number("presence_penalty", self.presence_penalty, -_MAX_SHIFT, _MAX_SHIFT)
        _check_number("frequency_penalty", self.frequency_penalty, -_MAX_SHIFT, _MAX_SHIFT)
        if not isinstance(self.logit_bias, Mapping):
            raise _refused("logit_bias", "numbers by token id", self.logit_bias)
        for token, bias in self.logit_bias.items():
            _check_int("logit_bias", token, None)
            _check_number("logit_bias", bias, -_MAX_SHIFT, _MAX_SHIFT)
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    @property
    def is_greedy(self) -> bool:
        """Whether only the likeliest token can be chosen."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1 or self.top_p == 0.0

    @property
    def changes_logits(self) -> bool:
        """Whether there is a penalty or a bias."""
        shifts = (self.presence_penalty, self.frequency_penalty, self.logit_bias)
        return self.repetition_penalty != 1.0 or any(shifts)


class Chooser:
    """Chooses the tokens of one text: its parameters, its draws, and its tokens so far.

    What it chooses depends on the logits and on its own past alone, so a text is the same alone
    and in any batch. Choosing twice without `add` in between gives the same token.

    Args:
        params: how to choose; a seed of None becomes a fresh one.
        prompt: the tokens that only the repetition penalty counts.
    """

    def __init__(self, params: SamplingParams, prompt: Iterable[int] = ()) -> None:
        self.params = params
        # How often the new text has a token, in the order of the tokens' first appearance.
        self._counts = dict.fromkeys(prompt, 0) if params.changes_logits else {}
        self._generator: torch.Generator | None = None
        self._draw: torch.Tensor | None = None

    @property
    def takes_likeliest(self) -> bool:
        """Whether the token is the likeliest by the logits as they are."""
        return self.params.is_greedy and not self.params.changes_logits

    def choose(self, logits: torch.Tensor) -> int:
        """The next token by the logits float32 [V], which stay as they are.

        Raises:
            InputError: a token of `logit_bias` is not in the vocabulary, or the logits have no
                finite maximum (any more).
        """
        if self.params.changes_logits:
            logits = self._changed(logits)
            best = float(logits.amax())
            if not math.isfinite(best):
                raise _refused("logits", "a finite maximum", best)
        if self.params.is_greedy:
            return int(logits.argmax())
        probs, tokens = _candidates(logits, self.params)
        pick = _pick(probs, self._uniform())
        return pick if tokens is None else int(tokens[pick])

    def add(self, token: int) -> None:
        """Tells that this is the next token of the text."""
        self._draw = None
        if self.params.changes_logits:
            self._counts[token] = self._counts.get(token, 0) + 1

    def _changed(self, logits: torch.Tensor) -> torch.Tensor:
        import torch

        params, changed = self.params, logits.clone()
        if self._counts:
            tokens = torch.tensor(list(self._counts), device=logits.device)
            counts = torch.tensor(list(self._counts.values()), device=logits.device)
            old, penalty = logits[tokens], params.repetition_penalty
            new = torch.where(old > 0, old / penalty, old * penalty)
            new -= params.presence_penalty * (counts > 0) + params.frequency_penalty * counts
            changed[tokens] = new
        if params.logit_bias:
            if max(params.logit_bias) >= len(logits):
                expected = f"token ids below {len(logits)}"
                raise _refused("logit_bias", expected, max(params.logit_bias))
            tokens = torch.tensor(list(params.logit_bias), device=logits.device)
            values = list(params.logit_bias.values())
            changed[tokens] += torch.tensor(values, dtype=changed.dtype, device=logits.device)
        return changed

    def _uniform(self) -> torch.Tensor:
        """The number in [0, 1) of the token that comes next, in float64 [1]."""
        import torch

        if self._generator is None:
            self._generator = torch.Generator()
            if self.params.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(self.params.seed)
        if self._draw is None:
            self._draw = torch.rand(1, generator=self._generator, dtype=torch.float64)
        return self._draw


class Sampler:
    """Chooses tokens; row r of every call draws from a generator of its own.

    So a row gives the same tokens whatever the number of rows beside it, and row 0 of a batch
    gives those of the same seed alone. Not safe to share between threads.

    Args:
        params: how to choose.
        prompt: what every row begins with, for the repetition penalty.
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int] = ()) -> None:
        self.params = params
        self._prompt = tuple(prompt)
        self._base_seed = params.seed
        self._choosers: list[Chooser] = []

    def sample(self, logits: torch.Tensor) -> list[int]:
        """Returns one token per row of `logits` ([V] is one row, [B,V] is B rows).

        Raises:
            InputError: the logits have another shape, are not floating point, or a row has no
                finite maximum (a NaN, +inf, or -inf everywhere). Nothing was drawn.
        """
        rows = as_rows(logits)
        while len(self._choosers) < len(rows):
            self._choosers.append(self._new_chooser(len(self._choosers)))
        choosers = self._choosers[: len(rows)]
        tokens = []
        for token in choose_rows(rows, choosers):
            if isinstance(token, InputError):
                raise token
            tokens.append(token)
        for chooser, token in zip(choosers, tokens, strict=True):
            chooser.add(token)
        return tokens

    def _new_chooser(self, row: int) -> Chooser:
        import torch

        if self._base_seed is None:
            self._base_seed = torch.Generator().seed()
        seed = (self._base_seed + row * _ROW_STRIDE) % _SEED_RANGE
        return Chooser(replace(self.params, seed=seed), self._prompt)


def choose_rows(rows: torch.Tensor, choosers: Sequence[Chooser]) -> list[int | InputError]:
    """The next token of each row of logits float32 [B,V], each with its own chooser.

    A row that fails has its error in its place, and leaves the others alone. The rows that only
    take the likeliest token are done together; every row gets what it gets alone.
    """
    best = rows.amax(dim=-1).tolist()
    likeliest = _likeliest(rows) if any(c.takes_likeliest for c in choosers) else []
    return [
        _choose_row(rows, row, chooser, best[row], likeliest)
        for row, chooser in enumerate(choosers)
    ]


def as_rows(logits: torch.Tensor) -> torch.Tensor:
    """Logits [V] or [B,V] as float32 [B,V].

    Raises:
        InputError: another shape, or not floating point.
    """
    if logits.ndim not in (1, 2) or logits.shape[-1] == 0:
        raise _refused("logits", "shape [V] or [B,V]", list(logits.shape))
    if not logits.is_floating_point():
        raise _refused("logits", "floating point", logits.dtype)
    return logits.detach().float().reshape(-1, logits.shape[-1])


def _choose_row(
    rows: torch.Tensor, row: int, chooser: Chooser, best: float, likeliest: Sequence[int]
) -> int | InputError:
    if not math.isfinite(best):
        return _refused(f"logits[{row}]", "a finite maximum", best)
    if chooser.takes_likeliest:
        return likeliest[row]
    try:
        return chooser.choose(rows[row])
    except InputError as error:
        return error


def _likeliest(rows: torch.Tensor) -> list[int]:
    """The first of the largest of each row."""
    if rows.device.type == "cpu":
        # NumPy's is vectorised along the row, torch's is not.
        return [int(token) for token in rows.numpy().argmax(-1)]
    return [int(token) for token in rows.argmax(-1).tolist()]


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
    for num_likely in _NUM_LIKELY:
        best, tokens = probs.topk(min(num_likely, len(probs)))
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


def _check_number(name: str, value: object, low: float, high: float) -> None:
    expected = f"a number from {low:g} to {high:g}"
    if high == math.inf:
        expected = f"a finite number from {low:g}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _refused(name, expected, value)
    if not math.isfinite(value) or not low <= value <= high:
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
    "repetition_penalty": "1 changes nothing",
    "presence_penalty": "0 changes nothing",
    "frequency_penalty": "0 changes nothing",
    "logit_bias": "such as {50: -100.0}",
    "logits": "sample from the logits that an entry returned",
}


def _refused(name: str, expected: str, got: object) -> InputError:
    shown = repr(got)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return InputError(
        f"expected {expected}, got {shown}", where=name, hint=_HINTS[name.split("[")[0]]
    )
