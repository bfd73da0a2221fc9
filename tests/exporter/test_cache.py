"""The cache of programs: what was made is not made again, and only that."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llama_artifacts.errors import BuildError
from llama_export import cache as caching
from llama_export.blueprint import Blueprint, draw
from llama_export.build import BuildResult, build
from llama_export.cache import ProgramCache, key_of
from llama_export.lower.backend import Lowered
from llama_export.lower.pt2 import Pt2Backend
from llama_export.programs import Maker
from llama_export.recipe import Recipe
from tests.cli.running import invoke
from tests.tiny import write_tiny


@pytest.fixture
def own(tmp_path: Path) -> ProgramCache:
    return ProgramCache(tmp_path / "cache")


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which programs were really made."""
    made: list[str] = []

    def lower(self: Pt2Backend, job: Any, place: Any) -> Lowered:
        made.append(job.stem)
        return real(self, job, place)

    real = Pt2Backend.lower
    monkeypatch.setattr(Pt2Backend, "lower", lower)
    return made


def run(
    model: Path, output: Path, cache: ProgramCache, *entries: str, **choices: Any
) -> BuildResult:
    given: dict[str, Any] = {"formats": ("pt2",), "max_seq": 32, "weights": "none"}
    given |= {"num_layers": 1, **choices}
    return build(Recipe(str(model), output, entries or ("decode",), **given), cache=cache)


def test_a_second_build_makes_nothing(
    tiny_checkpoint: Path, tmp_path: Path, own: ProgramCache, lowered: list[str]
) -> None:
    first = run(tiny_checkpoint, tmp_path / "a", own)
    second = run(tiny_checkpoint, tmp_path / "b", own)
    assert lowered == ["decode"]
    assert [made.is_cached for made in (*first.programs, *second.programs)] == [False, True]
    for path in first.folder.iterdir():
        assert path.read_bytes() == (second.folder / path.name).read_bytes(), path.name


def test_one_more_entry_costs_one_entry(
    tiny_checkpoint: Path, tmp_path: Path, own: ProgramCache, lowered: list[str]
) -> None:
    run(tiny_checkpoint, tmp_path / "a", own, "decode", "decode_rows")
    run(tiny_checkpoint, tmp_path / "b", own, "decode", "next_token", "decode_rows")
    assert lowered == ["decode", "decode_rows", "next_token"]


def test_another_checkpoint_of_the_same_network_shares_programs(
    tiny_checkpoint: Path, tmp_path: Path, own: ProgramCache, lowered: list[str]
) -> None:
    run(tiny_checkpoint, tmp_path / "a", own)
    run(write_tiny(tmp_path / "other", has_tokenizer=False), tmp_path / "b", own)
    assert len(lowered) == 1


