"""The image formats of model families, one per file: the text of an image in a prompt, and its units.

``FAMILIES`` lists the architectures that read images; to add one, see :mod:`aioinfer.images.formats.base`.
"""

from __future__ import annotations

from aioinfer import plugins
from aioinfer.images.formats.base import ImageFormat

__all__ = ["FAMILIES", "format_of"]

_FOLDER = "images/formats"
#: by architecture, the file of its format, and of its encoder in ``aioinfer/model/vision/families``
FAMILIES = {
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Idefics3ForConditionalGeneration": "smolvlm",
    "InternVLForConditionalGeneration": "internvl",
    "Lfm2VlForConditionalGeneration": "lfm2_vl",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl",
    "Qwen3_5ForConditionalGeneration": "qwen3_vl",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_vl",
    "SmolVLMForConditionalGeneration": "smolvlm",
}


def format_of(architecture: str) -> type[ImageFormat] | None:
    """The format of an architecture; None: no images are read for it."""
    name = FAMILIES.get(architecture)
    return None if name is None else plugins.load(_FOLDER, name)
