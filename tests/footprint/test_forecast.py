"""Figures of bundles and models, and the search for the largest that fits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from llama_artifacts.errors import ChoiceError, InputError, LlamaExportError
from llama_export import presets
from llama_export.footprint.call import Asked, Call
from llama_export.footprint.figures import Forecast
from llama_export.footprint.forecast import Planned, Question, forecast, open_subject
from llama_export.footprint.network import from_model
from llama_export.footprint.search import largest_fit
from llama_export.shards import shard
from tests.bundles import sample_program, write_sample
from tests.footprint.jobs import tiny_network
from tests.tiny import write_tiny

BYTES = 2  # of a bf16 number


class Linear:
    """Activations of a known size, instead of a graph's."""

    how = "tests"

    def __init__(self, per_row: int) -> None:
        self._per_row = per_row

    def peak(self, call: Call) -> int:
        return self._per_row * call.rows


def sizes(found: Forecast) -> dict[str, int]:
    return {figure.name: figure.bytes for figure in found.figures}


def planned(model: str, entry: str, *, per_row: int = 1000, **choices: object) -> Planned:
    subject = open_subject(model, Question(entry, device="cuda", **choices))  # type: ignore[arg-type]
    assert isinstance(subject, Planned)
    subject.__dict__["activations"] = Linear(per_row)
    return subject


def test_states_of_rows_and_pages_are_those_of_the_signature() -> None:
    rows = sizes(forecast(planned("llama-3.1-8b-instruct", "decode"), Asked(4, 8192)))
    assert rows["states"] == 32 * 2 * 4 * 8 * 8192 * 128 * BYTES
    pool = sizes(forecast(planned("llama-3.1-8b-instruct", "decode_paged"), Asked(4, 8192)))
    page = 32 * 2 * 8 * 16 * 128 * BYTES
    assert pool["states"] == rows["states"] + page  # page 0 is scratch
    assert pool["inputs"] == 4 * (4 + 4 + 512 * 4)


@pytest.mark.parametrize("name", presets.names())
def test_presets_are_known_without_their_weights(name: str) -> None:
    preset = presets.find(name)
    assert preset is not None
    network = from_model(name)
    assert network.weights_basis == "modelled"
    eight_bits = sum(info.dtype == "f8e4m3" for info in network.tensors.values())
    assert bool(eight_bits) == name.endswith("fp8")
    if not eight_bits:
        table = network.config.head_dim // 2 * 4
        assert network.weights_bytes == preset.num_parameters * BYTES + table


def test_a_checkpoint_is_known_by_its_header(tmp_path: Path) -> None:
    network = from_model(str(write_tiny(tmp_path / "m")))
    data = (tmp_path / "m/model.safetensors").stat().st_size
    assert network.weights_basis == "exact"
    assert 0 < data - (network.weights_bytes - 8 * 4) < 4000  # the header
    half = from_model(str(tmp_path / "m"), dtype="bf16")
    assert half.weights_bytes - 32 == (network.weights_bytes - 32) // 2


def test_a_config_alone_will_do(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "m")
    whole = from_model(str(folder))
    (folder / "model.safetensors").unlink()
    alone = from_model(str(folder))
    assert alone.weights_bytes == whole.weights_bytes
    assert alone.weights_basis == "modelled"


# --- shards ---------------------------------------------------------------------------------------


def test_shards_divide_heads_widths_and_vocabulary() -> None:
    whole = from_model("llama-3.1-8b-instruct")
    quarter = whole.shard(4)
    assert quarter.tensors["model.layers.0.self_attn.q_proj.weight"].shape == (1024, 4096)
    assert quarter.tensors["model.layers.0.self_attn.k_proj.weight"].shape == (256, 4096)
    assert quarter.tensors["model.layers.0.self_attn.o_proj.weight"].shape == (4096, 1024)
    assert quarter.tensors["model.layers.0.mlp.down_proj.weight"].shape == (4096, 3584)
    assert quarter.tensors["lm_head.weight"].shape == (32064, 4096)
    assert quarter.tensors["model.embed_tokens.weight"].shape == (128256, 4096)
    undivided = (65 + 128256) * 4096 * BYTES + 64 * 4  # norms, embedding, frequencies
    assert whole.weights_bytes - undivided == 4 * (quarter.weights_bytes - undivided)
    found = forecast(planned("llama-3.1-8b-instruct", "decode", shards=4), Asked(4, 8192))
    assert sizes(found)["states"] == 32 * 2 * 4 * 2 * 8192 * 128 * BYTES
    assert any("communication" in text for text in found.unknown)


def test_rows_of_a_tied_head_take_no_memory_of_their_own() -> None:
    whole = tiny_network(tie_word_embeddings=True)
    half = whole.shard(2)
    assert half.tensors["lm_head.weight"].shape == (64, 64)
    undivided = 4 * (128 * 64 + 5 * 64 + 8)  # embedding, norms, frequencies; of f32
    assert 2 * (half.weights_bytes - undivided) == whole.weights_bytes - undivided


def test_every_process_has_the_whole_logits() -> None:
    subject = open_subject("smollm2-1.7b", Question("next_token", shards=4))
    call = subject.call(Asked(32, 8))
    assert call.signature.outputs[0].shape == ("B", 49152)
    assert subject.activations is not None
    # Gathered, then put side by side.
    assert subject.activations.peak(call) >= 2 * 32 * 49152 * BYTES


def test_shards_that_do_not_divide_are_refused_with_the_numbers() -> None:
    config = tiny_network(vocab_size=129).config
    with pytest.raises(
        LlamaExportError, match=r"4 shards divide, got key/value heads 2, vocabulary 129"
    ):
        shard(config, 4)
    assert shard(replace(config, vocab_size=128), 2).num_heads == 2


