from __future__ import annotations

import click
import pytest

from llama_export import presets
from llama_export.cli import COMMANDS, command_line
from tests.cli.running import invoke


def found(name: str) -> click.Command:
    command = command_line.get_command(click.Context(command_line), name)
    assert command is not None
    return command


@pytest.mark.parametrize("name", COMMANDS)
def test_the_summary_of_a_command_is_the_first_line_of_its_help(name: str) -> None:
    command = found(name)
    assert (command.help or "").split("\n")[0] == COMMANDS[name]


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_each_command_has_a_manual_page(name: str, flag: str) -> None:
    result = invoke(name, flag)
    assert result.exit_code == 0
    assert result.stdout.startswith(f"Usage: llama-export {name} [OPTIONS]")
    assert "Examples:" in result.stdout
    assert not result.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_help_and_shows_its_default(name: str) -> None:
    command = found(name)
    for param in command.params:
        if isinstance(param, click.Option):
            assert param.help, param.name
            assert (
                param.is_flag
                or param.required
                or param.default is not None
                or param.show_default
                or param.multiple
                or (param.name in ("prompt", "tokens"))
            ), param.name


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_the_terminal_except_for_examples(name: str, width: int) -> None:
    lines = invoke(name, "--help", terminal_width=width).stdout.split("\n")
    prose = lines[: lines.index("Examples:")]
    assert max(map(len, prose)) <= max(width, 50)


def test_the_program_lists_commands_exit_status_and_environment() -> None:
    text = invoke("--help").stdout
    for word in (*COMMANDS, *COMMANDS.values(), "Exit status", "NO_COLOR", "LLAMA_EXPORT_DEBUG"):
        assert word in text


def test_the_help_of_build_names_every_preset() -> None:
    text = " ".join(invoke("build", "--help").stdout.split())
    for name in presets.names():
        assert name in text


def test_version() -> None:
    result = invoke("--version")
    assert result.exit_code == 0
    assert result.stdout.split()[0] == "llama-export"


def test_no_command_shows_the_help_on_stderr_and_is_wrong_usage() -> None:
    result = invoke()
    assert result.exit_code == 2
    assert not result.stdout
    assert "Build:" in result.stderr


def test_shell_completion_knows_the_commands() -> None:
    ctx = click.Context(command_line)
    assert [item.value for item in command_line.shell_complete(ctx, "")] == list(COMMANDS)
