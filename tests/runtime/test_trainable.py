"""Gradients of packed training programs against transformers' loss on the sequences, each alone."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
import transformers

import llama_runtime
from llama_artifacts.errors import CompatibilityError, InputError
from llama_export.build import build
from llama_export.cache import ProgramCache
from llama_export.recipe import Recipe
from llama_runtime import LoadedBundle, TrainableEntry
from llama_runtime.programs.base import Loading
from tests.runtime.loading import random_tokens, rewrite_programs
from tests.tiny import write_tiny

pytestmark = pytest.mark.slow  # it builds bundles of its own

Tensors = dict[str, torch.Tensor]

LENGTHS = (200, 31, 200, 1)
"""Tokens of each packed sequence that have a target."""
NUM_PADDING = 5
ENTRIES = ("loss_packed", "log_probs_packed", "forward", "decode")


def built(checkpoint: Path, folder: Path, *entries: str) -> Path:
    recipe = Recipe(str(checkpoint), folder, entries, ("pt2",), max_seq=256)
    return build(recipe, cache=ProgramCache()).folder


@pytest.fixture(scope="module")
def bundle(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Do not write into it."""
    return built(tiny_checkpoint, tmp_path_factory.mktemp("trained") / "bundle", *ENTRIES)


@pytest.fixture(scope="module")
def loaded(bundle: Path) -> LoadedBundle:
    return llama_runtime.load(bundle)


def packed(seed: int = 1) -> Tensors:
    """Sequences one after the other, in an odd order of segments, then padding of weight 0."""
    generator = torch.Generator().manual_seed(seed)
    segments = torch.tensor([7, 2, 0, 5]).repeat_interleave(torch.tensor(LENGTHS))
    num_real = len(segments)
    weights = torch.rand(num_real + NUM_PADDING, generator=generator) + 0.5
    weights[num_real:] = 0
    weights /= weights.sum()  # the loss is a weighted mean, of the size that training has
    tokens = random_tokens(num_real + NUM_PADDING, seed=seed)
    targets = random_tokens(num_real + NUM_PADDING, seed=seed + 1).long()
    positions = torch.cat([torch.arange(length) for length in (*LENGTHS, NUM_PADDING)])
    return {
        "tokens": tokens,
        "positions": positions.int(),
        "segments": torch.cat((segments, torch.full((NUM_PADDING,), 9))).int(),
        "targets": targets,
        "weights": weights,
    }


def unpacked_loss(model: transformers.LlamaForCausalLM, inputs: Tensors) -> torch.Tensor:
    """The weighted sum of losses of the sequences, each through transformers alone."""
    total = torch.zeros(())
    rows = {name: tensor[:-NUM_PADDING].split(LENGTHS) for name, tensor in inputs.items()}
    for tokens, targets, weights in zip(
        rows["tokens"], rows["targets"], rows["weights"], strict=True
    ):
        logits = model(tokens[None].long()).logits[0]
        losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
        total = total + (weights * losses).sum()
    return total


CHECKPOINTS = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "scaled rope, wide heads": {
        "head_dim": 32,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_gradients_and_a_step_are_those_of_the_sequences_alone(kind: str, tmp_path: Path) -> None:
    checkpoint = write_tiny(tmp_path / "c", **CHECKPOINTS[kind])
    module = llama_runtime.load(built(checkpoint, tmp_path / "b", "loss_packed")).trainable(
        "loss_packed"
    )
    model = transformers.LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    inputs = packed()
    loss, expected = module(**inputs), unpacked_loss(model, inputs)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    loss.backward()
    expected.backward()
    reference = dict(model.named_parameters())
    parameters = dict(module.named_parameters())
    assert set(parameters) == set(reference)
    for name, parameter in parameters.items():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name
        torch.testing.assert_close(
            parameter.grad,
            reference[name].grad,
            rtol=1e-4,
            atol=1e-6,
            msg=lambda text, name=name: f"{name}: {text}",
        )
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.step()
    with torch.no_grad():
        assert module(**inputs) < loss


def test_log_probs_are_those_of_forward(loaded: LoadedBundle) -> None:
    inputs = packed()
    inputs.pop("weights")
    log_probs = loaded.entry("log_probs_packed").run(None, inputs)[0]
    start = 0
    for length in LENGTHS:
        part = slice(start, start + length)
        logits = loaded.entry("forward").run(None, {"tokens": inputs["tokens"][None, part]})[0][0]
        expected = logits.log_softmax(-1).gather(1, inputs["targets"][part, None])[:, 0]
        torch.testing.assert_close(log_probs[part], expected, rtol=1e-5, atol=1e-5)
        start += length


def test_any_function_of_the_log_probs_has_gradients(loaded: LoadedBundle) -> None:
    inputs = packed()
    weights = inputs.pop("weights")
    log_probs = loaded.trainable("log_probs_packed")
    (-(weights * log_probs(**inputs)).sum()).backward()
    loss = loaded.trainable("loss_packed")
    loss(**inputs, weights=weights).backward()
    expected = {name: parameter.grad for name, parameter in loss.named_parameters()}
    for name, parameter in log_probs.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])


