"""From the metadata of a GGUF file to a config.json, and from its names of tensors to transformers'.

Architectures: llama (and Mistral, which converts to it), qwen2, qwen3, qwen3moe.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from aioinfer.checkpoint.gguf_file import GGUFFile
from aioinfer.errors import ConfigError, shown

__all__ = ["ADDED", "CONTROL", "config_of", "end_tokens", "name_of"]

_NUMBER = (int, float)
#: kinds of tokens in ``tokenizer.ggml.token_type``
CONTROL, ADDED = 3, 4
#: tokens that end a turn wherever they are control tokens
_ENDS = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<EOT>",
        "<|eot|>",
    }
)


class _Architecture(NamedTuple):
    """What differs between architectures."""

    model_type: str
    name: str
    #: further entries of the config, from file and prefix
    more: Callable[[GGUFFile, str], dict[str, Any]]


def _llama(file: GGUFFile, prefix: str) -> dict[str, Any]:
    tensors = file.tensors
    if file.value(f"{prefix}.expert_count", int, 0):
        raise ConfigError("model: GGUF files of Mixtral, which are Llama with experts, are not supported")
    return {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_gate.bias" in tensors}


def _qwen2(file: GGUFFile, prefix: str) -> dict[str, Any]:
    return {"use_sliding_window": False}


def _qwen3(file: GGUFFile, prefix: str) -> dict[str, Any]:
    return {"attention_bias": False, "use_sliding_window": False}


def _qwen3moe(file: GGUFFile, prefix: str) -> dict[str, Any]:
    return {
        **_qwen3(file, prefix),
        "num_experts": file.value(f"{prefix}.expert_count", int),
        "num_experts_per_tok": file.value(f"{prefix}.expert_used_count", int),
        "moe_intermediate_size": file.value(f"{prefix}.expert_feed_forward_length", int),
        # The architecture always does so; transformers' default is not to.
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


_ARCHITECTURES = {
    "llama": _Architecture("llama", "LlamaForCausalLM", _llama),
    "qwen2": _Architecture("qwen2", "Qwen2ForCausalLM", _qwen2),
    "qwen3": _Architecture("qwen3", "Qwen3ForCausalLM", _qwen3),
    "qwen3moe": _Architecture("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3moe),
}

#: names of a layer's tensors
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
#: stacks of the experts of a layer, which transformers' layouts name without "weight"
_STACKS = {
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def name_of(name: str) -> str | None:
    """What transformers calls a tensor; None for one that is not a weight. Unknown ones keep their name."""
    if name in ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"):
        return None
    match = _BLOCK.fullmatch(name)
    if match is not None:
        layer, part, kind = match.groups()
        if part in _STACKS and kind == "weight":
            return f"model.layers.{layer}.{_STACKS[part]}"
        return f"model.layers.{layer}.{_LAYER[part]}.{kind}" if part in _LAYER else name
    stem, _, kind = name.rpartition(".")
    return f"{_WHOLE[stem]}.{kind}" if stem in _WHOLE else name


def config_of(file: GGUFFile) -> dict[str, Any]:
    """What a config.json would say. Raises ConfigError for an architecture or a variant that is not read."""
    prefix = file.value("general.architecture", str)
    architecture = _ARCHITECTURES.get(prefix)
    if architecture is None:
        raise ConfigError(
            f"model: GGUF files of the architecture {shown(prefix)} are not supported: "
            f"{', '.join(_ARCHITECTURES)} are"
        )

    def number(name: str, default: int | None = None) -> int:
        found: int = file.value(f"{prefix}.{name}", int, default)
        return found

    heads, hidden = number("attention.head_count"), number("embedding_length")
    if heads < 1:
        raise ConfigError(f"model: {prefix}.attention.head_count of the GGUF file is {heads}")
    size = number("attention.key_length", number("rope.dimension_count", hidden // heads))
    if number("attention.value_length", size) != size:
        raise ConfigError("model: the values of the GGUF file have another size than its keys")
    ends = end_tokens(file)
    return {
        "model_type": architecture.model_type,
        "architectures": [architecture.name],
        "num_hidden_layers": number("block_count"),
        "hidden_size": hidden,
        "intermediate_size": number("feed_forward_length", 0) or hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", heads),
        "head_dim": size,
        "vocab_size": _vocabulary(file),
        "max_position_embeddings": number("context_length"),
        "rms_norm_eps": float(file.value(f"{prefix}.attention.layer_norm_rms_epsilon", _NUMBER)),
        "rope_parameters": _rope(file, prefix, size),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": _dtype(file),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ends or None,
        **architecture.more(file, prefix),
    }


def end_tokens(file: GGUFFile) -> list[int]:
    """The tokens that end a text, a turn, or a message: those that the metadata name, and those whose text
    says so, which many files do not name."""
    names = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    found = {file.value(name, int) for name in names if name in file.metadata}
    tokens = file.value("tokenizer.ggml.tokens", list, [])
    kinds = file.value("tokenizer.ggml.token_type", list, [])
    for at, (token, kind) in enumerate(zip(tokens, kinds, strict=False)):
        if kind in (CONTROL, ADDED) and token in _ENDS:
            found.add(at)
    return sorted(found)


def _vocabulary(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ConfigError("model: the GGUF file has no tensor token_embd.weight")
    return embedding.shape[0]


def _dtype(file: GGUFFile) -> str:
    """float32 if all weights are; else bfloat16, of which most files were made."""
    kinds = {tensor.kind.name for tensor in file.tensors.values()}
    return "float32" if kinds == {"F32"} else "bfloat16"


def _rope(file: GGUFFile, prefix: str, size: int) -> dict[str, Any]:
    """The rotary positions: plain, scaled as the metadata say, or as Llama 3 does by a tensor of factors."""
    base = float(file.value(f"{prefix}.rope.freq_base", _NUMBER, 10_000.0))
    plain = {"rope_type": "default", "rope_theta": base}
    if size != file.value(f"{prefix}.rope.dimension_count", int, size):
        plain["partial_rotary_factor"] = file.metadata[f"{prefix}.rope.dimension_count"] / size
    if "rope_freqs.weight" in file.tensors:
        return {**plain, **_llama3(file, base, size)}
    if "rope_factors_long.weight" in file.tensors or "rope_factors_short.weight" in file.tensors:
        raise ConfigError("model: rotary positions that depend on the length (LongRoPE) are not supported")
    # Old files have a factor under another name, and no type.
    factor = file.value(
        f"{prefix}.rope.scaling.factor", _NUMBER, file.metadata.get(f"{prefix}.rope.scale_linear", 1.0)
    )
    kind = file.value(f"{prefix}.rope.scaling.type", str, "linear")
    if kind == "none" or (kind == "linear" and factor in (0, 1)):
        return plain
    if kind == "linear":
        return {**plain, "rope_type": "linear", "factor": float(factor)}
    if kind == "yarn":
        original = file.value(f"{prefix}.rope.scaling.original_context_length", int)
        return {
            **plain,
            "rope_type": "yarn",
            "factor": float(factor),
            "original_max_position_embeddings": original,
        }
    raise ConfigError(f"model: rotary positions scaled by {shown(kind)} are not supported")


def _llama3(file: GGUFFile, base: float, size: int) -> dict[str, Any]:
    """Llama 3's scaling, whose parameters are not in the file, by the factors that follow from them.

    All models that are so scaled differ in one parameter, which is the largest factor. Raises ConfigError if
    the factors are not those that follow from it."""
    import numpy as np

    stored = file.tensors["rope_freqs.weight"]
    if stored.kind.name != "F32" or stored.shape != (size // 2,):
        raise ConfigError(f"model: rope_freqs.weight is {stored.kind.name} {stored.shape}")
    factors = stored.data.view("<f4")[0].astype(np.float64)
    parameters = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    factor = float(factors.max())
    wavelengths = 2 * np.pi * base ** (np.arange(0, size, 2) / size)
    smooth = np.clip((8192 / wavelengths - 1) / 3, 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not np.allclose(factors, expected, rtol=1e-3):
        raise ConfigError(
            "model: the rotary factors of the GGUF file are not Llama 3's, others are not supported"
        )
    return {"rope_type": "llama3", "factor": factor, **parameters}
