"""The architectures of GGUF files that are read: what each adds to the config, and how it stores weights.

llama (and Mistral, which converts to it), qwen2, qwen3, qwen3moe, qwen3vl (text), gemma, gemma2, gemma3
(text), smollm3, olmo2 (and OLMo 3, which converts to it), glm4, phi3, gpt2.
Defaults of metadata that a file leaves out are those of llama.cpp, which its converter relies on:
https://github.com/ggml-org/llama.cpp/tree/master/src/models
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aioinfer.checkpoint.gguf_file import GGUFFile
from aioinfer.errors import ConfigError, shown

__all__ = ["DEFAULT_BASE", "Architecture", "Common", "architecture_of"]

#: of rotations in files that state none
DEFAULT_BASE = 10_000.0
_NUMBER = (int, float)
#: more are damage, of which no list is made
_MOST_LAYERS = 10_000
_FULL, _SLIDING = "full_attention", "sliding_attention"
_QWEN2 = {"use_sliding_window": False}
_QWEN3 = {"attention_bias": False, **_QWEN2}


@dataclass(frozen=True, slots=True)
class Common:
    """Metadata that the configs of all architectures are made of."""

    file: GGUFFile
    prefix: str
    layers: int
    hidden: int
    heads: int
    head_dim: int
    #: positions of the longest sequence
    context: int
    #: see :func:`~aioinfer.checkpoint.gguf_config.rope_of`
    rope: dict[str, Any]

    def value(self, name: str, kind: type[Any] | tuple[type[Any], ...], default: Any = None) -> Any:
        """See :meth:`~aioinfer.checkpoint.gguf_file.GGUFFile.value`; without the prefix."""
        return self.file.value(f"{self.prefix}.{name}", kind, default)

    def has(self, name: str) -> bool:
        """Whether the metadata have a name, without the prefix."""
        return f"{self.prefix}.{name}" in self.file.metadata

    @property
    def attention_bias(self) -> bool:
        return not self.file.tensors.keys().isdisjoint({"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"})


@dataclass(frozen=True, slots=True)
class Architecture:
    """The differences between architectures."""

    model_type: str
    name: str
    #: further entries of the config
    more: Callable[[Common], dict[str, Any]]
    #: names of tensors of a layer, and of others, that transformers calls otherwise than elsewhere
    names: Mapping[str, str] = field(default_factory=dict)
    #: what transformers calls the layers
    layers: str = "model.layers"
    #: ends of transformers' names of matrices that it has transposed
    transposed: tuple[str, ...] = ()
    #: name of the epsilon of norms in the metadata
    epsilon: str = "layer_norm_rms_epsilon"
    #: whether rows of queries and keys are in the order of neighbours that rotate together, transformers'
    #: being that of two halves
    neighbours: bool = False
    #: whether weights of norms are factors, transformers' being those less one
    norms_plus_one: bool = False
    #: whether a part of each head may be rotated: then its size does not follow from that part's
    partial_rotary: bool = False
    #: texts of control tokens that end a turn, beside those that do so everywhere
    ends: frozenset[str] = frozenset()


def architecture_of(file: GGUFFile) -> Architecture:
    """Raises ConfigError if it is not read."""
    stated = file.value("general.architecture", str)
    found = _ARCHITECTURES.get(stated)
    if found is None:
        raise ConfigError(
            f"model: GGUF files of the architecture {shown(stated)} are not supported: "
            f"{', '.join(_ARCHITECTURES)} are"
        )
    return found


def _llama(common: Common) -> dict[str, Any]:
    if common.value("expert_count", int, 0):
        raise ConfigError("model: GGUF files of Mixtral, which are Llama with experts, are not supported")
    return _biases(common)


def _biases(common: Common) -> dict[str, Any]:
    return {
        "attention_bias": common.attention_bias,
        "mlp_bias": "blk.0.ffn_gate.bias" in common.file.tensors,
    }


def _qwen3moe(common: Common) -> dict[str, Any]:
    return {
        **_QWEN3,
        "num_experts": common.value("expert_count", int),
        "num_experts_per_tok": common.value("expert_used_count", int),
        "moe_intermediate_size": common.value("expert_feed_forward_length", int),
        # The architecture always does so; transformers' default is not to.
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gemma(common: Common) -> dict[str, Any]:
    gate = "gelu_pytorch_tanh"
    return {"hidden_act": gate, "hidden_activation": gate, "attention_bias": common.attention_bias}


def _gemma2(common: Common) -> dict[str, Any]:
    return {
        **_gemma(common),
        **_windows(common, default=4096, period=2),
        "query_pre_attn_scalar": _query_scalar(common, largest=46),
        "attn_logit_softcapping": _cap(common, "attn_logit_softcapping", 50.0),
        "final_logit_softcapping": _cap(common, "final_logit_softcapping", 30.0),
    }


def _gemma3(common: Common) -> dict[str, Any]:
    return {
        **_gemma(common),
        **_windows(common, default=0, period=6),
        "query_pre_attn_scalar": _query_scalar(common, largest=62),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": _cap(common, "final_logit_softcapping", 0.0),
        "rope_parameters": _two_rotations(common, DEFAULT_BASE),
    }


def _smollm3(common: Common) -> dict[str, Any]:
    # Which layers do not rotate is not in the metadata.
    return {**_biases(common), "no_rope_layer_interval": 4, "use_sliding_window": False}


def _olmo2(common: Common) -> dict[str, Any]:
    """OLMo 3 is OLMo 2 with a window, and plain rotations where it applies."""
    stated = {"attention_bias": common.attention_bias}
    if not common.value("attention.sliding_window", int, 0):
        return stated
    return {
        **stated,
        **_windows(common, default=0, period=4),
        "model_type": "olmo3",
        "architectures": ["Olmo3ForCausalLM"],
        "rope_parameters": _two_rotations(common, common.rope["rope_theta"]),
    }


def _glm4(common: Common) -> dict[str, Any]:
    """Neighbours rotate together, for which transformers has rows of queries and keys in the same order."""
    sections = common.value("rope.dimension_sections", list, [])
    if any(sections) or common.value("nextn_predict_layers", int, 0):
        # Of GLM-4V, whose rows are in another order, and of GLM-OCR.
        raise ConfigError(
            "model: GGUF files of GLM-4 for images, or with layers for further tokens, are not supported"
        )
    return {"attention_bias": common.attention_bias, "rope_parameters": _partial(common)}


def _phi3(common: Common) -> dict[str, Any]:
    return {
        "sliding_window": common.value("attention.sliding_window", int, 0) or None,
        "original_max_position_embeddings": common.value(
            "rope.scaling.original_context_length", int, common.context
        ),
        "rope_parameters": _partial(common),
    }


def _gpt2(common: Common) -> dict[str, Any]:
    return {
        "n_layer": common.layers,
        "n_embd": common.hidden,
        "n_head": common.heads,
        "n_positions": common.context,
        "n_inner": common.value("feed_forward_length", int, 4 * common.hidden),
        "layer_norm_epsilon": float(common.value("attention.layer_norm_epsilon", _NUMBER)),
    }


def _partial(common: Common) -> dict[str, Any]:
    """The rotation with the part of a head that rotates; transformers' default is not all of it."""
    return {"partial_rotary_factor": 1.0, **common.rope}


