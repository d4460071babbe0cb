"""Random small models that read images: their directories with weights, processors and tokenizers.

A function per family writes a directory and returns transformers' model in float32.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.model.checkpoints import scale_layers

#: of all languages inside
TEXT: dict[str, Any] = {
    "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 80, "max_position_embeddings": 1024,
    **dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id")),
}  # fmt: skip
#: an image as a part, text as a part or as the content
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}:"
    "{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}PLACEHOLDER"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant:{% endif %}"
)
_ROWS = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """An image that is unlike others."""
    pixels = np.random.default_rng([width, height, seed]).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def write_tokenizer(
    path: Path, special: Iterable[str], placeholder: str, template: str = TEMPLATE, **facts: Any
) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are the bytes, behind them ``special`` ones; "<|start|>" and "<|end|>" are
    there. ``facts``: of tokenizer_config.json."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ["<|start|>", "<|end|>", *special]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", **facts)
    fast.chat_template = template.replace("PLACEHOLDER", placeholder)
    fast.save_pretrained(path)
    return fast


def write_processor(
    path: Path, settings: dict[str, Any], processor: dict[str, Any], *, within: bool = False
) -> None:
    """The files of an image processor. ``within``: in processor_config.json, as newer releases have it."""
    if within:
        processor = {**processor, "image_processor": settings}
    else:
        (path / "preprocessor_config.json").write_text(json.dumps(settings))
    (path / "processor_config.json").write_text(json.dumps(processor))


def write_model(path: Path, family: str, **config: Any) -> Any:
    """Random weights of a ``family`` (the prefix of the class), wide enough that all of them matter."""
    made = getattr(transformers, f"{family}Config")(**config)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(made).eval().float()
    model.set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(sum(map(ord, family)))
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.25 if parameter.dim() > 1 else 1 + 0.3 * noise)
        scale_layers(model, generator)
    model.save_pretrained(path)
    return model


def smolvlm(
    path: Path, *, family: str = "SmolVLM", split: bool = True, within: bool = False, **config: Any
) -> Any:
    """SmolVLM; with ``family="Idefics3"`` that. A tile has 32 x 32 pixels, 64 patches and 16 positions, and
    an image up to 6 tiles and itself. ``config``: fields of the model's."""
    special = ["<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>", *_ROWS]
    tokenizer = write_tokenizer(path, special, "<image>")
    settings = {
        "image_processor_type": f"{family}ImageProcessor",
        "size": {"longest_edge": 96},
        "max_image_size": {"longest_edge": 32},
        "do_image_splitting": split,
    }
    write_processor(
        path, settings, {"image_seq_len": 16, "processor_class": f"{family}Processor"}, within=within
    )
    vision = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
        "image_size": 32, "patch_size": 4,
    }  # fmt: skip
    fields = {"scale_factor": 2, "image_token_id": tokenizer.convert_tokens_to_ids("<image>"), **config}
    text = {**TEXT, "model_type": "llama", "head_dim": 16, "vocab_size": len(tokenizer)}
    return write_model(path, family, text_config=text, vision_config=vision, **fields)


def lfm2_vl(path: Path, *, within: bool = True, special: bool = True, **config: Any) -> Any:
    """LFM2-VL. A tile has 32 x 32 pixels, 64 patches and 16 positions, an image 4 to 16 positions, or up to 6
    tiles and itself."""
    marks = ["<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"]
    rows = [f"<|img_row_{row}_col_{column}|>" for row in range(1, 7) for column in range(1, 7)]
    tokenizer = write_tokenizer(path, ["<image>", *marks, *rows], "<image>")
    settings = {
        "image_processor_type": "Lfm2VlImageProcessorFast", "encoder_patch_size": 4, "downsample_factor": 2,
        "tile_size": 32, "min_tiles": 2, "max_tiles": 6, "min_image_tokens": 4, "max_image_tokens": 16,
        "image_mean": [0.5, 0.4, 0.5], "image_std": [0.5, 0.5, 0.6], "resample": 2,
    }  # fmt: skip
    stated = {"processor_class": "Lfm2VlProcessor", "use_image_special_tokens": special}
    write_processor(path, settings, stated, within=within)
    vision = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
        "num_patches": 25, "patch_size": 4, "vision_use_head": False, "model_type": "siglip2_vision_model",
    }  # fmt: skip
    text = {
        **TEXT, "model_type": "lfm2", "vocab_size": len(tokenizer), "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention", "conv"],
    }  # fmt: skip
    fields = {
        "downsample_factor": 2, "projector_hidden_size": 40, "tie_word_embeddings": True,
        "image_token_id": tokenizer.convert_tokens_to_ids("<image>"), **config,
    }  # fmt: skip
    return write_model(path, "Lfm2Vl", text_config=text, vision_config=vision, **fields)
