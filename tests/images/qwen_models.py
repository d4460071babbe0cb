"""Random small models of Qwen3-VL and Qwen3.5 that read images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image
from transformers import AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from tests.images.checkpoints import TEXT, picture, write_model, write_processor, write_tokenizer

__all__ = ["FAMILIES", "IMAGE", "greedy", "qwen", "whole_inputs"]

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 16, "linear_value_head_dim": 32, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "shared_expert_intermediate_size": 32,
}  # fmt: skip
#: fields of the text model
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3VL": {},
    "Qwen3VLMoe": _EXPERTS,
    "Qwen3_5": _DELTA,
    "Qwen3_5Moe": {**_DELTA, **_EXPERTS},
}
#: what a chat template writes
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_SETTINGS = {
    "image_processor_type": "Qwen2VLImageProcessorFast", "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    "patch_size": 4, "temporal_patch_size": 2, "merge_size": 2,
    # From 4 to 48 positions of 8 x 8 pixels.
    "size": {"shortest_edge": 256, "longest_edge": 3072},
}  # fmt: skip


def qwen(path: Path, family: str = "Qwen3VL", **config: Any) -> Any:
    """Write a checkpoint of a family; returns transformers' model. ``config``: fields of the model's."""
    tokenizer = write_tokenizer(path, _TOKENS, IMAGE)
    write_processor(path, _SETTINGS, {"processor_class": "Qwen3VLProcessor"})
    of = tokenizer.convert_tokens_to_ids
    vision: dict[str, Any] = {
        "depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 64,
        "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2, "num_position_embeddings": 49,
    }  # fmt: skip
    if family.startswith("Qwen3VL"):
        vision["deepstack_visual_indexes"] = [0, 1]
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]}
    if family.startswith("Qwen3_5"):
        rope |= {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
    text = {**TEXT, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": len(tokenizer)}
    tokens = {
        "image_token_id": of("<|image_pad|>"), "video_token_id": of("<|video_pad|>"),
        "vision_start_token_id": of("<|vision_start|>"), "vision_end_token_id": of("<|vision_end|>"),
    }  # fmt: skip
    fields = {**text, **FAMILIES[family], "rope_parameters": rope}
    return write_model(path, family, text_config=fields, vision_config=vision, **{**tokens, **config})


def whole_inputs(path: Path, text: str, pictures: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
    """What transformers' model takes for a text with images. Its processor needs packages for videos: of
    it there is the text of an image."""
    tokenizer, images = AutoTokenizer.from_pretrained(path), Qwen2VLImageProcessorPil.from_pretrained(path)
    found = images(list(pictures), return_tensors="pt")
    processor = SimpleNamespace(image_processor=images, image_token="<|image_pad|>")
    pieces = text.split("<|image_pad|>")
    for index in range(len(pictures)):
        pieces[index] += Qwen3VLProcessor.replace_image_token(processor, found, index)
    ids = torch.tensor([tokenizer.encode("".join(pieces), add_special_tokens=False)])
    types = (ids == tokenizer.convert_tokens_to_ids("<|image_pad|>")).int()
    return {"input_ids": ids, "mm_token_type_ids": types, **found}


def greedy(
    oracle: Any, path: Path, text: str, sizes: Sequence[tuple[int, int]], count: int
) -> tuple[list[int], torch.Tensor]:
    """The ids of a prompt and ``count`` that follow, and the logits of all but the last, by transformers,
    which computes all of it for each. ``sizes``: of its images."""
    if sizes:
        inputs = whole_inputs(path, text, [picture(*size) for size in sizes])
    else:
        ids = AutoTokenizer.from_pretrained(path).encode(text, add_special_tokens=False)
        inputs = {"input_ids": torch.tensor([ids])}
    for _ in range(count):
        with torch.inference_mode():
            logits = oracle(**inputs, use_cache=False).logits[0]
        inputs["input_ids"] = torch.cat((inputs["input_ids"], logits[-1:].argmax(-1, keepdim=True)), dim=1)
        if sizes:
            types = inputs["mm_token_type_ids"]
            inputs["mm_token_type_ids"] = torch.cat((types, torch.zeros_like(types[:, :1])), dim=1)
    return inputs["input_ids"][0].tolist(), logits
