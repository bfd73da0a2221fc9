"""What each key of a config.json means to this model: read, harmless, or a change of the maths.

Three tables. A key in none of them is ignored with a note: nobody knows what it does.
"""

from __future__ import annotations

from typing import Any


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


ARCHITECTURES = ("LlamaForCausalLM",)

# Model types whose published classes compute exactly this network when the architecture is Llama's.
MODEL_TYPES = ("llama", "mistral")

ACTIVATIONS = ("silu", "swish")

DTYPES = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "float64": "f64",
    "half": "f16",
    "float": "f32",
    "bf16": "bf16",
    "fp16": "f16",
    "fp32": "f32",
}

# Keys that the reader takes in.
READ = _words(
    """
    architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers
    num_attention_heads num_key_value_heads head_dim hidden_act rms_norm_eps rope_theta rope_scaling
    rope_parameters max_position_embeddings tie_word_embeddings attention_bias mlp_bias dtype
    torch_dtype eos_token_id sliding_window use_sliding_window quantization_config
    compression_config quantization pretraining_tp
    """
)

# Keys of the Llama family that change what the network computes, with the values that do not.
# None (JSON null) is always one of them.
_OFF: tuple[Any, ...] = (False,)
_ZERO: tuple[Any, ...] = (0, False)
_ONE: tuple[Any, ...] = (1,)
_NULL: tuple[Any, ...] = ()
_EMPTY: tuple[Any, ...] = ([], {})

MATHS: dict[str, tuple[Any, ...]] = {
    # scales put on embeddings, residuals, scores and logits
    "attention_multiplier": _ONE,
    "embedding_multiplier": _ONE,
    "residual_multiplier": _ONE,
    "logits_scaling": _ONE,
    "logit_scale": _ONE,
    "logits_scale": _ONE,
    "lm_head_multiplier": _ONE,
    "key_multiplier": _ONE,
    "mup_multipliers": _NULL,
    "scale_emb": _ONE,
    "scale_depth": _NULL,
    "dim_model_base": _NULL,
    "query_pre_attn_scalar": _NULL,
    "attention_scale": _NULL,
    "attn_scale": _NULL,
    "softmax_scale": _NULL,
    "normalize_embedding": _OFF,
    # bounds on scores and logits
    "attn_logit_softcapping": _NULL,
    "final_logit_softcapping": _NULL,
    "attention_logit_softcapping": _NULL,
    "logit_softcap": _NULL,
    "logits_soft_cap": _NULL,
    "attn_logits_soft_cap": _NULL,
    "clip_qkv": _NULL,
    # norms
    "qk_norm": _OFF,
    "use_qk_norm": _OFF,
    "qk_layernorm": _OFF,
    "use_qk_layernorm": _OFF,
    "use_post_norm": _OFF,
    "post_norm": _OFF,
    "norm_after": _OFF,
    "norm_type": ("rmsnorm", "rms_norm", "RMSNorm"),
    "rms_norm_add_unit_offset": _OFF,
    "use_layernorm": _OFF,
    # positions
    "partial_rotary_factor": _ONE,
    "rotary_pct": _ONE,
    "rope_pct": _ONE,
    "rope_percentage": _ONE,
    "rope_ratio": _ONE,
    "rope_interleaved": _OFF,
    "rope_interleave": _OFF,
    "interleaved_rope": _OFF,
    "rope_local_base_freq": _NULL,
    "no_rope_layer_interval": _ZERO,
    "alibi": _OFF,
    "use_alibi": _OFF,
    "position_embedding_type": ("rope", "rotary"),
    # which positions attend to which
    "attention_chunk_size": _ZERO,
    "attn_temperature_tuning": (False, 0),
    "attention_sink_size": _ZERO,
    "num_sink_tokens": _ZERO,
    "is_causal": (True,),
    "use_bidirectional_attention": _OFF,
    "is_encoder_decoder": _OFF,
    "add_cross_attention": _OFF,
    # another network
    "parallel_attn": _OFF,
    "use_parallel_residual": _OFF,
    "parallel_residual": _OFF,
    "num_kv_shared_layers": _ZERO,
    "num_nextn_predict_layers": _ZERO,
    "num_experts": _ZERO,
    "num_local_experts": _ZERO,
    "n_routed_experts": _ZERO,
    "kv_lora_rank": _NULL,
    "q_lora_rank": _NULL,
    "hidden_activation": ACTIVATIONS,
    "chunk_size_feed_forward": _ZERO,
    "pruned_heads": _EMPTY,
    # biases that the network lacks
    "bias": _OFF,
    "use_bias": _OFF,
    "qkv_bias": _OFF,
    "attention_qkv_bias": _OFF,
    "lm_head_bias": _OFF,
    "norm_bias": _OFF,
    # nested models
    "text_config": _NULL,
    "vision_config": _NULL,
}

# Lists with one entry per layer, and the only entry that leaves the maths alone.
PER_LAYER: dict[str, Any] = {"layer_types": "full_attention", "no_rope_layers": 1}

# Keys that say nothing about the maths of inference.
HARMLESS = _words(
    """
    attention_dropout hidden_dropout dropout resid_pdrop embd_pdrop attn_pdrop classifier_dropout
    attention_probs_dropout_prob hidden_dropout_prob initializer_range use_cache cache_implementation
    max_window_layers original_max_position_embeddings
    bos_token_id pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id
    decoder_start_token_id
    transformers_version tokenizer_class prefix name_or_path finetuning_task task_specific_params
    problem_type id2label label2id num_labels
    return_dict return_dict_in_generate output_attentions output_hidden_states output_scores
    torchscript use_bfloat16 tf_legacy_loss gradient_checkpointing attn_implementation
    tie_encoder_decoder cross_attention_hidden_size is_decoder is_llama_config
    max_length max_new_tokens min_length do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p typical_p min_p repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
    forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty
    suppress_tokens begin_suppress_tokens renormalize_logits
    transformers.js_config unsloth_fixed unsloth_version
    neuron onnx license language
    """
)

# Keys that a rope type reads; any of them under another type would be a change of the maths.
ROPE_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset(
        {
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        }
    ),
}
ROPE_HEAD_KEYS = frozenset({"type", "rope_type", "rope_theta", "partial_rotary_factor"})
ROPE_MATHS = _words(
    """
    factor low_freq_factor high_freq_factor attention_factor beta_fast beta_slow short_factor
    long_factor mscale mscale_all_dim short_mscale long_mscale mrope_section mrope_interleaved alpha
    truncate
    """
)
