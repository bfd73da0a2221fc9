"""`llama-export run`: text or tokens from a bundle, as they come."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

from llama_artifacts.manifest import FORMATS, Format
from llama_runtime.cli import output, ranks
from llama_runtime.cli.options import (
    Command,
    bundle_argument,
    checked_text,
    json_option,
    option,
    weights_dir_option,
)

if TYPE_CHECKING:
    from llama_runtime import LoadedBundle

EXAMPLES = (
    ("A question, answered greedily:", 'llama-export run smollm2-135m-instruct -p "Hello!"'),
    (
        "Sampled, the same each time, with figures:",
        'llama-export run smollm2-135m-instruct -p "Hello!" --temperature 0.8 --seed 7 --stats',
    ),
    (
        "A text to go on with, from a file:",
        "llama-export run smollm2-135m -p - --no-chat < story.txt",
    ),
    (
        "A long prompt, kept for others that begin as it does:",
        'llama-export run smollm2-135m-instruct -p "$RULES Agreed?" --save-state rules.state',
    ),
    (
        "One of these, of which only the rest is read:",
        'llama-export run smollm2-135m-instruct -p "$RULES Why?" --load-state rules.state',
    ),
    (
        "Two processes, each with half of the weights, for a bundle built with --shards 2:",
        'torchrun --standalone --nproc-per-node 2 -m llama_runtime run sharded -p "Hello!"',
    ),
    ("Token ids in, token ids out:", 'llama-export run smollm2-135m --tokens "1 9690 198"'),
)
PROMPT, PROGRAM = "Prompt (one of -p and --tokens)", "Program"
LENGTH, SAMPLING = "Length and end", "Sampling"
STATES = "States on disk"
STDIN = "-"


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


def _token_ids(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    if value is None:
        return None
    words = value.replace(",", " ").split()
    # 18 digits are enough for any id and too few for a slow conversion.
    bad = [word for word in words if not re.fullmatch(r"[0-9]{1,18}", word)]
    if bad or not words:
        got = f"`{bad[0][:40]}`" if bad else "none"
        message = f"expected token ids such as `1 9690 198`, got {got}"
        raise click.BadParameter(message, ctx, param)
    return tuple(map(int, words))


@click.command(cls=Command, examples=EXAMPLES)
@bundle_argument
@option(
    "--prompt",
    "-p",
    group=PROMPT,
    callback=checked_text,
    metavar="TEXT",
    help="A user's message, or with --no-chat a text to go on with; `-` reads it from stdin.",
)
@option(
    "--tokens",
    group=PROMPT,
    callback=_token_ids,
    metavar="IDS",
    help='Token ids such as "1 9690 198"; prints ids instead of text.',
)
@option(
    "--chat/--no-chat",
    group=PROMPT,
    default=None,
    show_default="chat, if there is a template",
    help="Put the prompt into the bundle's chat template, or take it as it stands.",
)
@option(
    "--system",
    group=PROMPT,
    callback=checked_text,
    metavar="TEXT",
    show_default="the template's",
    help="The chat's system message.",
)
@option(
    "--max-new",
    group=LENGTH,
    type=click.IntRange(min=1),
    default=128,
    metavar="N",
    help="New tokens at most.",
)
@option(
    "--stop",
    group=LENGTH,
    callback=checked_text,
    multiple=True,
    metavar="TEXT",
    help="End before this text; repeat it for several. The bundle's stop tokens always end it.",
)
@option(
    "--temperature",
    group=SAMPLING,
    type=float,
    default=0.0,
    metavar="T",
    help="0 takes the likeliest token; 1 samples from the model's own distribution.",
)
@option(
    "--top-k",
    group=SAMPLING,
    type=int,
    default=0,
    metavar="K",
    help="Sample from the K likeliest tokens; 0 keeps all.",
)
@option(
    "--top-p",
    group=SAMPLING,
    type=float,
    default=1.0,
    metavar="P",
    help="Sample from the likeliest tokens that together reach probability P.",
)
@option(
    "--min-p",
    group=SAMPLING,
    type=float,
    default=0.0,
    metavar="P",
    help="Drop tokens with less than P times the probability of the likeliest.",
)
@option(
    "--seed",
    group=SAMPLING,
    type=int,
    metavar="N",
    show_default="a fresh one",
    help="Makes the draws repeatable.",
)
@option(
    "--format",
    group=PROGRAM,
    type=click.Choice(FORMATS),
    show_default="the best that fits this machine",
    help="The format to run.",
)
@option(
    "--device",
    group=PROGRAM,
    default="cpu",
    metavar="DEVICE",
    help="`cpu`, `cuda`, or one GPU such as `cuda:1`.",
)
@option(
    "--threads",
    group=PROGRAM,
    type=click.IntRange(min=1),
    metavar="N",
    show_default="one per core",
    help="CPU threads.",
)
@option(
    "--no-native",
    group=PROGRAM,
    is_flag=True,
    show_default=False,
    help="Refuse compiled programs (aoti): they are code, and run with your rights.",
)
@option(
    "--no-cuda-graphs",
    group=PROGRAM,
    is_flag=True,
    show_default=False,
    help="On a GPU, launch every step anew instead of replaying a captured graph.",
)
@option(
    "--load-state",
    group=STATES,
    type=click.Path(path_type=Path),
    metavar="FILE",
    show_default="the whole prompt is read",
    help="Take as much of the prompt as a saved run had read, too, from this file.",
)
@option(
    "--save-state",
    group=STATES,
    type=click.Path(path_type=Path),
    metavar="FILE",
    show_default="nothing is kept",
    help="At the end, write what was read of the prompt and the new tokens to this file, for any bundle over the same weights.",
)
@ranks.timeout_option(group=PROGRAM)
@weights_dir_option
@option(
    "--require-signature",
    group=PROGRAM,
    type=click.Path(path_type=Path),
    metavar="KEY",
    show_default="unsigned bundles run, too",
    help="Refuse a bundle that is not signed by this public key (a PEM file), or that changed since.",
)
@option(
    "--stats",
    is_flag=True,
    show_default=False,
    help="Print times and counts to stderr at the end.",
)
@json_option
def command(
    *,
    bundle: Path,
    prompt: str | None,
    tokens: tuple[int, ...] | None,
    chat: bool | None,
    system: str | None,
    stop: tuple[str, ...],
    format: Format | None,
    device: str,
    threads: int | None,
    no_native: bool,
    no_cuda_graphs: bool,
    weights_dir: Path | None,
    require_signature: Path | None,
    timeout: float,
    load_state: Path | None,
    save_state: Path | None,
    stats: bool,
    as_json: bool,
    **settings: Any,
) -> None:
    """Generate text or tokens from a bundle.

    BUNDLE is the folder that `llama-export build` wrote.

    Text comes on stdout piece by piece. With --json, one object with the whole result and the
    figures comes at the end instead.

    A bundle built with `--shards N` is run by N processes, which torchrun starts; see the examples.
    """
    _check_usage(prompt, tokens, chat, system, stop)
    if prompt == STDIN and not ranks.is_follower():
        prompt = _read_stdin()
    with ranks.joined(device, timeout) as group:
        with output.waiting("loading"):
            started = time.perf_counter()
            loaded = group.load(
                bundle,
                device=device,
                format=format,
                threads=threads,
                allow_native=not no_native,
                weights_dir=weights_dir,
                require_signature=require_signature,
                cuda_graphs=False if no_cuda_graphs else None,
            )
            if loaded is None:
                return
            if save_state is not None or load_state is not None:
                from llama_runtime import snapshot

                snapshot.check_alone(loaded.group, loaded.folder)
            # The programs are loaded here, too; the first step comes with the first piece.
            words = {"stop": stop, "chat": chat, "system": system}
            stream = _stream(loaded, prompt, tokens, words, settings)
            num_resumed = 0 if load_state is None else stream.resume(load_state)
        load_s = time.perf_counter() - started
        pieces: Iterable[str] = stream if tokens is None else _spaced(stream)
        write: Callable[[str], None] = _discard if as_json else output.write_piece
        started = time.perf_counter()
        text, times = _follow(pieces, stream, write, ends_line=not as_json)
        if save_state is not None:
            stream.save(save_state)
    figures = _figures(stream, num_resumed, load_s, started, times)
    if as_json:
        result = {"text": text} if tokens is None else {"tokens": list(stream.tokens)}
        output.write_json({**result, **vars(figures)})
    if stats:
        _show_stats(figures)


def _check_usage(
    prompt: str | None,
    tokens: tuple[int, ...] | None,
    chat: bool | None,
    system: str | None,
    stop: tuple[str, ...],
) -> None:
    if (prompt is None) == (tokens is None):
        raise click.UsageError("expected one of `-p TEXT` and `--tokens IDS`")
    if tokens is not None and (chat is not None or system is not None or stop):
        raise click.UsageError("`--chat`, `--system` and `--stop` need `-p TEXT`")
    if system is not None and chat is False:
        raise click.UsageError("`--system` needs a chat; got `--no-chat`")
    if "" in stop:
        raise click.UsageError("expected a text after `--stop`, got none")


def _stream(
    loaded: LoadedBundle,
    prompt: str | None,
    tokens: tuple[int, ...] | None,
    words: dict[str, Any],
    settings: dict[str, Any],
) -> Any:
    """The tokens that follow tokens, or the text that follows a prompt; `words` are for text alone."""
    if tokens is not None:
        return loaded.generate_tokens(tokens, **settings)
    assert prompt is not None  # _check_usage
    return loaded.generate(prompt, **words, **settings)


def _read_stdin() -> str:
    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as cause:
        raise click.UsageError(f"expected UTF-8 text on stdin, got byte {cause.start}") from cause
    return text.removesuffix("\n")


def _spaced(tokens: Iterable[int]) -> Iterator[str]:
    separator = ""
    for token in tokens:
        yield f"{separator}{token}"
        separator = " "


def _follow(
    pieces: Iterable[str], stream: Stream, write: Callable[[str], None], *, ends_line: bool
) -> tuple[str, list[tuple[float, int]]]:
    """Passes the pieces on; returns all of them, and the time and token count at each."""
    text, times = [], []
    try:
        for piece in pieces:
            times.append((time.perf_counter(), len(stream.tokens)))
            text.append(piece)
            write(piece)
    finally:
        if ends_line and text and not text[-1].endswith("\n"):
            write("\n")
    return "".join(text), times


def _figures(
    stream: Stream,
    num_resumed: int,
    load_s: float,
    started: float,
    times: Sequence[tuple[float, int]],
) -> Figures:
    ttft_ms = tok_s = None
    if times:
        (first, num_first), (last, num_last) = times[0], times[-1]
        ttft_ms = 1000 * (first - started)
        if num_last > num_first and last > first:
            tok_s = (num_last - num_first) / (last - first)
    return Figures(
        finish_reason=stream.finish_reason,
        prompt_tokens=len(stream.prompt_tokens),
        resumed_tokens=num_resumed,
        new_tokens=len(stream.tokens),
        load_s=round(load_s, 4),
        ttft_ms=None if ttft_ms is None else round(ttft_ms, 3),
        decode_tok_s=None if tok_s is None else round(tok_s, 3),
    )


def _show_stats(figures: Figures) -> None:
    ttft, rate = figures.ttft_ms, figures.decode_tok_s
    output.tell(f"load         {figures.load_s:.2f} s")
    output.tell(f"first token  {'-' if ttft is None else f'{ttft:.1f} ms'}")
    output.tell(f"decode       {'-' if rate is None else f'{rate:.1f} tokens/s'}")
    resumed = f" ({figures.resumed_tokens} from a file)" if figures.resumed_tokens else ""
    output.tell(f"tokens       {figures.prompt_tokens} prompt{resumed}, {figures.new_tokens} new")
    output.tell(f"finish       {figures.finish_reason or '-'}")


def _discard(text: str) -> None:
    pass
