"""The reference against transformers' own loading, and what it says of bundles that are not right."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llama_artifacts.errors import CompatibilityError, IntegrityError, LlamaExportError
from llama_artifacts.manifest import WEIGHTS_NAME
from llama_export.build import build
from llama_export.recipe import Recipe
from llama_export.reference import Reference, check
from llama_export.report import Reporter
from tests.runtime.loading import (
    LOGITS_ATOL,
    copied,
    expected_logits,
    greedy_tokens,
    random_tokens,
    rewrite,
    sealed,
    sealed_header,
)
from tests.tiny import write_tiny

pytestmark = pytest.mark.slow  # it builds bundles of its own

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied, llama3 rope": {"tie_word_embeddings": True, "rope_scaling": LLAMA3},
    "biased, wide heads": {"attention_bias": True, "mlp_bias": True, "head_dim": 32},
    "linear rope": {"rope_scaling": {"type": "linear", "factor": 4.0}, "num_key_value_heads": 4},
}


class Notes(Reporter):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


def built(checkpoint: Path, output: Path, **choices: Any) -> Path:
    return build(Recipe(str(checkpoint), output, ("forward",), ("pt2",), **choices)).folder


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint with scaled rope and its bundle. Do not write into them."""
    folder = tmp_path_factory.mktemp("scaled")
    checkpoint = write_tiny(folder / "checkpoint", **CHECKPOINTS["linear rope"])
    return checkpoint, built(checkpoint, folder / "bundle")


