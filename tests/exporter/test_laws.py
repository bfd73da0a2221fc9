"""Every law passes on a bundle of three formats; which laws are asked for, and what is recorded."""

from __future__ import annotations

import dataclasses
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from llama_artifacts import manifest_file
from llama_artifacts.errors import VerificationError
from llama_export.laws import registry
from llama_export.laws.draws import noise, threefry
from llama_export.verify import CheckResult, record, verify
from tests.exporter.sabotage import STEPS

pytestmark = pytest.mark.slow  # it builds bundles of its own


@pytest.fixture(scope="module")
def whole(laws_bundle: Path) -> dict[tuple[str, str], CheckResult]:
    """What the laws find in it, by law and entry."""
    return {(result.law, result.entry): result for result in verify(laws_bundle)}


def test_every_law_is_kept_by_every_entry_it_applies_to(
    whole: dict[tuple[str, str], CheckResult],
) -> None:
    assert [result.place for result in whole.values() if not result.passed] == []
    entries = {entry for _, entry in whole} - {""}
    expected = {("integrity", ""), ("layout", "")}
    for law in registry.LAWS:
        if law.scope == "program":
            expected |= {(law.name, entry) for entry in entries if law.applies(entry)}
    assert set(whole) == expected  # one format: no `formats`
    assert {law for law, _ in whole} == {"integrity", *registry.NAMES} - {"formats"}


def test_every_law_is_kept_in_every_format(tiny_bundle: Path) -> None:
    results = verify(tiny_bundle)
    assert [result.place for result in results if not result.passed] == []
    formats = [result for result in results if result.law == "formats"]
    assert {result.entry for result in formats} == {
        *("forward", "next_token", "prefill", "decode", "decode_rows")
    }
    assert all(0 < result.figure < 1e-5 for result in formats)
    assert all("pt2 and " in result.detail for result in formats)


def test_every_law_is_kept_by_packs_pages_and_loops_in_every_format(
    tiny_packed_bundle: Path,
) -> None:
    results = verify(tiny_packed_bundle)
    assert [result.place for result in results if not result.passed] == []
    assert any(result.entry == "decode_paged:Rows=1" for result in results)


# --- what the laws stand on -----------------------------------------------------------------------


def test_threefry_gives_the_words_of_its_paper() -> None:
    """Test vectors of the Random123 library, with the second counter word free."""
    first, second = threefry((0, 0), np.array([0], dtype=np.uint32))
    assert (int(first[0]), int(second[0])) == (0x6B200159, 0x99BA4EFE)


def test_noise_is_gumbel_and_depends_on_key_and_step() -> None:
    drawn = noise((1, 2), 0, 4, 20_000)
    assert abs(float(drawn.mean()) - 0.5772) < 0.02
    assert abs(float(drawn.var()) - math.pi**2 / 6) < 0.05
    assert not torch.equal(drawn, noise((1, 2), 1, 4, 20_000))
    assert not torch.equal(drawn, noise((1, 3), 0, 4, 20_000))


def test_laws_have_modules_and_one_line_each() -> None:
    for law in registry.LAWS:
        assert callable(law.load())
        assert "\n" not in law.summary
        assert law.entries or law.scope == "bundle"


# --- asking for laws ------------------------------------------------------------------------------


def test_a_law_that_applies_to_nothing_is_an_error(short_bundle: Path) -> None:
    with pytest.raises(VerificationError, match="`pages` applies to nothing"):
        verify(short_bundle, laws=("pages",))
    with pytest.raises(VerificationError, match="`formats` applies to nothing"):
        verify(short_bundle, laws=("formats", "parity"))
    with pytest.raises(VerificationError, match="`rows` applies to nothing"):
        verify(short_bundle, laws=("rows",))  # it has one row
    with pytest.raises(VerificationError, match=r"unknown law `casual`") as caught:
        verify(short_bundle, laws=("casual",))
    assert caught.value.hint == "did you mean `causal`?"


def test_a_short_bundle_of_one_row_keeps_the_laws_that_apply(short_bundle: Path) -> None:
    results = verify(short_bundle)
    assert all(result.passed for result in results)
    assert {result.law for result in results} == {
        *("integrity", "layout", "parity", "causal", "gqa", "room", "chain", "chunks", "scratch")
    }


def test_entries_and_laws_can_be_chosen(laws_bundle: Path) -> None:
    results = verify(laws_bundle, laws=("steps", "scratch"), entries=("generate", "decode"))
    places = [result.place for result in results]
    assert places == [
        "integrity",
        "decode/pt2 scratch",
        f"generate<{STEPS}>/pt2 scratch",
        f"generate<{STEPS}>/pt2 steps",
    ]
    with pytest.raises(VerificationError, match="no entry `encode`"):
        verify(laws_bundle, entries=("encode",))


# --- the record -----------------------------------------------------------------------------------


def test_results_are_recorded_in_place_of_earlier_ones(laws_bundle: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(laws_bundle, tmp_path / "copy")
    before = manifest_file.read(copy)
    results = verify(copy, laws=("causal", "parity", "layout"), entries=("decode",))
    record(copy, results)
    after = manifest_file.read(copy)
    assert dataclasses.replace(after, checks=()) == dataclasses.replace(before, checks=())
    keys = [(check.law, check.entry, check.format) for check in after.checks]
    assert len(set(keys)) == len(keys)
    assert ("causal", "decode", "pt2") in keys
    assert ("layout", "", "") in keys
    assert ("scratch", "decode_rows", "pt2") in keys  # from the build
    assert verify(copy, laws=("layout",))[0].passed  # digests are as they were
    assert sorted(path.name for path in copy.iterdir()) == sorted(
        path.name for path in laws_bundle.iterdir()
    )


def test_a_failure_records_nothing(laws_bundle: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(laws_bundle, tmp_path / "copy")
    before = (copy / "manifest.json").read_bytes()
    results = verify(copy, laws=("layout",))
    bad = dataclasses.replace(results[1], passed=False, figure=3.0, detail="3 faults")
    with pytest.raises(VerificationError, match="3 faults"):
        record(copy, [results[0], bad])
    assert (copy / "manifest.json").read_bytes() == before
