"""The cases of `tests.benchmarks.table`: bundles, commands, engines, and what must be reached."""

from __future__ import annotations

from dataclasses import dataclass, field

BF16_PEERS = (
    *("llama.cpp", "openvino", "openvino-paged", "onnxruntime-genai", "ctranslate2"),
    *("transformers", "transformers-compiled"),
)
CODES_PEERS = ("llama.cpp", "openvino-paged")
NO_ADAPTER = "no adapter"

AOTI = ("--format", "aoti")
BUNDLES = {
    "bf16": (*AOTI, "--dtype", "bf16"),
    "int8": (*AOTI, "--dtype", "bf16", "--quantize", "int8", "--group-size", "32"),
    "int4": (*AOTI, "--dtype", "bf16", "--quantize", "int4", "--group-size", "32"),
    "short": (*AOTI, "--dtype", "bf16", "--max-seq", "256"),
    "long": (*AOTI, "--dtype", "bf16", "--max-seq", "8192"),
    "serving": ("--dtype", "bf16", "--entry", "serving"),
}
"""What `llama-export build` is asked for, by the bundle's name."""


@dataclass(frozen=True)
class Goal:
    """What a ratio must be at least.

    Attributes:
        engine: how the other's name begins.
        ratio: of the speeds, ours to the other's.
    """

    engine: str
    ratio: float

    def judge(self, ratio: float) -> str:
        """The goal, and whether it is met."""
        return f"{self.ratio:.2f}: {'met' if ratio >= self.ratio else 'missed'}"

    def judge_most(self, ratio: float) -> str:
        """The same of a ratio that is better the smaller it is."""
        return f"at most {self.ratio:.2f}: {'met' if ratio <= self.ratio else 'missed'}"


@dataclass(frozen=True)
class Case:
    """One command.

    Attributes:
        name: in the table.
        bundle: that is measured.
        words: of the command.
        figure: the field of its rows that the case is about.
        unit: of the figure.
        peers: engines beside it.
        beside: bundles beside it.
        goals: for some of the engines.
        missing: engines that cannot be measured, and why.
        runs: where the case needs another number than the others.
    """

    name: str
    bundle: str
    words: tuple[str, ...]
    figure: str
    unit: str
    peers: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    goals: tuple[Goal, ...] = ()
    missing: dict[str, str] = field(default_factory=dict)
    runs: int | None = None


CASES = (
    Case(
        "decode, bf16", "bf16", ("--new-tokens", "64"), "decode_tok_s", "tok/s", BF16_PEERS,
        goals=(Goal("llama.cpp", 1.5),),
    ),
    Case(
        "decode, int8", "int8", ("--new-tokens", "64"), "decode_tok_s", "tok/s", CODES_PEERS,
        goals=(Goal("llama.cpp", 1.3),),
    ),
    Case(
        "decode, int4", "int4", ("--new-tokens", "64"), "decode_tok_s", "tok/s",
        (*CODES_PEERS, "onnxruntime-genai"),
        goals=(Goal("onnxruntime-genai", 1.2),), missing={"ExecuTorch 8da4w": NO_ADAPTER},
    ),
    Case(
        "prefill 512, bf16", "bf16", ("--workload", "prefill"), "ttft_ms", "ms", BF16_PEERS,
        goals=(Goal("openvino-paged", 1.0),),
    ),
    Case(
        "position 100 of 8,192 beside 256", "long", ("--prompt-len", "85", "--new-tokens", "32"),
        "decode_tok_s", "tok/s", beside=("short",), goals=(Goal("aoti of short", 1 / 1.1),),
    ),
    Case(
        "start to first token, 16", "bf16", ("--workload", "load"), "load_s", "s",
        ("llama.cpp", "openvino", "openvino-paged", "onnxruntime-genai", "ctranslate2"),
        goals=(Goal("openvino-paged", 1.0),),
        missing={"llama-run": "see Without Python"},
    ),
    Case(
        "build of one program", "bf16", ("--workload", "build"), "build_s", "s", runs=3,
        missing={"first version": "65.1 s for the program alone, as `make demo` printed it"},
    ),
)  # fmt: skip
