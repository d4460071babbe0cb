"""Random small checkpoints of every family, and what transformers generates from them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.model.further_families import FURTHER, GRANITE, LATENT, LATENT_EXPERTS, WIDE, YARN, rope
from tests.model.harness import Driver, load

VOCAB = 211
_SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 80, "max_position_embeddings": 256,
    **dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id")),
}  # fmt: skip


_LLAMA3 = {
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_EXPERTS = {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "hidden_size": 64,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000.0},
    },
}

#: name -> (model class prefix, config)
# fmt: off
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-mha-untied": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "llama-mqa": ("Llama", {"num_key_value_heads": 1, "num_hidden_layers": 2}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "llama-rope-llama3": ("Llama", rope("llama3", **_LLAMA3)),
    "llama-rope-linear": ("Llama", rope("linear", factor=2.0)),
    "llama-rope-yarn": ("Llama", {**rope("yarn", **YARN), "head_dim": 16}),
    "llama-head-dim": ("Llama", {"head_dim": 32}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 9, "head_dim": 16}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1, "hidden_size": 64}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-wide-untied": ("Qwen3",
        {"head_dim": 32, "hidden_size": 64, "num_attention_heads": 8, "tie_word_embeddings": False,
        "rms_norm_eps": 0.05}),
    # Inner dimensions that blocks of 32 divide.
    "qwen3-blocks": ("Qwen3",
        {"head_dim": 32, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
        "tie_word_embeddings": False}),
    "qwen3-moe": ("Qwen3Moe", {**_EXPERTS, "norm_topk_prob": True}),
    # A dense layer, then experts whose weights do not sum up to 1, then a layer that could have had some.
    "qwen3-moe-mixed": ("Qwen3Moe",
        {**_EXPERTS, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3],
        "num_experts_per_tok": 3, "moe_intermediate_size": 32, "tie_word_embeddings": True}),
    "qwen3-moe-window": ("Qwen3Moe",
        {**_EXPERTS, "attention_bias": True, "use_sliding_window": True, "sliding_window": 7}),
    "mixtral": ("Mixtral",
        {"head_dim": 16, "hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4,
        "num_experts_per_tok": 2}),
    "phi3": ("Phi3", {"hidden_size": 64}),
    # Factors for sequences of up to 128 positions, others for longer ones.
    "phi3-longrope": ("Phi3",
        {"hidden_size": 64, "original_max_position_embeddings": 128, **rope("longrope",
        partial_rotary_factor=0.75, short_factor=[1.0, 1.1, 1.3, 1.7, 2.0, 2.5], long_factor=[5.0, 6.0, 7.0,
        8.0, 9.0, 10.0], original_max_position_embeddings=128)}),
    "phi3-partial-rotary": ("Phi3",
        {"hidden_size": 64, "sliding_window": 9, "tie_word_embeddings": True, "num_attention_heads": 2,
        "num_key_value_heads": 1, **rope("default", partial_rotary_factor=0.75)}),
    "gpt2": ("GPT2", {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 256, "bos_token_id": None}),
    "gpt2-wide": ("GPT2",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 96, "n_positions": 256, "bos_token_id": None,
        "tie_word_embeddings": False, "scale_attn_by_inverse_layer_idx": True}),
    "gpt-neox": ("GPTNeoX", {"num_key_value_heads": None, **WIDE}),
    "opt": ("OPT", {"ffn_dim": 96, "hidden_size": 64, "word_embed_proj_dim": 64, "pad_token_id": 1}),
    "cohere2": ("Cohere2",
        {**WIDE, "sliding_window": 9, "logit_scale": 0.3, "attention_bias": True, "layer_types":
        ["sliding_attention", "sliding_attention", "full_attention"]}),
    # Queries grow from position 32 on.
    "ministral3": ("Ministral3",
        {**WIDE, "head_dim": 16, **rope("yarn", **YARN | {"original_max_position_embeddings": 16},
        llama_4_scaling_beta=0.6, mscale=1.0, mscale_all_dim=1.0)}),
    "ernie4.5-moe": ("Ernie4_5_Moe",
        {**WIDE, "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 32, "num_hidden_layers": 4,
        "moe_num_shared_experts": 2, "moe_layer_end_index": 2}),
    "hunyuan": ("HunYuanDenseV1",
        {**WIDE, "head_dim": 16, **rope("dynamic", alpha=50.0, factor=1.0), "attention_bias": True}),
    "granite": ("Granite", {**GRANITE, "mlp_bias": True}),
    "gemma": ("Gemma", {"head_dim": 12}),
    "gemma-mqa": ("Gemma", {"head_dim": 16, "hidden_size": 64, "num_key_value_heads": 1}),
    # Caps that matter: scores and logits of these models are of their size.
    "gemma2": ("Gemma2",
        {"head_dim": 16, "hidden_size": 64, "sliding_window": 9, "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 4.0, "final_logit_softcapping": 6.0}),
    "gemma2-uncapped": ("Gemma2",
        {"head_dim": 32, "attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias":
        True}),
    # Two tables of frequencies and a window in every other layer.
    "gemma3-window": ("Gemma3",
        {"head_dim": 12, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention",
        "sliding_attention"]}),
    "gemma3": ("Gemma3",
        {"head_dim": 32, "hidden_size": 64, "sliding_window": 7, "query_pre_attn_scalar": 20, "layer_types":
        ["sliding_attention", "full_attention", "sliding_attention"], "rope_parameters":
        {"sliding_attention": {"rope_type": "default", "rope_theta": 100.0}, "full_attention": {"rope_type":
        "linear", "rope_theta": 10_000.0, "factor": 8.0}}}),
    # As E2B: shared keys and values, inputs by layer, double-wide parts, a cap of logits.
    "gemma4-shared": ("Gemma4",
        {**_GEMMA4, "num_hidden_layers": 6, "num_key_value_heads": 1, "layer_types": ["sliding_attention",
        "full_attention"] * 3, "num_kv_shared_layers": 3, "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB, "final_logit_softcapping":
        6.0}),
    # As 31B: keys that are values, too.
    "gemma4-keys": ("Gemma4", {**_GEMMA4, "num_global_key_value_heads": 1, "attention_k_eq_v": True}),
    # As 26B: experts beside the dense part.
    "gemma4-experts": ("Gemma4",
        {**_GEMMA4, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "enable_moe_block": True,
        "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 32}),
    # Sizes that native kernels do not compute, biases, and a part of each of the above.
    "gemma4-odd": ("Gemma4",
        {**_GEMMA4, "head_dim": 12, "global_head_dim": 20, "hidden_size": 48, "num_hidden_layers": 5,
        "layer_types": ["full_attention", *["sliding_attention", "full_attention"] * 2],
        "num_kv_shared_layers": 2, "attention_bias": True, "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 10, "vocab_size_per_layer_input": VOCAB + 5, "tie_word_embeddings":
        False}),
    "smollm3": ("SmolLM3", {"head_dim": 16, "no_rope_layers": [1, 0, 1], "tie_word_embeddings": True}),
    "olmo2": ("Olmo2", {"hidden_size": 64, "rms_norm_eps": 0.05}),
    "olmo2-biases": ("Olmo2",
        {"num_key_value_heads": 4, "attention_bias": True, "tie_word_embeddings": True}),
    "olmo3": ("Olmo3",
        {"hidden_size": 64, "num_key_value_heads": 1, "sliding_window": 9, "layer_types":
        ["sliding_attention", "full_attention", "sliding_attention"], "rope_parameters":
        {"sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}, "full_attention":
        {"rope_type": "yarn", "rope_theta": 10_000.0, **YARN}}}),
    "glm4": ("Glm4", {"head_dim": 16, **rope("default", partial_rotary_factor=0.5)}),
    "glm4-whole-rotary": ("Glm4",
        {"head_dim": 32, "hidden_size": 64, "num_key_value_heads": 1, "attention_bias": False,
        **rope("default", partial_rotary_factor=1.0)}),
    # Latents, and experts by sigmoids in groups.
    "deepseek-v3": ("DeepseekV3",
        {**LATENT, **LATENT_EXPERTS, "q_lora_rank": 32, "n_group": 4, "topk_group": 2,
        **rope("yarn", **YARN, mscale=0.707, mscale_all_dim=0.707)}),
    # Sinks, and windows in every other layer.
    "gpt-oss": ("GptOss",
        {"head_dim": 16, "hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4,
        "num_experts_per_tok": 2, "sliding_window": 9, **rope("yarn", **YARN, truncate=False)}),
    # Families and variants of own families that only transformers computes.
    "persimmon": ("Persimmon", {"num_key_value_heads": None}),
    "llama-rope-dynamic": ("Llama", rope("dynamic", factor=2.0)),
    "llama-gelu": ("Llama", {"hidden_act": "gelu"}),
}
_DELTA = {
    "hidden_size": 64, "head_dim": 32, "num_hidden_layers": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 48, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    **rope("default", partial_rotary_factor=0.25),
}
_DELTA_EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
_MAMBA = {
    "hidden_size": 64, "num_hidden_layers": 4, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 32,
    "mamba_expand": 2,
}
_MAMBA_TYPES = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
_GRANITE = {
    "embedding_multiplier": 6.0, "logits_scaling": 3.0, "residual_multiplier": 0.3,
    "attention_multiplier": 0.15,
}
_CONV = {"hidden_size": 64, "head_dim": 16, "num_hidden_layers": 4, "block_multiple_of": 16}
_CONV_TYPES = ["conv", "full_attention", "conv", "conv"]
#: families with layers that have recurrent state; all own, and of sizes that native kernels compute
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("Lfm2", {**_CONV, "layer_types": _CONV_TYPES}),
    "lfm2-biases": ("Lfm2",
        {**_CONV, "layer_types": ["full_attention", "conv", "full_attention", "conv"], "conv_bias": True,
        "conv_L_cache": 4, "block_auto_adjust_ff_dim": False, "norm_eps": 0.05,
        "tie_word_embeddings": False}),
    "lfm2-moe": ("Lfm2Moe",
        {**_CONV, "layer_types": _CONV_TYPES, "num_dense_layers": 1, "num_experts": 6,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "routed_scaling_factor": 1.5}),
    "qwen3.5": ("Qwen3_5", _DELTA),
    "bamba": ("Bamba", {**_MAMBA, "attn_layer_indices": [1]}),
    "granite-hybrid": ("GraniteMoeHybrid",
        {**_MAMBA, **_GRANITE, "layer_types": _MAMBA_TYPES, "num_local_experts": 0,
        "shared_intermediate_size": 96, "tie_word_embeddings": True}),
    # Experts beside the dense part, and rotations.
    "granite-hybrid-moe": ("GraniteMoeHybrid",
        {**_MAMBA, **_GRANITE, "layer_types": _MAMBA_TYPES, "num_local_experts": 6, "num_experts_per_tok": 2,
        "intermediate_size": 32, "shared_intermediate_size": 48,
        "position_embedding_type": "rope"}),
    # A layer without a feed-forward part, and one with a state space at the end.
    "nemotron-h": ("NemotronH",
        {"hidden_size": 64, "head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 32,
        "n_groups": 2, "intermediate_size": 96, "num_hidden_layers": None, "layers_block_type":
        ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp", "linear_attention"]}),
    "nemotron-h-moe": ("NemotronH",
        {"hidden_size": 64, "head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 32,
        "n_groups": 2, "num_hidden_layers": None, "n_routed_experts": 8, "num_experts_per_tok": 3,
        "moe_intermediate_size": 48, "moe_shared_expert_intermediate_size": 80, "n_group": 4, "topk_group": 2,
        "routed_scaling_factor": 1.5, "layers_block_type":
        ["linear_attention", "moe", "full_attention", "moe", "linear_attention", "mlp"]}),
    "falcon-h1": ("FalconH1",
        {**_MAMBA, "mamba_d_ssm": 128, "mamba_n_groups": 2, "key_multiplier": 0.4,
        "embedding_multiplier": 3.0, "lm_head_multiplier": 0.3, "mlp_multipliers": [0.8, 0.6],
        "attention_in_multiplier": 0.9, "attention_out_multiplier": 0.7, "ssm_in_multiplier": 1.2,
        "ssm_out_multiplier": 0.5, "ssm_multipliers": [0.35, 0.25, 0.5, 0.7, 1.1]}),
    # As many heads of keys as of values, columns that are no pairs of vectors, and biases.
    "qwen3.5-equal": ("Qwen3_5",
        {**_DELTA, "linear_key_head_dim": 32, "linear_value_head_dim": 16, "linear_num_key_heads": 3,
        "linear_num_value_heads": 3, "linear_conv_kernel_dim": 2, "attention_bias": True,
        "tie_word_embeddings": True, "num_key_value_heads": 1, "rms_norm_eps": 0.05}),
    "qwen3.5-moe": ("Qwen3_5Moe", {**_DELTA, **_DELTA_EXPERTS}),
    "qwen3-next": ("Qwen3Next",
        {**_DELTA, **_DELTA_EXPERTS, "mlp_only_layers": [2], "norm_topk_prob": False}),
}
# fmt: on
OWN = [name for name in FAMILIES if name not in ("persimmon", "llama-rope-dynamic", "llama-gelu")]
#: of these, those of sizes that native kernels compute
NATIVE = [
    name
    for name in OWN
    if FAMILIES[name][1].get("head_dim", 12) % 16 == 0
    or 64 in (FAMILIES[name][1].get("hidden_size"), FAMILIES[name][1].get("n_embd"))
]
#: families that torch's kernels compute, too: one for each kind of layers
BY_TORCH = [
    *("llama-gqa-tied", "mistral-window", "gpt2-wide", "gemma2", "gemma3", "gemma4-shared", "gemma4-experts"),
    *("olmo2", "glm4", "gpt-oss", "qwen3-moe-mixed", "lfm2", "qwen3.5", "granite", "cohere2", "gpt-neox"),
    *("ministral3", "hunyuan", "ernie4.5-moe", "opt", "falcon-h1", "nemotron-h", "deepseek-v3"),
]
#: (family, kernels) in engines: every family by native kernels where these can compute it
IN_ENGINES = [
    *((name, "native" if name in NATIVE else "sdpa") for name in FAMILIES),
    *((name, "native") for name in RECURRENT),
    *((name, "sdpa") for name in BY_TORCH if name in NATIVE or name in RECURRENT),
]
#: as well, of further families, by both kernels
FURTHER_IN_ENGINES = [
    (name, kernels)
    for name in FURTHER
    for kernels in ("native", "sdpa")
    if kernels == "sdpa" or "hidden_size" in FURTHER[name][1]
]


def make_checkpoint(name: str, path: Path, dtype: torch.dtype = torch.float32, **save: Any) -> Any:
    """Write a random checkpoint of a family; returns the model, in ``dtype``."""
    prefix, changes = {**FAMILIES, **RECURRENT, **FURTHER}[name]
    return make_model(prefix, changes, path, seed=sum(map(ord, name)), dtype=dtype, **save)


def make_model(
    prefix: str,
    changes: dict[str, Any],
    path: Path,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    **save: Any,
) -> Any:
    """As :func:`make_checkpoint`, of a prefix and changes as :data:`FAMILIES` has them."""
    config_class = getattr(transformers, f"{prefix}Config")
    model_class = getattr(transformers, "GPT2LMHeadModel" if prefix == "GPT2" else f"{prefix}ForCausalLM")
    if prefix in ("Gemma3", "Gemma4", "Qwen3_5", "Qwen3_5Moe"):
        config_class = getattr(transformers, f"{prefix}TextConfig")
    shape = {"vocab_size": VOCAB, "eos_token_id": None} if prefix == "GPT2" else dict(_SHAPE)
    shape = {
        key: value for key, value in {**shape, **changes}.items() if key != "num_key_value_heads" or value
    }
    model = model_class(config_class(**shape)).eval()
    # Of torch's own attention some releases forget the caps of scores.
    model.set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # Wide enough that no two logits come close by chance: exact ids are to be compared.
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.25 if parameter.dim() > 1 else 1 + 0.3 * noise)
            if parameter_name.endswith("A_log"):
                # States that remember for about twenty tokens.
                parameter.copy_(noise - 3)
        scale_layers(model, generator)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.2)
    model.to(dtype).save_pretrained(path, **save)
    return model


def scale_layers(model: Any, generator: torch.Generator) -> None:
    """Random factors of the residual, which are no parameters, where a model has them."""
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))


@torch.no_grad()
def greedy(model: Any, prompt: Sequence[int], tokens: int, guess: Sequence[int] = ()) -> list[int]:
    """Greedy ids by a full forward per token: the plainest oracle there is.

    A guess that is right costs one forward: a row of logits depends on the tokens up to it alone, so what it
    chooses is greedy up to the first id that differs from ``guess``.
    """
    ids = list(prompt)
    if guess:
        ids += _agreed(model, [(prompt, tokens, guess)])[0]
    while len(ids) < len(prompt) + tokens:
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@torch.no_grad()
def greedy_each(
    model: Any,
    prompts: Sequence[Sequence[int]],
    tokens: int | Sequence[int],
    guesses: Sequence[Sequence[int]],
) -> list[list[int]]:
    """:func:`greedy` of several prompts, of so many tokens each, in one forward if all guesses are right."""
    lengths = [tokens] * len(prompts) if isinstance(tokens, int) else tokens
    asked = list(zip(prompts, lengths, guesses, strict=True))
    return [
        ids if len(ids) == length else greedy(model, prompt, length, ids)
        for ids, (prompt, length, _) in zip(_agreed(model, asked), asked, strict=True)
    ]


def assert_greedy(
    path: Path, prompts: Sequence[Sequence[int]], tokens: int, *oracles: Any, chunk: int = 5, **options: Any
) -> None:
    """A checkpoint continues prompts as transformers' models do."""
    model, kernels = load(path, **options), options.get("kernels", "auto")
    driven = Driver(model, chunk=chunk, kernels=kernels).run(prompts, tokens)
    found = [sequence.ids[sequence.prompt_len :] for sequence in driven]
    for oracle in oracles:
        assert found == greedy_each(oracle, prompts, tokens, found)


def _agreed(model: Any, asked: Sequence[tuple[Sequence[int], int, Sequence[int]]]) -> list[list[int]]:
    """Of each guess the greedy part, and the id that is greedy behind it. What pads rows comes after them."""
    rows = [[*prompt, *guess[: tokens - 1]] for prompt, tokens, guess in asked]
    width = max(map(len, rows))
    logits = model(torch.tensor([row + [0] * (width - len(row)) for row in rows]), use_cache=False).logits
    found = []
    for (prompt, _, guess), row, chosen in zip(asked, rows, logits.argmax(-1).tolist(), strict=True):
        ids = chosen[len(prompt) - 1 : len(row)]
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ids, guess, strict=False))
        found.append(ids[: sum(1 for _ in same) + 1])
    return found
