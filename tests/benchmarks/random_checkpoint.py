"""Writes a checkpoint of a preset's size with random weights, for benchmarks without a download.

    python -m tests.benchmarks.random_checkpoint PRESET FOLDER [--num-layers N]
    llama-export build FOLDER --entry serving -o random
    llama-export bench random --workload serve --requests 256 --concurrency 64 \\
      --prompt-len 512 --new-tokens 128

Values have the size of trained ones. There is no tokenizer, and no token ends a text.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

from llama_artifacts.dtypes import from_name
from llama_artifacts.summary import show_bytes
from llama_export import presets
from llama_export.checkpoint.source import TensorInfo
from llama_export.footprint.network import from_model
from llama_export.model.llama import INV_FREQ
from llama_export.trace import torch_dtype

WEIGHT_SPREAD = 0.02
SCALE = 2.0**-9
"""Of FP8 weights, whose codes are therefore some units large."""


def write_random(folder: Path, config: dict[str, Any], *, seed: int = 1) -> Path:
    """A checkpoint of a config.json's values, one tensor in memory at a time."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    tensors = dict(from_model(str(folder)).tensors)
    del tensors[INV_FREQ]  # follows from the config
    header, end = {}, 0
    for name, info in tensors.items():
        dtype = from_name(info.dtype)
        start, end = end, end + dtype.num_bytes * math.prod(info.shape)
        header[name] = {
            "dtype": dtype.safetensors,
            "shape": info.shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    generator = torch.Generator().manual_seed(seed)
    with (folder / "model.safetensors").open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, info in tensors.items():
            file.write(_values(name, info, generator).view(torch.uint8).numpy())
    return folder


def _values(name: str, info: TensorInfo, generator: torch.Generator) -> torch.Tensor:
    if name.endswith("_scale"):
        values = torch.full(info.shape, SCALE)
    elif len(info.shape) == 1:
        values = torch.ones(info.shape)
    else:
        values = torch.empty(info.shape).normal_(0, WEIGHT_SPREAD, generator=generator)
        values /= SCALE if from_name(info.dtype).num_bytes == 1 else 1
    return values.to(torch_dtype(info.dtype)).flatten()


def main() -> None:
    """Writes the checkpoint and prints what it weighs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("preset", choices=presets.names())
    parser.add_argument("folder", type=Path)
    parser.add_argument("--num-layers", type=int, help="fewer layers than the preset has")
    chosen = parser.parse_args()
    preset = presets.find(chosen.preset)
    assert preset is not None
    config = dict(preset.config)
    if chosen.num_layers is not None:
        config["num_hidden_layers"] = chosen.num_layers
    path = write_random(chosen.folder, config) / "model.safetensors"
    sys.stdout.write(f"{path}: {show_bytes(path.stat().st_size)}\n")


if __name__ == "__main__":
    main()
