"""Configs of the model types for which transformers has no class. Importing this imports transformers."""

from __future__ import annotations

from typing import Any

from transformers import DeepseekV3Config, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

__all__ = ["OWN_CONFIGS", "KimiK2Config", "LLaDA2Config", "SDARConfig", "SDARMoeConfig"]


class KimiK2Config(DeepseekV3Config):  # type: ignore[misc]
    """The config of Kimi K2: DeepSeek-V3's under another model type."""

    model_type = "kimi_k2"


class SDARConfig(Qwen3Config):  # type: ignore[misc]
    """The config of SDAR: Qwen3's under another model type."""

    model_type = "sdar"


class SDARMoeConfig(Qwen3MoeConfig):  # type: ignore[misc]
    """The config of SDAR-MoE: Qwen3-MoE's under another model type."""

    model_type = "sdar_moe"


class LLaDA2Config(PretrainedConfig):  # type: ignore[misc]
    """The config of LLaDA2. Sizes have no defaults."""

    model_type = "llada2_moe"
    # Transformers 5.17 prints a config that it has read, as what differs from one without sizes.
    has_no_defaults_at_init = True

    vocab_size: int | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_parameters: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    use_qkv_bias: bool = False
    use_bias: bool = False
    use_qk_norm: bool = True
    norm_head: bool = False
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    num_shared_experts: int | None = None
    moe_intermediate_size: int | None = None
    first_k_dense_replace: int = 0
    n_group: int = 1
    topk_group: int = 1
    score_function: str = "sigmoid"
    norm_topk_prob: bool = True
    moe_router_enable_expert_bias: bool = True
    routed_scaling_factor: float = 1.0
    partial_rotary_factor: float = 1.0
    #: of LLaDA2.2: experts that the tokens of a block share, and the tokens that delete and split
    expert_capacity: int | None = None
    block_size: int | None = None
    delete_token_id: int | None = None
    split_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Raise ValueError for sizes that are missing or not positive."""
        for name, absent in (("first_k_dense_replace", 0), ("n_group", 1), ("topk_group", 1)):
            if getattr(self, name) is None:
                setattr(self, name, absent)
        needed = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"]
        needed += ["max_position_embeddings", "n_group", "topk_group"]
        if self.num_experts:
            needed += ["num_experts_per_tok", "moe_intermediate_size"]
        if not self.num_experts or self.first_k_dense_replace:
            needed.append("intermediate_size")
        if self.expert_capacity is not None:
            needed.append("expert_capacity")
        for name in needed:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        super().__post_init__(**kwargs)


#: config classes by model type; dFactory checkpoints with merged experts have the type "llada2_moe_veomni"
OWN_CONFIGS: dict[str, type[PretrainedConfig]] = {
    "kimi_k2": KimiK2Config,
    "sdar": SDARConfig,
    "sdar_moe": SDARMoeConfig,
    "llada2_moe": LLaDA2Config,
    "llada2_moe_veomni": LLaDA2Config,
}
