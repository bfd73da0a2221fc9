"""The reference implementation, transformers' Llama, over a bundle's own weights in float32.

It shares no code with the model of this package: the network is built by `transformers` from the
bundle's `config.json`, rotary frequencies included. Needs `transformers`, which nothing else does.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from llama_artifacts.bundle import Bundle, check_digest, open_bundle
from llama_artifacts.errors import CompatibilityError, IntegrityError
from llama_artifacts.manifest import Format, Manifest
from llama_artifacts.strict_json import parse_object
from llama_export.checkpoint.layout import ORDER, order_of
from llama_export.laws.bench import Bench
from llama_export.laws.oracle import Oracle, network_weights
from llama_export.model.llama import INV_FREQ
from llama_export.report import Reporter
from llama_export.verify import CheckResult, check_against
from llama_runtime.places import find_weights
from llama_runtime.weights import bundle_weights

if TYPE_CHECKING:
    import transformers

LAW = "transformers"
INV_FREQ_LIMIT = 1e-6
"""Largest relative difference of the rotary frequencies: a few roundings of float32."""

CONFIG_NAME = "config.json"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
SCALE, MIN = "_scale", "_min"
"""`<module>.weight_scale` multiplies the codes of a `<module>.weight`; `<module>.weight_min` is added."""

# What describes the network; other keys of a config.json could make transformers load code.
_KEYS = (
    "attention_bias",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "mlp_bias",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "vocab_size",
)
_CODES = (torch.float8_e4m3fn, torch.int8, torch.uint8)
_ROPE_KINDS = ("default", "linear", "llama3")


class Reference:
    """One loaded reference model; all its results are float32 on the CPU.

    Attributes:
        inv_freq: the inverse frequencies that it rotates by, float32 [D/2].
        has_own_inv_freq: whether it computed them itself; else they are the bundle's.
        version: of `transformers`.
    """

    def __init__(self, model: transformers.LlamaForCausalLM, *, has_own_inv_freq: bool) -> None:
        import transformers

        self._model = model
        self.inv_freq: torch.Tensor = model.model.rotary_emb.inv_freq
        self.has_own_inv_freq = has_own_inv_freq
        self.version: str = transformers.__version__

    @classmethod
    def load(
        cls, folder: Path, *, reporter: Reporter | None = None, weights_dir: Path | None = None
    ) -> Reference:
        """Loads the model of a bundle.

        Digests of the weights are not computed: `verify` does that. The number of layers and
        whether the head is tied are the manifest's, since a build may decide them.

        Args:
            folder: the bundle.
            reporter: told where the reference had to take the bundle's word.
            weights_dir: the checkpoint's folder, for a bundle that refers to its weights.

        Raises:
            CompatibilityError: `transformers` is not installed or refuses the configuration, or
                the bundle has no weights.
            ManifestError, IntegrityError: the bundle is damaged, or its weights are not those of
                the network.
        """
        model, is_own = load_model(folder, reporter=reporter, weights_dir=weights_dir)
        return cls(model, has_own_inv_freq=is_own)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """The stream [B, S, H] after the final norm of whole sequences [B, S]."""
        with torch.no_grad():
            hidden: torch.Tensor = self._model.model(tokens.long(), use_cache=False)[0]
        return hidden

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [B, S, V] of whole sequences [B, S]."""
        with torch.no_grad():
            logits: torch.Tensor = self._model.lm_head(self.hidden(tokens))
        return logits

    def greedy(
        self, prompt: Sequence[int], *, max_new: int, stop_tokens: Sequence[int]
    ) -> list[int]:
        """The likeliest tokens after a prompt of ids, up to a stop token, which is left out."""
        import transformers

        settings = transformers.GenerationConfig(
            do_sample=False,
            max_new_tokens=max_new,
            eos_token_id=list(stop_tokens) or None,
            pad_token_id=0,
        )
        ids = torch.tensor([prompt])
        output = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=settings
        )
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens[:-1] if tokens and tokens[-1] in stop_tokens else tokens