def _cap(common: Common, name: str, default: float) -> float | None:
    """A soft cap; 0 is none."""
    return float(common.value(name, _NUMBER, default)) or None


def _query_scalar(common: Common, *, largest: int) -> int:
    """The number whose root divides queries: the size of a head, but hidden / heads in the largest model
    of a release, which is known by its number of layers."""
    if not common.has("attention.scale"):
        return common.hidden // common.heads if common.layers == largest else common.head_dim
    scale = float(common.value("attention.scale", _NUMBER))
    scalar = round(scale**-2) if 0 < scale <= 1 else 0
    if scalar < 1 or abs(scalar**-0.5 - scale) > 1e-6 * scale:
        raise ConfigError(f"model: {common.prefix}.attention.scale of the GGUF file is {scale}")
    return scalar


def _windows(common: Common, *, default: int, period: int) -> dict[str, Any]:
    """The attention window, and which layers have it: all but every ``period``-th, unless the file states
    another period, or says it of each layer. A window of 0 is none."""
    window = common.value("attention.sliding_window", int, default)
    pattern = common.value("attention.sliding_window_pattern", (int, list), period)
    if window < 0 or (isinstance(pattern, int) and pattern < 0):
        raise ConfigError(f"model: {common.prefix}.attention.sliding_window of the GGUF file is negative")
    if common.layers > _MOST_LAYERS:
        raise ConfigError(f"model: the GGUF file states {common.layers} layers")
    if isinstance(pattern, int):
        sliding = [pattern == 0 or (layer + 1) % pattern != 0 for layer in range(common.layers)]
    elif len(pattern) == common.layers and all(isinstance(each, int) for each in pattern):
        sliding = [bool(each) for each in pattern]
    else:
        raise ConfigError(
            f"model: {common.prefix}.attention.sliding_window_pattern has {len(pattern)} values for "
            f"{common.layers} layers"
        )
    types = [_SLIDING if window and each else _FULL for each in sliding]
    return {"sliding_window": window or None, "layer_types": types}


def _two_rotations(common: Common, base: float) -> dict[str, Any]:
    """Layers with a window rotate without scaling, by a base of their own. ``base``: of files that do not
    state that."""
    own = float(common.value("rope.freq_base_swa", _NUMBER, base))
    return {_FULL: common.rope, _SLIDING: {"rope_type": "default", "rope_theta": own}}


_OLMO_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FOUR_NORMS = {**_OLMO_NORMS, "ffn_norm": "pre_feedforward_layernorm"}
_GLM = {
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
}
_PHI = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_GPT2 = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}

_ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", _llama, neighbours=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", lambda _: _QWEN2),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", lambda _: _QWEN3),
    # In a text all positions of M-RoPE are the same, and so it is Qwen3.
    "qwen3vl": Architecture("qwen3", "Qwen3ForCausalLM", lambda _: _QWEN3),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3moe),
    "gemma": Architecture("gemma", "GemmaForCausalLM", _gemma, norms_plus_one=True),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", _gemma2, _FOUR_NORMS, norms_plus_one=True),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", _gemma3, _FOUR_NORMS, norms_plus_one=True),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", _smollm3, neighbours=True),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM", _olmo2, _OLMO_NORMS),
    "glm4": Architecture(
        *("glm4", "Glm4ForCausalLM", _glm4, _GLM),
        partial_rotary=True,
        ends=frozenset({"<|user|>", "<|observation|>"}),
    ),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", _phi3, _PHI, partial_rotary=True),
    "gpt2": Architecture(
        *("gpt2", "GPT2LMHeadModel", _gpt2, _GPT2),
        layers="transformer.h",
        transposed=(".c_attn.weight", ".c_proj.weight", ".c_fc.weight"),
        epsilon="layer_norm_epsilon",
    ),
}
