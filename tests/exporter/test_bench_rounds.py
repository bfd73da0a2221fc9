"""Methods in turn, and the processes that they run in."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llama_artifacts.errors import CompatibilityError, LlamaExportError, VerificationError
from llama_export.bench import remote, worker
from llama_export.bench.methods import Setup
from llama_export.bench.peers import bundle as bundle_peer
from llama_export.bench.peers import transformers as transformers_peer
from tests.exporter.benches import measured


def test_methods_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timings, log = measured(tmp_path, [10] * 5, monkeypatch)
    warm = log.index("bundle", log.index("transformers loaded"))
    assert log[warm:] == [
        *["bundle", "transformers"] * 3,
        "machine closed",
        "transformers closed",
        "bundle closed",
    ]
    own, peer = timings.rows
    # The load and the warm-up were the first two runs; those that count took 3 and 4 seconds.
    assert (own.ttft_ms, own.ttft_ms_range) == (3500, (3250, 3750))
    assert (own.decode_tok_s, own.load_s) == (2, 2.0)
    assert own.roofline_share == pytest.approx((1e9 + 256 * 34.5) * 2 / 80e9)
    assert peer.notes == "tokens equal: 5 of 5"
    assert peer.max_logit_difference == pytest.approx(0.1)
    assert timings.machine is not None
    assert timings.machine.read_bytes_s == 80e9
    assert timings.versions == {"bundle": "1", "transformers": "1"}


def test_a_tie_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timings, _ = measured(tmp_path, [10, 10, 11, 10, 10], monkeypatch)
    assert timings.rows[1].notes == "tokens equal: 2 of 5, then a tie (0.1)"


def test_a_peer_that_says_something_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(VerificationError, match=r"transformers: .* got 2 of 5, then another \(1\)"):
        measured(tmp_path, [10, 10, 12, 10, 10], monkeypatch)


def test_loads_are_starts_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timings, log = measured(tmp_path, [10] * 5, monkeypatch, "load")
    assert log.count("bundle loaded") == log.count("bundle closed") == 3
    assert timings.rows[0].load_s_range == (2.0, 2.0)
    assert timings.rows[0].ttft_ms is None


# The worker


class Echo:
    label, versions, files = "echo", {"echo": "1"}, ()

    def generate(self, prompt: Sequence[int], num_new: int) -> Iterator[int]:
        yield from [*prompt][:num_new]

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        return torch.tensor(tokens, dtype=torch.float32)


def test_a_worker_answers_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "open_calls", lambda kind, values: worker._MethodCalls(Echo()))
    calls = [
        {"kind": "method", "setup": {}},
        {"do": "describe"},
        {"do": "generate", "prompt": [4, 5, 6], "num_new": 2},
        {"do": "logits", "tokens": [1, 2]},
        {"do": "peak"},
    ]
    replies: list[Any] = []
    worker.serve(iter(map(json.dumps, calls)), replies.append)
    assert replies[0] == {}
    assert replies[1]["disk_bytes"] == 0
    assert replies[2]["tokens"] == [4, 5]
    assert np.frombuffer(base64.b64decode(replies[3]["logits"]), np.float32).tolist() == [1, 2]
    assert replies[4]["peak_memory_bytes"] > 10_000_000


@pytest.mark.slow
def test_a_process_passes_known_failures_on(tmp_path: Path) -> None:
    setup = Setup("bundle", tmp_path / "none", tmp_path, 1, 8)
    with pytest.raises(LlamaExportError, match="none"):
        remote.start("method", setup)


def test_a_process_that_dies_is_told_with_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "WORKER", "no_such_module_here")
    with pytest.raises(CompatibilityError, match=r"ended with status 1: .*no_such_module_here"):
        remote.start_machine(1)


@pytest.mark.slow
def test_the_bundle_in_a_process(tiny_bundle: Path, tmp_path: Path) -> None:
    setup = Setup("bundle", tiny_bundle, tmp_path, 1, 8, format="pt2")
    process = remote.start("method", setup)
    try:
        run = remote.generate(process, (5, 6, 7), 2)
        assert len(run.tokens) == 2
        assert int(remote.logits(process, (5, 6, 7)).argmax()) == run.tokens[0]
        assert process.call("describe")["label"] == "pt2"
    finally:
        process.close()


@pytest.mark.slow
def test_transformers_says_what_the_bundle_says(tiny_bundle: Path, tmp_path: Path) -> None:
    setup = Setup("transformers", tiny_bundle, tmp_path, 1, 16)
    own = bundle_peer.open(dataclasses.replace(setup, method="bundle", format="pt2"))
    peer = transformers_peer.open(setup)
    assert [*peer.generate((5, 6, 7), 8)] == [*own.generate((5, 6, 7), 8)]
    torch.testing.assert_close(peer.logits((5, 6)), own.logits((5, 6)), rtol=0, atol=1e-4)


def test_a_peer_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(transformers_peer, "version", lambda name: None)
    with pytest.raises(CompatibilityError, match="`transformers`, which is not installed") as got:
        transformers_peer.prepare(Setup("transformers", tmp_path, tmp_path, 1, 8))
    assert got.value.hint == "pip install transformers"
