"""From the metadata of a GGUF file to a config.json, and from its names of tensors to transformers'."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from aioinfer.checkpoint.gguf.architectures import architecture_of
from aioinfer.checkpoint.gguf.architectures.base import DEFAULT_BASE, Architecture, Common
from aioinfer.checkpoint.gguf.file import GGUFFile
from aioinfer.errors import ConfigError, shown

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["ADDED", "CONTROL", "config_of", "end_tokens", "name_of", "rope_of"]

_NUMBER = (int, float)
#: more are damage, of which no list is made
_MOST_LAYERS = 10_000
#: rotary factors from here on stand for no rotation
_NEVER = 1e29
#: parameters of YaRN in a config, and their names in metadata; transformers' defaults apply without them
_YARN = {"attention_factor": "yarn_attn_factor", "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
#: kinds of tokens in ``tokenizer.ggml.token_type``
CONTROL, ADDED = 3, 4
#: tokens that end a text, a turn or a call wherever they are control tokens; llama.cpp ends there, too
_ENDS = frozenset(
    {
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<|eot|>"),
        *("<|end_of_text|>", "<end_of_utterance>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "</s>", "<eos>"),
        *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<turn|>", "<|tool_response>", "[e~["),
        "<｜end▁of▁sentence｜>",
    }
)
#: the one that is a tag of HTML where it is an added token, as in Gemma's vocabulary
_TAG = "</s>"
#: the one that ends but a message in vocabularies that have the others
_MESSAGE_END, _TURN_ENDS = "<|end|>", ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})
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
    # Stacks, which transformers' layouts name without "weight".
    "ffn_gate_exps.weight": "mlp.experts.gate_proj",
    "ffn_up_exps.weight": "mlp.experts.up_proj",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
    "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
}
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_NO_WEIGHTS = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
_BLOCK = re.compile(r"blk\.(\d{1,9})\.(.+)")
#: of a single expert, in old files
_EXPERT = re.compile(r"(ffn_(?:gate|up|down))\.(\d{1,9})\.weight")


def name_of(name: str, architecture: Architecture, layers: int) -> str | None:
    """The name of a tensor in transformers; None if it is not a weight. Unknown ones keep their name.
    ``layers``: number of those that do not predict further tokens."""
    if name in _NO_WEIGHTS:
        return None
    match = _BLOCK.fullmatch(name)
    if match is None:
        return _translated(name, architecture.names, _WHOLE) or name
    index, part = int(match[1]), match[2]
    if expert := _EXPERT.fullmatch(part):
        own = architecture.names.get(f"{expert[1]}.N.weight")
        return f"{architecture.layers}.{index}.{own.replace('N', expert[2])}" if own else name
    found = _translated(part, architecture.names, _LAYER)
    if found is None:
        return name
    if index < layers or not architecture.further:
        return f"{architecture.layers}.{index}.{found}"
    # What there is once for all layers that predict further tokens has the first part of their name.
    once = found.startswith(architecture.further.partition(".")[0] + ".")
    return found if once else f"{architecture.further}.{index - layers}.{found}"


def _translated(name: str, own: Mapping[str, str], usual: Mapping[str, str]) -> str | None:
    for names in (own, usual):
        if name in names:
            return names[name]
    stem, _, kind = name.rpartition(".")
    found = own.get(stem) or usual.get(stem)
    return f"{found}.{kind}" if found and kind in ("weight", "bias") else None


def config_of(file: GGUFFile) -> dict[str, Any]:
    """The config.json of the model. Raises ConfigError for an architecture or a variant that is not read."""
    architecture, prefix = architecture_of(file), file.value("general.architecture", str)

    def number(name: str, default: int | None = None) -> int:
        found: int = file.value(f"{prefix}.{name}", int, default)
        return found

    def most(name: str, default: int) -> int:
        """Of the layers, for each of which some files state it."""
        found = file.value(f"{prefix}.{name}", (int, list), default)
        numbers: list[int] = found if isinstance(found, list) else [found]
        if not numbers or not all(isinstance(each, int) for each in numbers):
            raise ConfigError(f"model: {prefix}.{name} of the GGUF file is no list of numbers")
        return max(numbers)

    heads, hidden = number("attention.head_count"), number("embedding_length")
    # Of all blocks the last ones may predict further tokens.
    blocks = number("block_count")
    layers = blocks - number("nextn_predict_layers", 0)
    _check_blocks(file, blocks, layers)
    for name, size in (("attention.head_count", heads), ("embedding_length", hidden)):
        if size < 1:
            raise ConfigError(f"model: {prefix}.{name} of the GGUF file is {size}")
    size = hidden // heads
    if not architecture.partial_rotary:
        size = number("rope.dimension_count", size)
    if not architecture.latent:
        size = number("attention.key_length", size)
    if size < 1:
        raise ConfigError(f"model: heads of the GGUF file have {size} elements")
    if not architecture.latent and number("attention.value_length", size) != size:
        raise ConfigError("model: the values of the GGUF file have another size than its keys")
    if not file.value(f"{prefix}.attention.causal", bool, True):
        raise ConfigError("model: the GGUF file has bidirectional attention, which is not supported")
    ends, rope, context = end_tokens(file), rope_of(file, prefix, size), number("context_length")
    return {
        "model_type": architecture.model_type,
        "architectures": [architecture.name],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": most("feed_forward_length", 0) or hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": most("attention.head_count_kv", heads),
        "head_dim": size,
        "vocab_size": _vocabulary(file),
        "max_position_embeddings": context,
        "rms_norm_eps": float(file.value(f"{prefix}.attention.{architecture.epsilon}", _NUMBER)),
        "rope_parameters": rope,
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": _dtype(file),
        "bos_token_id": _token(file, "bos"),
        "eos_token_id": ends or None,
        **architecture.more(Common(file, prefix, layers, hidden, heads, size, context, rope)),
    }


def _check_blocks(file: GGUFFile, blocks: int, layers: int) -> None:
    """Raise ConfigError for absurd numbers, and for blocks that are no layers: those that predict further
    tokens may be left out, others not."""
    if max(blocks, layers) > _MOST_LAYERS:
        raise ConfigError(f"model: the GGUF file states {max(blocks, layers)} layers")
    last = max((int(match[1]) for match in map(_BLOCK.fullmatch, file.tensors) if match), default=-1)
    if last >= blocks or (last >= layers and f"blk.{layers}.nextn.eh_proj.weight" not in file.tensors):
        raise ConfigError(
            f"model: the GGUF file has tensors of blk.{last}, and states {layers} layers and "
            f"{blocks - layers} that predict further tokens"
        )


def end_tokens(file: GGUFFile) -> list[int]:
    """The tokens that end a text, a turn, or a message: those that the metadata name, and those whose text
    says so, which many files do not name."""
    texts = _ENDS | architecture_of(file).ends
    names = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    found = {file.value(name, int) for name in names if name in file.metadata}
    tokens = file.value("tokenizer.ggml.tokens", list, [])
    kinds = file.value("tokenizer.ggml.token_type", list, [])
    marked = {
        token: at
        for at, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if isinstance(token, str)
        and token in texts
        and (kind == CONTROL or (kind == ADDED and token != _TAG))
    }
    if any(each <= marked.keys() for each in _TURN_ENDS):
        marked.pop(_MESSAGE_END, None)
    return sorted(found | {*marked.values()})


def _token(file: GGUFFile, name: str) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    found: int | None = file.value(key, int) if key in file.metadata else None
    return found


def _vocabulary(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ConfigError("model: the GGUF file has no tensor token_embd.weight")
    return embedding.shape[0]


def _dtype(file: GGUFFile) -> str:
    """float32 if all weights are; else bfloat16, of which most files were made."""
    kinds = {tensor.kind.name for tensor in file.tensors.values()}
    return "float32" if kinds == {"F32"} else "bfloat16"


def rope_of(file: GGUFFile, prefix: str, size: int) -> dict[str, Any]:
    """Plain, scaled as the metadata say, or by tensors of factors (Llama 3, LongRoPE). ``size``: of a head.
    Raises ConfigError for a scaling that is not known."""
    base = float(file.value(f"{prefix}.rope.freq_base", _NUMBER, DEFAULT_BASE))
    plain = {"rope_type": "default", "rope_theta": base}
    rotated = file.value(f"{prefix}.rope.dimension_count", int, size)
    if size != rotated:
        plain["partial_rotary_factor"] = rotated / size
    if "rope_freqs.weight" in file.tensors:
        return {**plain, **_factors(file, base, size)}
    if not file.tensors.keys().isdisjoint(f"rope_factors_{each}.weight" for each in ("short", "long")):
        return {**plain, **_longrope(file, prefix, rotated)}
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
        return {**plain, **_yarn(file, f"{prefix}.rope.scaling"), "factor": float(factor)}
    raise ConfigError(f"model: rotary positions scaled by {shown(kind)} are not supported")


def _yarn(file: GGUFFile, prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "rope_type": "yarn",
        "original_max_position_embeddings": file.value(f"{prefix}.original_context_length", int),
    }
    for name, stated in _YARN.items():
        if f"{prefix}.{stated}" in file.metadata:
            found[name] = float(file.value(f"{prefix}.{stated}", _NUMBER))
    return found


def _longrope(file: GGUFFile, prefix: str, rotated: int) -> dict[str, Any]:
    """Factors for short and for long sequences, in tensors. ``rotated``: dimensions of a head."""
    # Of MiniCPM3 the length is not stated.
    context = file.metadata.get(f"{prefix}.context_length")
    original = file.value(f"{prefix}.rope.scaling.original_context_length", int, context)
    found: dict[str, Any] = {"rope_type": "longrope", "original_max_position_embeddings": original}
    for name in ("short", "long"):
        found[f"{name}_factor"] = _frequency_factors(file, f"rope_factors_{name}.weight", rotated).tolist()
    key = f"{prefix}.rope.scaling.attn_factor"
    if key in file.metadata:
        found["attention_factor"] = float(file.value(key, _NUMBER))
    return found


def _frequency_factors(file: GGUFFile, name: str, rotated: int) -> npt.NDArray[np.float32]:
    """A tensor with a factor for each pair of dimensions. Raises ConfigError."""
    stored = file.tensors.get(name)
    if stored is None:
        raise ConfigError(f"model: the GGUF file has no tensor {name}")
    if stored.kind.name != "F32" or stored.shape != (rotated // 2,):
        raise ConfigError(f"model: {name} is {stored.kind.name} {stored.shape}")
    found: npt.NDArray[np.float32] = stored.data.view("<f4")[0]
    return found


def _factors(file: GGUFFile, base: float, size: int) -> dict[str, Any]:
    """The scaling whose result is a tensor of factors: Llama 3's, or the part of a head that rotates where
    halves of whole heads rotate together (Gemma 4). Raises ConfigError for others."""
    factors = _frequency_factors(file, "rope_freqs.weight", size).astype(np.float64)
    rotated = int((factors < _NEVER).sum())
    if rotated == len(factors):
        return _llama3(factors, base, size)
    if not (factors[:rotated] == 1).all():
        raise ConfigError("model: rotary factors of the GGUF file are neither 1 nor endless")
    return {"rope_type": "proportional", "partial_rotary_factor": rotated / len(factors)}


def _llama3(factors: npt.NDArray[np.float64], base: float, size: int) -> dict[str, Any]:
    """Llama 3's scaling, whose parameters are not in the file, by the factors that follow from them.

    All models that are so scaled differ in one parameter, which is the largest factor. Raises ConfigError if
    the factors are not those that follow from it."""
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
