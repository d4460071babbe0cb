"""Further architectures without experts: Granite, Cohere, EXAONE 4, ERNIE 4.5, Seed-OSS, Hunyuan, StarCoder2,
Pythia, StableLM, Phi-2, Nemotron and Arcee."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from aioinfer.checkpoint.gguf.architectures.base import (
    LESS_ONE,
    NEIGHBOURS,
    NUMBER,
    POST_NORMS,
    Architecture,
    Common,
    biases,
    partial_rotation,
    windows,
)

__all__ = ["ARCHITECTURES", "HUNYUAN_NORMS", "granite_factors"]

_EPSILON = "layer_norm_epsilon"
HUNYUAN_NORMS = {
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
}
_STARCODER = {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
_PHI2 = {
    "output_norm": "model.final_layernorm",
    "attn_output": "self_attn.dense",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_NEOX = {
    "token_embd": "gpt_neox.embed_in",
    "output_norm": "gpt_neox.final_layer_norm",
    "output": "embed_out",
    "attn_qkv": "attention.query_key_value",
    "attn_output": "attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}


def granite_factors(common: Common) -> dict[str, Any]:
    """The factors of Granite; those that a file leaves out are 1, and that of scores the usual one."""
    names = {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    factors = {name: float(common.value(stated, NUMBER, 1.0)) for name, stated in names.items()}
    usual = common.head_dim**-0.5
    scale = float(common.value("attention.scale", NUMBER, 0.0)) or usual
    return {**biases(common), **factors, "attention_multiplier": scale}


def _epsilon(common: Common, name: str = "layer_norm_eps") -> dict[str, Any]:
    """That of layer norms, under the config's name."""
    return {name: float(common.value(f"attention.{_EPSILON}", NUMBER))}


def _cohere(common: Common) -> dict[str, Any]:
    return {
        **_epsilon(common),
        "attention_bias": common.attention_bias,
        "logit_scale": float(common.value("logit_scale", NUMBER)),
        "use_qk_norm": common.any(".attn_q_norm.weight"),
    }


def _cohere2(common: Common) -> dict[str, Any]:
    return {**_cohere(common), **windows(common, default=0, period=4)}


def _exaone4(common: Common) -> dict[str, Any]:
    return windows(common, default=0, period=4)


def _ernie(common: Common) -> dict[str, Any]:
    return {"use_bias": common.attention_bias}


def _seed_oss(common: Common) -> dict[str, Any]:
    return {**biases(common), "attention_out_bias": common.any(".attn_output.bias")}


def _hunyuan(common: Common) -> dict[str, Any]:
    # The base is that which the config's alpha makes of its own.
    return {"attention_bias": common.attention_bias}


def _starcoder2(common: Common) -> dict[str, Any]:
    return {
        **_epsilon(common, "norm_epsilon"),
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": common.attention_bias,
        # Not in the metadata; it is as long as the sequences of the releases.
        "sliding_window": None,
    }


def _neox(common: Common) -> dict[str, Any]:
    return {
        **_epsilon(common),
        "hidden_act": "gelu",
        "attention_bias": common.attention_bias,
        "use_parallel_residual": common.value("use_parallel_residual", bool, True),
        "rope_parameters": partial_rotation(common),
    }


def _stablelm(common: Common) -> dict[str, Any]:
    return {
        **_epsilon(common),
        "use_qkv_bias": common.attention_bias,
        "qk_layernorm": common.any(".attn_q_norm.weight"),
        # Which is what llama.cpp goes by, too.
        "use_parallel_residual": not common.any(".ffn_norm.weight"),
        "rope_parameters": partial_rotation(common),
    }


def _phi2(common: Common) -> dict[str, Any]:
    return {
        **_epsilon(common),
        "hidden_act": "gelu_new",
        "rope_parameters": partial_rotation(common),
    }


def _nemotron(common: Common) -> dict[str, Any]:
    return {
        **_epsilon(common, "norm_eps"),
        "hidden_act": "relu2",
        "attention_bias": common.attention_bias,
        "mlp_bias": common.any(".ffn_up.bias"),
        "rope_parameters": partial_rotation(common),
    }


def _arcee(common: Common) -> dict[str, Any]:
    return {
        "hidden_act": "relu2",
        "attention_bias": common.attention_bias,
        "mlp_bias": common.any(".ffn_up.bias"),
    }


def _by_head(config: Mapping[str, Any], rows: int) -> npt.NDArray[np.int64]:
    """Of each head queries, keys and values are side by side in transformers."""
    return np.arange(rows).reshape(3, config["num_attention_heads"], -1).swapaxes(0, 1).ravel()


_BY_HEAD = dict.fromkeys(("query_key_value.weight", "query_key_value.bias"), _by_head)
ARCHITECTURES = {
    "granite": Architecture("granite", "GraniteForCausalLM", granite_factors, rows=NEIGHBOURS),
    "command-r": Architecture("cohere", "CohereForCausalLM", _cohere, epsilon=_EPSILON),
    "cohere2": Architecture("cohere2", "Cohere2ForCausalLM", _cohere2, epsilon=_EPSILON),
    "exaone4": Architecture("exaone4", "Exaone4ForCausalLM", _exaone4, POST_NORMS),
    "ernie4_5": Architecture("ernie4_5", "Ernie4_5ForCausalLM", _ernie),
    "seed_oss": Architecture(
        "seed_oss", "SeedOssForCausalLM", _seed_oss, {"post_attention_norm": "post_attention_layernorm"}
    ),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", _hunyuan, HUNYUAN_NORMS),
    "starcoder2": Architecture(
        "starcoder2", "Starcoder2ForCausalLM", _starcoder2, _STARCODER, epsilon=_EPSILON
    ),
    "gptneox": Architecture(
        *("gpt_neox", "GPTNeoXForCausalLM", _neox, _NEOX),
        layers="gpt_neox.layers",
        epsilon=_EPSILON,
        rows=_BY_HEAD,
        partial_rotary=True,
    ),
    "stablelm": Architecture(
        "stablelm", "StableLmForCausalLM", _stablelm, epsilon=_EPSILON, partial_rotary=True
    ),
    "phi2": Architecture("phi", "PhiForCausalLM", _phi2, _PHI2, epsilon=_EPSILON, partial_rotary=True),
    "nemotron": Architecture(
        *("nemotron", "NemotronForCausalLM", _nemotron),
        epsilon=_EPSILON,
        values=LESS_ONE,
        partial_rotary=True,
    ),
    "arcee": Architecture("arcee", "ArceeForCausalLM", _arcee, rows=NEIGHBOURS),
}
