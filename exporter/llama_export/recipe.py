"""What to build: the choices of one build, with every default made explicit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llama_artifacts.manifest import FORMATS, Format, Numerics, WeightsMode
from llama_export.entries.registry import DEFAULT_PAGE_SIZE, DEFAULT_ROWS

DEFAULT_ENTRIES = ("prefill", "decode")
DEFAULT_MAX_SEQ = 2048
GroupSize = Literal["32", "64", "128", "row"]
Quantize = Literal["int8", "int4", "uint4", "stored"]


@dataclass(frozen=True)
class Recipe:
    """The choices of one build.

    Attributes:
        model: a checkpoint folder, a `.gguf` file, a hub `owner/name[@revision]` or a preset.
        output: the folder to write; None: the model's short name, in the current folder.
        entries: which entries to build; a group of `llama_export.entries.registry` stands for its
            members.
        formats: in which formats.
        max_seq: positions of a state, the last of which is scratch; None: the preset's, else
            the smaller of the model's own limit and 2,048.
        batch: rows of the `rows` states.
        page_size: positions of a page of the `pool` states.
        rows: most rows of a call of the paged entries.
        pages: most pages of a row; None: as many as `max_seq` positions fill.
        steps: tokens that `generate` and `sample` give where their name fixes none; None: 32, or
            what fits into `max_seq`.
        max_new: most tokens that `generate_until` gives, likewise; None: 128, or what fits.
        variants: further programs with fixed dimensions, such as `decode_paged:Rows=1`, in every
            format; None: those of `DEFAULT_VARIANTS` whose entry is built.
        dtype: compute dtype `bf16`, `f16` or `f32`; None: the checkpoint's.
        device: `cpu` or `cuda`.
        weights: `copy` them into the bundle; `link` the checkpoint's files into it, untouched;
            `reference` them: the manifest names and pins them; or `none`: programs only.
        isa: instruction set of native CPU code (`avx2`, `avx512`); None: this machine's best.
        numerics: how products with FP8 weights are computed: `exact`, or `fast`.
        quantize: round matrices to integers of eight or four bits (`int8`, `int4`, and `uint4` with
            minima), or keep those that a GGUF file holds (`stored`); None: codes of FP8 stay, GGUF's are decoded.
        group_size: how many values of a row share a scale then; None: 64 of
            eight bits, 32 of four.
        shards: for how many processes to build programs that run together, each with its part of
            the weights; every entry is built for each of the numbers.
        num_layers: use only so many of the checkpoint's first layers; None: all.
        jobs: processes that make programs at the same time; None: as many as cores and memory
            allow.
        overwrites: whether a bundle that is at the output is replaced once the new one is whole.
    """

    model: str
    output: Path | None = None
    entries: tuple[str, ...] = DEFAULT_ENTRIES
    formats: tuple[Format, ...] = FORMATS
    max_seq: int | None = None
    batch: int = 1
    page_size: int = DEFAULT_PAGE_SIZE
    rows: int = DEFAULT_ROWS
    pages: int | None = None
    steps: int | None = None
    max_new: int | None = None
    variants: tuple[str, ...] | None = None
    dtype: Literal["bf16", "f16", "f32"] | None = None
    device: Literal["cpu", "cuda"] = "cpu"
    weights: WeightsMode = "copy"
    isa: Literal["avx2", "avx512"] | None = None
    numerics: Numerics = "exact"
    quantize: Quantize | None = None
    group_size: GroupSize | None = None
    shards: tuple[int, ...] = (1,)
    num_layers: int | None = None
    jobs: int | None = 1
    overwrites: bool = False
