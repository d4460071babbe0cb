"""The text models of Gemma 4."""

from __future__ import annotations

from typing import Any

from aioinfer.checkpoint.gguf.architectures.base import (
    FOUR_NORMS,
    FULL,
    SLIDING,
    Architecture,
    Common,
    per_layer,
    soft_cap,
    two_rotations,
    windows,
)
from aioinfer.errors import ConfigError

__all__ = ["ARCHITECTURES"]

_TABLE = "per_layer_token_embd"
_NAMES = {
    **FOUR_NORMS,
    _TABLE: "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "layer_output_scale.weight": "layer_scalar",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_exps.weight": "experts.gate_proj",
    "ffn_up_exps.weight": "experts.up_proj",
    "ffn_down_exps.weight": "experts.down_proj",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
}


def _gemma4(common: Common) -> dict[str, Any]:
    shared = common.value("attention.shared_kv_layers", int)
    common.value("attention.sliding_window_pattern", list)
    known = windows(common, default=0, period=0)
    types = known["layer_types"]
    size = common.value("attention.key_length_swa", int)
    for name in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if common.value(name, int, size) != size:
            raise ConfigError(
                f"model: {common.prefix}.{name} of the GGUF file is not its size of keys, {size}"
            )
    return {
        **known,
        **_heads(common, types),
        **_feed_forward(common, max(0, common.layers - shared)),
        **_per_layer_inputs(common),
        "head_dim": size,
        "global_head_dim": common.head_dim,
        "num_kv_shared_layers": shared,
        "attention_bias": common.attention_bias,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": soft_cap(common, "final_logit_softcapping", 0.0),
        "rope_parameters": _rotations(common),
    }


def _rotations(common: Common) -> dict[str, Any]:
    """Whole heads rotate in layers with a window, a part of them in others."""
    both = two_rotations(common, common.rope["rope_theta"])
    whole = {"rope_type": "proportional", "partial_rotary_factor": 1.0}
    return {**both, FULL: {**whole, **both[FULL]}} if both[FULL]["rope_type"] == "default" else both


def _heads(common: Common, types: list[str]) -> dict[str, Any]:
    """Numbers of heads of keys, which depend on the type of a layer; and whether keys of layers without a
    window are their values, too."""
    by_type: dict[str, set[int]] = {SLIDING: set(), FULL: set()}
    for kind, count in zip(types, per_layer(common, "attention.head_count_kv"), strict=True):
        by_type[kind].add(count)
    if any(len(counts) > 1 for counts in by_type.values()):
        raise ConfigError("model: layers of the GGUF file that have a window, or none, differ in their heads")
    few, many = (next(iter(by_type[kind]), None) for kind in (FULL, SLIDING))
    tensors = common.file.tensors
    alone = any(
        kind == FULL
        and f"blk.{layer}.attn_k.weight" in tensors
        and f"blk.{layer}.attn_v.weight" not in tensors
        for layer, kind in enumerate(types)
    )
    own = {} if few in (many, None) else {"num_global_key_value_heads": few}
    return {"num_key_value_heads": many or few, "attention_k_eq_v": alone, **own}


def _feed_forward(common: Common, own: int) -> dict[str, Any]:
    """``own``: number of layers with keys and values of their own; the others may be twice as wide."""
    sizes = per_layer(common, "feed_forward_length")
    first = sizes[0] if sizes else 0
    wide = len(sizes) > own and sizes[-1] == 2 * first
    if sizes != [first * (2 if wide and layer >= own else 1) for layer in range(len(sizes))]:
        raise ConfigError("model: feed-forward parts of the GGUF file have sizes that Gemma 4 does not have")
    stated: dict[str, Any] = {"intermediate_size": first, "use_double_wide_mlp": wide}
    if not (experts := common.value("expert_count", int, 0)):
        return stated
    return {
        **stated,
        "enable_moe_block": True,
        "num_experts": experts,
        "top_k_experts": common.value("expert_used_count", int),
        "moe_intermediate_size": common.value("expert_feed_forward_length", int),
    }


def _per_layer_inputs(common: Common) -> dict[str, Any]:
    size = common.value("embedding_length_per_layer_input", int, 0)
    table = common.file.tensors.get(f"{_TABLE}.weight")
    words = {} if table is None else {"vocab_size_per_layer_input": table.shape[0]}
    return {"hidden_size_per_layer_input": size, **words}


ARCHITECTURES = {"gemma4": Architecture("gemma4_text", "Gemma4ForCausalLM", _gemma4, _NAMES)}
