from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from llama_artifacts.errors import CheckpointError
from llama_export.cache import ProgramCache
from llama_export.recipe import Recipe
from llama_export.report import Reporter
from tests.cli import fakes
from tests.cli.running import invoke
from tests.cli.synthetic import write_bundle


@dataclass(frozen=True)
class Program:
    format: str


@dataclass(frozen=True)
class Made:
    program: Program
    label: str
    seconds: float
    bytes: int
    is_cached: bool


@dataclass(frozen=True)
class Result:
    folder: Path
    bundle_bytes: int = 3_500_000
    weights_bytes: int = 2_000_000
    programs: tuple[Made, ...] = (
        Made(Program("aoti"), "decode", 12.34, 1_500_000, is_cached=False),
        Made(Program("pt2"), "decode", 0.01, 15_000, is_cached=True),
    )
    seconds: float = 13.5
    notes: tuple[str, ...] = ("assumed something",)


@pytest.fixture
def caches() -> list[ProgramCache | None]:
    """What `build` was given to keep programs in."""
    return []


@pytest.fixture
def recipes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caches: list[ProgramCache | None]
) -> list[Recipe]:
    """What `build` was called with; it writes a bundle where it was told to."""
    found: list[Recipe] = []

    def build(recipe: Recipe, *, reporter: Reporter, cache: ProgramCache | None) -> Result:
        found.append(recipe)
        caches.append(cache)
        reporter.note("assumed something")
        with reporter.step("decode aoti"):
            pass
        with reporter.step("weights", 10) as advance:
            advance(10)
        changes = {"weights": "none", "weights_headers": {}} if recipe.weights == "none" else {}
        return Result(write_bundle(recipe.output or tmp_path / "bundle", **changes))

    fakes.install(monkeypatch, "llama_export.build", build=build)
    return found


def test_the_defaults_are_those_of_the_recipe(recipes: list[Recipe]) -> None:
    assert invoke("build", "some/model").exit_code == 0
    assert recipes == [Recipe("some/model", jobs=None)]


def test_every_option_reaches_the_recipe(recipes: list[Recipe], tmp_path: Path) -> None:
    words = (
        "--entry decode --entry forward --format onnx --format pt2 --max-seq 99 --batch 3"
        " --dtype f32 --device cuda --weights none --isa avx2 --num-layers 2 --numerics fast -j 3"
    )
    assert invoke("build", "m", "-o", tmp_path / "o", *words.split()).exit_code == 0
    assert recipes == [
        Recipe(
            model="m",
            output=tmp_path / "o",
            entries=("decode", "forward"),
            formats=("onnx", "pt2"),
            max_seq=99,
            batch=3,
            dtype="f32",
            device="cuda",
            weights="none",
            isa="avx2",
            numerics="fast",
            num_layers=2,
            jobs=3,
        )
    ]


def test_programs_with_their_cost_and_the_next_commands(
    recipes: list[Recipe], tmp_path: Path
) -> None:
    folder = tmp_path / "ein Bündel's"
    result = invoke("build", "m", "--output", folder)
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["ENTRY", "FORMAT", "TIME", "SIZE"] in lines
    assert ["decode", "aoti", "12.3", "s", "1.5", "MB"] in lines
    assert ["decode", "pt2", "cached", "15.0", "kB"] in lines
    assert f"llama-export inspect '{tmp_path}/ein Bündel'\"'\"'s'" in result.stdout
    assert "llama-export verify" in result.stdout
    assert "llama-export run" in result.stdout


def test_a_bundle_without_weights_is_not_offered_to_be_run(
    recipes: list[Recipe],
) -> None:
    result = invoke("build", "m", "--weights", "none")
    assert "llama-export inspect" in result.stdout
    assert "llama-export run" not in result.stdout


def test_the_cache_is_where_it_is_asked_for(
    recipes: list[Recipe],
    caches: list[ProgramCache | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LLAMA_EXPORT_CACHE", str(tmp_path / "usual"))
    for words in ((), ("--cache-dir", tmp_path / "other"), ("--no-cache",)):
        assert invoke("build", "m", "-o", tmp_path / f"o{len(caches)}", *words).exit_code == 0
    folders = [cache and cache.folder for cache in caches]
    assert folders == [tmp_path / "usual" / "programs", tmp_path / "other" / "programs", None]


def test_progress_goes_to_stderr_as_plain_lines(recipes: list[Recipe]) -> None:
    lines = invoke("build", "m").stderr.splitlines()
    assert lines == ["note: assumed something", "decode aoti: 0.0 s", "weights: 0.0 s"]


def test_json_is_all_that_stdout_holds(recipes: list[Recipe], tmp_path: Path) -> None:
    found = json.loads(invoke("build", "m", "--json").stdout)
    assert found == {
        "folder": str(tmp_path / "bundle"),
        "bytes": 3_500_000,
        "weights_bytes": 2_000_000,
        "seconds": 13.5,
        "programs": [
            {
                "entry": "decode",
                "format": "aoti",
                "seconds": 12.34,
                "bytes": 1_500_000,
                "is_cached": False,
            },
            {
                "entry": "decode",
                "format": "pt2",
                "seconds": 0.01,
                "bytes": 15_000,
                "is_cached": True,
            },
        ],
        "notes": ["assumed something"],
    }


def test_the_error_of_a_wrong_model_passes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(recipe: Recipe, *, reporter: Reporter, cache: ProgramCache | None) -> None:
        with reporter.step("weights"):
            raise CheckpointError("is not a model", where=recipe.model, hint="try another")

    fakes.install(monkeypatch, "llama_export.build", build=build)
    result = invoke("build", "moddel")
    assert result.exit_code == 1
    assert result.stderr == "error: moddel: is not a model\nhint: try another\n"
