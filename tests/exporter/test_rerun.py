"""A bundle's recipe: read off it, written, taken by `build`, and the same again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llama_artifacts.bundle import Bundle, open_bundle
from llama_artifacts.errors import BuildError, CompatibilityError
from llama_artifacts.manifest import Cut, Program, Source, Target
from llama_export.build import build
from llama_export.checkpoint.config import config_from_hf
from llama_export.cli.config import CHOICES
from llama_export.entries import registry
from llama_export.entries.registry import Sizes
from llama_export.entries.variants import Variant
from llama_export.recipe import Recipe
from llama_export.rerun import choices, from_json, to_json
from tests.bundles import sample_manifest, write_sample
from tests.cli import fakes
from tests.cli.running import invoke
from tests.tiny import tiny_config


def program(entry: str, format: Any = "pt2", variant: Variant | None = None, **kw: Any) -> Program:
    """What `build` declares for the tiny model, without tracing anything."""
    sizes = Sizes(
        config_from_hf(tiny_config(), where="config.json"),
        1,
        64,
        "f32",
        page_size=8,
        max_rows=4,
        max_pages=5,
    )
    spec = registry.find(entry).sized(sizes)
    stem = spec.stem if variant is None else variant.stem(spec)
    settings: dict[str, Any] = {
        "entry": spec.name,
        "format": format,
        "file": f"{stem}.{format}",
        "dtype": "f32",
        "target": Target("cpu"),
        "signature": spec.signature(sizes, {} if variant is None else variant.sizes),
        "constants": (),
        "requires": {},
        "variant": {} if variant is None else dict(variant.sizes),
    }
    return Program(**{**settings, **kw})


def bundle(*programs: Program, **changes: Any) -> Bundle:
    """A bundle of which only the manifest is there."""
    files = {item.file: sample_manifest().files["decode.pt2"] for item in programs}
    manifest = sample_manifest(
        programs=programs, files=files, weights="none", weights_headers={}, tokenizer=None,
        has_chat_template=False, **changes
    )  # fmt: skip
    return Bundle(Path("nowhere"), manifest)


ROWS = Variant("decode_paged", {"Rows": 1})


def test_sizes_of_paged_entries_and_counts_in_names() -> None:
    found = choices(bundle(program("decode_paged"), program("generate<9>")))
    assert found["entries"] == ["decode_paged", "generate<9>"]
    assert (found["page_size"], found["rows"], found["pages"]) == (8, 4, 5)


def test_what_a_bundle_leaves_open_is_left_out() -> None:
    found = choices(bundle(program("decode")))
    assert not {"page_size", "rows", "pages", "variants", "isa", "numerics"} & set(found)


def test_default_variants_are_left_out() -> None:
    native = Target("cpu", "x86_64", "avx512")
    programs = (
        program("decode_paged"),
        program("decode_paged", "aoti", target=native),
        program("decode_paged", "aoti", ROWS, target=native),
    )
    found = choices(bundle(*programs))
    assert "variants" not in found
    assert found["isa"] == "avx512"
    assert choices(bundle(*programs[:2]))["variants"] == ["none"]


def test_numbers_of_processes() -> None:
    cuts = {"lm_head.weight": Cut("lm_head.weight", "rows")}
    programs = (program("decode"), program("decode", shards=2))
    assert choices(bundle(*programs, cuts=cuts))["shards"] == [1, 2]
    assert "shards" not in choices(bundle(programs[0]))
    with pytest.raises(CompatibilityError, match="entries for several numbers of shards"):
        choices(bundle(*programs, program("prefill"), cuts=cuts))


def test_variants_in_every_format() -> None:
    programs = (program("decode_paged"), program("decode_paged", variant=ROWS))
    assert choices(bundle(*programs))["variants"] == ["decode_paged:Rows=1"]


@pytest.mark.parametrize(
    ("programs", "what"),
    [
        (lambda: (program("decode"), program("prefill", target=Target("cuda"))), "devices"),
        (
            lambda: (
                program("decode_paged"),
                program("decode_paged", "onnx"),
                program("decode_paged", "onnx", ROWS),
            ),
            "in some formats only",
        ),
    ],
)
def test_programs_of_several_builds(programs: Callable[[], Any], what: str) -> None:
    with pytest.raises(CompatibilityError, match=what):
        choices(bundle(*programs()))


def test_a_hub_model_comes_with_its_commit() -> None:
    found = choices(bundle(program("decode"), source=Source("hub", "a/b", "c0ffee")))
    assert found["model"] == "a/b@c0ffee"


def test_several_stored_dtypes_leave_the_dtype_open(tmp_path: Path) -> None:
    folder = write_sample(tmp_path / "b")
    assert choices(open_bundle(folder))["dtype"] == "f32"
    half = write_sample(tmp_path / "h", dtype="f16")
    assert "dtype" not in choices(open_bundle(half))


def test_every_key_is_a_choice_of_build(tmp_path: Path) -> None:
    native = Target("cpu", "x86_64", "avx2")
    found = choices(bundle(program("decode_paged", "aoti", target=native, numerics="exact")))
    assert set(found) <= CHOICES
    Recipe(**found)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[]", "expected a JSON object"),
        (b"{", "expected valid JSON"),
        (b"{}", "expected `llama-export`: 1, got `None`"),
        (b'{"llama-export": 2}', "expected `llama-export`: 1, got `2`"),
        (b'{"llama-export": 1, "output": "x"}', "unknown key"),
        (b'{"llama-export": 1, "max_seq": 1, "max_seq": 2}', "duplicate JSON key"),
    ],
)
def test_a_file_that_is_no_recipe(text: bytes, message: str) -> None:
    with pytest.raises(BuildError, match=message.replace("[", r"\[")):
        from_json(text, where="recipe.json", known=CHOICES)


# --- build --config -------------------------------------------------------------------------------


@pytest.fixture
def recipes(monkeypatch: pytest.MonkeyPatch) -> list[Recipe]:
    """The recipes that `build` is called with; it then ends with a known failure."""
    found: list[Recipe] = []

    def fake_build(recipe: Recipe, **settings: Any) -> None:
        found.append(recipe)
        raise BuildError("enough")

    fakes.install(monkeypatch, "llama_export.build", build=fake_build)
    return found


def write_config(folder: Path, **values: Any) -> Path:
    path = folder / "recipe.json"
    path.write_text(json.dumps({"llama-export": 1, **values}))
    return path


def test_the_file_is_the_recipe(tmp_path: Path, recipes: list[Recipe]) -> None:
    source = Source("hub", "a/b", "c0ffee")
    made = bundle(program("decode_paged"), program("generate<9>"), source=source)
    (tmp_path / "recipe.json").write_text(to_json(made))
    invoke("build", "--config", tmp_path / "recipe.json")
    expected = Recipe(
        "a/b@c0ffee",
        entries=("decode_paged", "generate<9>"),
        formats=("pt2",),
        max_seq=16,
        page_size=8,
        rows=4,
        pages=5,
        dtype="f32",
        weights="none",
        num_layers=1,
        jobs=None,
    )
    assert recipes == [expected]


def test_the_command_line_comes_first(tmp_path: Path, recipes: list[Recipe]) -> None:
    path = write_config(tmp_path, model="tiny", entries=["decode"], max_seq=64, formats=["pt2"])
    invoke(
        "build", "./here", "--config", path, "--entry", "forward", "--max-seq", "32", "-o", "out"
    )
    (recipe,) = recipes
    assert (recipe.model, recipe.entries, recipe.max_seq) == ("./here", ("forward",), 32)
    assert recipe.formats == ("pt2",)
    assert recipe.output == Path("out")


@pytest.mark.parametrize(
    "values",
    [
        {"model": "x", "formats": ["elf"]},
        {"model": "x", "max_seq": "many"},
        {"model": "x", "entries": 5},
        {"max_seq": 64},
    ],
)
def test_values_are_checked_like_options(
    tmp_path: Path, recipes: list[Recipe], values: dict[str, Any]
) -> None:
    result = invoke("build", "--config", write_config(tmp_path, **values))
    assert (result.exit_code, recipes) == (2, [])
    assert result.stderr.startswith("error: ")


def test_a_file_that_is_not_there(tmp_path: Path, recipes: list[Recipe]) -> None:
    result = invoke("build", "x", "--config", tmp_path / "none.json")
    assert result.exit_code == 1
    assert "cannot be read: No such file" in result.stderr


@pytest.mark.slow
def test_a_rerun_gives_the_same_programs(
    short_bundle: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    first = open_bundle(short_bundle)
    found = from_json(to_json(first).encode(), where="recipe.json", known=CHOICES)
    assert found.pop("model") == tiny_checkpoint.name
    made = {key: tuple(x) if isinstance(x, list) else x for key, x in found.items()}
    again = open_bundle(build(Recipe(str(tiny_checkpoint), tmp_path / "again", **made)).folder)
    kept = {"checks": first.manifest.checks, "files": first.manifest.files}
    assert replace(again.manifest, **kept) == first.manifest
    weights = "weights.safetensors"
    assert again.manifest.files[weights] == first.manifest.files[weights]
    assert to_json(again) == to_json(first)
