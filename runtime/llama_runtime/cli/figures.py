"""What `run` follows and tells of a generation: pieces as they come, figures at the end."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from llama_runtime.cli import output


class Stream(Protocol):
    """What `llama_runtime` generates: iterated, it fills `tokens` and then `finish_reason`."""

    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def prompt_tokens(self) -> Sequence[int]: ...
    @property
    def finish_reason(self) -> str | None: ...
    def resume(self, path: Path) -> int: ...
    def save(self, path: Path) -> None: ...


@dataclass(frozen=True)
class Figures:
    """What `--stats` and `--json` tell of a run; None where there were too few tokens to tell."""

    finish_reason: str | None
    prompt_tokens: int
    resumed_tokens: int
    new_tokens: int
    load_s: float
    ttft_ms: float | None
    decode_tok_s: float | None


def follow(
    pieces: Iterable[str], stream: Stream, *, is_shown: bool
) -> tuple[str, list[tuple[float, int]]]:
    """Goes through the pieces, and writes them where that is asked.

    Returns:
        All of them as one text, and at each the seconds since the start and the tokens so far.
    """
    text, times, started = list[str](), list[tuple[float, int]](), time.perf_counter()
    try:
        for piece in pieces:
            times.append((time.perf_counter() - started, len(stream.tokens)))
            text.append(piece)
            if is_shown:
                output.write_piece(piece)
    finally:
        if is_shown and text and not text[-1].endswith("\n"):
            output.write_piece("\n")
    return "".join(text), times


def make_figures(
    stream: Stream, times: Sequence[tuple[float, int]], *, num_resumed: int, load_s: float
) -> Figures:
    """The figures of a stream that has ended; `times` as `follow` gives them."""
    ttft_ms = tok_s = None
    if times:
        (first, num_first), (last, num_last) = times[0], times[-1]
        ttft_ms = round(1000 * first, 3)
        if num_last > num_first and last > first:
            tok_s = round((num_last - num_first) / (last - first), 3)
    return Figures(
        finish_reason=stream.finish_reason,
        prompt_tokens=len(stream.prompt_tokens),
        resumed_tokens=num_resumed,
        new_tokens=len(stream.tokens),
        load_s=round(load_s, 4),
        ttft_ms=ttft_ms,
        decode_tok_s=tok_s,
    )


def show_stats(figures: Figures) -> None:
    """Tells the figures on stderr, a line each."""
    ttft, rate = figures.ttft_ms, figures.decode_tok_s
    output.tell(f"load         {figures.load_s:.2f} s")
    output.tell(f"first token  {'-' if ttft is None else f'{ttft:.1f} ms'}")
    output.tell(f"decode       {'-' if rate is None else f'{rate:.1f} tokens/s'}")
    resumed = f" ({figures.resumed_tokens} from a file)" if figures.resumed_tokens else ""
    output.tell(f"tokens       {figures.prompt_tokens} prompt{resumed}, {figures.new_tokens} new")
    output.tell(f"finish       {figures.finish_reason or '-'}")
