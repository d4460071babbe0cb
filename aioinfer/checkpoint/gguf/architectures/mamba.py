"""Models with the state space of Mamba-2: Granite 4 H and Bamba, Falcon-H1, Nemotron-H and Nemotron Nano."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aioinfer.checkpoint.gguf.architectures.base import (
    FULL,
    NEIGHBOURS,
    NUMBER,
    Architecture,
    Common,
    Values,
    per_layer,
)
from aioinfer.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["ARCHITECTURES"]

_STATE_SPACE = "linear_attention"
#: of norms of Nemotron-H, where its files do not state the usual one
_EPSILON = "layer_norm_epsilon"


def _state_space(at: str) -> dict[str, str]:
    return {
        "ssm_in": f"{at}.in_proj",
        "ssm_conv1d": f"{at}.conv1d",
        "ssm_dt.bias": f"{at}.dt_bias",
        "ssm_a": f"{at}.A_log",
        "ssm_d": f"{at}.D",
        "ssm_norm": f"{at}.norm",
        "ssm_out": f"{at}.out_proj",
    }


_GRANITE = {
    **_state_space("mamba"),
    **{f"ffn_{part}": f"shared_mlp.{part}_proj" for part in ("gate", "up", "down")},
    **{f"ffn_{part}_shexp": f"shared_mlp.{part}_proj" for part in ("gate", "up", "down")},
    **{f"ffn_{part}_exps.weight": f"block_sparse_moe.experts.{part}_proj" for part in ("gate", "up", "down")},
    "ffn_gate_up_exps.weight": "block_sparse_moe.experts.gate_up_proj",
    "ffn_gate_inp": "block_sparse_moe.router.layer",
}
_FALCON = {
    **_state_space("mamba"),
    **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
    # Files have it without "weight".
    **dict.fromkeys(("ffn_norm", "ffn_norm.weight"), "pre_ff_layernorm.weight"),
    "output_norm": "model.final_layernorm",
}
_NEMOTRON = {
    **_state_space("mixer"),
    **{f"attn_{part}": f"mixer.{part}_proj" for part in "qkv"},
    "attn_output": "mixer.o_proj",
    "attn_norm": "norm",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_up_exps.weight": "mixer.experts.up_proj",
    "ffn_down_exps.weight": "mixer.experts.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "token_embd": "backbone.embeddings",
    "output_norm": "backbone.norm_f",
}


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1)


def _log_rate(tensor: torch.Tensor) -> torch.Tensor:
    return (-tensor.reshape(-1)).log()


def _with_axis(tensor: torch.Tensor) -> torch.Tensor:
    """[channels, size] of a convolution as [channels, 1, size]."""
    return tensor[:, None]


#: the converter turns heads and groups into columns
_VALUES: Mapping[str, Values] = {
    "A_log": _log_rate,
    **dict.fromkeys(("mamba.D", "mixer.D", "mamba.norm.weight", "mixer.norm.weight"), _flat),
    "conv1d.weight": _with_axis,
}


def _sizes(common: Common, prefix: str, names: tuple[str, str, str, str, str]) -> dict[str, Any]:
    """The sizes of state spaces; ``names``: of heads, of one of them, of groups, of the state and of the
    convolution."""
    heads, inner = common.value("ssm.time_step_rank", int), common.value("ssm.inner_size", int)
    if heads < 1 or inner % heads:
        raise ConfigError(f"model: {inner} elements of {heads} heads of state spaces in the GGUF file")
    numbers = (common.value(f"ssm.{name}", int) for name in ("group_count", "state_size", "conv_kernel"))
    return dict(zip((f"{prefix}{name}" for name in names), (heads, inner // heads, *numbers), strict=True))


_MAMBA = "mamba_", ("n_heads", "d_head", "n_groups", "d_state", "d_conv")


def _granite(common: Common) -> dict[str, Any]:
    """Bamba is Granite with rotations and without factors."""
    sizes = _sizes(common, *_MAMBA)
    inner = sizes["mamba_n_heads"] * sizes["mamba_d_head"]
    if inner % common.hidden:
        raise ConfigError(f"model: {inner} elements of state spaces for {common.hidden} in the GGUF file")
    heads = per_layer(common, "attention.head_count_kv")
    experts = common.value("expert_count", int, 0)
    middle = common.value("feed_forward_length", (int, list))
    shared = common.value("expert_shared_feed_forward_length", int, 0)
    rotates = common.value("rope.scaling.finetuned", bool, True)
    scale = float(common.value("attention.scale", NUMBER, 0.0))
    return {
        **sizes,
        "mamba_expand": inner // common.hidden,
        "mamba_conv_bias": common.any(".ssm_conv1d.bias"),
        "mamba_proj_bias": common.any(".ssm_in.bias"),
        "layer_types": [FULL if each else _STATE_SPACE for each in heads],
        "position_embedding_type": "rope" if rotates else "nope",
        "attention_bias": common.attention_bias,
        "num_local_experts": experts,
        "num_experts_per_tok": common.value("expert_used_count", int, 0),
        "shared_intermediate_size": shared or (max(middle) if isinstance(middle, list) else middle),
        "embedding_multiplier": float(common.value("embedding_scale", NUMBER, 1.0)) or 1.0,
        "residual_multiplier": float(common.value("residual_scale", NUMBER, 1.0)) or 1.0,
        "logits_scaling": float(common.value("logit_scale", NUMBER, 1.0)) or 1.0,
        "attention_multiplier": scale or common.head_dim**-0.5,
    }


def _falcon(common: Common) -> dict[str, Any]:
    """Factors are in the weights."""
    sizes = _sizes(common, *_MAMBA)
    return {
        **sizes,
        "mamba_d_ssm": sizes["mamba_n_heads"] * sizes["mamba_d_head"],
        "mamba_conv_bias": common.any(".ssm_conv1d.bias"),
        "mamba_rms_norm": common.any(".ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "attention_bias": common.attention_bias,
    }


def _nemotron(common: Common) -> dict[str, Any]:
    """A layer with heads of keys is attention, and one with an inner size a feed-forward part. A number of
    experts is stated by files without experts, too."""
    experts = common.value("expert_count", int) if common.prefix.endswith("_moe") else 0
    heads, middles = per_layer(common, "attention.head_count_kv"), per_layer(common, "feed_forward_length")
    part = "moe" if experts else "mlp"
    epsilon = f"attention.{_EPSILON}"
    if common.has("attention.layer_norm_rms_epsilon"):
        epsilon = "attention.layer_norm_rms_epsilon"
    names = "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"
    found = {
        **_sizes(common, "", names),
        "layers_block_type": [
            FULL if head else part if middle else _STATE_SPACE
            for head, middle in zip(heads, middles, strict=True)
        ],
        "use_conv_bias": common.any(".ssm_conv1d.bias"),
        "use_bias": common.any(".ssm_in.bias"),
        "mlp_bias": common.any(".ffn_up.bias"),
        "layer_norm_epsilon": float(common.value(epsilon, NUMBER)),
    }
    if not experts:
        return found
    return {
        **found,
        "n_routed_experts": experts,
        "num_experts_per_tok": common.value("expert_used_count", int),
        "moe_intermediate_size": common.value("expert_feed_forward_length", int),
        "n_shared_experts": common.value("expert_shared_count", int, 0),
        "moe_shared_expert_intermediate_size": common.value("expert_shared_feed_forward_length", int),
        "moe_latent_size": common.value("moe_latent_size", int, 0) or None,
        "n_group": common.value("expert_group_count", int, 1) or 1,
        "topk_group": common.value("expert_group_used_count", int, 1) or 1,
        "norm_topk_prob": common.value("expert_weights_norm", bool, True),
        "routed_scaling_factor": float(common.value("expert_weights_scale", NUMBER, 1.0)) or 1.0,
    }


_COMMON: dict[str, Any] = {"partial_rotary": True, "values": _VALUES}
_NEMOTRON_H = Architecture(
    *("nemotron_h", "NemotronHForCausalLM", _nemotron, _NEMOTRON, "backbone.layers"),
    further="mtp.layers",
    epsilon=_EPSILON,
    **_COMMON,
)
ARCHITECTURES = {
    "granitehybrid": Architecture(
        *("granitemoehybrid", "GraniteMoeHybridForCausalLM", _granite, _GRANITE),
        rows=NEIGHBOURS,
        **_COMMON,
    ),
    "falcon-h1": Architecture("falcon_h1", "FalconH1ForCausalLM", _falcon, _FALCON, **_COMMON),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
}
