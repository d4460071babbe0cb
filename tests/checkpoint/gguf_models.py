"""Small checkpoints as GGUF, written by the package gguf as llama.cpp's converter does."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from tests.checkpoint import gguf_further, gguf_latents
from tests.checkpoint.gguf_kinds import KINDS as OWN_KINDS
from tests.model.checkpoints import FAMILIES, RECURRENT, make_model

__all__ = ["EVERY", "MORE", "make_family", "write_file", "write_gguf"]

#: a family of every architecture
EVERY = [
    "llama-gqa-tied", "qwen2", "qwen3", "qwen3-moe", "gemma", "gemma2", "gemma3", "smollm3-interval", "olmo2",
    "olmo3-yarn", "glm4", "phi3", "gpt2", "gpt-oss", "gemma4-shared", "qwen3.5", "lfm2-moe-unscaled",
    "granite-hybrid-moe-still", "falcon-h1", "nemotron-h", "deepseek-v3",
]  # fmt: skip
#: further variants of them
MORE = [
    "mixtral", "mistral3", "gemma4-keys", "gemma4-experts", "gemma4-odd", "qwen3.5-equal", "qwen3.5-moe",
    "qwen3-next-experts", "lfm2", "granite-hybrid-equal", "granite-hybrid-moe", "nemotron-h-experts",
    *gguf_further.FAMILIES, *gguf_latents.FAMILIES,
]  # fmt: skip
KINDS = {**OWN_KINDS, **gguf_further.KINDS, **gguf_latents.KINDS}

_SAME = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "smollm3", "olmo2", "glm4", "phi3", "gpt2")
_ARCHITECTURES = {
    **{name: name for name in _SAME},
    "mistral": "llama",
    "qwen3_moe": "qwen3moe",
    "qwen3_vl_text": "qwen3vl",
    "gemma3_text": "gemma3",
    "olmo3": "olmo2",
    "mixtral": "llama",
    "gpt_oss": "gpt-oss",
    "gemma4_text": "gemma4",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
    "granitemoehybrid": "granitehybrid",
    "falcon_h1": "falcon-h1",
    "nemotron_h": "nemotron_h",
    **gguf_further.ARCHITECTURES,
    **gguf_latents.ARCHITECTURES,
}
#: ends of names of matrices that the converter transposes
_TRANSPOSED = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
#: further families as tests/model/checkpoints.py has them: SmolLM3 as its releases, of which a file does not
#: say which layers rotate
_FURTHER: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm3-interval": ("SmolLM3", {"head_dim": 16, "num_hidden_layers": 5, "attention_bias": True}),
    # Mistral Small 3, whose files have an architecture of their own.
    "mistral3": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    # What the converter writes of these two.
    "qwen3-next-experts": ("Qwen3Next",
        {**RECURRENT["qwen3-next"][1], "mlp_only_layers": [], "norm_topk_prob": True}),
    "lfm2-moe-unscaled": ("Lfm2Moe", {**RECURRENT["lfm2-moe"][1], "routed_scaling_factor": 1.0}),
    # What the converter writes of these: one inner size, and parts with experts alone.
    "granite-hybrid-equal": ("GraniteMoeHybrid",
        {**RECURRENT["granite-hybrid"][1], "intermediate_size": 96}),
    "granite-hybrid-moe-still": ("GraniteMoeHybrid",
        {**RECURRENT["granite-hybrid-moe"][1], "position_embedding_type": None}),
    "nemotron-h-experts": ("NemotronH",
        {**RECURRENT["nemotron-h-moe"][1], "layers_block_type":
        ["linear_attention", "moe", "full_attention", "moe", "linear_attention"]}),
    "gpt2-inner": ("GPT2", {
        "n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 96, "n_positions": 256, "bos_token_id": None,
        "tie_word_embeddings": False,
    }),
    "olmo3-yarn": ("Olmo3", {
        "sliding_window": 9, "num_hidden_layers": 4,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {
                "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "attention_factor": 1.5,
                "beta_fast": 8.0, "beta_slow": 2.0, "original_max_position_embeddings": 64,
            },
        },
    }),
}  # fmt: skip
#: those whose rows of queries and keys llama.cpp's converter reorders, and whose norms it adds 1 to
_NEIGHBOURS = {"llama", "smollm3", "mistral3", "granitehybrid", *gguf_further.NEIGHBOURS}
_PLUS_ONE = {"gemma", "gemma2", "gemma3"}
#: every how many layers one has no window
_PERIODS = {"gemma2": 2, "gemma3": 6}


def make_family(name: str, path: Path, **changes: Any) -> Any:
    """Write a random checkpoint of a family, with a config that is changed so; returns the model."""
    prefix, stated = {**FAMILIES, **RECURRENT, **_FURTHER, **gguf_further.FAMILIES, **gguf_latents.FAMILIES}[
        name
    ]
    return make_model(prefix, {**stated, **changes}, path, seed=sum(map(ord, name)))


def write_gguf(
    folder: Path,
    target: Path,
    kind: str = "F32",
    *,
    more: dict[str, Any] | None = None,
    further: dict[str, torch.Tensor] | None = None,
    fused: bool = False,
    architecture: str | None = None,
) -> dict[str, torch.Tensor]:
    """A checkpoint with its matrices in a type that the package can make; returns its tensors as they were.

    ``more``: numbers, texts and lists of the metadata; ``further``: tensors; ``fused``: tensors are joined
    that the converter can join; ``architecture``: if it is not that of the config's model type.
    """
    config = gguf_further.usual_names(json.loads((folder / "config.json").read_text()))
    # Nemotron-H states neither of these.
    config = {
        "num_hidden_layers": len(config.get("layers_block_type", ())),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        **config,
    }
    architecture = architecture or _ARCHITECTURES[config["model_type"]]
    architecture += "_moe" if "moe" in config.get("layers_block_type", ()) else ""
    writer: Any = gguf.GGUFWriter(str(target), architecture)
    if architecture == "gpt2":
        _add_gpt2(writer, config)
    else:
        _add_sizes(writer, config, architecture)
        _add_rope(writer, config)
        _add_windows(writer, config, architecture)
    if architecture in KINDS:
        KINDS[architecture].add(writer, config)
    for name, value in (more or {}).items():
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_string(name, value) if isinstance(value, str) else writer.add_uint32(name, value)
    tensors: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    placed = _placed(tensors, config, architecture)
    _add_tensors(writer, _joined(placed) if fused else placed, gguf.GGMLQuantizationType[kind])
    for name, tensor in (further or {}).items():
        writer.add_tensor(name, tensor.numpy())
    _write(writer)
    return tensors


def _add_sizes(writer: Any, config: dict[str, Any], architecture: str) -> None:
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    if eps := config.get("rms_norm_eps") or config.get("norm_eps"):
        writer.add_layer_norm_rms_eps(eps)
    if architecture not in ("olmo2", "phi3", "gemma4"):
        writer.add_key_length(size)
        writer.add_value_length(size)
    rotated = int(size * config["rope_parameters"].get("partial_rotary_factor", 1))
    if architecture not in _PLUS_ONE and architecture != "gemma4":
        writer.add_rope_dimension_count(rotated)
    if experts := config.get("num_experts") or config.get("num_local_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.get("num_experts_per_tok") or config["top_k_experts"])
        if "moe_intermediate_size" in config:
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _add_gpt2(writer: Any, config: dict[str, Any]) -> None:
    writer.add_block_count(config["n_layer"])
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_feed_forward_length(config["n_inner"] or 4 * config["n_embd"])
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])


def _add_rope(writer: Any, config: dict[str, Any]) -> None:
    """Of the layers without a window; the others rotate plainly, by a base of their own."""
    rope = config["rope_parameters"]
    if local := rope.get("sliding_attention"):
        rope = rope["full_attention"]
        if local["rope_theta"] != 10_000.0:
            writer.add_float32(f"{writer.arch}.rope.freq_base_swa", local["rope_theta"])
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for name in ("attention_factor", "beta_fast", "beta_slow"):
            if name in rope:
                key = f"yarn_{name.replace('attention', 'attn')}"
                writer.add_float32(f"{writer.arch}.rope.scaling.{key}", rope[name])


def _add_windows(writer: Any, config: dict[str, Any], architecture: str) -> None:
    """And what else of Gemma is beside them; its pattern only if it is not that of the architecture."""
    if architecture == "phi3":
        writer.add_sliding_window(config["sliding_window"] or 0)
        original = config["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        if config["rope_parameters"]["rope_type"] == "longrope":
            scale = config["max_position_embeddings"] / original
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
            for name in ("long", "short"):
                factors = np.array(config["rope_parameters"][f"{name}_factor"], np.float32)
                writer.add_tensor(f"rope_factors_{name}.weight", factors)
    if architecture == "olmo2" and "sliding_window" in config:
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([each == "sliding_attention" for each in config["layer_types"]])
    if architecture not in _PERIODS:
        return
    writer.add_sliding_window(config["sliding_window"])
    sliding = [each == "sliding_attention" for each in config["layer_types"]]
    period = _PERIODS[architecture]
    if sliding != [(layer + 1) % period != 0 for layer in range(len(sliding))]:
        writer.add_sliding_window_pattern(sliding)
    # A cap of 0 is none: configs of releases have numbers.
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"] or 0.0)
    writer.add_final_logit_softcapping(config["final_logit_softcapping"] or 0.0)
    writer.add_attention_scale(config["query_pre_attn_scalar"] ** -0.5)


def _placed(tensors: dict[str, torch.Tensor], config: dict[str, Any], architecture: str) -> dict[str, Any]:
    """Arrays by their names in files, as the converter changes them."""
    names = gguf.get_tensor_name_map(
        {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[architecture],
        config.get("num_hidden_layers") or config["n_layer"],
    )
    if architecture in KINDS:
        tensors = KINDS[architecture].placed(tensors, config)
    found: dict[str, Any] = {}
    for name, tensor in _stacked(tensors).items():
        values = tensor.float().numpy()
        known = (names.get_name(each, (".weight", ".bias")) for each in (name, name.removeprefix("model.")))
        place = next(filter(None, known), name)
        if architecture == "gpt2" and name.endswith(_TRANSPOSED):
            values = values.T
        if architecture in _PLUS_ONE and name.endswith("norm.weight"):
            values = values + 1
        for part, count in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if architecture in _NEIGHBOURS and part in name:
                values = _neighbours(values, config[count])
        found[place] = np.ascontiguousarray(values)
    return found


def _joined(placed: dict[str, Any]) -> dict[str, Any]:
    """With queries, keys and values in one tensor, and gates and inputs of experts."""
    found = dict(placed)
    parts = {"attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps")}
    for whole, (first, *rest) in parts.items():
        for name in [name for name in placed if f".{first}." in name]:
            each = [found.pop(name.replace(first, part)) for part in (first, *rest)]
            found[name.replace(first, whole)] = np.concatenate(each, axis=-2 if each[0].ndim > 1 else 0)
    return found


def _add_tensors(writer: Any, placed: dict[str, Any], kind: Any) -> None:
    for place, values in placed.items():
        if values.ndim == 1 or "conv1d" in place or "shortconv.conv" in place or kind.name == "F32":
            writer.add_tensor(place, values)
        else:
            writer.add_tensor(place, gguf.quants.quantize(values, kind), raw_dtype=kind)


def _neighbours(values: Any, heads: int) -> Any:
    """Rows in an order in which neighbours rotate together."""
    rows, rest = len(values), values.shape[1:]
    return values.reshape(heads, 2, rows // heads // 2, *rest).swapaxes(1, 2).reshape(values.shape)


def _stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With the experts of a layer in one tensor."""
    found = {}
    groups: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        before, _, after = name.partition(".experts.")
        number, _, rest = after.partition(".")
        if number.isdigit():
            groups.setdefault(f"{before}.experts.{rest}", {})[int(number)] = tensor
        else:
            found[name] = tensor
    for name, group in groups.items():
        found[name] = torch.stack([group[number] for number in sorted(group)])
    return found


def write_file(
    target: Path,
    metadata: dict[str, Any],
    architecture: str = "llama",
    tensors: dict[str, Any] | None = None,
) -> None:
    """A file with these metadata and tensors, by default the least of a model; of bytes the type is given as
    well: (bytes, type)."""
    writer: Any = gguf.GGUFWriter(str(target), architecture)
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for name, value in metadata.items():
        kinds.get(type(value), writer.add_array)(name, value)
    if tensors is None:
        tensors = {"token_embd.weight": np.zeros((2, 32), dtype=np.float32)}
    for name, tensor in tensors.items():
        data, kind = tensor if isinstance(tensor, tuple) else (tensor, None)
        writer.add_tensor(name, data, raw_dtype=kind)
    _write(writer)


def _write(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
