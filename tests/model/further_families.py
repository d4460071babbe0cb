"""Random small checkpoints of further families, whose layers are those of others: their configs."""

from __future__ import annotations

from typing import Any


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **parameters}}


#: sizes that native kernels compute
WIDE = {"hidden_size": 64, "intermediate_size": 96}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
GRANITE = {
    **WIDE, "embedding_multiplier": 6.0, "logits_scaling": 3.0, "residual_multiplier": 0.3,
    "attention_multiplier": 0.15,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 32, "tie_word_embeddings": False, **WIDE,
}  # fmt: skip
LATENT_EXPERTS = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
}  # fmt: skip

#: as those of :mod:`tests.model.checkpoints`
# fmt: off
FURTHER: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-neox-serial": ("GPTNeoX",
        {"num_key_value_heads": None, "use_parallel_residual": False, "attention_bias": False, "hidden_act":
        "gelu_fast", **rope("default", partial_rotary_factor=0.5)}),
    "phi": ("Phi", WIDE),
    "stablelm": ("StableLm", {**WIDE, "use_qkv_bias": True, "tie_word_embeddings": True}),
    "opt-350m": ("OPT",
        {"ffn_dim": 80, "word_embed_proj_dim": 32, "do_layer_norm_before": False, "pad_token_id": 1}),
    "starcoder2": ("Starcoder2", {**WIDE, "sliding_window": 9}),
    "nemotron": ("Nemotron", {**WIDE, "tie_word_embeddings": True}),
    "arcee": ("Arcee", {**WIDE, "mlp_bias": True}),
    "cohere": ("Cohere", {**WIDE, "logit_scale": 0.3}),
    "cohere-norms": ("Cohere", {"use_qk_norm": True}),
    "exaone4": ("Exaone4",
        {**WIDE, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention",
        "sliding_attention"]}),
    "exaone4-global": ("Exaone4",
        {**WIDE, "sliding_window": None, "layer_types": ["full_attention"] * 3, "tie_word_embeddings":
        True}),
    "ernie4.5": ("Ernie4_5", {**WIDE, "head_dim": 16}),
    "seed-oss": ("SeedOss", {**WIDE, "head_dim": 16, "attention_out_bias": True, "mlp_bias": True}),
    "seed-oss-biases": ("SeedOss", {"head_dim": 16, "attention_out_bias": False}),
    "hunyuan-moe": ("HunYuanMoEV1",
        {**WIDE, "head_dim": 16, "num_experts": 6, "moe_topk": [2, 2, 2], **rope("default")}),
    "minimax-m2": ("MiniMaxM2",
        {**WIDE, "head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 3, "rotary_dim": 8}),
    "glm4-moe": ("Glm4Moe",
        {**WIDE, "head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1,
        "moe_intermediate_size": 32, "n_group": 4, "topk_group": 2, "use_qk_norm": True, "attention_bias":
        True, "routed_scaling_factor": 1.5}),
    "dots1": ("Dots1",
        {**WIDE, "head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2,
        "moe_intermediate_size": 32, "first_k_dense_replace": 1, "sliding_window": 9, "max_window_layers":
        2, "norm_topk_prob": True}),
    "exaone-moe": ("ExaoneMoe",
        {**WIDE, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
        "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "solar-open": ("SolarOpen",
        {**WIDE, "head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size":
        32}),
    "qwen2-moe": ("Qwen2Moe",
        {**WIDE, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48, "num_hidden_layers": 4, "mlp_only_layers": [1]}),
    "olmoe": ("Olmoe", {**WIDE, "intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 3}),
    "mellum": ("Mellum",
        {**WIDE, "head_dim": 16, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 3,
        "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"]}),
    "helium": ("Helium", {**WIDE, "head_dim": 16}),
    "glm": ("Glm", {**WIDE, "head_dim": 16}),
    "hyperclovax": ("HyperCLOVAX",
        {**WIDE, "embedding_multiplier": 6.0, "logits_scaling": 3.0, "residual_multiplier": 0.3,
        "use_post_norm": True}),
    "jais2": ("Jais2", WIDE),
    "cwm": ("Cwm",
        {**WIDE, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 16, "sliding_window": 9, "layer_types":
        ["full_attention", "sliding_attention", "sliding_attention"]}),
    "granitemoe": ("GraniteMoe", {**GRANITE, "num_local_experts": 6, "num_experts_per_tok": 2}),
    "granitemoe-shared": ("GraniteMoeShared",
        {**GRANITE, "num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 48}),
    # Queries without a low rank, and a softmax.
    "deepseek-v2": ("DeepseekV2",
        {**LATENT, **LATENT_EXPERTS, "q_lora_rank": None, "topk_method": "greedy"}),
    # YaRN with factors that differ.
    "deepseek-v2-groups": ("DeepseekV2",
        {**LATENT, **LATENT_EXPERTS, "q_lora_rank": 48, "topk_method": "group_limited_greedy", "n_group": 4,
        "topk_group": 2, "n_shared_experts": 2, "attention_bias": True,
        **rope("yarn", **YARN, mscale=1.0, mscale_all_dim=0.5)}),
    # Sizes that native kernels do not compute.
    "deepseek-v3-odd": ("DeepseekV3",
        {"num_key_value_heads": 4, **LATENT_EXPERTS, "q_lora_rank": 20, "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 6, "kv_lora_rank": 20, "v_head_dim": 10, "n_group": 1, "topk_group": 1,
        "rope_interleave": False, "norm_topk_prob": False}),
    "glm4-moe-lite": ("Glm4MoeLite",
        {**LATENT, **LATENT_EXPERTS, "q_lora_rank": 32, "num_attention_heads": 5, "v_head_dim": 64}),
    "minicpm3": ("MiniCPM3",
        {**LATENT, "q_lora_rank": 48, "kv_lora_rank": 32, "num_attention_heads": 8, "num_key_value_heads":
        8}),
    "youtu": ("Youtu", {**LATENT, "q_lora_rank": 32, "tie_word_embeddings": True}),
}
# fmt: on