def test_padding_adds_nothing_to_a_gradient(loaded: LoadedBundle) -> None:
    gradients = []
    for num_dropped in (0, NUM_PADDING):
        module = loaded.trainable("loss_packed")
        inputs = packed()
        end = len(inputs["tokens"]) - num_dropped
        module(**{name: tensor[:end] for name, tensor in inputs.items()}).backward()
        gradients.append([parameter.grad for parameter in module.parameters()])
    for padded, bare in zip(*gradients, strict=True):
        torch.testing.assert_close(padded, bare, rtol=1e-5, atol=1e-7)


def test_a_step_reaches_neither_the_bundle_nor_another_module(bundle: Path) -> None:
    loaded = llama_runtime.load(bundle)
    before = {name: tensor.clone() for name, tensor in loaded.weights.items()}
    first, second = loaded.trainable("loss_packed"), loaded.trainable("loss_packed")
    inputs = packed()
    loss = loaded.entry("loss_packed").run(None, inputs)[0]
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.mul_(0.5)
        assert not torch.allclose(first(**inputs), loss)
        torch.testing.assert_close(second(**inputs), loss)
    assert all(torch.equal(before[name], tensor) for name, tensor in loaded.weights.items())
    assert not loaded.entry("loss_packed").run(None, inputs)[0].requires_grad


def test_what_was_trained_can_be_stored_and_read(loaded: LoadedBundle) -> None:
    inputs = packed()
    first, second = loaded.trainable("loss_packed"), loaded.trainable("loss_packed")
    first(**inputs).backward()
    torch.optim.SGD(first.parameters(), lr=0.1).step()
    stored = first.state_dict()
    assert set(stored) == set(loaded.weights)
    second.load_state_dict(stored)
    with torch.no_grad():
        assert torch.equal(first(**inputs), second(**inputs))


def test_half_precision_weights_are_trained_as_they_are_stored(tmp_path: Path) -> None:
    checkpoint = write_tiny(tmp_path / "c", dtype=torch.bfloat16)
    loaded = llama_runtime.load(built(checkpoint, tmp_path / "b", "loss_packed"))
    module, inputs = loaded.trainable("loss_packed"), packed()
    loss = module(**inputs)
    loss.backward()
    for name, parameter in module.named_parameters():
        assert parameter.dtype == loaded.weights[name].dtype == torch.bfloat16
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
        assert parameter.grad.abs().max() > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": [128]}, "tokens: expected at most 127, got 128"),
        ({"targets": [-1]}, "targets: expected at least 0, got -1"),
        ({"weights": [1, 2]}, "expected P = 1"),
    ],
)
def test_inputs_are_checked_as_those_of_an_entry(
    loaded: LoadedBundle, change: dict[str, list[int]], message: str
) -> None:
    one = {"tokens": [1], "positions": [0], "segments": [0], "targets": [1], "weights": [1]}
    with pytest.raises(InputError, match=message):
        loaded.trainable("loss_packed")(**{**one, **change})
    with pytest.raises(InputError, match="missing: weights"):
        loaded.trainable("loss_packed")(tokens=[1], positions=[0], segments=[0], targets=[1])


def test_what_cannot_be_trained_is_refused_by_name(bundle: Path, tmp_path: Path) -> None:
    loaded = llama_runtime.load(bundle)
    with pytest.raises(CompatibilityError, match="`decode` writes its states in place"):
        loaded.trainable("decode")
    with pytest.raises(InputError, match="no entry `loss`"):
        loaded.trainable("loss")
    with pytest.raises(CompatibilityError, match="in format onnx has no gradients") as caught:
        llama_runtime.load(bundle, format="onnx").trainable("loss_packed")
    assert caught.value.hint == "load the bundle with format pt2"
    other = shutil.copytree(bundle, tmp_path / "other")
    rewrite_programs(other, lambda program: dataclasses.replace(program, format="onnx"))
    with pytest.raises(CompatibilityError, match="in format onnx has no gradients") as caught:
        llama_runtime.load(other).trainable("loss_packed")
    assert caught.value.hint == "build it with --entry loss_packed --format pt2"


def test_weights_of_eight_bits_are_refused_by_name(bundle: Path) -> None:
    loaded = llama_runtime.load(bundle)
    program = next(p for p in loaded.manifest.programs if p.entry == "loss_packed")
    name = "model.layers.1.mlp.up_proj.weight"
    weights = {**loaded.weights, name: loaded.weights[name].to(torch.float8_e4m3fn)}
    loading = Loading(bundle / program.file, program, weights, torch.device("cpu"), None)
    with pytest.raises(CompatibilityError, match=f"`{name}` is float8_e4m3fn"):
        TrainableEntry(loading)
