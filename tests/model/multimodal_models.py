"""Random small models of text and images, and their checkpoints in every naming of tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.model.checkpoints import VOCAB, scale_layers

#: a token that stands for an image where there is one
IMAGE = 200
# fmt: off
TEXT = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 256,
    **dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id")),
}
_HEADS = {"head_dim": 16}
_QWEN_VISION = {
    "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 64,
    "patch_size": 4, "temporal_patch_size": 1,
}
_QWEN3_5_VISION = {**_QWEN_VISION, "num_position_embeddings": 16}
_QWEN3_VISION = {**_QWEN3_5_VISION, "deepstack_visual_indexes": [0]}
_VISION = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48,
    "image_size": 16, "patch_size": 4,
}
_PIXTRAL = {**_VISION, "model_type": "pixtral", "head_dim": 16}
_AUDIO = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_SLIDING = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
# The whole model takes the padding for the tokens of images, even where there is none: these have other ids.
_GEMMA4 = {
    **_HEADS, **_SLIDING, "global_head_dim": 32, "pad_token_id": 0, "vocab_size_per_layer_input": VOCAB
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_IMAGE_ID, _IMAGE_INDEX = {"image_token_id": IMAGE}, {"image_token_index": IMAGE}
_TIED, _UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}


def _mrope(**parameters: Any) -> dict[str, Any]:
    parameters = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2], **parameters}
    return {"rope_parameters": parameters}


_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_DELTA = {
    **_HEADS, "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 16,
    "linear_value_head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    # Of 8 rotated dimensions, half of the heads'.
    **_mrope(mrope_section=[2, 1, 1], mrope_interleaved=True, partial_rotary_factor=0.5),
}

#: name -> (model class prefix, config of the text, config of the vision, other fields)
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen3-vl": ("Qwen3VL",
        {**_HEADS, **_mrope(mrope_interleaved=True)}, _QWEN3_VISION, {**_IMAGE_ID, **_TIED}),
    "qwen3-vl-moe": ("Qwen3VLMoe",
        {**_HEADS, **_EXPERTS, **_mrope(mrope_interleaved=True)}, _QWEN3_VISION, _IMAGE_ID),
    "qwen2-vl": ("Qwen2VL", _mrope(), {**_QWEN_VISION, "embed_dim": 32}, _IMAGE_ID),
    "qwen2.5-vl": ("Qwen2_5_VL",
        _mrope(), {**_QWEN_VISION, "window_size": 16, "fullatt_block_indexes": [0]}, _IMAGE_ID),
    "qwen2.5-vl-yarn": ("Qwen2_5_VL",
        {**_mrope(**_YARN), "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
        _QWEN_VISION, {**_IMAGE_ID, **_TIED}),
    "mistral3": ("Mistral3",
        {**_HEADS, "model_type": "mistral", "sliding_window": None}, _PIXTRAL, {**_IMAGE_INDEX, **_UNTIED}),
    # Its queries grow with their positions, which only transformers computes.
    "mistral3-of-ministral3": ("Mistral3",
        {**_HEADS, "model_type": "ministral3",
        "rope_parameters": {**_YARN, "rope_theta": 10_000.0, "llama_4_scaling_beta": 0.5}},
        _PIXTRAL, {**_IMAGE_INDEX, **_UNTIED}),
    "internvl": ("InternVL",
        {"model_type": "qwen2"}, {**_VISION, "image_size": [16, 16], "patch_size": [4, 4]},
        {**_IMAGE_ID, **_TIED}),
    # As the encoder of 6 billion parameters.
    "internvl-rms": ("InternVL",
        {**_HEADS, "model_type": "qwen3"},
        {**_VISION, "image_size": [24, 24], "patch_size": [4, 4], "num_hidden_layers": 2,
        "norm_type": "rms_norm", "use_qk_norm": True, "use_mean_pooling": False, "attention_bias": True,
        "hidden_act": "gelu_pytorch_tanh"},
        {**_IMAGE_ID, **_UNTIED}),
    "smolvlm": ("SmolVLM",
        {"model_type": "llama"}, {**_VISION, "num_hidden_layers": 3}, {**_IMAGE_ID, **_UNTIED}),
    "idefics3": ("Idefics3",
        {"model_type": "llama"}, {**_VISION, "image_size": 26, "patch_size": 4, "hidden_act": "gelu"},
        {**_IMAGE_ID, **_TIED, "scale_factor": 3}),
    "gemma3": ("Gemma3",
        {**_HEADS, **_SLIDING}, {**_VISION, "vision_use_head": False},
        {**_IMAGE_INDEX, "mm_tokens_per_image": 4}),
    # Of text, images and sounds.
    "gemma4": ("Gemma4",
        {**_GEMMA4, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16},
        {**_VISION, "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 16},
        {"audio_config": {**_AUDIO, "output_proj_dims": 64}}),
    "gemma4-deaf": ("Gemma4",
        _GEMMA4, {**_VISION, "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 16}, {}),
    "gemma4-unified": ("Gemma4Unified",
        {**_GEMMA4, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
        {"patch_size": 4, "mm_embed_dim": 32, "mm_posemb_size": 16, "output_proj_dims": 64},
        {"audio_config": {"audio_embed_dim": 16}}),
}
#: the same of text models with recurrent state
STATEFUL: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen3.5-vl": ("Qwen3_5", _DELTA, _QWEN3_5_VISION, {**_IMAGE_ID, **_TIED}),
    "qwen3.5-vl-moe": ("Qwen3_5Moe",
        {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 32}, _QWEN3_5_VISION, _IMAGE_ID),
    "lfm2-vl": ("Lfm2Vl",
        {**_HEADS, "model_type": "lfm2", "layer_types": ["conv", "full_attention"], "block_multiple_of": 16},
        {**_VISION, "model_type": "siglip2_vision_model", "num_patches": 16, "vision_use_head": False},
        {**_IMAGE_ID, "projector_hidden_size": 32}),
}
# fmt: on

#: where the tensors of the text model are, by naming: (those of the model, the head, what is in front of the
#: other parts); "oldest" is that of Qwen2-VL's releases
NAMINGS = {
    "new": ("model.language_model.", "lm_head.", "model."),
    "old": ("language_model.model.", "language_model.lm_head.", ""),
    "oldest": ("model.", "lm_head.", ""),
}


def make_wrapper(name: str, path: Path, **fields: Any) -> Any:
    """Write a random checkpoint; returns transformers' model, float32. ``fields``: of the outer config."""
    prefix, text, vision, other = {**MODELS, **STATEFUL}[name]
    config = getattr(transformers, f"{prefix}Config")(
        text_config={**TEXT, **text}, vision_config=vision, **{**other, **fields}
    )
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).eval()
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.25 if parameter.dim() > 1 else 1 + 0.3 * noise)
        scale_layers(model, generator)
    model.save_pretrained(path)
    return model


def edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Replace the tensors of a checkpoint."""
    file = path / "model.safetensors"
    changed = {name: tensor.contiguous() for name, tensor in change(load_file(file)).items()}
    save_file(changed, file, metadata={"format": "pt"})


def edit_config(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the config of a checkpoint in place."""
    file = path / "config.json"
    stated = json.loads(file.read_text())
    change(stated)
    file.write_text(json.dumps(stated))


def is_vision(name: str) -> bool:
    """Whether a tensor belongs to another part than the text model."""
    parts = (
        "visual.",
        "vision_",
        "multi_modal_projector.",
        "audio_tower.",
        "embed_vision.",
        "embed_audio.",
        "connector.",
    )
    return any(part in name for part in parts)


def renamed(tensors: dict[str, torch.Tensor], naming: str) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, in any naming, under the names of another one."""
    body, head, others = NAMINGS[naming]
    found = {}
    for name, tensor in tensors.items():
        inner = name.removeprefix("model.").removeprefix("language_model.").removeprefix("model.")
        front = others if is_vision(name) else head if inner.startswith("lm_head.") else body
        found[front + (inner.removeprefix("lm_head.") if front == head else inner)] = tensor
    return found
