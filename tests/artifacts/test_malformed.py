from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.artifacts.complaining import complaint
from tests.artifacts.patches import apply, write_base
from tests.bundles import CONTENTS

TABLE: dict[str, Any] = json.loads(Path(__file__).with_name("malformed.json").read_bytes())
"""A sound bundle (`base`), and what breaks it: steps, and the error of one line. A line that ends in
`...` is the beginning of the line: the rest is a JSON parser's own."""
CASES = TABLE["cases"]


def base(folder: Path) -> Path:
    (folder / "outside").write_bytes(b"x" * len(CONTENTS["decode.pt2"]))
    return write_base(folder / "bundle", TABLE["base"])


def test_the_base_is_sound(tmp_path: Path) -> None:
    assert complaint(base(tmp_path)) is None


def test_the_table_is_of_sixty_cases_or_more_with_names_of_their_own() -> None:
    assert len({case["name"] for case in CASES}) == len(CASES) >= 60


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_a_malformed_bundle_is_refused_in_one_line(tmp_path: Path, case: dict[str, Any]) -> None:
    folder = base(tmp_path)
    for step in case["steps"]:
        apply(folder, step)
    start = time.process_time()
    error = complaint(folder)
    assert time.process_time() - start < 1
    assert type(error).__name__ == case["error"]["kind"]
    line, expected = str(error), case["error"]["line"].replace("{bundle}", str(folder))
    assert line.isprintable()
    assert error is not None
    assert error.hint
    if expected.endswith("..."):
        assert line.startswith(expected.removesuffix("..."))
    else:
        assert line == expected