CHANGES: dict[str, dict[str, Any]] = {
    "entry": {"entries": ("decode_rows",)},
    "max_seq": {"max_seq": 48},
    "batch": {"batch": 2},
    "dtype": {"dtype": "bf16"},
    "format": {"formats": ("onnx",)},
    "device": {"device": "cuda"},
    "layers": {"num_layers": 1},
    "isa": {"formats": ("aoti",), "isa": "avx2"},
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_program_depends_on_is_in_its_key(tiny_checkpoint: Path, change: str) -> None:
    recipe = Recipe(str(tiny_checkpoint), None, ("decode",), ("pt2",), max_seq=32)
    if change == "isa":
        recipe = replace(recipe, formats=("aoti",))
    first, second = key(recipe), key(replace(recipe, **CHANGES[change]))
    assert first != second
    assert first == key(replace(recipe, weights="none" if change != "isa" else "copy"))


def key(recipe: Recipe) -> str:
    blueprint = draw(recipe)
    (draft,) = blueprint.drafts
    maker = Maker(weightless(blueprint), Path("nowhere"), None)
    job = maker.job(draft)
    return key_of(draft.format, job, maker._place)


def weightless(blueprint: Blueprint) -> Blueprint:
    return replace(blueprint, recipe=replace(blueprint.recipe, weights="none"))


def test_another_config_or_code_is_another_key(
    tmp_path: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write_tiny(tmp_path / "m", rms_norm_eps=1e-3)
    recipe = Recipe(str(tiny_checkpoint), None, ("decode",), ("pt2",), max_seq=32)
    keys = {key(recipe), key(replace(recipe, model=str(other)))}
    monkeypatch.setattr(caching, "_code", lambda: "changed")
    assert len({*keys, key(recipe)}) == 3


def test_where_weights_lie_matters_to_onnx_alone(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m")
    recipe = Recipe(str(model), None, ("decode",), ("pt2",), max_seq=32)
    onnx = replace(recipe, formats=("onnx",))
    assert key(recipe) == key(replace(recipe, weights="link"))
    linked = draw(replace(onnx, weights="link"))
    maker = Maker(weightless(linked), Path("nowhere"), None)
    job = maker.job(linked.drafts[0])
    assert key_of("onnx", job, maker._place) != key(onnx)


@pytest.mark.parametrize("file", ["program", "record.json"])
@pytest.mark.parametrize("damage", [b"", b"{", b"\x00" * 100])
def test_a_damaged_entry_is_made_again(
    tiny_checkpoint: Path,
    tmp_path: Path,
    own: ProgramCache,
    lowered: list[str],
    file: str,
    damage: bytes,
) -> None:
    first = run(tiny_checkpoint, tmp_path / "a", own)
    (entry,) = own.programs()
    (own.folder / entry.key / file).write_bytes(damage)
    second = run(tiny_checkpoint, tmp_path / "b", own)
    assert len(lowered) == 2
    assert (second.folder / "decode.pt2").read_bytes() == (first.folder / "decode.pt2").read_bytes()
    assert own.programs()[0].record == entry.record or own.programs()[0].record.seconds


def test_builds_at_the_same_time_make_a_program_once(
    tiny_checkpoint: Path, tmp_path: Path, own: ProgramCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, most, calls = [0], [0], list[str]()

    class Slow:
        def facts(self, job: Any, place: Any) -> dict[str, Any]:
            return {}

        def lower(self, job: Any, place: Any) -> Lowered:
            calls.append(job.stem)
            running[0] += 1
            most[0] = max(most[0], running[0])
            time.sleep(0.2)
            (place.folder / "x.pt2").write_bytes(b"made")
            running[0] -= 1
            return Lowered("x.pt2", caching.Target("cpu"), {}, ())

    monkeypatch.setattr(caching, "backend", lambda format: Slow())
    blueprint = draw(Recipe(str(tiny_checkpoint), None, ("decode",), ("pt2",), weights="none"))
    makers = [Maker(blueprint, tmp_path / str(number), own) for number in range(4)]
    for number in range(4):
        (tmp_path / str(number)).mkdir()

    def work(maker: Maker) -> None:
        job = maker.job(blueprint.drafts[0])
        assert own.lower("pt2", job, maker._place).file == "x.pt2"

    threads = [threading.Thread(target=work, args=(maker,)) for maker in makers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(calls), most[0]) == (1, 1)
    assert all((tmp_path / str(number) / "x.pt2").read_bytes() == b"made" for number in range(4))
    assert not list(own.folder.glob(".partial-*"))


def test_pruning_takes_the_least_recently_used(
    tiny_checkpoint: Path, tmp_path: Path, own: ProgramCache
) -> None:
    run(tiny_checkpoint, tmp_path / "a", own, "decode", "next_token")
    old, new = (
        next(p for p in own.programs() if p.record.label == n) for n in ("next_token", "decode")
    )
    os.utime(own.folder / old.key / "record.json", (0, 0))
    assert own.prune(max_bytes=10**9) == ()
    (removed,) = own.prune(max_age=3600)
    assert removed.key == old.key
    assert [item.key for item in own.programs()] == [new.key]
    assert [item.key for item in own.prune(max_bytes=0)] == [new.key]
    assert own.programs() == ()


@pytest.mark.slow
def test_the_command_lists_and_prunes(tiny_checkpoint: Path, tmp_path: Path) -> None:
    place = tmp_path / "cache"
    assert "0 programs" in invoke("cache", "list", "--cache-dir", place).stdout
    run(tiny_checkpoint, tmp_path / "a", ProgramCache(place))
    assert "decode" in invoke("cache", "list", "--cache-dir", place).stdout
    found = json.loads(invoke("cache", "list", "--cache-dir", place, "--json").stdout)
    assert [program["record"]["format"] for program in found["programs"]] == ["pt2"]
    assert invoke("cache", "prune", "--cache-dir", place).exit_code == 2
    assert invoke("cache", "prune", "--cache-dir", place, "--max-size", "1 furlong").exit_code == 2
    assert "1 programs" in invoke("cache", "prune", "--cache-dir", place, "--max-size", "0").stdout
    assert "0 programs" in invoke("cache", "list", "--cache-dir", place).stdout


def test_a_cache_that_cannot_be_written_is_told(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BuildError, match="the cache cannot be written") as caught:
        run(tiny_checkpoint, tmp_path / "a", ProgramCache(tmp_path / "file"))
    assert "--no-cache" in (caught.value.hint or "")
    assert not (tmp_path / "a").exists()


def test_a_full_disk_under_the_cache_is_told_as_the_caches(
    tiny_checkpoint: Path, tmp_path: Path, own: ProgramCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(source: Path, target: Path, **options: Any) -> Any:
        if not Path(target).is_relative_to(own.folder):
            return real(source, target, **options)
        raise OSError(errno.ENOSPC, "No space left on device", str(source), None, str(target))

    real = shutil.copyfile
    monkeypatch.setattr(shutil, "copyfile", fail)
    with pytest.raises(BuildError, match="programs: the cache cannot be written: No sp") as caught:
        run(tiny_checkpoint, tmp_path / "a", own)
    assert "--cache-dir" in (caught.value.hint or "")
    assert own.programs() == ()


def test_a_failed_lowering_leaves_no_entry(
    tiny_checkpoint: Path, tmp_path: Path, own: ProgramCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*words: Any) -> Lowered:
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(Pt2Backend, "lower", fail)
        with pytest.raises(BuildError, match="cannot be made: no"):
            run(tiny_checkpoint, tmp_path / "a", own)
    assert own.programs() == ()
    assert run(tiny_checkpoint, tmp_path / "b", own).programs[0].is_cached is False
    shutil.rmtree(own.folder)
