from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bundles import write_sample
from tests.cli.running import environment, invoke, start


@pytest.fixture(scope="module")
def served(tiny_packed_bundle: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, and its address."""
    words = [tiny_packed_bundle, "--port", 0, "--rows", 4, "--pool-pages", 64, "--threads", 1]
    env = environment(LLAMA_EXPORT_API_KEY="secret")
    with start("serve", *words, env=env) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        match = re.fullmatch(r"serving (.+) at (http://127\.0\.0\.1:\d+)\n", line)
        assert match is not None, line + process.stderr.read()
        yield process, match[2]
        process.kill()


def curl(*words: str) -> str:
    command = ["curl", "--silent", "--show-error", "--max-time", "60", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_curl_talks_to_it_and_sigterm_lets_it_finish(
    served: tuple[subprocess.Popen[str], str],
) -> None:
    process, url = served
    key = ["-H", "Authorization: Bearer secret"]
    model = json.loads(curl(f"{url}/v1/models", *key))["data"][0]["id"]
    assert "error" in json.loads(curl(f"{url}/v1/models"))
    answer = json.loads(curl(f"{url}/v1/models", *key, "-H", "Host: evil.example"))
    assert answer["error"]["code"] == "invalid_host"
    body = {"model": model, "prompt": "Hello", "max_tokens": 200, "temperature": 0}
    words = [f"{url}/v1/completions", *key, "-H", "Content-Type: application/json"]
    asked = subprocess.Popen(
        ["curl", "--silent", *words, "-d", json.dumps(body)], stdout=subprocess.PIPE, text=True
    )
    with asked:
        while "llama_export_requests_running 1.0" not in curl(f"{url}/metrics"):
            assert asked.poll() is None
        process.send_signal(signal.SIGTERM)
        answer = json.loads(asked.communicate(timeout=60)[0])
    assert answer["choices"][0]["finish_reason"] in ("length", "stop")
    assert process.wait(30) == 128 + signal.SIGTERM
    assert process.stderr is not None
    assert process.stderr.read() == ""


def test_a_bundle_without_paged_programs(tiny_bundle: Path) -> None:
    result = invoke("serve", tiny_bundle, "--format", "pt2", "--port", 0)
    assert result.exit_code == 1
    assert "error: " in result.stderr
    assert "paged" in result.stderr


def test_a_port_in_use(tiny_packed_bundle: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = invoke("serve", tiny_packed_bundle, "--format", "pt2", "--port", port)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: 127.0.0.1:{port}: cannot listen: ")
    assert "hint: choose another --host or --port" in result.stderr


@pytest.mark.parametrize(
    "words", [["--port", "70000"], ["--rows", "0"], ["--max-body", "0"], ["--api-key", ""]]
)
def test_wrong_usage(tmp_path: Path, words: list[str]) -> None:
    assert invoke("serve", write_sample(tmp_path / "b"), *words).exit_code == 2


def test_without_the_extra_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("llama_runtime.server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    result = invoke("serve", write_sample(tmp_path / "b"))
    assert result.exit_code == 1
    assert "hint: pip install 'llama-export[serve]'" in result.stderr
