"""The pipeline recipe: its YAML fits its script, and the script does what it says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from llama_artifacts.integrity import check_whole
from llama_artifacts.signing import PublicKey, open_signed
from llama_export.cli import COMMANDS
from tests.hub_server import serving
from tests.keys import write_pair

ROOT = Path(__file__).parents[2]
ACTION = ROOT / ".github" / "actions" / "llama-export"
SCRIPT = ACTION / "bundle.sh"
WORKFLOW = ROOT / ".github" / "workflows" / "bundle.yml"
FAKE = """#!/usr/bin/env bash
# Writes down how it is called and behaves as $FAKE_<COMMAND> says: a status, perhaps an error line.
printf '%s\\n' "$(printf '%q ' "$@")" >>"$CALLS"
[[ $1 != sign ]] || cat "$4" >"$CALLS.key"
variable=FAKE_${1//-/_}
behaviour=${!variable:-0}
[[ $behaviour != *error* ]] || echo "error: it failed" >&2
exit "${behaviour%% *}"
"""


def action() -> dict[str, Any]:
    value: dict[str, Any] = yaml.safe_load((ACTION / "action.yml").read_text())
    return value


def inputs_used(text: str) -> set[str]:
    return set(re.findall(r"inputs\.([a-z-]+)", text))


# --- the YAML -------------------------------------------------------------------------------------


def test_the_script_is_sound_bash_and_strict() -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    assert "set -euo pipefail" in SCRIPT.read_text()
    assert os.access(SCRIPT, os.X_OK)


def test_the_action_is_composite_with_named_steps() -> None:
    runs = action()["runs"]
    assert runs["using"] == "composite"
    assert [step["name"] for step in runs["steps"]] == [
        "Install",
        "Build",
        "Verify",
        "Compare with the last release",
        "Sign",
        "Push",
    ]
    assert all(step["shell"] == "bash" for step in runs["steps"])


def test_every_input_is_described_and_used_and_every_used_one_is_declared() -> None:
    value = action()
    assert inputs_used((ACTION / "action.yml").read_text()) == set(value["inputs"])
    assert all(item["description"] and "default" in item for item in value["inputs"].values())


def test_no_input_is_pasted_into_a_shell() -> None:
    for step in action()["runs"]["steps"]:
        assert "${{" not in step["run"]


def test_every_step_and_variable_of_the_action_is_known_to_the_script() -> None:
    text = SCRIPT.read_text()
    for step in action()["runs"]["steps"][1:]:
        name = step["run"].split()[-1]
        assert f"step_{name}()" in text
        own = set(step["env"]) - {"HF_TOKEN"}
        assert own <= set(re.findall(r"#   ([A-Z_]+) ", text)) | {"REVISION"}


def test_every_command_of_the_script_exists() -> None:
    called = set(re.findall(r"llama-export ([a-z-]+) ", SCRIPT.read_text()))
    assert called == {"build", "export-config", "verify", "pull", "diff", "sign", "sbom", "push"}
    assert called <= set(COMMANDS)


def test_outputs_come_from_steps_that_set_them() -> None:
    ids = {step.get("id") for step in action()["runs"]["steps"]}
    for output in action()["outputs"].values():
        for name in re.findall(r"steps\.(\w+)\.outputs", output["value"]):
            assert name in ids


def test_the_workflow_gives_the_action_only_what_it_takes() -> None:
    workflow = yaml.safe_load(WORKFLOW.read_text())
    (job,) = workflow["jobs"].values()
    (step,) = [step for step in job["steps"] if step.get("uses", "").startswith("./")]
    assert (ROOT / step["uses"]).samefile(ACTION)
    assert set(step["with"]) <= set(action()["inputs"])
    assert workflow["permissions"] == {"contents": "read", "id-token": "write"}


# --- the script, over a stand-in ------------------------------------------------------------------


@dataclass(frozen=True)
class Pipeline:
    """Runs steps in a folder, with a `llama-export` of the test's choice on the path."""

    folder: Path

    def run(self, *steps: str, **variables: str) -> subprocess.CompletedProcess[str]:
        env = {
            **os.environ,
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "CALLS": str(self.folder / "calls"),
            "GITHUB_OUTPUT": str(self.folder / "outputs"),
            "BUNDLE": "my bundle",
            **variables,
        }
        return subprocess.run(
            [SCRIPT, *steps], env=env, cwd=self.folder, capture_output=True, text=True
        )

    def calls(self) -> list[str]:
        return [line.strip() for line in (self.folder / "calls").read_text().splitlines()]

    def outputs(self) -> dict[str, str]:
        lines = (self.folder / "outputs").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines)


def with_command(folder: Path, text: str) -> Pipeline:
    path = folder / "bin" / "llama-export"
    path.parent.mkdir()
    path.write_text(text)
    path.chmod(0o755)
    return Pipeline(folder)


@pytest.fixture
def pipeline(tmp_path: Path) -> Pipeline:
    return with_command(tmp_path, FAKE)


