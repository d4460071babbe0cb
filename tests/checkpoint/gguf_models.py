"""Small checkpoints as GGUF, written by the package gguf as llama.cpp's converter does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from bench.peers.adapters.to_gguf import name_in_gguf

__all__ = ["TOKENS", "write_gguf", "write_tokenizer"]

_ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
}
#: of the smallest tokenizer there is
TOKENS = ["<s>", "</s>", "a", "b", "ab"]


def write_gguf(
    folder: Path, target: Path, kind: str = "F32", *, more: dict[str, Any] | None = None
) -> dict[str, torch.Tensor]:
    """A checkpoint with its matrices in a type that the package can make; returns its tensors as they were.

    ``more``: further integers and texts of the metadata.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture = _ARCHITECTURES[config["model_type"]]
    writer: Any = gguf.GGUFWriter(str(target), architecture)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    rope = config["rope_parameters"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if experts := config.get("num_experts") or config.get("num_local_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    for name, value in (more or {}).items():
        writer.add_string(name, value) if isinstance(value, str) else writer.add_uint32(name, value)
    tensors: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    _add_tensors(
        writer, tensors, gguf.GGMLQuantizationType[kind], heads, kv_heads, llama=architecture == "llama"
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def _add_tensors(
    writer: Any, tensors: dict[str, torch.Tensor], kind: Any, heads: int, kv_heads: int, *, llama: bool
) -> None:
    for name, tensor in _stacked(tensors).items():
        values = tensor.float().numpy()
        place = name_in_gguf(name)
        for part, count in (("q_proj", heads), ("k_proj", kv_heads)):
            if llama and part in name:
                # Neighbours rotate together.
                shape = values.shape
                values = (
                    values.reshape(count, 2, shape[0] // count // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
                )
        if values.ndim == 1 or kind.name == "F32":
            writer.add_tensor(place, np.ascontiguousarray(values))
        else:
            writer.add_tensor(place, gguf.quants.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)


def _stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With the experts of a layer in one tensor, called as the first one."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    groups: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if ".experts." in name:
            before, _, after = name.partition(".experts.")
            number, _, rest = after.partition(".")
            groups.setdefault(f"{before}.experts.0.{rest}", {})[int(number)] = tensor
    for name, group in groups.items():
        found[name] = torch.stack([group[number] for number in sorted(group)])
    return found


def write_tokenizer(target: Path, metadata: dict[str, Any]) -> None:
    """A file with the least of a model, and these metadata."""
    writer: Any = gguf.GGUFWriter(str(target), "llama")
    for name, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    writer.add_tensor("token_embd.weight", np.zeros((2, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