# --- bundles --------------------------------------------------------------------------------------


def test_a_bundle_has_the_sizes_of_its_build(tmp_path: Path) -> None:
    bundle = str(
        write_sample(
            tmp_path / "b",
            programs=(sample_program("decode", "onnx", "decode.onnx"),),
            weights="none",
            weights_headers={},
        )
    )
    subject = open_subject(bundle, Question("decode"))
    found = forecast(subject, subject.usual)
    assert (found.batch, found.seq_len, found.format) == (1, 16, "onnx")
    assert sizes(found)["states"] == 2 * 16 * 2 * 4
    assert "activations" not in sizes(found)
    assert any(text.startswith("activations:") for text in found.unknown)
    for asked, option in ((Asked(2, 16), "--batch 1"), (Asked(1, 8), "--seq-len 16")):
        with pytest.raises(LlamaExportError, match=option) as caught:
            forecast(subject, asked)
        assert "give the model" in str(caught.value.hint)
    with pytest.raises(LlamaExportError, match="the build fixed --batch"):
        largest_fit(subject, subject.usual, "batch", 10**9)


@pytest.mark.parametrize(
    ("question", "words"),
    [
        (Question("forward"), "no entry `forward`"),
        (Question("decode", format="aoti"), "not there as aoti"),
        (Question("decode", device="cuda"), "not there as cuda"),
    ],
)
def test_what_a_bundle_lacks_is_named(tmp_path: Path, question: Question, words: str) -> None:
    with pytest.raises(InputError, match=words):
        open_subject(str(write_sample(tmp_path / "b")), question)


def test_choices_of_a_build_are_no_choices_in_a_bundle(tmp_path: Path) -> None:
    with pytest.raises(ChoiceError, match="fixed in a bundle"):
        open_subject(str(write_sample(tmp_path / "b")), Question("decode", dtype="bf16"))


@pytest.mark.slow
def test_a_saved_program_needs_what_a_traced_one_does(
    short_bundle: Path, tiny_checkpoint: Path
) -> None:
    built = open_subject(str(short_bundle), Question("prefill"))
    made = open_subject(str(tiny_checkpoint), Question("prefill"))
    found, expected = forecast(built, Asked(1, 16, 5)), forecast(made, Asked(1, 16, 5))
    assert sizes(found) == sizes(expected)
    assert [figure.basis for figure in found.figures] == ["exact"] * 3 + ["modelled", "estimated"]


# --- what fits ------------------------------------------------------------------------------------


def test_the_largest_batch_is_the_last_that_fits() -> None:
    subject = planned("llama-3.1-8b-instruct", "decode_paged", per_row=10**8)
    budget = 80 * 1024**3
    found = largest_fit(subject, Asked(1, 8192), "batch", budget)
    assert found.forecast.num_bytes <= budget
    assert forecast(subject, Asked(found.value + 1, 8192)).num_bytes > budget
    assert found.limit.startswith(f"batch {found.value + 1} needs ")


def test_every_budget_gives_the_batch_that_counting_gives() -> None:
    subject = planned("smollm2-135m", "decode", per_row=0)
    needs = [forecast(subject, Asked(batch, 512)).num_bytes for batch in range(1, 40)]
    for batch, need in enumerate(needs[:-1], start=1):
        for budget in (need, needs[batch] - 1):
            assert largest_fit(subject, Asked(1, 512), "batch", budget).value == batch


def test_the_context_ends_at_the_model_s_positions() -> None:
    subject = planned("smollm2-135m", "decode")
    found = largest_fit(subject, Asked(1, 64), "context", 10**12)
    assert found.value == subject.network.config.max_position
    assert "the model's 8,192" in found.limit


@pytest.mark.parametrize(("entry", "tokens"), [("prefill", 512), ("generate<64>", None)])
def test_a_context_is_found_from_the_shortest_that_the_entry_takes(
    entry: str, tokens: int | None
) -> None:
    subject = planned("llama-3.1-8b-instruct", entry, shards=2)
    found = largest_fit(subject, Asked(1, 64, tokens), "context", 10 * 10**9)
    position = 32 * 2 * 4 * 128 * BYTES
    assert found.value > 10_000
    assert found.forecast.num_bytes <= 10 * 10**9 < found.forecast.num_bytes + position
    assert found.forecast.sizes.get("S") == tokens


def test_more_tokens_than_a_call_takes_are_refused() -> None:
    subject = planned("smollm2-135m", "prefill")
    with pytest.raises(LlamaExportError, match="expected S from 1 to 512, got 513"):
        forecast(subject, Asked(1, 2048, 513))


def test_the_batch_ends_where_the_entry_does() -> None:
    subject = planned("smollm2-135m", "next_token")
    found = largest_fit(subject, Asked(1, 64), "batch", 10**12)
    assert found.value == 64
    assert found.limit == "expected B from 1 to 64, got 65"


def test_what_is_short_is_named_where_nothing_fits() -> None:
    subject = planned("llama-3.1-8b-instruct", "decode")
    with pytest.raises(
        LlamaExportError,
        match=r"expected at most 8.0 GB, got 16.\d GB for batch 1: weights 16.1 GB",
    ):
        largest_fit(subject, Asked(1, 64), "batch", 8 * 10**9)


def test_a_figure_is_never_left_out_in_silence() -> None:
    found = forecast(planned("llama-3.1-8b-instruct", "decode"), Asked(1, 64))
    assert "runtime" not in sizes(found)
    assert json.dumps(found.unknown).count("CUDA context") == 1
