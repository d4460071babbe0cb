"""ImageFormat: what the images of a model family are in a prompt.

To add a family: a file in this folder with a class that has the file's name in capitals (``qwen3_vl`` ->
``Qwen3Vl``), one of the same name in ``aioinfer/model/vision/families`` for its encoder, and its
architectures in ``aioinfer/images/formats/__init__.py``.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from aioinfer.checkpoint.libraries import importing_transformers
from aioinfer.errors import ConfigError, shown

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["FormatFacts", "ImageFormat", "ImageParts", "UnitPixels", "pil_processor"]


class FormatFacts(NamedTuple):
    """What the files of a checkpoint say about images."""

    #: the model's config, of transformers' class for it
    config: Any
    #: the settings of the image processor
    settings: dict[str, Any]
    #: the contents of processor_config.json; empty without one
    processor: dict[str, Any]
    #: ids of the tokenizer's added tokens
    tokens: Mapping[str, int]

    def token(self, text: str) -> int:
        """The id of a token that the format needs. Raises ConfigError."""
        if text not in self.tokens:
            raise ConfigError(f"model: its tokenizer has no token {text}, which images need")
        return self.tokens[text]

    def text(self, token_id: int) -> str:
        """The text of a token that the format needs. Raises ConfigError."""
        found = [text for text, token in self.tokens.items() if token == token_id]
        if not found:
            raise ConfigError(f"model: its tokenizer has no added token {token_id}, which images need")
        return found[0]


class UnitPixels(NamedTuple):
    """What the encoder computes at a time, within its image."""

    #: positions of the prompt, without one between them that is not the unit's
    length: int
    #: positions that the encoder computes
    patches: int
    #: arrays that only the model's encoder understands
    pixels: Mapping[str, npt.NDArray[np.generic]]
    #: of M-RoPE: rows and columns of its positions in the prompt, ``rows * columns == length``
    grid: tuple[int, int] | None = None


class ImageParts(NamedTuple):
    """An image as a part of a prompt."""

    #: replaces the placeholder; it has the text of the image token once for each position of each unit
    text: str
    units: tuple[UnitPixels, ...]


class ImageFormat(Protocol):
    """The images of one model. Its methods may be called on any thread.

    The constructor raises ConfigError for a checkpoint whose images would not be what transformers makes of
    them; whatever else it raises is told as one.
    """

    #: what the chat template writes for an image
    placeholder: str
    #: stands in token ids at the positions of an image
    token_id: int
    #: further texts that stand for parts of images, such as the one of the image token
    reserved: tuple[str, ...]
    #: the image processor of transformers; its settings name images
    processor: Any

    def __init__(self, facts: FormatFacts) -> None: ...

    def parts(self, image: Image) -> ImageParts:
        """The parts of an image of mode RGB. What it raises is told as an InvalidRequest."""


def pil_processor(facts: FormatFacts, modules: Mapping[str, str], **settings: Any) -> Any:
    """transformers' image processor on Pillow and NumPy, whatever else is installed.

    Args:
        modules: by classes that a checkpoint may name, without "Fast": their folders in transformers. The
            first one counts where none is named.
        settings: go before those of the checkpoint.

    Raises:
        ConfigError: the checkpoint names another class, or says that images are not to be resized, so that no
            encoder knows how large they are.
    """
    named = facts.settings.get("image_processor_type") or next(iter(modules))
    kind = str(named).removesuffix("Fast").removesuffix("Pil")
    if kind not in modules:
        raise ConfigError(f"model: images that {shown(named)} processes are not supported")
    name = modules[kind]
    with importing_transformers():
        module = importlib.import_module(f"transformers.models.{name}.image_processing_pil_{name}")
        found = getattr(module, f"{kind}Pil")
        made = found(**{**facts.settings, **settings})
    if not made.do_resize:
        raise ConfigError("model: an image processor with do_resize false is not supported")
    return made
