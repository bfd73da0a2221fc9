from __future__ import annotations

import re

import pytest

from llama_export import presets
from llama_export.checkpoint.config import RopeConfig, config_from_hf, read_hf_config
from llama_export.checkpoint.layout import parameter_count

PARAMETERS = {
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "llama-3.1-8b": 8_030_261_248,
}
NAMES = (
    "llama-3.1-8b-instruct",
    "llama-3.1-8b-instruct-fp8",
    "smollm2-1.7b",
    "smollm2-1.7b-instruct",
    "smollm2-135m",
    "smollm2-135m-instruct",
    "smollm2-360m",
    "smollm2-360m-instruct",
)


def preset(name: str) -> presets.Preset:
    found = presets.find(name)
    assert found is not None
    return found


def architecture(name: str) -> dict[str, object]:
    return preset(name).config


def test_names() -> None:
    assert sorted(presets.names()) == sorted(NAMES)
    assert presets.find("gpt-2") is None


@pytest.mark.parametrize("name", NAMES)
def test_parameter_counts_come_out_exactly(name: str) -> None:
    config = config_from_hf(architecture(name), where=name)
    (expected,) = (count for stem, count in PARAMETERS.items() if name.startswith(stem))
    assert parameter_count(config) == preset(name).num_parameters == expected


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_is_complete(name: str) -> None:
    found = preset(name)
    assert found.name == name
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", found.repository)
    assert re.fullmatch(r"[0-9a-f]{40}", found.revision)
    assert found.files
    assert all(file.endswith(".safetensors") for file in found.files)
    assert found.dtype in ("bf16", "f16", "f32")
    config = config_from_hf(architecture(name), where=name)
    assert 1 <= found.max_seq <= config.max_position
    assert found.plain_prompts
    assert bool(found.chat_prompts) == ("instruct" in name)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("smollm2-135m", (576, 1536, 30, 9, 3, 64)),
        ("smollm2-360m", (960, 2560, 32, 15, 5, 64)),
        ("smollm2-1.7b", (2048, 8192, 24, 32, 32, 64)),
        ("llama-3.1-8b-instruct", (4096, 14336, 32, 32, 8, 128)),
    ],
)
def test_sizes(name: str, sizes: tuple[int, ...]) -> None:
    config = config_from_hf(architecture(name), where=name)
    assert sizes == (
        config.hidden_size,
        config.intermediate_size,
        config.num_layers,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
    )


def test_ropes() -> None:
    def rope(name: str) -> RopeConfig:
        return config_from_hf(architecture(name), where=name).rope

    assert rope("smollm2-135m") == RopeConfig(100_000.0)
    assert rope("llama-3.1-8b-instruct") == RopeConfig(500_000.0, "llama3", 8.0, 1.0, 4.0, 8192)


def test_the_fp8_presets_linear_layers_are_fp8() -> None:
    found = preset("llama-3.1-8b-instruct-fp8")
    assert found.revision == "442e7f522277df12f53d63e8384087af31fbfc4b"
    assert len(found.files) == 2
    read = read_hf_config(found.config, where=found.name)
    assert read.scheme is not None
    assert read.scheme.covers("model.layers.31.mlp.down_proj")
    assert not read.scheme.covers("lm_head")
    assert read.config == config_from_hf(preset("llama-3.1-8b-instruct").config, where="other")
