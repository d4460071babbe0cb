"""Random small models of InternVL that read images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image
from transformers import AutoTokenizer
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.internvl.processing_internvl import InternVLProcessor

from tests.images.checkpoints import TEXT, write_model, write_processor, write_tokenizer

__all__ = ["IMAGE", "internvl", "whole_inputs"]

#: what a chat template writes
IMAGE = "<IMG_CONTEXT>"
_TILE = 16


def internvl(path: Path, **config: Any) -> Any:
    """Write a checkpoint; returns transformers' model. A tile has 16 x 16 pixels and 4 positions, and an
    image up to 4 tiles and itself. ``config``: fields of the model's."""
    tokenizer = write_tokenizer(path, ["<img>", "</img>", IMAGE, "<video>"], f"{IMAGE}\n")
    settings = {
        "image_processor_type": "GotOcr2ImageProcessorFast", "size": {"height": _TILE, "width": _TILE},
        "crop_to_patches": False, "min_patches": 1, "max_patches": 4,
    }  # fmt: skip
    write_processor(path, settings, {"processor_class": "InternVLProcessor", "image_seq_length": 4})
    vision = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
        "image_size": [_TILE, _TILE], "patch_size": [4, 4],
    }  # fmt: skip
    text = {**TEXT, "model_type": "qwen3", "head_dim": 16, "vocab_size": len(tokenizer)}
    fields = {"image_token_id": tokenizer.convert_tokens_to_ids(IMAGE), "tie_word_embeddings": False}
    return write_model(
        path, "InternVL", text_config=text, vision_config=vision, image_seq_length=4, **{**fields, **config}
    )


def whole_inputs(path: Path, text: str, pictures: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
    """What transformers' model takes for a text with images. Its processor needs packages for videos: of
    it there is the text of an image."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    images = GotOcr2ImageProcessorPil.from_pretrained(path, crop_to_patches=True)
    found = images(list(pictures), return_tensors="pt")
    processor = SimpleNamespace(
        start_image_token="<img>", end_image_token="</img>", image_token=IMAGE, image_seq_length=4
    )
    pieces = text.split(IMAGE)
    for index in range(len(pictures)):
        pieces[index] += InternVLProcessor.replace_image_token(processor, found, index)
    ids = torch.tensor([tokenizer.encode("".join(pieces), add_special_tokens=False)])
    return {"input_ids": ids, "pixel_values": found["pixel_values"]}
