"""`llama-export run`: text or tokens from a bundle, as they come."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llama_artifacts.errors import SessionError
from llama_runtime.cli import output, ranks
from llama_runtime.cli.figures import Figures, follow, make_figures, show_stats
from llama_runtime.cli.options import (
    PROGRAM,
    Command,
    LoadOptions,
    bundle_argument,
    checked_text,
    device_option,
    format_option,
    json_option,
    native_option,
    option,
    signature_option,
    take,
    threads_option,
    timeout_option,
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
PROMPT, LENGTH = "Prompt (one of -p and --tokens)", "Length and end"
SAMPLING, STATES = "Sampling", "States on disk"
STDIN = "-"


@dataclass(frozen=True)
class Question:
    """What is asked: a prompt and how it is put, or token ids."""

    prompt: str | None
    tokens: tuple[int, ...] | None
    chat: bool | None
    system: str | None
    stop: tuple[str, ...]

    def check(self) -> None:
        """Refuses options that contradict each other, as wrong usage."""
        is_chat = self.chat is not None or self.system is not None
        if (self.prompt is None) == (self.tokens is None):
            raise click.UsageError("expected one of `-p TEXT` and `--tokens IDS`")
        if self.tokens is not None and (is_chat or self.stop):
            raise click.UsageError("`--chat`, `--system` and `--stop` need `-p TEXT`")
        if self.system is not None and self.chat is False:
            raise click.UsageError("`--system` needs a chat; got `--no-chat`")
        if "" in self.stop:
            raise click.UsageError("expected a text after `--stop`, got none")

    def stream(self, loaded: LoadedBundle, settings: dict[str, Any]) -> Any:
        """The tokens that follow the tokens, or the text that follows the prompt."""
        if self.tokens is not None:
            return loaded.generate_tokens(self.tokens, **settings)
        assert self.prompt is not None  # check
        return loaded.generate(
            self.prompt, stop=self.stop, chat=self.chat, system=self.system, **settings
        )

    def pieces(self, stream: Any) -> Iterable[str]:
        """What is written of a stream: its text, or its tokens with spaces between."""
        return stream if self.tokens is None else _spaced(stream)


@dataclass(frozen=True)
class StateFiles:
    """The options of the group `States on disk`."""

    load_state: Path | None
    save_state: Path | None

    def check_folder(self) -> None:
        """Refuses a file that could not be written at the end, before anything is loaded.

        Raises:
            SessionError: its folder is not there.
        """
        if self.save_state is not None and not self.save_state.absolute().parent.is_dir():
            message = "cannot be written: no such folder"
            raise SessionError(message, where=self.save_state, hint="choose another file")

    def check(self, loaded: LoadedBundle) -> None:
        """Refuses them where states are parts of a whole, as `llama_runtime.snapshot.check_alone`."""
        if self.load_state is not None or self.save_state is not None:
            from llama_runtime import snapshot

            snapshot.check_alone(loaded.group, loaded.folder)


@dataclass(frozen=True)
class Answer:
    """What came of a question; `text` is what is written of it."""

    text: str
    tokens: list[int]
    figures: Figures


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
@format_option
@device_option
@threads_option
@native_option
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
@timeout_option
@weights_dir_option
@signature_option
@option(
    "--stats",
    is_flag=True,
    show_default=False,
    help="Print times and counts to stderr at the end.",
)
@json_option
def command(*, stats: bool, as_json: bool, **values: Any) -> None:
    """Generate text or tokens from a bundle.

    BUNDLE is the folder that `llama-export build` wrote.

    Text comes on stdout piece by piece. With --json, one object with the whole result and the
    figures comes at the end instead.

    A bundle built with `--shards N` is run by N processes, which torchrun starts; see the examples.
    """
    question, files = take(Question, values), take(StateFiles, values)
    loading = take(LoadOptions, values)
    question.check()
    files.check_folder()
    if question.prompt == STDIN and not ranks.is_follower():
        question = replace(question, prompt=_read_stdin())
    answer = _generate(loading, question, files, values, is_shown=not as_json)
    if answer is None:
        return
    if as_json:
        result = {"text": answer.text} if question.tokens is None else {"tokens": answer.tokens}
        output.write_json({**result, **vars(answer.figures)})
    if stats:
        show_stats(answer.figures)


def _generate(
    loading: LoadOptions,
    question: Question,
    files: StateFiles,
    settings: dict[str, Any],
    *,
    is_shown: bool,
) -> Answer | None:
    """The answer, shown as it comes; None in a process that has followed the leader to its end."""
    with ranks.joined(loading.device, loading.timeout) as group:
        with output.waiting("loading"):
            started = time.perf_counter()
            loaded = group.load(loading.bundle, **loading.settings())
            if loaded is None:
                return None
            files.check(loaded)
            # The programs are loaded here, too; the first step comes with the first piece.
            stream = question.stream(loaded, settings)
            num_resumed = 0 if files.load_state is None else stream.resume(files.load_state)
        load_s = time.perf_counter() - started
        text, times = follow(question.pieces(stream), stream, is_shown=is_shown)
        if files.save_state is not None:
            stream.save(files.save_state)
    figures = make_figures(stream, times, num_resumed=num_resumed, load_s=load_s)
    return Answer(text, list(stream.tokens), figures)


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
