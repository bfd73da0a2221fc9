from __future__ import annotations

from pathlib import Path

import pytest

from tests.bundles import write_sample
from tests.cli.running import environment, start

HEAVY = (
    "torch",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "transformers",
    "numpy",
    "tokenizers",
    "gguf",
)
READERS = ("inspect", "export-config", "sbom")
SCRIPT = f"""
import atexit, sys
atexit.register(lambda: print([n for n in {HEAVY} if n in sys.modules], file=sys.stderr))
from llama_export.cli import main
main()
"""


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["--version"],
        ["build", "--help"],
        ["run", "--help"],
        ["verify", "--help"],
        ["perplexity", "--help"],
        ["diff", "--help"],
        ["sign", "--help"],
        ["report", "--help"],
        ["serve", "--help"],
        ["triton", "--help"],
        ["bench", "--help"],
        ["entries"],
        ["inspect"],
        ["export-config"],
        ["sbom"],
    ],
    ids=" ".join,
)
def test_nothing_heavy_is_imported(tmp_path: Path, words: list[str]) -> None:
    bundle = [str(write_sample(tmp_path / "b"))] if words[0] in READERS and len(words) == 1 else []
    with start(*words, *bundle, script=SCRIPT) as process:
        stdout, stderr = process.communicate()
    assert process.returncode == 0
    assert stdout
    assert stderr == "[]\n"


def test_the_help_of_the_program_imports_no_command() -> None:
    script = SCRIPT.replace(
        repr(HEAVY), "('rich', *map('llama_export.cli.{}'.format, ('build', 'run')))"
    )
    with start("--help", script=script) as process:
        _, stderr = process.communicate()
    assert stderr == "[]\n"


def test_an_unknown_entry_is_refused_before_anything_heavy_is_imported() -> None:
    with start("build", "model", "--entry", "decod", script=SCRIPT) as process:
        _, stderr = process.communicate()
    assert process.returncode == 1
    assert stderr == "error: unknown entry `decod`\nhint: did you mean `decode`?\n[]\n"


def test_python_dash_m() -> None:
    script = "import runpy, sys; runpy.run_module('llama_export', run_name='__main__')"
    with start("--version", script=script, env=environment()) as process:
        stdout, _ = process.communicate()
    assert stdout.startswith("llama-export ")
