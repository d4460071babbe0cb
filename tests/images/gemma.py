"""Random small Gemma 3 and 4 models that read images, as :mod:`tests.images.checkpoints` has others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.images.checkpoints import TEXT, write_model, write_processor, write_tokenizer

_TEXT: dict[str, Any] = {
    **TEXT, "head_dim": 16, "sliding_window": 24, "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
_VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}


def gemma3(path: Path, *, crops: bool | None = None, within: bool = False, **text: Any) -> Any:
    """Gemma 3. An image or a crop has 32 x 32 pixels, 64 patches and 16 positions. ``text``: fields of its
    config of the text."""
    names = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    tokenizer = write_tokenizer(path, names.values(), names["boi_token"], extra_special_tokens=names)
    begin, end, image = (tokenizer.convert_tokens_to_ids(name) for name in names.values())
    settings = {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": 32, "width": 32},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "do_pan_and_scan": crops,
        "pan_and_scan_min_crop_size": 20 if crops else None,
        "pan_and_scan_max_num_crops": None,
        "pan_and_scan_min_ratio_to_activate": None,
    }
    write_processor(
        path, settings, {"image_seq_length": 16, "processor_class": "Gemma3Processor"}, within=within
    )
    return write_model(
        path,
        "Gemma3",
        text_config={**_TEXT, "vocab_size": len(tokenizer), "query_pre_attn_scalar": 16, **text},
        vision_config={**_VISION, "image_size": 32, "patch_size": 4},
        mm_tokens_per_image=16,
        boi_token_index=begin,
        eoi_token_index=end,
        image_token_index=image,
    )


def gemma4(path: Path, *, clipped: bool = False, within: bool = True, **text: Any) -> Any:
    """Gemma 4. An image has up to 70 positions, of 2 x 2 patches of 4 x 4 pixels each. ``clipped``: its
    encoder clips and shifts. ``text``: fields of its config of the text."""
    names = {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>"}
    more = {"audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"}
    special = [*names.values(), *more.values(), "<|video|>"]
    tokenizer = write_tokenizer(
        path, special, names["image_token"], extra_special_tokens={**names, **more}, pad_token="<|end|>"
    )
    begin, end, image, audio, begin_audio, end_audio, video = (
        tokenizer.convert_tokens_to_ids(name) for name in special
    )
    settings = {
        "image_processor_type": "Gemma4ImageProcessor",
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "max_soft_tokens": 70,
    }
    write_processor(path, settings, {"processor_class": "Gemma4Processor"}, within=within)
    model = write_model(
        path,
        "Gemma4",
        text_config={
            **_TEXT, "vocab_size": len(tokenizer), "vocab_size_per_layer_input": len(tokenizer),
            "pad_token_id": 0, "global_head_dim": 32, **text,
        },
        vision_config={
            **_VISION, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 2,
            "position_embedding_size": 300, "use_clipped_linears": clipped, "standardize": clipped,
        },
        vision_soft_tokens_per_image=70,
        boi_token_id=begin,
        eoi_token_id=end,
        image_token_id=image,
        audio_token_id=audio,
        boa_token_id=begin_audio,
        eoa_token_index=end_audio,
        video_token_id=video,
    )  # fmt: skip
    if clipped:
        generator = torch.Generator().manual_seed(4)
        for name, buffer in model.model.vision_tower.named_buffers():
            drawn = torch.rand(buffer.shape, generator=generator)
            if name.endswith(("_min", "_max")):
                buffer.copy_((0.5 + drawn) * (-1 if name.endswith("_min") else 1))
            elif name.startswith("std_"):
                buffer.copy_(0.5 + drawn)
        model.save_pretrained(path)
    return model
