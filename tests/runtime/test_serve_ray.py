from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from llama_artifacts.errors import CompatibilityError, InputError
from llama_runtime.serve_ray import application

STAND_IN = "tests.runtime.asgi_app:create_app"
SCRIPT = """
import sys, time
import ray
from ray import serve
from llama_runtime.serve_ray import application

ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
serve.run(application({
    "bundle": "a/bundle", "app": sys.argv[2], "min_replicas": "2", "max_replicas": "2",
    "rows": "16", "name": "tiny",
}))
print("ready", flush=True)
sys.stdin.read()
serve.shutdown()
ray.shutdown()
"""
needs_ray = pytest.mark.skipif(
    find_spec("ray") is None, reason="Ray Serve is not installed: pip install 'llama-export[ray]'"
)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Of two replicas, in processes of their own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number: int = free.getsockname()[1]
    paths = os.pathsep.join([str(Path.cwd()), *filter(None, sys.path)])
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(number), STAND_IN],
        env={**os.environ, "PYTHONPATH": paths, "RAY_USAGE_STATS_ENABLED": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin
    assert process.stdout
    assert process.stderr
    try:
        lines = iter(process.stdout.readline, "")
        assert any(line.strip() == "ready" for line in lines), process.stderr.read()
        yield number
    finally:
        process.communicate("", timeout=60)
    assert process.returncode == 0


def ask(port: int) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=20) as reply:
        answer: dict[str, Any] = json.load(reply)
    return answer


@needs_ray
@pytest.mark.slow
def test_two_replicas_serve_the_app(port: int) -> None:
    answers, end = [ask(port)], time.monotonic() + 30
    while len({answer["pid"] for answer in answers}) < 2 and time.monotonic() < end:
        answers.append(ask(port))
    assert len({answer["pid"] for answer in answers}) == 2
    for answer in answers:
        assert answer["is_up"]
        assert answer["bundle"] == "a/bundle"
        assert answer["options"] == {"device": "cpu", "rows": 16, "name": "tiny"}


@needs_ray
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray's own modules
def test_a_replica_has_a_gpu_of_its_own() -> None:
    built = application({"bundle": "b", "device": "cuda", "max_replicas": 4, "app": STAND_IN})
    deployment = built._bound_deployment
    assert deployment.ray_actor_options == {"num_cpus": 1, "num_gpus": 1}
    scaling = deployment._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (1, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "bundle: expected a folder, got None"),
        ({"bundle": "7"}, "bundle: expected a folder, got 7"),
        ({"bundle": "b", "max_replicas": "0"}, "max_replicas: expected a number from 1, got 0"),
        ({"bundle": "b", "cpus": "two"}, "cpus: expected a number from 1, got 'two'"),
        ({"bundle": "b", "max_requests": "true"}, "max_requests: expected a number from 1"),
        ({"bundle": "b", "min_replicas": 3}, "expected at least min_replicas = 3, got 1"),
        ({"bundle": "b", "device": "cuda:1"}, "device: expected cpu or cuda, got 'cuda:1'"),
    ],
)
def test_arguments_that_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        application(arguments)


def test_ray_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(CompatibilityError, match="`ray`, which is not installed") as caught:
        application({"bundle": "b"})
    assert caught.value.hint == "pip install 'llama-export[ray]'"


def test_an_app_that_is_no_function() -> None:
    with pytest.raises(InputError, match="app: expected MODULE:FUNCTION, got 'server'"):
        application({"bundle": "b", "app": "server"})
