"""A model of eight billion parameters is traced from its headers alone."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llama_artifacts import manifest as manifests
from llama_export import presets
from tests.cli.running import environment

_LOG = logging.getLogger(__name__)

PRESET = "llama-3.1-8b-instruct"
# Of the process's own memory since it began; a parent's figure for a child also counts what the
# parent held when it forked.
SCRIPT = """
import sys
from pathlib import Path
from llama_export.cli import main
try:
    main()
finally:
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    sys.stderr.write("\\npeak " + fields["VmHWM"].split()[0])
"""


def write_headers(folder: Path) -> Path:
    """The checkpoint's config.json and a weights file that ends after its header."""
    config = presets.find(PRESET).config
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
    header, end = {}, 0
    for name, shape in tensors.items():
        start, end = end, end + 2 * shape[0] * (shape[1] if len(shape) == 2 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    return folder


@pytest.mark.slow
def test_eight_billion_parameters_need_little_memory(tmp_path: Path) -> None:
    checkpoint = write_headers(tmp_path / PRESET)
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
    manifest = manifests.read(output)
    assert manifest.model.num_parameters == 8_030_261_248
    assert [(p.entry, p.format) for p in manifest.programs] == [("decode", "pt2")]
    assert not (output / "weights.safetensors").exists()
    assert sum(path.stat().st_size for path in output.iterdir()) < 4 * 2**20
