"""What is to be measured: a network with the dtypes of its weights, from a model or a manifest.

No tensor's data is read: a checkpoint's header, a preset's config or a manifest will do.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from llama_artifacts.bundle import Bundle
from llama_artifacts.dtypes import from_name
from llama_artifacts.errors import CompatibilityError, IntegrityError
from llama_artifacts.manifest import Manifest
from llama_artifacts.manifest import Program as ProgramRecord
from llama_artifacts.summary import show_quantized
from llama_artifacts.weights import stored_tensors
from llama_export import presets
from llama_export.checkpoint.config import (
    HfConfig,
    LlamaConfig,
    RopeConfig,
    read_hf_config,
)
from llama_export.checkpoint.files import CONFIG, read_json
from llama_export.checkpoint.layout import (
    E4M3,
    FP8,
    SCALE,
    Codes,
    coded_modules,
    expected_tensors,
    first_layers,
    linear_shapes,
    matrix_shapes,
)
from llama_export.checkpoint.open import check_codes, open_checkpoint
from llama_export.checkpoint.packed import packed_codes
from llama_export.checkpoint.schemes import Fp8Scheme, PackedScheme
from llama_export.checkpoint.source import TensorInfo
from llama_export.footprint.figures import Basis
from llama_export.model.llama import INV_FREQ
from llama_export.pack import plan_weights
from llama_export.quantize import choose, quantized_tensors
from llama_export.recipe import Quantize
from llama_export.shards import cuts_of, part_of, shard

DEFAULT_DTYPE = "bf16"
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin")


@dataclass(frozen=True)
class Network:
    """A network and how its weights are stored.

    Attributes:
        name: of the model.
        config: its sizes; what only changes values, such as the rotary scaling, may be anything.
        dtype: the compute dtype.
        tensors: dtype and shape of every weight, by name.
        weights_basis: how sure the dtypes are.
        weights_how: where they come from, in a few words.
        shards: how many processes share it; `config` and `tensors` are those of one of them, the
            embedding being whole.
        rows: names of tensors that lie within another one, and take no memory of their own.
    """

    name: str
    config: LlamaConfig
    dtype: str
    tensors: Mapping[str, TensorInfo]
    weights_basis: Basis
    weights_how: str
    shards: int = 1
    rows: frozenset[str] = frozenset()

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(
            math.prod(info.shape) * from_name(info.dtype).num_bytes
            for name, info in self.tensors.items()
            if name not in self.rows
        )

    @property
    def called_as(self) -> LlamaConfig:
        """The configuration by which a program is called: its own heads, the whole vocabulary."""
        return replace(self.config, vocab_size=self.config.vocab_size * self.shards)

    def first_layers(self, num_layers: int) -> Network:
        """The network with fewer layers."""
        config = replace(self.config, num_layers=num_layers)
        return replace(self, config=config, tensors=first_layers(self.tensors, num_layers))

    def shard(self, num_shards: int) -> Network:
        """What one of several devices holds of it.

        Raises:
            BuildError: a size does not divide.
        """
        cuts = cuts_of(self.config, self.tensors)
        return replace(
            self,
            config=shard(self.config, num_shards),
            tensors=part_of(self.tensors, cuts, num_shards),
            weights_how=f"{self.weights_how}, one of {num_shards} shards",
            shards=num_shards,
            rows=frozenset(cuts.keys() - self.tensors.keys()),  # a tied head's
        )


def from_model(
    model: str,
    *,
    dtype: str | None = None,
    quantize: Quantize | None = None,
    group_size: str | None = None,
) -> Network:
    """The network of a checkpoint folder, GGUF file, hub repository or preset.

    A preset and a folder with nothing but a config.json are taken by their config alone.

    Args:
        model: as `build` takes it.
        dtype: the compute dtype, which weights take too as in a build; None: the checkpoint's.
        quantize: what a build makes of the matrices.
        group_size: as a build takes it.

    Raises:
        CheckpointError: nothing of that name, or it cannot be used.
        ChoiceError: it cannot be quantised so, or has no codes to keep.
    """
    network = _unquantised(model, dtype, keeps_codes=quantize == "stored")
    are_fp8 = [codes.is_fp8 for codes in coded_modules(network.tensors).values()]
    quantized = choose(
        quantize, group_size, is_fp8=any(are_fp8), is_packed=bool(are_fp8) and not any(are_fp8)
    )
    if quantized is None:
        return network
    how = f"{network.weights_how}, {show_quantized(quantized)}"
    tensors = quantized_tensors(network.tensors, quantized)
    return replace(network, tensors=tensors, weights_how=how)


def _unquantised(model: str, dtype: str | None, *, keeps_codes: bool) -> Network:
    network = _of_config(model, dtype)
    if network is not None:
        if keeps_codes:
            check_codes(network.tensors, is_choice=False)
        return network
    checkpoint = open_checkpoint(model, headers_only=True, keeps_codes=keeps_codes)
    compute = dtype or checkpoint.dtype
    plan = plan_weights(checkpoint, compute=compute, keeps_stored=dtype is None)
    return Network(
        checkpoint.name,
        checkpoint.config,
        compute,
        plan.tensors,
        "exact",
        "the checkpoint's header",
    )


def _of_config(model: str, dtype: str | None) -> Network | None:
    """The network of a preset or of a folder without weights; None: there is more than a config."""
    path = Path(model)
    preset = None if os.path.lexists(model) else presets.find(model)
    if preset is not None:
        hf = read_hf_config(preset.config, where=preset.name)
        return _from_config(preset.name, hf, dtype or preset.dtype, "the preset's config")
    if not (path / CONFIG).is_file() or any(any(path.glob(name)) for name in _WEIGHT_FILES):
        return None
    hf = read_hf_config(read_json(path / CONFIG), where=path / CONFIG)
    found = dtype or (DEFAULT_DTYPE if hf.dtype in (None, "f64") else hf.dtype)
    return _from_config(path.resolve().name, hf, found, "config.json")


def from_bundle(bundle: Bundle, program: ProgramRecord) -> Network:
    """The network of a bundle, as one of its programs computes it.

    Raises:
        IntegrityError: the weights' header is damaged, or lacks what the program binds.
        CompatibilityError: it has no header of weights that are integers as they were stored.
    """
    manifest = bundle.manifest
    config = _config(manifest)
    if manifest.weights in ("none", "reference"):
        tensors = _bound_tensors(config, manifest, program)
        how = "the manifest's sizes; the bundle holds no weights"
        return Network(manifest.name, config, program.dtype, tensors, "modelled", how)
    stored = {name: tensor for name, (_, tensor) in stored_tensors(bundle).items()}
    infos = {name: TensorInfo(found.dtype, found.shape) for name, found in stored.items()}
    shapes = _shapes(config, coded_modules(infos))
    for name, shape in shapes.items():
        if name not in stored or stored[name].shape != shape:
            raise IntegrityError(f"expected `{name}` of shape {list(shape)}", where=bundle.folder)
    tensors = {name: TensorInfo(stored[name].dtype, shapes[name]) for name in shapes}
    return Network(manifest.name, config, program.dtype, tensors, "exact", "the weights' headers")


def _from_config(name: str, hf: HfConfig, dtype: str, where: str) -> Network:
    tensors = plain_tensors(hf.config, dtype)
    if hf.scheme is not None:
        for module, shape in linear_shapes(hf.config).items():
            if hf.scheme.covers(module):
                tensors |= _scheme_codes(hf.scheme, shape, dtype).tensors(module, shape)
    return Network(name, hf.config, dtype, tensors, "modelled", f"{where} and dtype {dtype}")


def _scheme_codes(scheme: Fp8Scheme | PackedScheme, shape: tuple[int, ...], dtype: str) -> Codes:
    if isinstance(scheme, PackedScheme):
        return packed_codes(scheme, shape[1], "f16")
    return replace(FP8, scale_dtype=dtype)


def plain_tensors(
    config: LlamaConfig, dtype: str, modules: frozenset[str] = frozenset()
) -> dict[str, TensorInfo]:
    """Every weight in one dtype, but for FP8 layers and the table of frequencies."""
    eight_bits = {f"{module}.weight" for module in modules}
    fixed = {**dict.fromkeys(eight_bits, E4M3), INV_FREQ: "f32"}
    return {
        name: TensorInfo(fixed.get(name, dtype), shape)
        for name, shape in _shapes(config, dict.fromkeys(modules, FP8)).items()
    }


def _bound_tensors(
    config: LlamaConfig, manifest: Manifest, program: ProgramRecord
) -> Mapping[str, TensorInfo]:
    """What a program binds, where its weights are not here."""
    if manifest.quantized is not None:
        return quantized_tensors(plain_tensors(config, manifest.dtype), manifest.quantized)
    modules = {name.removesuffix(SCALE) for name in program.constants if name.endswith(SCALE)}
    if modules and program.numerics is None:  # codes, and not of FP8
        raise CompatibilityError(
            f"{manifest.name} keeps integers of its checkpoint, whose sizes are with the weights,"
            " and these are not in the bundle",
            hint="ask for the checkpoint instead of the bundle",
        )
    return plain_tensors(config, manifest.dtype, frozenset(modules))


def _shapes(config: LlamaConfig, modules: Mapping[str, Codes]) -> dict[str, tuple[int, ...]]:
    matrices = matrix_shapes(config)
    kept = {name: codes for name, codes in modules.items() if name in matrices}
    return {**expected_tensors(config, kept), INV_FREQ: (config.head_dim // 2,)}


def _config(manifest: Manifest) -> LlamaConfig:
    """The sizes of a manifest's model; its rotary embedding is data that no graph depends on."""
    model = manifest.model
    return LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        rms_norm_eps=model.rms_norm_eps,
        rope=RopeConfig(theta=1.0),
        max_position=manifest.max_seq,
        tie_word_embeddings=model.tie_word_embeddings,
        attention_bias=model.attention_bias,
        mlp_bias=model.mlp_bias,
    )
