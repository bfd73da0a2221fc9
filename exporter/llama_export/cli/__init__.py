"""The command line: parses, calls one library function, shows the result.

A command's module is imported when the command is invoked, and what is heavy (torch, onnxruntime)
only inside its function.
"""

from __future__ import annotations

import difflib
import importlib
from typing import Any

import click

from llama_artifacts.places import CACHE_VARIABLE
from llama_export.cli import output
from llama_export.cli.options import CONTEXT, write_examples
from llama_runtime.cli import errors, signals

PROGRAM = "llama-export"

SECTIONS: dict[str, dict[str, str]] = {
    "Build": {
        "build": "Build a bundle from a checkpoint.",
        "entries": "List the entries that can be built.",
        "cache": "List or remove programs that earlier builds made.",
        "export-config": "Write down how a bundle was built, for a rerun.",
    },
    "Use": {
        "run": "Generate text or tokens from a bundle.",
        "serve": "Serve a bundle over HTTP, with the API of OpenAI.",
        "triton": "Write a model repository for the Triton Inference Server.",
    },
    "Understand": {
        "inspect": "Show what a bundle holds.",
        "report": "Write a page that shows a bundle.",
        "diff": "Show what changed between two bundles.",
        "memory": "Tell how much memory a call needs.",
        "fit": "Find the largest batch or context that fits.",
    },
    "Prove": {
        "verify": "Check that a bundle computes what it must.",
        "perplexity": "Measure how well bundles predict a text.",
        "bench": "Measure how fast a bundle runs.",
    },
    "Ship": {
        "sign": "Sign a bundle.",
        "sbom": "Write a bundle's bill of materials.",
        "push": "Put a bundle on the Hugging Face hub.",
        "pull": "Get a bundle from the Hugging Face hub.",
    },
}
"""The commands as the help groups them."""

COMMANDS = {name: text for section in SECTIONS.values() for name, text in section.items()}
"""Each command's name, which is its module's too (`_` for `-`), and the first line of its help."""

_EXAMPLES = (
    ("A preset, from the hub:", "llama-export build smollm2-135m-instruct"),
    ("What came out:", "llama-export inspect smollm2-135m-instruct"),
    ("Use it:", 'llama-export run smollm2-135m-instruct -p "Why is the sky blue?"'),
)
_EXIT_STATUS = (
    ("0", "It worked."),
    ("1", "A known failure: one `error:` line on stderr, and mostly a `hint:` line."),
    ("2", "Wrong usage."),
    ("130, 143", "Stopped by Ctrl-C, by SIGTERM; nothing half-written is left."),
)
_ENVIRONMENT = (
    ("NO_COLOR", "Set to anything: no colours."),
    (errors.DEBUG_VARIABLE, "Set to 1: known failures show their traceback, too."),
    (CACHE_VARIABLE, "The folder for programs and digests that are kept between commands."),
)


class CommandLine(click.Group):
    """The commands by name, each imported when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"{__name__}.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"commands: {', '.join(COMMANDS)}"
            raise errors.UsageError(f"unknown command `{name}`", ctx=ctx, hint=hint)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl(list(commands.items()), col_max=18)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_examples(formatter, _EXAMPLES)
        with formatter.section("Exit status"):
            formatter.write_dl(_EXIT_STATUS)
        with formatter.section("Environment"):
            formatter.write_dl(_ENVIRONMENT)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["standalone_mode"] = False
        errors.exit_with(lambda: super(CommandLine, self).main(*args, **kwargs))


@click.group(
    cls=CommandLine,
    context_settings=CONTEXT,
    invoke_without_command=True,
    subcommand_metavar="COMMAND ...",
)
@click.version_option(
    package_name=PROGRAM,
    prog_name=PROGRAM,
    message="%(prog)s %(version)s",
    help="Show the version.",
)
@click.pass_context
def command_line(ctx: click.Context) -> None:
    """Turn a Llama-family checkpoint into ahead-of-time exported programs, and replay them.

    A bundle is a folder: one program per entry of the model (such as `prefill` and `decode`) and
    format, over one shared copy of the weights, with a manifest that says how each is called.
    It runs without any model code.

    `llama-export COMMAND --help` is the manual page of a command.
    """
    if ctx.invoked_subcommand is None:
        output.tell(ctx.get_help())
        ctx.exit(errors.EXIT_USAGE)


def main() -> None:
    """The console script: runs the command of `sys.argv` and exits."""
    errors.quiet_warnings()
    output.prepare()
    with signals.handled():
        command_line.main(prog_name=PROGRAM)
