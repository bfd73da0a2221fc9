"""A real model through the whole tool: its GGUF file becomes bundles, and they compute it.

One file, since the session's bundles take minutes to build: a parallel run gives each file to one
worker.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import safetensors.torch
import torch

import llama_runtime
from llama_artifacts import manifest as manifests
from llama_artifacts import manifest_file
from llama_artifacts.safetensors import read_header
from llama_export.model.linear import RMSNorm
from llama_export.model.rope import rotations
from tests.benchmarks.cpp import run
from tests.end_to_end import resident
from tests.end_to_end.conftest import BUNDLES, LONG_BUNDLES, MAX_NEW, NUM_TOKENS, QUESTION
from tests.end_to_end.oracle import NUM_PARAMETERS, Oracle, load_tokenizer
from tests.end_to_end.texts import KNOWN_IDS

# The figures show with `--log-cli-level info`.
_LOG = logging.getLogger(__name__)

pytestmark = pytest.mark.slow

CLI = Callable[..., "subprocess.CompletedProcess[str]"]
MIB = 2**20


F32 = [
    ("f32", "onnx"),
    *(pytest.param(f"f32-{name}", name, marks=pytest.mark.long) for name in ("pt2", "aoti")),
]
BF16 = [("bf16", "aoti"), pytest.param("bf16-pt2", "pt2", marks=pytest.mark.long)]


# The checkpoint: weights, norm and rotations on their own.


def test_weights_equal_those_that_transformers_reads(smollm2_f32: Path, oracle_f32: Oracle) -> None:
    expected = dict(oracle_f32.model.named_parameters())
    actual = safetensors.torch.load_file(smollm2_f32 / "weights.safetensors")
    actual.pop("model.rotary_emb.inv_freq")
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    num_parameters = sum(tensor.numel() for tensor in actual.values())
    assert num_parameters == manifest_file.read(smollm2_f32).model.num_parameters == NUM_PARAMETERS


def test_rope_table_is_that_of_transformers(smollm2_f32: Path, oracle_f32: Oracle) -> None:
    inv_freq = llama_runtime.load(smollm2_f32).weights["model.rotary_emb.inv_freq"]
    positions = torch.arange(8192, dtype=torch.int32)
    expected_cos, expected_sin = oracle_f32.model.model.rotary_emb(torch.zeros(()), positions[None])
    cos, sin = rotations(positions, inv_freq, torch.float32)
    assert torch.equal(cos, expected_cos[0])
    first, second = sin.chunk(2, dim=-1)
    assert torch.equal(torch.cat((-first, second), dim=-1), expected_sin[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_is_that_of_transformers(
    smollm2_f32: Path, oracle_f32: Oracle, dtype: torch.dtype
) -> None:
    name = "model.layers.7.input_layernorm.weight"
    weight = llama_runtime.load(smollm2_f32).weights[name].to(dtype)
    reference = type(oracle_f32.model.model.norm)
    ours, theirs = RMSNorm(len(weight), 1e-5), reference(len(weight), 1e-5)
    for norm in (ours, theirs):
        norm.weight = torch.nn.Parameter(weight)
    x = torch.randn(33, len(weight), generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.no_grad():
        assert torch.equal(ours(x), theirs(x))


# Text: token ids and the chat template.


@pytest.mark.parametrize("text", KNOWN_IDS)
def test_token_ids_are_known(tokenizer: llama_runtime.Tokenizer, text: str) -> None:
    assert tokenizer.encode(text) == KNOWN_IDS[text]
    assert tokenizer.decode(KNOWN_IDS[text]) == text


def test_chat_equals_that_of_transformers(
    tokenizer: llama_runtime.Tokenizer, smollm2_gguf: Path
) -> None:
    reference = load_tokenizer(smollm2_gguf)
    question = {"role": "user", "content": f"  {QUESTION}\n"}
    chats = (
        [question],
        [{"role": "system", "content": "Be brief."}, question],
        [question, {"role": "assistant", "content": "Rayleigh, 1871."}, question],
    )
    for messages in chats:
        options = {"add_generation_prompt": True}
        expected = reference.apply_chat_template(messages, tokenize=False, **options)
        assert tokenizer.render_chat(messages) == expected
        ids = reference.apply_chat_template(messages, return_dict=False, **options)
        assert tokenizer.encode_chat(messages) == ids


# Float32: the same logits and the same text.


@pytest.mark.long
@pytest.mark.parametrize("format", ["pt2", "onnx"])
def test_f32_forward_logits(
    bundle_named: Callable[[str], Path],
    format: manifests.Format,
    text_tokens: list[int],
    logits_f32: torch.Tensor,
) -> None:
    forward = llama_runtime.load(bundle_named("f32-forward"), format=format).entry("forward")
    difference = float((forward(tokens=[text_tokens])[0] - logits_f32).abs().max())
    _LOG.info("largest difference %.2e", difference)
    assert difference <= 2e-4


@pytest.mark.parametrize(("name", "format"), F32)
def test_f32_session_logits(
    bundle_named: Callable[[str], Path],
    name: str,
    format: manifests.Format,
    text_tokens: list[int],
    logits_f32: torch.Tensor,
) -> None:
    """A prompt in two chunks, then token by token."""
    session = llama_runtime.load(bundle_named(name), format=format).session()
    rows = [session.prefill(text_tokens[:100]), session.prefill(text_tokens[100:240])]
    rows += [session.decode(token) for token in text_tokens[240:]]
    difference = float((torch.cat(rows) - logits_f32[[99, *range(239, NUM_TOKENS)]]).abs().max())
    _LOG.info("largest difference %.2e", difference)
    assert difference <= 2e-4


@pytest.mark.parametrize(("name", "format"), F32)
def test_f32_greedy_tokens(
    bundle_named: Callable[[str], Path],
    name: str,
    format: manifests.Format,
    greedy_tokens: tuple[list[int], list[int]],
) -> None:
    prompt, expected = greedy_tokens
    assert len(expected) == MAX_NEW
    bundle = llama_runtime.load(bundle_named(name), format=format)
    generation = bundle.generate(QUESTION, max_new=MAX_NEW)
    text = "".join(generation)
    assert generation.prompt_tokens == prompt
    assert generation.tokens == expected
    assert text == bundle.tokenizer.decode(expected)


def test_f32_answer_ends_where_that_of_transformers_does(
    smollm2_f32: Path, oracle_f32: Oracle
) -> None:
    bundle = llama_runtime.load(smollm2_f32, format="onnx")
    generation = bundle.generate("Hi", max_new=MAX_NEW)
    text = "".join(generation)
    [*expected, last] = oracle_f32.greedy(generation.prompt_tokens, max_new=MAX_NEW)
    assert last in bundle.manifest.stop_tokens
    assert generation.tokens == expected
    assert generation.finish_reason == "stop"
    assert "<|im_end|>" not in text


# bfloat16: the same choices wherever rounding cannot decide them.


@pytest.fixture(scope="module")
def clear_positions(logits_f32: torch.Tensor, logits_bf16: torch.Tensor) -> torch.Tensor:
    """Where the likeliest token leads by more than rounding changes any logit; bool [S].

    The noise of a position is the largest difference there between the reference in bfloat16 and
    the reference in float32.
    """
    noise = (logits_bf16 - logits_f32).abs().amax(-1)
    likeliest = logits_f32.topk(2).values
    is_clear = likeliest[:, 0] - likeliest[:, 1] > noise
    assert is_clear.float().mean() > 0.7, "most positions must be compared"
    return is_clear


@pytest.mark.long
def test_bf16_forward(
    bundle_named: Callable[[str], Path],
    text_tokens: list[int],
    logits_bf16: torch.Tensor,
    logits_f32: torch.Tensor,
    clear_positions: torch.Tensor,
) -> None:
    forward = llama_runtime.load(bundle_named("bf16-forward")).entry("forward")
    logits = forward(tokens=[text_tokens])
    assert isinstance(logits, torch.Tensor)
    assert logits.dtype == torch.bfloat16
    actual = logits[0].float()
    is_equal = actual.argmax(-1) == logits_bf16.argmax(-1)
    assert is_equal[clear_positions].all()
    assert is_equal.float().mean() > 0.9
    assert _rms(actual - logits_f32) < 1.2 * _rms(logits_bf16 - logits_f32)


@pytest.mark.parametrize(("name", "format"), BF16)
def test_bf16_prefill_and_decode(
    bundle_named: Callable[[str], Path],
    name: str,
    format: manifests.Format,
    text_tokens: list[int],
    logits_bf16: torch.Tensor,
    logits_f32: torch.Tensor,
    clear_positions: torch.Tensor,
) -> None:
    """A prompt in two chunks, then token by token."""
    session = llama_runtime.load(bundle_named(name), format=format).session()
    rows = [session.prefill(text_tokens[:32]), session.prefill(text_tokens[32:64])]
    rows += [session.decode(token) for token in text_tokens[64:]]
    actual = torch.cat(rows).float()
    positions = torch.tensor([31, *range(63, NUM_TOKENS)])
    is_clear = clear_positions[positions]
    _LOG.info("%d of %d positions compared", int(is_clear.sum()), len(positions))
    is_equal = actual.argmax(-1) == logits_bf16[positions].argmax(-1)
    assert is_equal[is_clear].all()
    assert is_equal.float().mean() > 0.9
    error, usual = (_rms(x - logits_f32[positions]) for x in (actual, logits_bf16[positions]))
    _LOG.info("root mean square error %.3f, the reference's %.3f", error, usual)
    assert error < 1.2 * usual


def _rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())


# One copy of the weights: on disk, in the ONNX programs, and in memory.


@pytest.mark.parametrize("name", BUNDLES)
def test_bundle_holds_the_weights_once(smollm2_bundles: dict[str, Path], name: str) -> None:
    folder = smollm2_bundles[name]
    manifest = manifest_file.read(folder)
    weights_bytes = NUM_PARAMETERS * {"f32": 4, "bf16": 2}[manifest.dtype]
    bundle_bytes = sum(path.stat().st_size for path in folder.iterdir())
    assert bundle_bytes <= 1.05 * weights_bytes + 2 * MIB * len(manifest.programs)
    assert all((folder / p.file).stat().st_size < 2 * MIB for p in manifest.programs)


@pytest.mark.parametrize("entry", ["decode", "prefill"])
def test_onnx_initializers_lie_in_the_weights_file(smollm2_f32: Path, entry: str) -> None:
    folder = smollm2_f32
    model = onnx.load(folder / f"{entry}.onnx", load_external_data=False)
    tensors = read_header(folder / "weights.safetensors").tensors
    outside = [x for x in model.graph.initializer if x.data_location == x.EXTERNAL]
    assert len(outside) >= 30 * 9 + 2
    for initializer in outside:
        place = {item.key: item.value for item in initializer.external_data}
        tensor = tensors[initializer.name]
        assert place["location"] == "weights.safetensors"
        assert int(place["offset"]) == tensor.start
        assert int(place["length"]) == tensor.end - tensor.start


@pytest.mark.parametrize("name", ["bf16", pytest.param("f32-aoti", marks=pytest.mark.long)])
def test_two_entries_hold_the_weights_once_in_memory(
    bundle_named: Callable[[str], Path],
    name: str,
) -> None:
    folder = bundle_named(name)
    command = [sys.executable, resident.__file__, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (before, _), (one, _), (two, most) = json.loads(done.stdout)
    weights_bytes = (folder / "weights.safetensors").stat().st_size
    growth = {"one": one - before, "two": two - before, "peak": most - before}
    _LOG.info("weights %d, growth with entries %s", weights_bytes, growth)
    # Running reads every weight, so that the map of the file is resident and counted.
    assert 0.9 * weights_bytes < growth["one"]
    assert growth["peak"] < 1.3 * weights_bytes
    assert growth["two"] - growth["one"] < 0.1 * weights_bytes


# Without Python.


@pytest.mark.long
@pytest.mark.parametrize("name", ["bf16", "f32-aoti"])
def test_cpp_tokens_and_memory(
    bundle_named: Callable[[str], Path],
    name: str,
    llama_run: Path,
    greedy_tokens: tuple[list[int], list[int]],
) -> None:
    folder = bundle_named(name)
    prompt, expected = greedy_tokens
    done = run([str(llama_run), str(folder)], prompt, max_new=MAX_NEW, threads=1)
    bundle = llama_runtime.load(folder, format="aoti", threads=1)
    assert done.tokens == list(bundle.generate_tokens(prompt, max_new=MAX_NEW))
    assert name != "f32-aoti" or done.tokens == expected
    states_bytes = sum(tensor.nbytes for tensor in bundle.entry("decode").new_states().values())
    weights_bytes = (folder / "weights.safetensors").stat().st_size
    limit = (weights_bytes + states_bytes) / 1e6 + 250
    _LOG.info("peak memory %.0f MB, at most %.0f", done.peak_mb, limit)
    assert done.peak_mb <= limit


# The command line, as the demo uses it.


def test_run_prints_the_text_of_the_api(cli: CLI, smollm2_bf16: Path) -> None:
    done = cli("run", smollm2_bf16, "-p", QUESTION, "--max-new", 24)
    assert (done.returncode, done.stderr) == (0, "")
    generation = llama_runtime.load(smollm2_bf16).generate(QUESTION, max_new=24)
    text = "".join(generation)
    assert len(generation.tokens) == 24
    assert done.stdout == f"{text}\n"


def test_run_prints_the_tokens_of_the_api(cli: CLI, smollm2_bf16: Path) -> None:
    prompt = [1, 9690, 198]
    options = ("--max-new", 12, "--temperature", 0.8, "--seed", 7)
    done = cli("run", smollm2_bf16, "--tokens", " ".join(map(str, prompt)), *options)
    assert (done.returncode, done.stderr) == (0, "")
    bundle = llama_runtime.load(smollm2_bf16)
    expected = list(bundle.generate_tokens(prompt, max_new=12, temperature=0.8, seed=7))
    assert list(map(int, done.stdout.split())) == expected


def test_run_streams(smollm2_bf16: Path) -> None:
    """The first words are there long before the last."""
    words = [sys.executable, "-m", "llama_export", "run", str(smollm2_bf16), "-p", QUESTION]
    with subprocess.Popen([*words, "--max-new", "400"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert os.read(process.stdout.fileno(), 4096)
        assert process.poll() is None
        process.terminate()


def test_inspect_lists_every_program(cli: CLI, smollm2_f32: Path) -> None:
    done = cli("inspect", smollm2_f32, "--json")
    programs = json.loads(done.stdout)["programs"]
    expected = {("prefill", "onnx"), ("decode", "onnx")}
    assert {(program["entry"], program["format"]) for program in programs} == expected
    assert {program["dtype"] for program in programs} == {"f32"}


@pytest.mark.parametrize(
    ("name", "laws"),
    [
        ("bf16", ()),
        ("f32", ()),
        *(pytest.param(name, (), marks=pytest.mark.long) for name in LONG_BUNDLES),
    ],
)
def test_verify_passes(
    cli: CLI, bundle_named: Callable[[str], Path], name: str, laws: tuple[str, ...]
) -> None:
    folder = bundle_named(name)
    done = cli("verify", folder, *laws, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["passed"]
    checked = {(x["entry"], x["format"]) for x in report["checks"] if x["law"] == "parity"}
    assert checked == {(p.entry, p.format) for p in manifest_file.read(folder).programs}


def test_verify_refuses_a_flipped_bit(cli: CLI, smollm2_bf16: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(smollm2_bf16, damaged)
    with (damaged / "weights.safetensors").open("r+b") as file:
        file.seek(-12_345, os.SEEK_END)
        [byte] = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    done = cli("verify", damaged)
    shutil.rmtree(damaged)
    assert done.returncode == 1
    [error] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "weights.safetensors" in error
    assert "Traceback" not in done.stderr