@pytest.fixture
def bundle(scaled: tuple[Path, Path], tmp_path: Path) -> Path:
    return shutil.copytree(scaled[1], tmp_path / "b")


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the order of sums in attention, of which transformers has several."""
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=LOGITS_ATOL)


def change_config(bundle: Path, **changes: Any) -> None:
    """As whoever changes a bundle and its digests would."""
    path = bundle / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    sealed(bundle, "config.json")


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_logits_are_those_of_the_checkpoint(kind: str, tmp_path: Path) -> None:
    checkpoint = write_tiny(tmp_path / "c", **CHECKPOINTS[kind])
    notes = Notes()
    reference = Reference.load(built(checkpoint, tmp_path / "b"), reporter=notes)
    tokens = random_tokens(2, 200)
    close(reference.logits(tokens), expected_logits(checkpoint, tokens))
    assert notes.texts == []
    assert reference.has_own_inv_freq


def test_without_a_config_the_bundle_is_taken_at_its_word(
    scaled: tuple[Path, Path], bundle: Path
) -> None:
    rewrite(bundle, lambda m: _without_file(m, "config.json"))
    (bundle / "config.json").unlink()
    notes = Notes()
    reference = Reference.load(bundle, reporter=notes)
    tokens = random_tokens(1, 200)
    close(reference.logits(tokens), expected_logits(scaled[0], tokens))
    assert notes.texts == [
        "no config.json: the reference takes sizes and rotary frequencies from the bundle"
    ]
    assert not reference.has_own_inv_freq


def test_a_rope_that_only_the_bundle_knows(scaled: tuple[Path, Path], bundle: Path) -> None:
    change_config(bundle, rope_scaling={"rope_type": "divisors", "divisors": [4.0] * 8})
    notes = Notes()
    reference = Reference.load(bundle, reporter=notes)
    tokens = random_tokens(1, 200)
    close(reference.logits(tokens), expected_logits(scaled[0], tokens))
    assert "transformers knows no rope `divisors`" in notes.texts[0]
    assert [result.entry for result in check(bundle, reference, reporter=notes)] == ["forward"]


def test_the_first_layers_of_a_checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = built(tiny_checkpoint, tmp_path / "b", num_layers=1)
    reference = Reference.load(folder)
    results = check(folder, reference, reporter=Reporter())
    assert all(result.passed for result in results)
    tokens = random_tokens(1, 20)
    assert not torch.allclose(reference.logits(tokens), expected_logits(tiny_checkpoint, tokens))


@pytest.mark.parametrize("is_per_row", [True, False])
def test_eight_bit_weights_are_codes_times_scales(
    is_per_row: bool, scaled: tuple[Path, Path], bundle: Path, tmp_path: Path
) -> None:
    weights = load_file(bundle / WEIGHTS_NAME)
    plain = load_file(scaled[0] / "model.safetensors")
    for name in [name for name in plain if "_proj" in name]:
        largest = plain[name].abs().amax(1, keepdim=True) if is_per_row else plain[name].abs().max()
        scale = (largest.reshape(-1, 1) / 448).to(torch.float32)
        weights[name] = (plain[name] / scale).to(torch.float8_e4m3fn)
        weights[f"{name}_scale"] = scale
        plain[name] = weights[name].float() * scale
    save_file(weights, bundle / WEIGHTS_NAME)
    sealed(bundle, WEIGHTS_NAME)
    sealed_header(bundle)
    decoded = shutil.copytree(scaled[0], tmp_path / "decoded")
    save_file(plain, decoded / "model.safetensors", metadata={"format": "pt"})
    tokens = random_tokens(1, 200)
    close(Reference.load(bundle).logits(tokens), expected_logits(decoded, tokens))
    del weights["model.layers.0.mlp.up_proj.weight_scale"]
    save_file(weights, bundle / WEIGHTS_NAME)
    sealed(bundle, WEIGHTS_NAME)
    sealed_header(bundle)
    with pytest.raises(IntegrityError, match=r"lack `model\.layers\.0\.mlp\.up_proj\.weight_scale"):
        Reference.load(bundle)


def test_greedy_tokens_are_the_likeliest_up_to_a_stop(scaled: tuple[Path, Path]) -> None:
    reference = Reference.load(scaled[1])
    prompt = random_tokens(20).tolist()
    expected = greedy_tokens(scaled[0], prompt, 40)
    assert reference.greedy(prompt, max_new=40, stop_tokens=()) == expected
    stop = expected[9]
    end = expected.index(stop)
    assert reference.greedy(prompt, max_new=40, stop_tokens=(stop, 127)) == expected[:end]


def test_every_program_passes(scaled: tuple[Path, Path]) -> None:
    results = check(scaled[1], Reference.load(scaled[1]), reporter=Reporter())
    assert [(r.law, r.entry, r.format, r.passed) for r in results] == [
        ("transformers", "", "", True),
        ("transformers", "forward", "pt2", True),
    ]
    assert all(result.figure < 1e-6 for result in results)


@pytest.mark.parametrize(
    ("changes", "failed"),
    [
        ({"rms_norm_eps": 1e-2}, ["forward"]),
        ({"rope_theta": 20000.0}, ["", "forward"]),
        ({"rope_scaling": {"type": "linear", "factor": 4.00001}}, [""]),
    ],
)
def test_a_bundle_that_computes_something_else_fails(
    bundle: Path, changes: dict[str, Any], failed: list[str]
) -> None:
    """Programs and config.json disagree: the eager model cannot know, the reference does."""
    change_config(bundle, **changes)
    results = check(bundle, Reference.load(bundle), reporter=Reporter())
    assert [result.entry for result in results if not result.passed] == failed


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"intermediate_size": 64}, IntegrityError, "not those of the network"),
        ({"attention_bias": True}, IntegrityError, "not those of the network"),
        ({"head_dim": 8}, IntegrityError, "not those of the network"),
        ({"hidden_act": "no such"}, CompatibilityError, "transformers refuses the configuration"),
        ({"hidden_size": "64"}, CompatibilityError, "transformers refuses the configuration"),
    ],
)
def test_a_config_of_another_network(
    bundle: Path, changes: dict[str, Any], kind: type[LlamaExportError], message: str
) -> None:
    change_config(bundle, **changes)
    with pytest.raises(kind, match=message) as caught:
        Reference.load(bundle)
    assert caught.value.hint


def test_keys_that_could_load_code_are_not_passed_on(bundle: Path) -> None:
    change_config(bundle, attn_implementation="someone/kernels", quantization_config={"x": 1})
    Reference.load(bundle)


@pytest.mark.parametrize("content", [b"[]", b"{", b"\xff"])
def test_a_config_that_is_no_object(bundle: Path, content: bytes) -> None:
    (bundle / "config.json").write_bytes(content)
    sealed(bundle, "config.json")
    with pytest.raises(IntegrityError, match=r"config\.json"):
        Reference.load(bundle)


def test_damage_is_named(bundle: Path, tmp_path: Path) -> None:
    config = bundle / "config.json"
    config.write_bytes(config.read_bytes().replace(b"64", b"65"))
    with pytest.raises(IntegrityError, match="damaged"):
        Reference.load(bundle)
    sealed(bundle, "config.json")
    data = bytearray((bundle / WEIGHTS_NAME).read_bytes())
    data[40] ^= 1
    (bundle / WEIGHTS_NAME).write_bytes(data)
    with pytest.raises(IntegrityError):
        Reference.load(bundle)


def test_weights_without_frequencies(bundle: Path) -> None:
    weights = load_file(bundle / WEIGHTS_NAME)
    del weights["model.rotary_emb.inv_freq"]
    save_file(weights, bundle / WEIGHTS_NAME)
    sealed(bundle, WEIGHTS_NAME)
    sealed_header(bundle)
    with pytest.raises(IntegrityError, match=r"lack `model\.rotary_emb\.inv_freq`"):
        Reference.load(bundle)


def test_a_bundle_without_weights(scaled: tuple[Path, Path], tmp_path: Path) -> None:
    folder = copied(scaled[1], tmp_path / "b", weights="none", weights_headers={})
    with pytest.raises(CompatibilityError, match="programs without weights"):
        Reference.load(folder)


def test_without_transformers_the_error_says_what_to_install(
    scaled: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(CompatibilityError, match="which is not installed") as caught:
        Reference.load(scaled[1])
    assert caught.value.hint == "pip install transformers"


def _without_file(manifest: Any, name: str) -> Any:
    files = {key: file for key, file in manifest.files.items() if key != name}
    return dataclasses.replace(manifest, files=files)
