"""Kernels for CUDA devices: in Triton's interpreter, in the graph, and as machine code of a device."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_artifacts.dtypes import from_torch
from llama_export.checkpoint.config import read_hf_config
from llama_export.checkpoint.layout import FP8, expected_tensors, linear_shapes
from llama_export.checkpoint.source import TensorInfo
from llama_export.entries import registry
from llama_export.entries.registry import Sizes
from llama_export.model.formulation import Formulation
from llama_export.model.llama import INV_FREQ
from llama_export.trace import Job, trace
from tests.tiny import tiny_config

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed: it comes with PyPI's torch, or by `pip install triton`",
)
ROOT = Path(__file__).parents[2]
CUDA = Formulation(
    torch.bfloat16, reads_positions=False, max_fused_rows=64, device="cuda", has_fp8_units=True
)


def run_script(code: str, *words: str, is_interpreted: bool) -> str:
    """What a process prints; Triton reads when it is imported whether it interprets."""
    paths = [ROOT / part for part in ("exporter", "runtime", "artifacts", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, paths), *filter(None, sys.path)])}
    env |= {"TRITON_INTERPRET": str(int(is_interpreted)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, code, *words]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_triton
@pytest.mark.slow
def test_the_kernels_compute_what_the_operators_say() -> None:
    found = json.loads(run_script("tests/cuda_kernels.py", is_interpreted=True))
    assert len(found) > 20
    assert {case: pair for case, pair in found.items() if not pair[0] <= pair[1]} == {}


@needs_triton
@pytest.mark.slow
def test_aotinductor_sees_every_kernel() -> None:
    """Each operator becomes launches, whose results nothing else writes, in the graph it compiles."""
    found = json.loads(run_script("tests/cuda_graph.py", is_interpreted=False))
    launches = {
        "_multiply writes y": 2 * 4 + 1,
        "_attend writes mixed tops totals": 2,
        "_merge writes y": 2,
    }
    assert found == {"decode": launches, "decode_paged": launches}


def calls(entry: str, form: Formulation = CUDA, *, is_fp8: bool = False) -> dict[str, int]:
    program = trace(job(entry, form, is_fp8=is_fp8))
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    ours = [name.removesuffix(".default") for name in names if name.startswith("llama_export.")]
    return {name.partition(".")[2]: ours.count(name) for name in sorted(set(ours))}


def job(entry: str, form: Formulation, *, is_fp8: bool = False, **sizes: Any) -> Job:
    config = read_hf_config(tiny_config(), where="config.json").config
    modules = [name for name in linear_shapes(config) if name != "lm_head"] if is_fp8 else []
    dtype = from_torch(form.dtype).name
    weights = {
        name: TensorInfo("f8e4m3" if name.removesuffix(".weight") in modules else dtype, shape)
        for name, shape in expected_tensors(config, dict.fromkeys(modules, FP8)).items()
    }
    weights[INV_FREQ] = TensorInfo("f32", (config.head_dim // 2,))
    spec = registry.find(entry)
    own = Sizes(config, sizes.pop("batch", 1), 64, dtype, **sizes)
    spec = spec.sized(own)
    return Job(config, spec, spec.stem, spec.signature(own), form, weights)


@pytest.mark.parametrize("entry", ["decode", "decode_rows", "decode_paged"])
def test_steps_for_cuda_are_calls_of_the_operators(entry: str) -> None:
    assert calls(entry) == {"attend_cached": 2, "products": 2 * 4 + 1}


def test_only_the_steps_of_a_mixed_call_attend_in_the_kernel() -> None:
    assert calls("step_paged")["attend_cached"] == 2
    assert "attend_cached" not in calls("prefill_paged")


def test_fp8_weights_have_their_operator_where_the_device_converts_them() -> None:
    assert calls("decode", is_fp8=True) == {
        "attend_cached": 2,
        "fp8_products": 2 * 4,
        "products": 1,
    }


def test_without_units_fp8_weights_are_left_to_the_compiler() -> None:
    form = replace(CUDA, has_fp8_units=False)
    assert calls("decode", form, is_fp8=True) == {"attend_cached": 2, "products": 1}
