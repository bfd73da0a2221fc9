"""The exponential of native programs of bf16."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from llama_export.lower.exponentials import short_exponentials
from tests.exporter.native import BEST, compile_native, kernel_sources, load_native

SPECIAL = [0.0, -0.0, 1e-30, 88.0, -88.0, 200.0, -200.0, math.inf, math.nan]


class Gate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return silu(x.float())


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "is_short"), [(torch.bfloat16, True), (torch.float32, False)])
def test_programs_of_bf16_have_the_short_one(
    dtype: torch.dtype, is_short: bool, tmp_path: Path
) -> None:
    x = torch.cat([torch.linspace(-20, 20, 503), torch.tensor(SPECIAL)])
    with short_exponentials(dtype):
        package = compile_native(Gate(), (x,), BEST, tmp_path)
    assert ("exp_u20" in kernel_sources(package)) is is_short
    actual = load_native(package)(x)
    error = 3e-6 if is_short else 5e-7
    torch.testing.assert_close(actual, silu(x), rtol=error, atol=1e-37, equal_nan=True)
