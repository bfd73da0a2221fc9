"""The command line of the runtime alone: `python -m llama_runtime`, mostly under `torchrun`.

A command's module is imported when the command is invoked, and what is heavy only inside of it.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import click

from llama_runtime.cli import errors, output, signals
from llama_runtime.cli.options import CONTEXT, write_examples

PROGRAM = "python -m llama_runtime"

COMMANDS = {
    "run": "Generate text or tokens from a bundle.",
    "serve": "Serve a bundle over HTTP, with the API of OpenAI.",
}
"""Each command's name, which is its module's too, and the first line of its help."""

_LAUNCH = "torchrun --standalone --nproc-per-node"
_EXAMPLES = (
    (
        "Two processes, each with half of the weights:",
        f'{_LAUNCH} 2 -m llama_runtime run b -p "Hi"',
    ),
    ("A server of four:", f"{_LAUNCH} 4 -m llama_runtime serve b --port 8000"),
    ("One alone:", f'{PROGRAM} run b -p "Hi"'),
)


class CommandLine(click.Group):
    """The commands by name, each imported when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"{__name__}.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_examples(formatter, _EXAMPLES)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["standalone_mode"] = False
        errors.exit_with(lambda: super(CommandLine, self).main(*args, **kwargs))


@click.group(cls=CommandLine, context_settings=CONTEXT, subcommand_metavar="COMMAND ...")
def command_line() -> None:
    """Run or serve a bundle, alone or in several processes that share its weights.

    A bundle built with `--shards N` runs in N processes, which `torchrun` starts: the first one
    takes prompts and requests, and the others compute with it. When one of them fails, all end.
    """


def main() -> None:
    """The console script: runs the command of `sys.argv` and exits."""
    errors.quiet_warnings()
    output.prepare()
    if not errors.is_debugging():
        # What fails between processes is told in one line, not with traces of native code.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    try:
        with signals.handled():
            command_line.main(prog_name=PROGRAM)
    except SystemExit as end:
        # Exit handlers of collectives may wait for processes that are gone.
        signals.leave(end.code)
