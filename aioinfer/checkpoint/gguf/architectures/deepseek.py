"""deepseek2, to which DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash and Youtu-LLM convert, and minicpm3:
attention over latents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aioinfer.checkpoint.gguf.architectures.base import NUMBER, Architecture, Common
from aioinfer.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["ARCHITECTURES"]

_NAMES = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    **{f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
}
_SOFTMAX, _SIGMOID = 1, 2
#: tokens of GLM-4.7-Flash, whose first files do not state how experts are chosen
_GLM_VOCABULARY = 154_880


def _by_rows(heads: torch.Tensor) -> torch.Tensor:
    """Matrices of heads, one below the other."""
    return heads.flatten(0, 1)


def _latents(common: Common, key_length: int, value_dim: int) -> dict[str, Any]:
    """``key_length``: of a head, with the part that rotates."""
    plain = key_length - common.head_dim
    if plain < 1 or value_dim < 1:
        raise ConfigError(f"model: heads of the GGUF file have {plain} and {value_dim} elements")
    return {
        "num_key_value_heads": common.heads,
        "kv_lora_rank": common.value("attention.kv_lora_rank", int),
        "q_lora_rank": common.value("attention.q_lora_rank", int) if common.any(".attn_q_a.weight") else None,
        "qk_nope_head_dim": plain,
        "qk_rope_head_dim": common.head_dim,
        "v_head_dim": value_dim,
        "attention_bias": common.any(".attn_kv_a_mqa.bias"),
    }


def _deepseek2(common: Common) -> dict[str, Any]:
    if common.has("attention.temperature_scale"):
        raise ConfigError("model: GGUF files whose scores have a temperature by position are not supported")
    length, value_dim = (
        common.value(f"attention.{part}_length_mla", int, common.value(f"attention.{part}_length", int))
        for part in ("key", "value")
    )
    stated = _latents(common, length, value_dim)
    if every := float(common.value("rope.scaling.yarn_log_multiplier", NUMBER, 0.0)) * 10:
        # A tenth of what the config has for all dimensions; of those that rotate it is the same.
        stated["rope_parameters"] = {**common.rope, "mscale": every, "mscale_all_dim": every}
    experts = common.value("expert_count", int, 0)
    if not experts:
        return {**stated, "model_type": "youtu", "architectures": ["YoutuForCausalLM"]}
    stated |= {
        "n_routed_experts": experts,
        "num_experts_per_tok": common.value("expert_used_count", int),
        "n_shared_experts": common.value("expert_shared_count", int, 0),
        "moe_intermediate_size": common.value("expert_feed_forward_length", int),
        "first_k_dense_replace": common.value("leading_dense_block_count", int, 0),
        "routed_scaling_factor": float(common.value("expert_weights_scale", NUMBER, 0.0)) or 1.0,
        "norm_topk_prob": common.value("expert_weights_norm", bool, False),
        "n_group": common.value("expert_group_count", int, 0) or 1,
        "topk_group": common.value("expert_group_used_count", int, 0) or 1,
        "num_nextn_predict_layers": common.value("nextn_predict_layers", int, 0),
    }
    embedding = common.file.tensors["token_embd.weight"].shape[0]
    usual = _SIGMOID if common.layers == 47 and embedding == _GLM_VOCABULARY else _SOFTMAX
    gates = common.value("expert_gating_func", int, 0) or usual
    if gates == _SIGMOID:
        return stated
    if gates != _SOFTMAX or stated["norm_topk_prob"]:
        raise ConfigError("model: the GGUF file chooses experts in a way that is not supported")
    method = "greedy" if stated["n_group"] == 1 else "group_limited_greedy"
    named = {"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"]}
    return {**stated, **named, "topk_method": method}


def _minicpm3(common: Common) -> dict[str, Any]:
    # Its factors are not in the metadata, nor is the size of values.
    length = common.value("attention.key_length", int)
    joined = common.file.tensors.get("blk.0.attn_kv_b.weight")
    if joined is None:
        raise ConfigError("model: the GGUF file has no tensor blk.0.attn_kv_b.weight")
    value_dim = joined.shape[0] // common.heads - (length - common.head_dim)
    stated = _latents(common, length, value_dim)
    return {**stated, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}


ARCHITECTURES = {
    "deepseek2": Architecture(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        _deepseek2,
        _NAMES,
        values={"k_b_proj.weight": _by_rows, "v_b_proj.weight": _by_rows},
        latent=True,
    ),
    "minicpm3": Architecture("minicpm3", "MiniCPM3ForCausalLM", _minicpm3, _NAMES, latent=True),
}