class ReferenceOracle(Oracle):
    """What the reference makes of sequences; the eager model only fills states for a call."""

    def __init__(self, reference: Reference, bench: Bench) -> None:
        super().__init__(bench.oracle.model, bench.sequences)
        self._reference = reference

    def read(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._reference.logits(tokens)

    @cached_property
    def hidden(self) -> torch.Tensor:
        return self._reference.hidden(self.tokens)


def load_model(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    attention: str = "eager",
    reporter: Reporter | None = None,
    weights_dir: Path | None = None,
) -> tuple[transformers.LlamaForCausalLM, bool]:
    """The network of `transformers` over a bundle's weights; arguments and errors as `Reference.load`.

    Args:
        folder: the bundle.
        dtype: of weights and arithmetic; rotary frequencies stay in float32.
        attention: the implementation that `transformers` is asked for, such as `sdpa`.
        reporter: told about assumptions.
        weights_dir: the checkpoint's folder.

    Returns:
        The model, and whether it computed the rotary frequencies itself.
    """
    bundle = open_bundle(folder)
    places = find_weights(bundle, weights_dir=weights_dir)
    library = import_library()
    weights = _weights(bundle, bundle_weights(bundle.manifest, places), dtype)
    inv_freq = weights.pop(INV_FREQ, None)
    if inv_freq is None:
        raise IntegrityError(f"the weights lack `{INV_FREQ}`", where=folder)
    network, is_own = _network(bundle, reporter or Reporter())
    model = _build(library, network, bundle, attention)
    _assign(model, weights, bundle)
    if not is_own:
        model.model.rotary_emb.inv_freq = inv_freq.float()
    return model.eval(), is_own


def new_cache(model: transformers.LlamaForCausalLM, max_len: int | None) -> dict[str, Any]:
    """Empty keys and values, as the argument by which a call of the model takes and fills them.

    Args:
        model: of `load_model`.
        max_len: positions of a cache of a fixed size, whose step compiles once; None: it grows.
    """
    library = import_library()
    # Newer releases call the argument another name, and warn of the older one.
    known = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in known else "past_key_values"
    if max_len is None:
        return {name: library.DynamicCache(config=model.config)}
    return {name: library.StaticCache(config=model.config, max_cache_len=max_len)}


def check(
    folder: Path,
    reference: Reference,
    *,
    reporter: Reporter,
    formats: Sequence[Format] | None = None,
    entries: Sequence[str] | None = None,
    weights_dir: Path | None = None,
) -> list[CheckResult]:
    """Compares the bundle with the reference: frequencies, then every program that can run here.

    The figures are those of `parity`, with the reference in place of the eager model.
    """
    bench = Bench(folder, open_bundle(folder).manifest, weights_dir=weights_dir)
    own = []
    if reference.has_own_inv_freq:
        own.append(_check_inv_freq(bench.weights[INV_FREQ], reference.inv_freq))
    oracle = ReferenceOracle(reference, bench)
    return own + check_against(
        LAW, bench, oracle, reporter=reporter, formats=formats, entries=entries
    )


def _check_inv_freq(stored: torch.Tensor, expected: torch.Tensor) -> CheckResult:
    """The programs' tokens stand too early to tell frequencies of long wavelength apart."""
    if stored.shape != expected.shape:
        detail = f"expected {len(expected)} rotary frequencies, got {list(stored.shape)}"
        return CheckResult(LAW, "", "", math.nan, INV_FREQ_LIMIT, False, detail)
    figure = float(((stored - expected) / expected).abs().max())
    return CheckResult(
        LAW, "", "", figure, INV_FREQ_LIMIT, figure <= INV_FREQ_LIMIT, "rotary frequencies"
    )


def import_library() -> Any:
    """`transformers`.

    Raises:
        CompatibilityError: it is not installed.
    """
    try:
        import transformers
    except ImportError as cause:
        raise CompatibilityError(
            "the reference needs `transformers`, which is not installed",
            hint="pip install transformers",
        ) from cause
    return transformers


def _weights(
    bundle: Bundle, mapped: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Every weight in a dtype; codes times their scales, which are no weights themselves."""
    stored = network_weights(mapped, bundle.manifest)
    weights = {}
    for name, tensor in stored.items():
        if tensor.dtype in _CODES:
            if name + SCALE not in stored:
                raise IntegrityError(f"the weights lack `{name}{SCALE}`", where=bundle.folder)
            found = _decoded(tensor, stored[name + SCALE], stored.get(name + MIN))
            order = order_of(name.removesuffix(".weight"), stored)
            if order is not None:
                found[:, stored[order].long()] = found.clone()
            weights[name] = found.to(dtype)
        elif not name.endswith((SCALE, MIN, ORDER)):
            weights[name] = tensor if name == INV_FREQ else tensor.to(dtype)
    return weights


def _decoded(
    codes: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor | None
) -> torch.Tensor:
    """A weight in float32; bytes hold pairs of 4-bit codes, 16 apart in blocks of 32."""
    wide = codes.float()
    if codes.dtype == torch.uint8:
        blocks = codes.reshape(len(codes), -1, 1, 16)
        wide = torch.cat((blocks % 16, blocks // 16), dim=2).reshape(len(codes), -1).float()
        wide = wide - (8.0 if minimum is None else 0.0)
    size = wide.shape[1] // scale.shape[1]
    wide = wide * scale.float().repeat_interleave(size, dim=1)
    return wide if minimum is None else wide + minimum.float().repeat_interleave(size, dim=1)


def _network(bundle: Bundle, reporter: Reporter) -> tuple[dict[str, Any], bool]:
    """Arguments of the configuration, and whether rotary frequencies follow from them."""
    manifest = bundle.manifest
    decided = {
        "num_hidden_layers": manifest.model.num_layers,
        "tie_word_embeddings": manifest.model.tie_word_embeddings,
    }
    if CONFIG_NAME not in manifest.files:
        reporter.note(
            f"no {CONFIG_NAME}: the reference takes sizes and rotary frequencies from the bundle"
        )
        return _from_manifest(manifest) | decided, False
    check_digest(bundle, CONFIG_NAME)
    path = bundle.path(CONFIG_NAME)
    values = parse_object(path.read_bytes(), where=path, error=IntegrityError)
    network = {key: values[key] for key in _KEYS if values.get(key) is not None}
    network.setdefault("intermediate_size", manifest.model.intermediate_size)
    kind = _rope_kind(network)
    if kind in _ROPE_KINDS:
        return network | decided, True
    reporter.note(
        f"transformers knows no rope `{kind}`: the reference takes the bundle's frequencies"
    )
    network = {key: value for key, value in network.items() if not key.startswith("rope_")}
    return network | decided, False


def _from_manifest(manifest: Manifest) -> dict[str, Any]:
    model = manifest.model
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "rms_norm_eps": model.rms_norm_eps,
        "attention_bias": model.attention_bias,
        "mlp_bias": model.mlp_bias,
        "max_position_embeddings": manifest.max_seq,
    }


def _rope_kind(network: Mapping[str, Any]) -> object:
    scaling = network.get("rope_parameters") or network.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        return type(scaling).__name__
    return scaling.get("rope_type") or scaling.get("type") or "default"


def _build(
    library: Any, network: dict[str, Any], bundle: Bundle, attention: str
) -> transformers.LlamaForCausalLM:
    """The network without weights; only its rotary frequencies have values."""
    try:
        # Its own default ids would end a generation.
        ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        config = library.LlamaConfig(**network, **ids, attn_implementation=attention)
        with torch.device("meta"):
            model = library.LlamaForCausalLM(config)
        rotary = type(model.model.rotary_emb)
        model.model.rotary_emb = rotary(config)
    except Exception as cause:  # whatever its checks and constructors make of wrong values
        reason = next(iter(str(cause).splitlines()), "") or type(cause).__name__
        raise CompatibilityError(
            f"transformers refuses the configuration: {reason:.200}",
            where=bundle.path(CONFIG_NAME),
        ) from cause
    return model


def _assign(
    model: transformers.LlamaForCausalLM, weights: dict[str, torch.Tensor], bundle: Bundle
) -> None:
    if bundle.manifest.model.tie_word_embeddings and EMBEDDING in weights:
        weights = {**weights, HEAD: weights[EMBEDDING]}
    try:
        model.load_state_dict(weights, strict=True, assign=True)
    except RuntimeError as cause:
        raise IntegrityError(
            "the weights are not those of the network that transformers builds",
            where=bundle.folder,
        ) from cause
