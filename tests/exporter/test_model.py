"""The network, run eagerly, against transformers' Llama; and its formulations against each other."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig as ReferenceConfig
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from llama_export.checkpoint.open import open_checkpoint
from llama_export.model.formulation import Formulation
from llama_export.model.linear import RMSNorm
from llama_export.model.llama import Llama
from llama_export.model.rope import inverse_frequencies
from tests.tiny import ABSENT, write_tiny
from tests.tiny_gguf import write_tiny_gguf

NUM_TOKENS, VOCAB_SIZE = 200, 128
LENGTH = 12
POISON = 1e4
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FORMULATIONS = [
    Formulation(torch.float32, reads_positions=reads, max_fused_rows=rows)
    for reads in (True, False)
    for rows in (0, 3, 64)
]


@pytest.fixture(autouse=True)
def _one_thread_and_no_gradients() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads cost more than such small products
    with torch.no_grad():
        yield
    torch.set_num_threads(num_threads)


def load(path: Path, form: Formulation | None = None) -> Llama:
    checkpoint = open_checkpoint(str(path))
    config = checkpoint.config
    form = form or Formulation(torch.float32, reads_positions=True)
    model = Llama(config, form)
    weights = {name: checkpoint.read(name) for name in checkpoint.tensors}
    weights["model.rotary_emb.inv_freq"] = inverse_frequencies(config.rope, config.head_dim)
    model.load_state_dict(weights, strict=True, assign=True)
    return model.requires_grad_(False)


def load_reference(path: Path, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    values = json.loads((path / "config.json").read_text())
    heads = values["num_attention_heads"]
    is_odd = values["hidden_size"] % heads != 0
    # transformers refuses such a config when it is made, but computes it.
    config = ReferenceConfig(**values | ({"num_attention_heads": 1} if is_odd else {}))
    config.num_attention_heads = heads
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config).to(dtype)
    found = model.load_state_dict(load_file(path / "model.safetensors"), strict=False)
    assert not found.unexpected_keys
    assert found.missing_keys in ([], ["lm_head.weight"])
    model.tie_weights()
    return model.eval()


def some_tokens(num_rows: int = 1, num_tokens: int = NUM_TOKENS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    shape = (num_rows, num_tokens)
    return torch.randint(VOCAB_SIZE, shape, generator=generator, dtype=torch.int32)


def new_states(
    path: Path, num_rows: int, capacity: int, fill: float = POISON
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    config = open_checkpoint(str(path)).config
    shape = (num_rows, config.num_kv_heads, capacity, config.head_dim)
    return [(torch.full(shape, fill), torch.full(shape, fill)) for _ in range(config.num_layers)]


def at(pos: int) -> torch.Tensor:
    return torch.tensor(pos, dtype=torch.int32)


CONFIGS: dict[str, dict[str, Any]] = {
    "grouped heads": {},
    "as many key heads as query heads": {"num_key_value_heads": 4},
    "number of key heads absent": {"num_key_value_heads": ABSENT},
    "one key head": {"num_key_value_heads": 1},
    "head_dim that hidden does not divide into": {
        "hidden_size": 72,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "head_dim": 16,
    },
    "head_dim above hidden / heads": {"head_dim": 32},
    "attention bias": {"attention_bias": True},
    "mlp bias": {"mlp_bias": True},
    "both biases": {"attention_bias": True, "mlp_bias": True},
    "tied head": {"tie_word_embeddings": True},
    "rope base": {"rope_theta": 500000.0},
    "linear rope": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3 rope": {"rope_scaling": LLAMA3},
    "large epsilon": {"rms_norm_eps": 0.1},
    "epsilon absent": {"rms_norm_eps": ABSENT},
    "12 layers, whose names sort otherwise as text": {"num_hidden_layers": 12},
}


@pytest.mark.parametrize("overrides", CONFIGS.values(), ids=CONFIGS.keys())
def test_logits_equal_the_references(tmp_path: Path, overrides: dict[str, Any]) -> None:
    write_tiny(tmp_path, has_tokenizer=False, **overrides)
    tokens = some_tokens()
    expected = load_reference(tmp_path)(tokens.long()).logits
    actual = load(tmp_path)(tokens)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))


def test_bfloat16_logits_are_as_exact_as_the_references(tmp_path: Path) -> None:
    write_tiny(tmp_path, has_tokenizer=False, dtype=torch.bfloat16, torch_dtype="bfloat16")
    tokens = some_tokens()
    exact = load_reference(tmp_path)(tokens.long()).logits
    reference = load_reference(tmp_path, torch.bfloat16)(tokens.long()).logits
    actual = load(tmp_path, Formulation(torch.bfloat16, reads_positions=True))(tokens)
    assert actual.dtype == torch.bfloat16
    allowed = (reference.float() - exact).square().mean()
    assert (actual.float() - exact).square().mean() <= 1.1 * allowed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_norm_is_bit_equal_to_the_references(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    ours, reference = RMSNorm(64, 1e-5), LlamaRMSNorm(64, 1e-5)
    weight = torch.nn.Parameter((1 + 0.3 * torch.randn(64, generator=generator)).to(dtype))
    ours.weight = reference.weight = weight
    x = (torch.randn(50, 64, generator=generator) * 3).to(dtype)
    assert torch.equal(ours(x), reference(x))


# --- the same checkpoint, spelled otherwise -------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [{}, {"attention_bias": True}, {"num_key_value_heads": 1}, {"tie_word_embeddings": True}],
)
def test_a_gguf_file_gives_the_folders_logits(tmp_path: Path, overrides: dict[str, Any]) -> None:
    folder = write_tiny(tmp_path / "hf", **overrides)
    file = write_tiny_gguf(tmp_path, folder)
    tokens = some_tokens()
    torch.testing.assert_close(load(file)(tokens), load(folder)(tokens), rtol=0, atol=1e-5)


def test_rope_freqs_of_a_gguf_file_are_the_llama3_scaling(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "hf", rope_scaling=LLAMA3)
    config = open_checkpoint(str(folder)).config
    unscaled = 10000 ** (-torch.arange(0, 16, 2).double() / 16)
    divisors = unscaled / inverse_frequencies(config.rope, 16).double()
    extra = {"rope_freqs.weight": divisors.float().numpy().astype(np.float32)}
    file = write_tiny_gguf(tmp_path, folder, extra=extra)
    tokens = some_tokens()
    torch.testing.assert_close(load(file)(tokens), load(folder)(tokens), rtol=0, atol=1e-5)
    unscaled_file = write_tiny_gguf(tmp_path / "unscaled.gguf", folder)
    assert (load(unscaled_file)(tokens) - load(folder)(tokens)).abs().max() > 1e-2


@pytest.mark.parametrize("scaling", [None, LLAMA3, {"rope_type": "linear", "factor": 2.0}])
def test_both_generations_of_config_give_the_same_bits(
    tmp_path: Path, scaling: dict[str, Any] | None
) -> None:
    old = write_tiny(tmp_path / "old", rope_scaling=scaling, rope_theta=500000)
    parameters = {"rope_type": "default", **(scaling or {}), "rope_theta": 500000.0}
    new = write_tiny(
        tmp_path / "new",
        rope_parameters=parameters,
        dtype_=None,
        rope_theta=ABSENT,
        rope_scaling=ABSENT,
        torch_dtype=ABSENT,
    )
    config = json.loads((new / "config.json").read_text())
    config["dtype"] = config.pop("dtype_") or "float32"
    (new / "config.json").write_text(json.dumps(config))
    tokens = some_tokens()
    assert torch.equal(load(old)(tokens), load(new)(tokens))


def test_a_changed_scaling_base_or_epsilon_changes_the_logits(tmp_path: Path) -> None:
    base = load(write_tiny(tmp_path / "base"))(some_tokens())
    for number, overrides in enumerate(
        ({"rope_scaling": LLAMA3}, {"rope_theta": 20000}, {"rms_norm_eps": 1e-3})
    ):
        other = load(write_tiny(tmp_path / str(number), **overrides))(some_tokens())
        assert (base - other).abs().max() > 1e-4, overrides


# --- formulations and states ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    overrides = {"attention_bias": True, "mlp_bias": True}
    return write_tiny(tmp_path_factory.mktemp("model"), has_tokenizer=False, **overrides)


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> torch.Tensor:
    with torch.no_grad():
        return load_reference(checkpoint)(some_tokens(4, LENGTH).long()).logits


def each(values: Sequence[Formulation]) -> Any:
    names = [f"reads={form.reads_positions} fused={form.max_fused_rows}" for form in values]
    return pytest.mark.parametrize("form", values, ids=names)


@each(FORMULATIONS)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4])
def test_decode_from_the_first_token(
    checkpoint: Path, oracle: torch.Tensor, form: Formulation, num_rows: int
) -> None:
    model, tokens = load(checkpoint, form), some_tokens(4, LENGTH)[:num_rows]
    states = new_states(checkpoint, num_rows, 20)
    logits = [model.decode(tokens[:, i : i + 1], at(i), states) for i in range(LENGTH)]
    torch.testing.assert_close(torch.stack(logits, 1), oracle[:num_rows], rtol=0, atol=1e-5)


@each(FORMULATIONS)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4])
@pytest.mark.parametrize("cuts", [(12,), (1, 11), (11, 1), (5, 1, 2, 4)])
def test_prefill_in_chunks(
    checkpoint: Path, oracle: torch.Tensor, form: Formulation, num_rows: int, cuts: tuple[int, ...]
) -> None:
    model, tokens = load(checkpoint, form), some_tokens(4, LENGTH)[:num_rows]
    states, position = new_states(checkpoint, num_rows, LENGTH + 1), 0
    for cut in cuts:
        logits = model.prefill(tokens[:, position : position + cut], at(position), states)
        position += cut
        expected = oracle[:num_rows, position - 1]
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


@each(FORMULATIONS)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4])
def test_decode_rows_each_at_its_own_position(
    checkpoint: Path, oracle: torch.Tensor, form: Formulation, num_rows: int
) -> None:
    model, tokens = load(checkpoint, form), some_tokens(4, LENGTH)[:num_rows]
    capacity = LENGTH + 2
    states = new_states(checkpoint, num_rows, capacity)
    starts = torch.tensor([0, 3, 1, 5])[:num_rows]  # rows idle until then
    for step in range(LENGTH + 5):
        positions = step - starts
        is_live = (positions >= 0) & (positions < LENGTH)
        column = tokens[torch.arange(num_rows), positions.clamp(0, LENGTH - 1)][:, None]
        positions = torch.where(is_live, positions, capacity - 1).int()
        logits = model.decode_rows(column, positions, states)
        for row in torch.nonzero(is_live)[:, 0]:
            expected = oracle[row, positions[row]]
            torch.testing.assert_close(logits[row], expected, rtol=0, atol=1e-5)


@each(FORMULATIONS)
def test_a_step_writes_only_its_position_in_every_layer(
    checkpoint: Path, form: Formulation
) -> None:
    model, states = load(checkpoint, form), new_states(checkpoint, 2, 16, fill=0.5)
    before = [tensor.clone() for state in states for tensor in state]
    model.decode(some_tokens(2, 1), at(5), states)
    after = [tensor for state in states for tensor in state]
    for old, new in zip(before, after, strict=True):
        is_changed = (old != new).any(-1)
        assert is_changed[:, :, 5].all()
        assert is_changed.sum() == 2 * 2


@each(FORMULATIONS)
def test_idle_rows_write_only_scratch_and_change_nothing_elsewhere(
    checkpoint: Path, form: Formulation
) -> None:
    model, tokens = load(checkpoint, form), some_tokens(2, 2)
    results = []
    for idle_token in (3, 77):
        states = new_states(checkpoint, 2, 16, fill=0.25)
        model.decode_rows(torch.tensor([[idle_token], [9]]).int(), torch.tensor([15, 0]), states)
        column = torch.tensor([[idle_token], [int(tokens[1, 1])]]).int()
        logits = model.decode_rows(column, torch.tensor([15, 1]), states)
        for keys, values in states:
            assert (keys[0, :, :15] == 0.25).all()
            assert (values[0, :, :15] == 0.25).all()
        results.append(logits[1])
    assert torch.equal(results[0], results[1])


@each(FORMULATIONS)
def test_another_rows_content_changes_nothing_bit_for_bit(
    checkpoint: Path, form: Formulation
) -> None:
    model, tokens = load(checkpoint, form), some_tokens(4, 12)
    found = []
    for other in (0, 50):
        changed = tokens.clone()
        changed[[0, 2, 3]] = (changed[[0, 2, 3]] + other) % VOCAB_SIZE
        states = new_states(checkpoint, 4, 16, fill=0.0)
        model.prefill(changed[:, :11], at(0), states)
        found.append(model.decode(changed[:, 11:], at(11), states)[1])
    assert torch.equal(found[0], found[1])


def test_next_token_is_the_last_row_of_forward(checkpoint: Path, oracle: torch.Tensor) -> None:
    for form in FORMULATIONS:
        model = load(checkpoint, form)
        torch.testing.assert_close(model(some_tokens(4, LENGTH)), oracle, rtol=0, atol=1e-5)
        last = model.next_token(some_tokens(4, LENGTH))
        torch.testing.assert_close(last, oracle[:, -1], rtol=0, atol=1e-5)


def test_a_later_token_changes_nothing_before_it(checkpoint: Path) -> None:
    model, tokens = load(checkpoint), some_tokens(1, 24)
    changed = tokens.clone()
    changed[0, 15] = (changed[0, 15] + 1) % VOCAB_SIZE
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :15], after[:, :15])
    assert not torch.equal(before[:, 15], after[:, 15])


@pytest.mark.parametrize("pos", [-1, 16])
def test_a_position_outside_the_state_is_refused_where_it_is_read(
    checkpoint: Path, pos: int
) -> None:
    model, states = load(checkpoint), new_states(checkpoint, 1, 16)
    with pytest.raises(RuntimeError):
        model.decode(some_tokens(1, 1), at(pos), states)


def test_weights_of_another_dtype_than_the_arithmetic(checkpoint: Path, tmp_path: Path) -> None:
    """bfloat16 weights in float32 arithmetic are the float32 model of the rounded weights."""
    folder = write_tiny(tmp_path, has_tokenizer=False, dtype=torch.bfloat16)
    tokens = some_tokens()
    expected = load_reference(folder, torch.float32)(tokens.long()).logits
    torch.testing.assert_close(load(folder)(tokens), expected, rtol=0, atol=1e-5)
