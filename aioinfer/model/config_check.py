"""Checks of the numbers in a config.json before any class of transformers reads them.

The many config classes take nearly everything and fail later, each in its own way. What families without
built-in code make of their sizes is transformers' affair: some state 0 experts, or a size for each layer. Of
those, numbers are refused only that would take all memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from aioinfer.config.values import shown
from aioinfer.errors import ConfigError

__all__ = ["check_numbers"]

_LARGEST = 2**31 - 1
#: integers from 1 on
_SIZES = frozenset(
    {
        *("block_ff_dim", "block_multiple_of", "conv_L_cache", "conv_kernel", "ffn_dim", "global_head_dim"),
        *("head_dim", "hidden_size", "intermediate_size", "linear_conv_kernel_dim", "linear_key_head_dim"),
        *("linear_num_key_heads", "linear_num_value_heads", "linear_value_head_dim", "mamba_d_conv"),
        *("mamba_d_ssm", "mamba_d_state", "mamba_expand", "mamba_head_dim", "mamba_n_groups"),
        *("mamba_n_heads", "mamba_num_heads", "n_embd", "n_groups", "n_head", "n_inner"),
        *("no_rope_layer_interval", "num_attention_heads", "num_global_key_value_heads"),
        *("num_key_value_heads", "ssm_state_size", "vocab_size", "vocab_size_per_layer_input"),
        *("dim_model_base", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"),
        "v_head_dim",
    }
)
#: as well, of models with experts
_EXPERTS = frozenset(
    {
        *("moe_intermediate_size", "moe_layer_interval", "moe_shared_expert_intermediate_size", "n_group"),
        *("num_experts_per_tok", "top_k_experts", "topk_group"),
    }
)
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
#: numbers of layers, of which the classes of transformers make lists
_LAYERS = frozenset({"n_layer", "num_hidden_layers"})
_MOST_LAYERS = 10_000
#: lengths of sequences, for each position of which there are rotary factors in memory
_LENGTHS = frozenset({"max_position_embeddings", "n_positions", "original_max_position_embeddings"})
_LONGEST = 2**26
#: integers from 0 on
_COUNTS = frozenset(
    {
        *("first_k_dense_replace", "hidden_size_per_layer_input", "max_window_layers"),
        *("moe_layer_start_index", "moe_num_experts", "moe_num_shared_experts", "n_routed_experts"),
        *("n_shared_experts", "num_dense_layers", "num_experts", "num_kv_shared_layers"),
        *("num_local_experts", "num_nextn_predict_layers", "num_shared_experts"),
        *("shared_expert_intermediate_size", "shared_intermediate_size", "sliding_window"),
    }
)
#: finite numbers above 0
_NUMBERS = frozenset(
    {
        *("alpha", "attention_in_multiplier", "attention_multiplier", "attention_out_multiplier"),
        *("attn_logit_softcapping", "beta_fast", "beta_slow", "block_ffn_dim_multiplier"),
        *("embedding_multiplier", "factor", "final_logit_softcapping", "high_freq_factor", "key_multiplier"),
        *("layer_norm_eps", "layer_norm_epsilon", "llama_4_scaling_beta", "lm_head_multiplier"),
        *("logit_scale", "logits_scaling", "low_freq_factor", "norm_eps", "norm_epsilon"),
        *("partial_rotary_factor", "query_pre_attn_scalar", "residual_multiplier", "rms_norm_eps"),
        *("rotary_pct", "routed_scaling_factor", "scale_depth", "scale_emb", "ssm_in_multiplier"),
        "ssm_out_multiplier",
    }
)
#: as well, bases of rotations: that of Falcon-H1 is 1e11
_BASES = frozenset({"rope_local_base_freq", "rope_theta", "rotary_emb_base"})
_LARGEST_BASE = 10**18
#: a model type, and its field that may be a list with one number for each layer
_LIST = ("hunyuan_v1_moe", "num_experts_per_tok")
#: objects whose numbers are checked, too, and those of the objects in them: rotations by type of layers
_PARTS = frozenset({"per_layer_config", "rope_parameters", "rope_scaling", "text_config"})

#: those of them that all families read
_ROTATION = _BASES | {
    *("alpha", "beta_fast", "beta_slow", "factor", "high_freq_factor", "llama_4_scaling_beta"),
    *("low_freq_factor", "original_max_position_embeddings", "partial_rotary_factor"),
}
#: names, and the least and largest integer
_RANGES = (
    (_SIZES | _EXPERTS, 1, _LARGEST),
    (_LAYERS, 1, _MOST_LAYERS),
    (_LENGTHS, 1, _LONGEST),
    (_COUNTS, 0, _LARGEST),
)


def check_numbers(
    stated: Mapping[str, Any],
    own_fields: Callable[[object], frozenset[str]],
    file: str = "config.json",
    prefix: str = "",
    read: frozenset[str] = frozenset(),
) -> None:
    """Raise ConfigError, with the names of the file and the field, for a number that no model can have.

    Fields that are null are as good as absent, and unknown ones are the config class's affair.

    Args:
        own_fields: of a model type with built-in code, the fields that it reads; none for other types.
        read: those of the object that this one is a part of.
    """
    if "model_type" in stated or not prefix:
        read = own_fields(stated.get("model_type"))
    experts = any(stated.get(name) for name in _EXPERT_COUNTS)
    for name, value in stated.items():
        if value is None:
            continue
        needed = name in _ROTATION or (name in read and (value != 0 or experts or name not in _EXPERTS))
        needed = needed and not (isinstance(value, list) and (stated.get("model_type"), name) == _LIST)
        wanted = _wanted(name, value) if needed else _bound(name, value)
        if wanted is not None:
            raise ConfigError(f"model: {prefix}{name} in {file} must be {wanted}, got {shown(value)}")
        if (name in _PARTS or prefix) and isinstance(value, Mapping):
            check_numbers(value, own_fields, file, f"{prefix}{name}.", read)


def _wanted(name: str, value: Any) -> str | None:
    """Requirement that ``value`` does not meet, in words; None if it does."""
    number = _is_number(value)
    for names, low, high in _RANGES:
        if name in names:
            fits = number and isinstance(value, int) and low <= value <= high
            return None if fits else f"an integer in [{low}, {high}]"
    if name in _NUMBERS or name in _BASES:
        largest = _LARGEST_BASE if name in _BASES else _LARGEST
        fits = number and 0 < value <= largest and math.isfinite(value)
        return None if fits else "a positive number"
    return None


def _bound(name: str, value: Any) -> str | None:
    """Bound that ``value``, or a number in a list of that name, is above, in words; None if there is none."""
    for each in value if isinstance(value, list) else [value]:
        for names, _, high in _RANGES:
            if name in names and _is_number(each) and not each <= high:
                return f"{high} at most"
    return None


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, float))
