"""A model of eight billion parameters is traced from its headers alone."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from llama_artifacts import manifest_file
from llama_export import presets
from tests.cli.running import environment

_LOG = logging.getLogger(__name__)

PRESETS = ("llama-3.1-8b-instruct", "llama-3.1-8b-instruct-fp8")
# Of the process's own memory since it began; a parent's figure for a child also counts what the
# parent held when it forked.
SCRIPT = """
import sys
from pathlib import Path
from typing import Any
from llama_export.cli import main
try:
    main()
finally:
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    sys.stderr.write("\\npeak " + fields["VmHWM"].split()[0])
"""


def write_headers(folder: Path, config: dict[str, Any]) -> Path:
    """The checkpoint's config.json and a weights file that ends after its header."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv_width = config["num_key_value_heads"] * hidden // config["num_attention_heads"]
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv_width, hidden),
        "self_attn.v_proj": (kv_width, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    tensors = {
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(config["num_hidden_layers"])
        for name, shape in shapes.items()
    }
    tensors["model.embed_tokens.weight"] = (config["vocab_size"], hidden)
    tensors["model.norm.weight"] = (hidden,)
    tensors["lm_head.weight"] = (config["vocab_size"], hidden)
    fp8 = [name for name in tensors if "_proj" in name and "quantization_config" in config]
    tensors |= {f"{name}_scale": (tensors[name][0], 1) for name in fp8}
    header, end = {}, 0
    for name, shape in tensors.items():
        dtype, num_bytes = ("F8_E4M3", 1) if name in fp8 else ("BF16", 2)
        start, end = end, end + num_bytes * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_eight_billion_parameters_need_little_memory(tmp_path: Path, name: str) -> None:
    preset = presets.find(name)
    assert preset is not None
    checkpoint = write_headers(tmp_path / name, preset.config)
    output = tmp_path / "bundle"
    options = ("--entry", "decode", "--format", "pt2", "--weights", "none", "-o", str(output))
    command = [sys.executable, "-c", SCRIPT, "build", str(checkpoint), *options]
    started = time.perf_counter()
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment(), cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    peak_kib = int(done.stderr.rpartition("peak ")[2])
    _LOG.info("%.1f s, peak %d KiB", time.perf_counter() - started, peak_kib)
    assert peak_kib < 3 * 2**20
    manifest = manifest_file.read(output)
    assert manifest.model.num_parameters == 8_030_261_248
    assert [(p.entry, p.format) for p in manifest.programs] == [("decode", "pt2")]
    is_fp8 = name.endswith("fp8")
    assert manifest.programs[0].numerics == ("exact" if is_fp8 else None)
    scales = [constant for constant in manifest.programs[0].constants if "scale" in constant]
    assert len(scales) == (7 * 32 if is_fp8 else 0)
    assert not (output / "weights.safetensors").exists()
    assert sum(path.stat().st_size for path in output.iterdir()) < 4 * 2**20