def test_all_steps_in_order(pipeline: Pipeline) -> None:
    done = pipeline.run(
        *("build", "verify", "diff", "sign", "push"),
        MODEL="-a model",
        BUILD_OPTIONS="--format pt2  --max-seq 16",
        VERIFY_OPTIONS="--law parity",
        PREVIOUS="me/last@v1",
        SIGNING_KEY="a key",
        PUBLIC_KEY="key.pub",
        REPOSITORY="me/new",
        REVISION="candidate",
    )
    assert done.returncode == 0, done.stderr
    calls = [re.sub(r"/\S*/(previous|key\.pem)", r"TMP/\1", call) for call in pipeline.calls()]
    assert calls == [
        r"build -o my\ bundle --format pt2 --max-seq 16 -- -a\ model",
        r"export-config my\ bundle -o my\ bundle.recipe.json",
        r"verify my\ bundle --law parity",
        r"pull me/last@v1 -o TMP/previous",
        r"diff TMP/previous my\ bundle",
        r"sign my\ bundle --private-key TMP/key.pem",
        r"verify my\ bundle --signature --public-key key.pub",
        r"sbom my\ bundle -o my\ bundle.cdx.json",
        r"push my\ bundle me/new --revision candidate",
    ]
    assert (pipeline.folder / "calls.key").read_text() == "a key\n"
    assert pipeline.outputs() == {"changed": "false", "signed": "true"}


def test_the_key_does_not_stay(pipeline: Pipeline) -> None:
    temporary = pipeline.folder / "tmp"
    temporary.mkdir()
    pipeline.run("sign", SIGNING_KEY="a key", TMPDIR=str(temporary))
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("behaviour", "changed"), [("0", "false"), ("1", "true"), ("1 error", None), ("2 error", None)]
)
def test_a_difference_is_no_failure_and_a_failure_no_difference(
    pipeline: Pipeline, behaviour: str, changed: str | None
) -> None:
    (pipeline.folder / "last").mkdir()
    done = pipeline.run("diff", PREVIOUS="last", FAKE_diff=behaviour)
    if changed is None:
        assert done.returncode == 1
        assert not (pipeline.folder / "outputs").exists()
    else:
        assert done.returncode == 0
        assert pipeline.outputs() == {"changed": changed}


def test_without_a_last_release_everything_is_new(pipeline: Pipeline) -> None:
    pipeline.run("diff")
    assert pipeline.outputs() == {"changed": "true"}
    assert not (pipeline.folder / "calls").exists()


@pytest.mark.parametrize("step", ["build", "verify", "sign", "push"])
def test_a_failure_ends_the_pipeline(pipeline: Pipeline, step: str) -> None:
    variables = {"MODEL": "m", "REPOSITORY": "a/b", "SIGSTORE": "true", f"FAKE_{step}": "1 error"}
    assert pipeline.run(step, "verify", **variables).returncode == 1
    assert len(pipeline.calls()) == 1


def test_unsigned_is_said(pipeline: Pipeline) -> None:
    done = pipeline.run("sign")
    assert done.returncode == 0
    assert "stays unsigned" in done.stderr
    assert pipeline.outputs() == {"signed": "false"}


@pytest.mark.parametrize("steps", [(), ("bake",), ("build",), ("push",)])
def test_wrong_use_is_one_line(pipeline: Pipeline, steps: tuple[str, ...]) -> None:
    done = pipeline.run(*steps)
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if line.startswith("error: ")]


# --- the script, for real -------------------------------------------------------------------------


@pytest.mark.slow
def test_from_a_checkpoint_to_the_hub(
    tiny_checkpoint: Path, short_bundle: Path, tmp_path: Path
) -> None:
    command = f'#!/bin/sh\nexec "{sys.executable}" -m llama_export "$@"\n'
    pipeline = with_command(tmp_path, command)
    pair = write_pair(tmp_path / "keys")
    with serving() as hub:
        done = pipeline.run(
            *("build", "verify", "diff", "sign", "push"),
            MODEL=str(tiny_checkpoint),
            BUILD_OPTIONS="--entry decode --format pt2 --max-seq 16",
            VERIFY_OPTIONS="--law layout",
            PREVIOUS=str(short_bundle),
            SIGNING_KEY=pair.private.read_text(),
            PUBLIC_KEY=str(pair.public),
            REPOSITORY="me/tiny",
            HF_ENDPOINT=hub.url,
            HF_TOKEN="hf_of_a_test",
        )
        assert done.returncode == 0, done.stderr
        files = hub.files("me/tiny")
    assert "prefill pt2 cpu" in done.stdout  # what the last release had
    check_whole(tmp_path / "my bundle")
    open_signed(tmp_path / "my bundle", PublicKey(pair.public))
    assert {"manifest.json", "model.sig", "decode.pt2", "weights.safetensors"} <= set(files)
    assert json.loads((tmp_path / "my bundle.cdx.json").read_text())["specVersion"] == "1.6"
    assert json.loads((tmp_path / "my bundle.recipe.json").read_text())["entries"] == ["decode"]
    assert pipeline.outputs() == {"changed": "true", "signed": "true"}
