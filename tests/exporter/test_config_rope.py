"""The rope of a config, in every spelling."""

from __future__ import annotations

import math
from typing import Any

import pytest

from llama_export.checkpoint.config import RopeConfig
from tests.exporter.configs import read, refusal
from tests.tiny import ABSENT

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA3_ROPE = RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)


def scaling(**changes: Any) -> dict[str, Any]:
    return {key: value for key, value in {**LLAMA3, **changes}.items() if value is not ABSENT}


SAME_ROPE: dict[str, dict[str, Any]] = {
    "rope_scaling with rope_type": {"rope_theta": 500000.0, "rope_scaling": scaling()},
    "rope_scaling with type": {
        "rope_theta": 500000.0,
        "rope_scaling": scaling(rope_type=ABSENT, type="llama3"),
    },
    "both spellings of the type": {
        "rope_theta": 500000.0,
        "rope_scaling": scaling(type="llama3"),
    },
    "integers": {
        "rope_theta": 500000,
        "rope_scaling": scaling(factor=8, low_freq_factor=1, high_freq_factor=4),
    },
    "rope_parameters": {
        "rope_theta": ABSENT,
        "rope_scaling": ABSENT,
        "rope_parameters": scaling(rope_theta=500000.0),
    },
    "theta beside rope_parameters": {
        "rope_theta": 500000.0,
        "rope_scaling": ABSENT,
        "rope_parameters": scaling(),
    },
    "both generations, equal": {
        "rope_theta": 500000.0,
        "rope_scaling": scaling(rope_type=ABSENT, type="llama3"),
        "rope_parameters": scaling(rope_theta=500000.0),
    },
    "neutral partial_rotary_factor": {
        "rope_theta": 500000.0,
        "rope_scaling": scaling(partial_rotary_factor=1.0),
    },
}


@pytest.mark.parametrize("case", SAME_ROPE)
def test_every_spelling_of_llama3_rope_reads_the_same(case: str) -> None:
    hf = read(**SAME_ROPE[case])
    assert hf.config.rope == LLAMA3_ROPE
    assert hf.notes == ()


@pytest.mark.parametrize(
    "value",
    [None, ABSENT, {"rope_type": "default"}, {"type": "default"}, {"rope_theta": 10000.0}],
    ids=["null", "absent", "default", "legacy default", "theta only"],
)
def test_unscaled_rope(value: object) -> None:
    assert read(rope_scaling=value).config.rope == RopeConfig(10000.0)


def test_linear_rope() -> None:
    rope = read(rope_scaling={"type": "linear", "factor": 2}).config.rope
    assert rope == RopeConfig(10000.0, "linear", 2.0)


@pytest.mark.parametrize("kind", ["yarn", "longrope", "dynamic", "su", "lama3", "ntk", ""])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_unknown_rope_type_is_refused(kind: str, key: str) -> None:
    error = refusal(rope_scaling={key: kind, "factor": 4.0})
    expected = f"rope_type '{kind}' is not supported (supported: default, linear, llama3)"
    assert error.message == expected


BAD_ROPE: dict[str, tuple[dict[str, Any], str, str]] = {
    "factor below one": ({"rope_scaling": scaling(factor=0.5)}, "factor", "at least 1"),
    "factor zero": ({"rope_scaling": scaling(factor=0)}, "factor", "got `0`"),
    "factor negative": ({"rope_scaling": scaling(factor=-8.0)}, "factor", "got `-8.0`"),
    "factor NaN": ({"rope_scaling": scaling(factor=math.nan)}, "factor", "got `nan`"),
    "factor infinite": ({"rope_scaling": scaling(factor=math.inf)}, "factor", "got `inf`"),
    "factor too long": ({"rope_scaling": scaling(factor=10**400)}, "factor", "positive number"),
    "factor a string": ({"rope_scaling": scaling(factor="8")}, "factor", "(a string)"),
    "factor a boolean": ({"rope_scaling": scaling(factor=True)}, "factor", "got `True`"),
    "factor absent": ({"rope_scaling": scaling(factor=ABSENT)}, "factor", "(null)"),
    "low absent": (
        {"rope_scaling": scaling(low_freq_factor=ABSENT)},
        "low_freq_factor",
        "(null)",
    ),
    "low zero": ({"rope_scaling": scaling(low_freq_factor=0)}, "low_freq_factor", "got `0`"),
    "high equals low": (
        {"rope_scaling": scaling(high_freq_factor=1.0)},
        "high_freq_factor",
        "above low_freq_factor (1.0)",
    ),
    "original a float": (
        {"rope_scaling": scaling(original_max_position_embeddings=8192.0)},
        "original_max_position_embeddings",
        "a positive integer",
    ),
    "type absent": ({"rope_scaling": scaling(rope_type=ABSENT)}, "rope_type", "(null)"),
    "types differ": ({"rope_scaling": scaling(type="linear")}, "rope_type", "differ"),
    "another type's key": (
        {"rope_scaling": {"type": "linear", "factor": 2.0, "attention_factor": 0.5}},
        "attention_factor",
        "changes the maths",
    ),
    "factor under default": (
        {"rope_scaling": {"type": "default", "factor": 8.0}},
        "factor",
        "changes the maths",
    ),
    "partial rotation": (
        {"rope_scaling": scaling(partial_rotary_factor=0.5)},
        "partial_rotary_factor",
        "changes the maths",
    ),
    "not an object": ({"rope_scaling": "llama3"}, "rope_scaling", "an object"),
    "one per layer type": (
        {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
        "rope_type",
        "(null)",
    ),
    "thetas differ": (
        {"rope_scaling": scaling(rope_theta=1000.0)},
        "rope_theta",
        "10000.0 and rope_scaling.rope_theta = 1000.0 differ",
    ),
    "generations differ": (
        {"rope_scaling": scaling(), "rope_parameters": scaling(factor=4.0)},
        "rope_parameters",
        "differ",
    ),
    "theta zero": ({"rope_theta": 0}, "rope_theta", "got `0`"),
    "theta NaN": ({"rope_theta": math.nan}, "rope_theta", "got `nan`"),
    "theta a string": ({"rope_theta": "1e4"}, "rope_theta", "(a string)"),
}


@pytest.mark.parametrize("case", BAD_ROPE)
def test_bad_rope_is_refused_by_field(case: str) -> None:
    overrides, field, message = BAD_ROPE[case]
    error = refusal(**overrides)
    assert (error.where or "").endswith(field)
    assert message in error.message
