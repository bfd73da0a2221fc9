from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from llama_artifacts import summary
from llama_artifacts.bundle import Bundle, open_bundle
from llama_artifacts.manifest import Source
from llama_artifacts.signature import Bounds, Dim, StateSpec
from tests.cli.synthetic import DECODE, FILES, PREFILL, PROGRAMS, STATES, write_bundle


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return open_bundle(write_bundle(tmp_path / "b"))


def rows(bundle: Bundle, title: str) -> list[dict[str, str]]:
    table = next(table for table in summary.tables(bundle) if table.title == title)
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def test_facts(bundle: Bundle) -> None:
    facts = dict(summary.facts(bundle))
    assert facts["name"] == "tiny"
    assert facts["source"] == "tiny.gguf (gguf)"
    assert facts["parameters"] == "123,456"
    assert facts["positions"] == "63 usable of 64; the last is scratch"
    assert facts["weights"] == "2.0 kB in weights.safetensors"
    assert facts["programs"] == "3, 1.5 MB"
    assert facts["tokenizer"] == "tokenizer.json, a chat template"
    assert facts["stop tokens"] == "2 7"
    assert facts["built with"] == "llama-export 0.1.0, torch 2.13.0"
    assert all(facts.values())


def test_facts_of_a_bundle_that_holds_programs_only(tmp_path: Path) -> None:
    source = Source("hub", "owner/name", "0" * 40)
    changes = {
        "weights": "none",
        "weights_headers": {},
        "tokenizer": None,
        "has_chat_template": False,
        "source": source,
    }
    facts = dict(summary.facts(open_bundle(write_bundle(tmp_path / "b", **changes))))
    assert facts["source"] == f"owner/name (hub) at {'0' * 40}"
    assert facts["weights"].startswith("none")
    assert facts["tokenizer"] == "none: token ids only"


def test_programs(bundle: Bundle) -> None:
    assert rows(bundle, "Programs")[2] == {
        "entry": "decode",
        "format": "aoti",
        "target": "cpu x86_64 avx512",
        "dtype": "bf16",
        "size": "1.5 MB",
        "file": "decode.cpu-avx512.pt2",
    }


def test_signatures_are_shown_once_for_all_formats(bundle: Bundle) -> None:
    found = rows(bundle, "Signatures")
    assert [row["entry"] for row in found if row["entry"]] == ["prefill", "decode"]
    assert [(row["kind"], row["name"], row["shape"], row["values"]) for row in found][:4] == [
        ("input", "tokens", "[1, S]", "0 to 127"),
        ("input", "pos", "[]", "from 0; pos+S-1 to 62"),
        ("output", "logits", "[1, 128]", ""),
        ("dim", "S", "", "1 to 63"),
    ]


def test_an_entry_that_differs_between_formats_is_shown_for_each(tmp_path: Path) -> None:
    narrow = dataclasses.replace(PREFILL, dims=(Dim("S", 1, 8),))
    other = dataclasses.replace(PROGRAMS[0], format="onnx", signature=narrow)
    bundle = open_bundle(write_bundle(tmp_path / "b", programs=(PROGRAMS[0], other)))
    labels = [row["entry"] for row in rows(bundle, "Signatures") if row["entry"]]
    assert labels == ["prefill (pt2)", "prefill (onnx)"]


def test_states_of_one_shape_are_counted_and_summed(bundle: Bundle) -> None:
    assert rows(bundle, "States")[1] == {
        "entry": "decode",
        "count": "4",
        "size": "16.4 kB",
        "dtype": "bf16",
        "shape": "[1, 2, 64, 16]",
        "names": "cache.0.key .. cache.1.value",
    }


def test_states_of_several_shapes_are_kept_apart() -> None:
    odd = StateSpec("odd", "f32", (3,))
    groups = summary.group_states((*STATES[:2], odd, *STATES[2:]))
    assert [(group.names, group.num_bytes) for group in groups] == [
        ("cache.0.key .. cache.0.value", 8192),
        ("odd", 12),
        ("cache.1.key .. cache.1.value", 8192),
    ]


def test_checks(bundle: Bundle) -> None:
    assert rows(bundle, "Checks")[0]["figure"] == "1.25e-06"


def test_tables_without_rows_are_left_out(tmp_path: Path) -> None:
    bundle = open_bundle(write_bundle(tmp_path / "b", programs=(), checks=()))
    assert summary.tables(bundle) == ()


def test_the_dict_is_json_and_holds_exact_sizes(bundle: Bundle) -> None:
    found = json.loads(json.dumps(summary.to_dict(bundle), allow_nan=False))
    assert found == summary.to_dict(bundle)
    assert found["bytes"] == sum(map(len, FILES.values()))
    assert found["weights"] == {"mode": "copy", "bytes": 2000, "referenced_bytes": 0}
    assert found["usable_positions"] == 63
    assert found["model"]["rope"] == "default theta=10000"
    assert [program["bytes"] for program in found["programs"]] == [300, 200, 1_500_000]
    decode = found["signatures"][1]
    assert decode["files"] == ["decode.pt2", "decode.cpu-avx512.pt2"]
    assert decode["states"]["count"] == 4
    assert decode["states"]["bytes"] == DECODE.state_bytes == 16384
    assert decode["states"]["tensors"][0]["shape"] == [1, 2, 64, 16]
    assert found["signatures"][0]["dims"][0] == {"name": "S", "min": 1, "max": 63}


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_951, "1.0 MB"),
        (269_060_552, "269.1 MB"),
        (16_060_000_000, "16.1 GB"),
        (5 * 10**15, "5,000.0 TB"),
    ],
)
def test_bytes_for_people(num_bytes: int, text: str) -> None:
    assert summary.show_bytes(num_bytes) == text


def test_bounds_for_people() -> None:
    assert summary.show_bounds(Bounds(0, 9), "pos") == "0 to 9"
    assert summary.show_bounds(Bounds(0, 9, "S"), "pos") == "from 0; pos+S-1 to 9"
    assert summary.show_bounds(Bounds(0, 9, dim="S"), "index") == "0 to S"
    paged = Bounds(-1, 9, dim="Pages", scale=16, offset=-1)
    assert summary.show_bounds(paged, "positions") == "-1 to 16*Pages-1"
