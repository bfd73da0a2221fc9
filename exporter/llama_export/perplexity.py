"""Perplexity of a text under a bundle, through its entry `log_probs_packed`.

The text is cut into windows of N tokens that start every `stride` tokens. In each window only the
tokens that no window before it counted are scored, so that each token is scored once, and, after
the first window, with at least N - stride tokens before it. This is the strided scheme of
transformers' documentation, "Perplexity of fixed-length models". Several windows go into one call,
as segments that do not see each other; positions begin at 0 in each.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import llama_runtime
from llama_artifacts.errors import CompatibilityError, InputError
from llama_artifacts.manifest import Format, Manifest
from llama_artifacts.signature import Signature
from llama_export.report import Reporter
from llama_runtime import Entry, LoadedBundle

ENTRY = "log_probs_packed"
MAX_DEFAULT_WINDOW = 1024
MIN_WINDOW = 2
MAX_NLL = 700.0
"""exp of more than this is no float."""

_MORE_TEXT = "give a longer text: thousands of tokens for a figure that means something"


@dataclass(frozen=True)
class Perplexity:
    """What a bundle makes of a text.

    Attributes:
        name: the model's name in the manifest.
        format: of the program that was run.
        dtype: its compute dtype.
        window: tokens of a window.
        stride: tokens from the start of a window to the start of the next.
        num_tokens: tokens that were scored: all but the first.
        nll: mean of -log p of a scored token, in nats.
        perplexity: exp(nll); comparable between models of the same tokenizer.
        bits_per_byte: bits of all scored tokens, by the bytes of the text in UTF-8; comparable
            between any models.
        change: of the perplexity against the first bundle's, as a share of that; None for the
            first, and where the two did not see the same tokens.
    """

    name: str
    format: Format
    dtype: str
    window: int
    stride: int
    num_tokens: int
    nll: float
    perplexity: float
    bits_per_byte: float
    change: float | None


@dataclass(frozen=True)
class _Window:
    """Tokens from `start` to `end`, of which those from `first` on are scored."""

    start: int
    first: int
    end: int

    @property
    def num_fed(self) -> int:
        """Nothing follows the last token, so it is a target only."""
        return self.end - self.start - 1


def perplexities(
    folders: Sequence[Path],
    text: str,
    *,
    window: int | None = None,
    stride: int | None = None,
    format: Format | None = None,
    device: str = "cpu",
    weights_dir: Path | None = None,
    reporter: Reporter | None = None,
) -> tuple[Perplexity, ...]:
    """Scores one text with several bundles, all with the same windows.

    The text is encoded as the bundle's tokenizer encodes raw text: with a token for its beginning
    if the tokenizer adds one, which is then the context of the first token and is not scored.
    Where it adds none, the first token of the text is not scored.

    Args:
        folders: the bundles.
        text: not empty.
        window: tokens of a window; None: 1,024, or as many as the smallest bundle takes.
        stride: 1 to window - 1; None: half the window.
        format: of the programs; None: the fastest that fits this machine.
        device: `cpu`, `cuda` or `cuda:N`.
        weights_dir: the checkpoint's folder, for bundles that refer to their weights.
        reporter: told about each bundle.

    Raises:
        InputError: the text is too short, or window or stride are out of range.
        CompatibilityError: a bundle lacks the entry, or this machine cannot run it.
        TokenizerError: a bundle has no tokenizer.
    """
    reporter = reporter or Reporter()
    if not text:
        raise InputError("expected a text, got an empty one", where="text", hint=_MORE_TEXT)
    bundles = [
        llama_runtime.load(folder, device=device, format=format, weights_dir=weights_dir)
        for folder in folders
    ]
    sizes = _sizes(window, stride, min(_largest_window(bundle) for bundle in bundles))
    tokens = [_encoded(bundle, text) for bundle in bundles]
    results: list[Perplexity] = []
    for bundle, ids in zip(bundles, tokens, strict=True):
        result = _scored(bundle, ids, sizes, len(text.encode()), reporter)
        if results and torch.equal(ids, tokens[0]):
            result = replace(result, change=result.perplexity / results[0].perplexity - 1)
        results.append(result)
    return tuple(results)


def _sizes(window: int | None, stride: int | None, largest: int) -> tuple[int, int]:
    """Window and stride, each in its range or at its default."""
    window = min(MAX_DEFAULT_WINDOW, largest) if window is None else window
    if not MIN_WINDOW <= window <= largest:
        raise InputError(
            f"expected a window of {MIN_WINDOW} to {largest:,} tokens, got {window:,}",
            where="window",
            hint="a larger --max-seq at build allows longer ones, up to what a packed call takes",
        )
    stride = window // 2 if stride is None else stride
    if not 1 <= stride < window:
        raise InputError(
            f"expected a stride of 1 to {window - 1:,}, below the window, got {stride:,}",
            where="stride",
            hint="each token needs at least one before it in its window",
        )
    return window, stride


def _scored(
    bundle: LoadedBundle,
    tokens: torch.Tensor,
    sizes: tuple[int, int],
    num_bytes: int,
    reporter: Reporter,
) -> Perplexity:
    """What a bundle makes of int32 tokens [T] of so many bytes of text, compared with none."""
    entry, num_scored, (window, stride) = bundle.entry(ENTRY), len(tokens) - 1, sizes
    with reporter.step(f"score {bundle.folder.name} {entry.format}", num_scored) as advance:
        nll = _total_nll(entry, tokens, window, stride, advance) / num_scored
    return Perplexity(
        name=bundle.manifest.name,
        format=entry.format,
        dtype=entry.dtype,
        window=window,
        stride=stride,
        num_tokens=num_scored,
        nll=nll,
        perplexity=math.exp(min(nll, MAX_NLL)),
        bits_per_byte=nll * num_scored / math.log(2) / num_bytes,
        change=None,
    )


def _signature(bundle: LoadedBundle) -> Signature:
    for program in bundle.manifest.programs:
        if program.entry == ENTRY and not program.variant:
            return program.signature
    raise CompatibilityError(
        f"the bundle has no entry `{ENTRY}`, which scores tokens",
        where=bundle.folder,
        hint=f"build it anew: {_build_line(bundle.manifest)}",
    )


def _build_line(manifest: Manifest) -> str:
    """The command that builds the bundle with the entry beside those that it has."""
    revision = f"@{manifest.source.revision}" if manifest.source.revision else ""
    words = ["llama-export", "build", f"{manifest.source.name}{revision}"]
    for entry in (*manifest.entries(), ENTRY):
        words += ["--entry", entry]
    return shlex.join(words)


def _largest_window(bundle: LoadedBundle) -> int:
    """As many tokens as there are positions, if one call takes them."""
    signature = _signature(bundle)
    return min(bundle.manifest.max_seq, signature.dim("P").max)


def _encoded(bundle: LoadedBundle, text: str) -> torch.Tensor:
    tokens = torch.tensor(bundle.tokenizer.encode(text), dtype=torch.int32)
    if len(tokens) < MIN_WINDOW:
        message = f"expected a text of at least {MIN_WINDOW} tokens, got {len(tokens)}"
        raise InputError(message, where="text", hint=_MORE_TEXT)
    return tokens


def _total_nll(
    entry: Entry, tokens: torch.Tensor, window: int, stride: int, advance: Callable[[int], None]
) -> float:
    """The sum of -log p of all tokens but the first."""
    total = 0.0
    for windows in _calls(_windows(len(tokens), window, stride), entry.signature.dim("P").max):
        total -= _score(entry, tokens, windows)
        advance(sum(window.end - window.first for window in windows))
    return total


def _windows(num_tokens: int, window: int, stride: int) -> Iterator[_Window]:
    first = 1  # nothing stands before token 0
    for start in range(0, num_tokens, stride):
        end = min(start + window, num_tokens)
        yield _Window(start, first, end)
        first = end
        if end == num_tokens:
            return


def _calls(windows: Iterator[_Window], most: int) -> Iterator[list[_Window]]:
    """Windows in order, as many together as have at most so many tokens to feed."""
    call: list[_Window] = []
    for window in windows:
        if sum(other.num_fed for other in call) + window.num_fed > most:
            yield call
            call = []
        call.append(window)
    yield call


def _score(entry: Entry, tokens: torch.Tensor, windows: Sequence[_Window]) -> float:
    """The sum of log p of the tokens that these windows score."""
    lengths = torch.tensor([window.num_fed for window in windows])
    inputs = {
        "tokens": torch.cat([tokens[window.start : window.end - 1] for window in windows]),
        "positions": torch.cat([torch.arange(int(length)) for length in lengths]).int(),
        "segments": torch.arange(len(windows)).repeat_interleave(lengths).int(),
        "targets": torch.cat([tokens[window.start + 1 : window.end] for window in windows]).long(),
    }
    log_probs = entry.run(None, inputs)[0].cpu().double()
    scored = [
        part[window.first - window.start - 1 :].sum()
        for window, part in zip(windows, log_probs.split(lengths.tolist()), strict=True)
    ]
    return float(torch.stack(scored).sum())
