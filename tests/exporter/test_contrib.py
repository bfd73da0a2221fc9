"""ONNX Runtime's own operators in ONNX programs for the CPU, against the network in plain form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor

from llama_artifacts.dtypes import from_torch
from llama_export.checkpoint.config import LlamaConfig
from llama_export.checkpoint.layout import EMBEDDING, Codes, expected_tensors, linear_shapes
from llama_export.checkpoint.source import TensorInfo
from llama_export.lower.backend import Place, backend
from llama_export.lower.onnx import CONTRIB
from llama_export.model import contrib, rope
from llama_export.model.formulation import Formulation
from llama_export.model.llama import INV_FREQ, Llama
from llama_export.pack import Extent
from llama_export.trace import Job
from tests.exporter.test_trace import job

CAPACITY, VOCAB = 24, 128
FORM = Formulation(torch.float32, reads_positions=True, has_contrib=True)
PLAIN = Formulation(torch.float32, reads_positions=False)
FILE = "weights.bin"
# Three query heads to a key/value head.
NETWORK = {"num_hidden_layers": 1, "hidden_size": 96, "num_attention_heads": 6, "head_dim": 16}


@dataclass(frozen=True)
class Made:
    """A program, and the network whose weights it reads."""

    config: LlamaConfig
    graph: onnx.GraphProto
    session: onnxruntime.InferenceSession
    network: Llama


def make(entry: str, folder: Path, *, batch: int, codes: Codes | None = None) -> Made:
    made = job(entry, FORM, batch=batch, max_seq=CAPACITY, **NETWORK)
    coded = {} if codes is None else dict.fromkeys(linear_shapes(made.config), codes)
    tensors = draw(made, coded)
    infos = {
        name: TensorInfo(from_torch(tensor.dtype).name, tuple(tensor.shape))
        for name, tensor in tensors.items()
    }
    place = Place("cpu", None, folder, None, torch.empty(0), write(folder / FILE, tensors))
    path = folder / backend("onnx").lower(replace(made, weights=infos), place).file
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])
    network = Llama(made.config, PLAIN, coded=coded)
    network.load_state_dict(tensors, assign=True)
    graph = onnx.load(path, load_external_data=False).graph
    return Made(made.config, graph, session, network.requires_grad_(False))


def draw(made: Job, coded: Mapping[str, Codes]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name, shape in expected_tensors(made.config, coded).items():
        if name.removesuffix(".weight") in coded:
            tensors[name] = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
        elif name.endswith("_scale"):
            tensors[name] = (torch.rand(shape, generator=generator) / 50).bfloat16()
        else:
            scale = 1.0 if name == EMBEDDING else 0.2
            tensors[name] = torch.randn(shape, generator=generator) * scale
    tensors[INV_FREQ] = rope.inverse_frequencies(made.config.rope, made.config.head_dim)
    return tensors


def write(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Extent]:
    extents, start = {}, 0
    with path.open("wb") as file:
        for name, tensor in tensors.items():
            data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
            file.write(data)
            extents[name] = Extent(path.name, start, len(data))
            start += len(data)
    return extents


def call(made: Made, tokens: Tensor, pos: int, states: list[Tensor]) -> Tensor:
    """Logits; the states are written in place."""
    binding = made.session.io_binding()
    logits = torch.full((tokens.shape[0], VOCAB), math.nan)
    given: dict[str, Tensor] = {"tokens": tokens, "pos": torch.tensor(pos, dtype=torch.int32)}
    names = [value.name for value in made.session.get_inputs() if value.name not in given]
    written = dict(zip(names, states, strict=True))
    for name, tensor in {**given, **written}.items():
        bind(binding.bind_input, name, tensor)
    for name, tensor in {"logits": logits, **{f"{n}.next": t for n, t in written.items()}}.items():
        bind(binding.bind_output, name, tensor)
    made.session.run_with_iobinding(binding)
    return logits


def bind(method: Any, name: str, tensor: Tensor) -> None:
    dtype = np.int32 if tensor.dtype == torch.int32 else np.float32
    method(name, "cpu", 0, dtype, list(tensor.shape), tensor.data_ptr())


def check(made: Made, entry: str, tokens: Tensor, pos: int) -> None:
    """Logits and states are the network's; what nobody may read is NaN, and stays."""
    past = torch.randn(2, tokens.shape[0], 2, CAPACITY, 16, generator=torch.manual_seed(1))
    past[..., pos:, :] = 0
    expected, actual = list(past.clone()), list(past.clone())
    end = pos + tokens.shape[1]
    for state in actual:
        state[:, :, end:] = math.nan
    method = getattr(made.network, entry)
    logits = method(tokens, torch.tensor(pos, dtype=torch.int32), [tuple(expected)])
    found = call(made, tokens, pos, actual)
    torch.testing.assert_close(found, logits, rtol=1e-5, atol=2e-5)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one[:, :, :end], other[:, :, :end], rtol=1e-5, atol=1e-5)
        assert one[:, :, end:].isnan().all()


def draw_tokens(rows: int, num: int) -> Tensor:
    return torch.randint(VOCAB, (rows, num), generator=torch.manual_seed(2), dtype=torch.int32)


def own_operators(made: Made) -> set[str]:
    return {node.op_type for node in made.graph.node if node.domain == CONTRIB}


def num_products(made: Made) -> int:
    return sum(node.op_type == "MatMulNBits" for node in made.graph.node)


def test_steps_of_several_rows_over_codes_of_four_bits(tmp_path: Path) -> None:
    made = make("decode", tmp_path, batch=2, codes=Codes("u8", 32))
    assert own_operators(made) == {"GroupQueryAttention", "MatMulNBits"}
    assert num_products(made) == len(linear_shapes(made.config))
    in_file = {tensor.name for tensor in made.graph.initializer if tensor.external_data}
    assert {f"{module}.weight" for module in linear_shapes(made.config)} <= in_file
    for pos in (0, 5, CAPACITY - 2):
        check(made, "decode", draw_tokens(2, 1), pos)


def test_prompts_of_one_row_over_codes_of_four_bits(tmp_path: Path) -> None:
    made = make("prefill", tmp_path, batch=1, codes=Codes("u8", 32))
    assert own_operators(made) == {"GroupQueryAttention", "MatMulNBits"}
    assert num_products(made) == 5  # of the head and the last layer, for the last token alone
    for num, pos in ((1, 0), (7, 0), (7, 5), (4, CAPACITY - 5)):
        check(made, "prefill", draw_tokens(1, num), pos)


def test_prompts_of_several_rows_keep_the_plain_form(tmp_path: Path) -> None:
    """ONNX Runtime refuses several tokens of several rows that have a past."""
    made = make("prefill", tmp_path, batch=2)
    assert not own_operators(made)
    check(made, "prefill", draw_tokens(2, 3), 5)


@pytest.mark.parametrize(
    ("dtype", "width", "num_groups", "is_taken"),
    [
        (torch.uint8, 48, 3, True),
        (torch.uint8, 256, 2, True),
        (torch.uint8, 48, 1, False),  # 96 values share a scale
        (torch.int8, 96, 3, False),
    ],
)
def test_which_codes_are_multiplied_as_they_are(
    dtype: torch.dtype, width: int, num_groups: int, is_taken: bool
) -> None:
    codes, scale = torch.zeros(5, width, dtype=dtype), torch.zeros(5, num_groups)
    assert contrib.takes(codes, scale) == is_taken
