"""Bundles that can be run without a model."""

from __future__ import annotations

import pytest

from tests.runtime.engine.fakes import PAGED, TAKING_TURNS, FakeBundle


@pytest.fixture(params=[PAGED, TAKING_TURNS], ids=["mixed", "turns"])
def bundle(request: pytest.FixtureRequest) -> FakeBundle:
    return FakeBundle(request.param)
