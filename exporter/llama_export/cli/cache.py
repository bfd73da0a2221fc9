"""`llama-export cache`: the programs that earlier builds made."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llama_artifacts.codec import encode
from llama_artifacts.summary import show_bytes
from llama_export.cli import output
from llama_export.cli.options import CONTEXT, Command, json_option, option, write_examples

if TYPE_CHECKING:
    from llama_export.cache import CachedProgram

LIST_EXAMPLES = (("What is kept, the last used first:", "llama-export cache list"),)
PRUNE_EXAMPLES = (
    ("What was not used for a month:", "llama-export cache prune --older-than 30d"),
    ("All but the last used 2 GB:", "llama-export cache prune --max-size 2GB"),
    ("Everything:", "llama-export cache prune --max-size 0"),
)
_SIZE = re.compile(r"(\d{1,15})\s*(|B|kB|MB|GB|TB|KiB|MiB|GiB|TiB)")
_UNITS = {
    **{unit: 1000**power for power, unit in enumerate(("B", "kB", "MB", "GB", "TB"))},
    **{unit: 1024**power for power, unit in enumerate(("", "KiB", "MiB", "GiB", "TiB"))},
}
_AGE = re.compile(r"(\d{1,9})(s|m|h|d)")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class ByteSize(click.ParamType[int]):
    """A number of bytes, such as `80GiB`, `2 GB` or `0`."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = _SIZE.fullmatch(str(value))
        if match is None:
            self.fail(f"expected a size such as 2GB or 80GiB, got `{value}`", param, ctx)
        return int(match[1]) * _UNITS[match[2]]


class Age(click.ParamType[int]):
    """A time in seconds, such as `30d` or `12h`."""

    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = _AGE.fullmatch(str(value))
        if match is None:
            self.fail(f"expected an age such as 30d, 12h, 5m or 90s, got `{value}`", param, ctx)
        return int(match[1]) * _SECONDS[match[2]]


cache_dir_option = option(
    "--cache-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    show_default="as for `build`",
    help="The cache.",
)


class CacheGroup(click.Group):
    """A group whose help ends with the examples of its commands."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_examples(formatter, (*LIST_EXAMPLES, *PRUNE_EXAMPLES))


@click.group(cls=CacheGroup, context_settings=CONTEXT)
def command() -> None:
    """List or remove programs that earlier builds made.

    A build keeps each program under a digest of all that it depends on: the network's config, the
    entry with its sizes, the dtype, the target, the compilers and the code that writes it. A later
    build that wants the same program copies it.
    """


@command.command("list", cls=Command, examples=LIST_EXAMPLES)
@cache_dir_option
@json_option
def list_programs(*, cache_dir: Path | None, as_json: bool) -> None:
    """List the programs, the most recently used first."""
    from llama_export.cache import ProgramCache

    cache = ProgramCache(cache_dir)
    programs = cache.programs()
    if as_json:
        output.write_json({"folder": str(cache.folder), "programs": encode(programs)})
    else:
        _show(programs, f"in {cache.folder}")


@command.command("prune", cls=Command, examples=PRUNE_EXAMPLES)
@option("--max-size", type=ByteSize(), metavar="SIZE", help="Keep at most so much.")
@option("--older-than", type=Age(), metavar="AGE", help="Remove what was not used for so long.")
@cache_dir_option
@json_option
def prune(
    *, max_size: int | None, older_than: int | None, cache_dir: Path | None, as_json: bool
) -> None:
    """Remove programs, the least recently used first."""
    from llama_export.cache import ProgramCache

    if max_size is None and older_than is None:
        raise click.UsageError("say what may stay: --max-size or --older-than")
    cache = ProgramCache(cache_dir)
    removed = cache.prune(max_bytes=max_size, max_age=older_than)
    if as_json:
        output.write_json({"folder": str(cache.folder), "removed": encode(removed)})
    else:
        _show(removed, f"removed from {cache.folder}")


def _show(programs: Sequence[CachedProgram], where: str) -> None:
    rows = [
        (
            item.record.label,
            item.record.format,
            _ago(time.time() - item.used),
            f"{item.record.seconds:.1f} s",
            show_bytes(item.record.bytes),
            item.key[:12],
        )
        for item in programs
    ]
    if rows:
        output.write_table(rows, columns=("program", "format", "used", "made in", "size", "key"))
        output.write("\n")
    total = show_bytes(sum(item.record.bytes for item in programs))
    output.write(f"{len(programs)} programs, {total} {where}\n")


def _ago(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return "just now"
