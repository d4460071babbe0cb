"""Checkpoints and configs that cannot be loaded: each is one ConfigError that names what is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aioinfer.errors import ConfigError
from tests.model.checkpoints import make_checkpoint
from tests.model.harness import load

Checkpoint = Callable[[str], tuple[Path, Any]]
Edit = Callable[[Path], object]
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def config(**changes: Any) -> Edit:
    def edit(path: Path) -> None:
        file = path / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return edit


def without(ending: str) -> Edit:
    def edit(path: Path) -> None:
        tensors = load_file(path / WEIGHTS)
        left = {name: tensor for name, tensor in tensors.items() if not name.endswith(ending)}
        assert len(left) < len(tensors)
        save_file(left, path / WEIGHTS, metadata={"format": "pt"})

    return edit


def put(name: str, tensor: torch.Tensor) -> Edit:
    def edit(path: Path) -> None:
        save_file({**load_file(path / WEIGHTS), name: tensor}, path / WEIGHTS, metadata={"format": "pt"})

    return edit


def write(name: str, text: str) -> Edit:
    return lambda path: (path / name).write_text(text)


FILES = [
    ("qwen3", lambda path: (path / "config.json").unlink(), "no config.json"),
    ("qwen3", lambda path: (path / WEIGHTS).unlink(), "no model.safetensors"),
    ("qwen3", lambda path: (path / WEIGHTS).rename(path / "weights.bin"), "are not loaded"),
    ("qwen3", lambda path: (path / WEIGHTS).write_bytes(b"nonsense"), "cannot be read"),
    ("qwen3", write("config.json", "{"), "cannot be read"),
    ("qwen3", write("generation_config.json", "{"), "generation_config.json"),
    ("qwen3", write(INDEX, "{"), "index.json cannot be read"),
    *(
        ("qwen3", write(INDEX, json.dumps({"weight_map": wrong})), "has no weight_map")
        for wrong in (None, [], {"a": 5}, {"a": "../model.safetensors"}, {"a": None}, {"a": "x.bin"})
    ),
    (
        "qwen3",
        write(INDEX, '{"weight_map": {"a": "gone.safetensors", "b": "model.safetensors"}}'),
        "gone.safetensors, which",
    ),
]
TENSORS = [
    ("qwen3", without("layers.1.self_attn.q_norm.weight"), "no tensor .*q_norm.weight"),
    (
        "qwen3",
        put("model.norm.weight", torch.ones(3)),
        r"norm.weight is shaped \(3,\), the config says",
    ),
    ("qwen3", put("extra", torch.ones(3)), "1 unexpected tensors, first extra"),
    ("llama-biases", without("mlp.down_proj.bias"), "no tensor .*down_proj.bias"),
    ("qwen3-moe", without("layers.1.mlp.experts.7.up_proj.weight"), "no tensor .*experts.7.up_proj"),
    (
        "qwen3-moe",
        put("model.layers.0.mlp.experts.8.down_proj.weight", torch.ones(3)),
        "1 unexpected tensors",
    ),
    ("lfm2-biases", without("conv.conv.bias"), "no tensor .*conv.conv.bias"),
    ("lfm2-moe", without("expert_bias"), "no tensor .*expert_bias"),
    ("qwen3.5", without("A_log"), "no tensor .*A_log"),
    ("qwen3.5", put("model.layers.0.linear_attn.conv1d.weight", torch.ones(3)), "conv1d.weight is shaped"),
    ("qwen3.5-moe", without("shared_expert_gate.weight"), "no tensor .*shared_expert_gate"),
    ("gemma4-shared", without("embed_tokens_per_layer.weight"), "no tensor .*embed_tokens_per_layer"),
    ("gemma4-shared", without("layers.3.layer_scalar"), "no tensor .*layers.3.layer_scalar"),
    ("gemma4-experts", without("router.per_expert_scale"), "no tensor .*per_expert_scale"),
    ("opt", put("model.decoder.embed_positions.weight", torch.ones(256, 64)), r"the config says \(258, 64\)"),
    ("gpt-neox", without("embed_out.weight"), "no tensor embed_out.weight"),
    ("gpt-neox", put("gpt_neox.layers.0.attention.dense.bias", torch.ones(9)), "dense.bias is shaped"),
    ("cohere2", put("model.layers.0.input_layernorm.bias", torch.ones(64)), "1 unexpected tensors"),
    ("hunyuan", without("layers.2.self_attn.key_layernorm.weight"), "no tensor .*key_layernorm"),
    ("ernie4.5-moe", without("moe_statics.e_score_correction_bias"), "no tensor .*correction_bias"),
    ("glm4-moe", without("layers.2.mlp.gate.e_score_correction_bias"), "no tensor .*correction_bias"),
    ("glm4-moe", put("model.layers.4.eh_proj.weight", torch.ones(3)), "1 unexpected tensors, first"),
    ("granitemoe", without("layers.0.block_sparse_moe.router.layer.weight"), "no tensor .*router.layer"),
    ("granitemoe", put("model.layers.1.block_sparse_moe.input_linear.weight", torch.ones(2)), "is shaped"),
    ("granitemoe-shared", without("layers.0.shared_mlp.input_linear.weight"), "no tensor .*shared_mlp"),
    ("qwen2-moe", without("shared_expert_gate.weight"), "no tensor .*shared_expert_gate"),
    ("minimax-m2", without("block_sparse_moe.experts.7.w3.weight"), "no tensor .*experts.7.w3"),
    ("phi", without("lm_head.bias"), "no tensor lm_head.bias"),
    ("deepseek-v3", without("layers.1.self_attn.kv_b_proj.weight"), "no tensor .*kv_b_proj"),
    ("deepseek-v3", put("model.layers.0.self_attn.kv_a_layernorm.weight", torch.ones(3)), "norm.weight is"),
    ("deepseek-v3", without("layers.0.self_attn.q_a_layernorm.weight"), "no tensor .*q_a_layernorm"),
    ("deepseek-v3", without("layers.2.mlp.shared_experts.up_proj.weight"), "no tensor .*shared_experts"),
    ("deepseek-v3", put("model.layers.4.self_attn.o_proj.weight", torch.ones(3)), "1 unexpected tensors"),
    # transformers would make these up and log it.
    ("persimmon", without("model.layers.1.mlp.dense_h_to_4h.weight"), "layers.1.mlp.dense_h_to_4h.weight"),
    (
        "persimmon",
        put("model.final_layernorm.weight", torch.ones(3)),
        r"final_layernorm.weight is shaped \(3,\), the config says \(48,\)",
    ),
]
CONFIGS = [
    ("qwen3", {"architectures": [None]}, "must be names"),
    ("qwen3", {"architectures": ["NonsenseForCausalLM"]}, "no causal language model"),
    ("persimmon", {"architectures": ["PersimmonForSequenceClassification"]}, "is no causal language model"),
    ("opt", {"num_attention_heads": 3}, "hidden_size, 64, is no multiple of 3 heads"),
    ("opt", {"ffn_dim": 0}, "ffn_dim in config.json must be an integer in"),
    ("ministral3", {"rope_parameters": {"llama_4_scaling_beta": 0.1}}, "needs original_max_position"),
    ("granite", {"residual_multiplier": "x"}, "residual_multiplier in config.json must be a positive number"),
    ("granite", {"logits_scaling": 0}, "logits_scaling in config.json must be a positive number"),
    ("cohere2", {"logit_scale": float("inf")}, "logit_scale in config.json must be a positive number"),
    ("cohere2", {"layer_types": ["sliding_attention"] * 2}, "the config"),
    ("hunyuan", {"rope_parameters": {"rope_type": "dynamic", "alpha": -1}}, "alpha in config.json must be"),
    ("hunyuan-moe", {"moe_topk": [2, 9, 2]}, "9 of 6 experts in layer 1"),
    ("hunyuan-moe", {"moe_topk": [2]}, "of 6 experts in layer 1"),
    ("hunyuan-moe", {"num_experts": [6, 6, 6]}, "num_experts"),
    ("glm4-moe", {"n_group": 3}, "cannot choose 3 of 8 experts in 2 of 3 groups"),
    ("glm4-moe", {"topk_group": 0}, "topk_group in config.json must be an integer"),
    ("glm4-moe", {"num_experts_per_tok": 9}, "9 of 8 experts in layer"),
    ("ernie4.5-moe", {"moe_layer_interval": 0}, "moe_layer_interval in config.json must be an integer"),
    ("qwen2-moe", {"decoder_sparse_step": 0}, "experts in every 0th layer"),
    ("deepseek-v3", {"kv_lora_rank": 0}, "kv_lora_rank in config.json must be an integer in"),
    ("deepseek-v3", {"kv_lora_rank": 48}, "kv_a_proj_with_mqa.weight is shaped"),
    ("deepseek-v3", {"q_lora_rank": -1}, "q_lora_rank in config.json must be an integer in"),
    ("deepseek-v3", {"q_lora_rank": None}, "no tensor .*q_proj.weight"),
    ("deepseek-v3", {"qk_nope_head_dim": 16}, "q_b_proj.weight is shaped"),
    ("deepseek-v3", {"qk_rope_head_dim": 15}, "its kind of rotary positions is not supported"),
    ("deepseek-v3", {"v_head_dim": 16}, "kv_b_proj.weight is shaped"),
    ("deepseek-v3", {"n_group": 3}, "cannot choose 3 of 8 experts in 2 of 3 groups"),
    ("deepseek-v3", {"topk_group": 9}, "cannot choose 3 of 8 experts in 9 of 4 groups"),
    ("deepseek-v3", {"first_k_dense_replace": 99}, "no tensor .*layers.1.mlp.gate_proj"),
    ("deepseek-v3", {"n_routed_experts": 7}, "gate.weight is shaped"),
    ("deepseek-v3", {"n_shared_experts": 2}, "shared_experts.gate_proj.weight is shaped"),
    ("deepseek-v3", {"hidden_act": "relu"}, "with the activation relu is not supported"),
    ("deepseek-v3", {"attention_bias": True}, "no tensor .*q_a_proj.bias"),
    ("deepseek-v3", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rotary positions"),
    ("deepseek-v2", {"topk_method": "best"}, "experts chosen by best is not supported"),
    ("deepseek-v2", {"mlp_bias": True}, "biases in parts that have none"),
    ("glm4-moe-lite", {"mlp_layer_types": ["sparse"]}, "mlp_layer_types"),
    ("minicpm3", {"scale_emb": -1}, "scale_emb in config.json must be a positive number"),
    ("minicpm3", {"dim_model_base": 0}, "dim_model_base in config.json must be an integer in"),
    ("mellum", {"mlp_layer_types": ["sparse"]}, "mlp_layer_types"),
    ("minimax-m2", {"num_local_experts": None}, "experts"),
    ("qwen3", {"model_type": "nonsense"}, "cannot be used"),
    ("qwen3", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised"),
    ("qwen3-moe", {"num_experts_per_tok": 9}, "9 of 8 experts in layer"),
    ("qwen3-moe", {"decoder_sparse_step": 0}, "experts in every 0th layer"),
    ("lfm2", {"conv_L_cache": 0}, "conv_L_cache in config.json must be an integer in"),
    ("lfm2", {"norm_eps": -1.0}, "norm_eps in config.json must be a positive number"),
    ("lfm2", {"layer_types": ["conv"] * 4}, "with no attention at all is not supported"),
    ("qwen3.5", {"linear_num_key_heads": 3}, "4 heads of values are no multiple of 3"),
    ("qwen3.5", {"layer_types": ["linear_attention"] * 2}, "the config"),
    ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping"),
    ("gpt2-wide", {"n_head": 3}, "n_embd, 64, is no multiple of n_head, 3"),
    ("olmo2", {"num_key_value_heads": 3}, "4 heads of queries are no multiple of 3 heads of keys"),
    ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers of the config has 1 entries for 3 layers"),
    ("llama-mqa", {"num_hidden_layers": 2**31 - 1}, "num_hidden_layers"),
    *(
        ("qwen3", {"vocab_size": value}, r"^model: vocab_size in config\.json must be an integer in \[1, ")
        for value in (-1, 0, 1.5, "x", 10**30, [], True)
    ),
    ("gemma4-keys", {"use_bidirectional_attention": "all"}, "bidirectional attention is not supported"),
    ("gemma4-shared", {"num_kv_shared_layers": 6}, "6 of 6 layers share keys and values"),
    ("gemma4-shared", {"num_kv_shared_layers": 5}, "no layer of full_attention has the keys"),
    ("gemma4-shared", {"vocab_size_per_layer_input": 90}, "inputs by layer of 90 tokens for 211"),
    ("gemma4-shared", {"hidden_size_per_layer_input": 32}, "is shaped"),
    ("gemma4-experts", {"top_k_experts": 9}, "9 of 8 experts"),
    ("gemma4-experts", {"num_experts": None}, "3 of 0 experts"),
]


@pytest.mark.parametrize(
    ("family", "edit", "message"),
    [*FILES, *TENSORS, *((family, config(**changes), message) for family, changes, message in CONFIGS)],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_cannot_be_loaded_is_one_error_that_says_why(
    checkpoint: Checkpoint, tmp_path: Path, family: str, edit: Edit, message: str
) -> None:
    shutil.copytree(checkpoint(family)[0], tmp_path / "edited")
    edit(tmp_path / "edited")
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / "edited", dtype="auto", kernels="sdpa")


def test_dtypes_and_directories_that_there_are_not_are_named(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path)
    with pytest.raises(ConfigError, match="int8"):
        load(tmp_path, dtype="int8")
    with pytest.raises(ConfigError, match="/no/such/place"):
        load(Path("/no/such/place"))
