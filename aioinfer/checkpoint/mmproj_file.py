"""MmprojFile: the metadata of a GGUF file with an image encoder, beside those of its text model."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from aioinfer.checkpoint.gguf.config import CONTROL, config_of
from aioinfer.checkpoint.gguf.file import GGUFFile
from aioinfer.errors import ConfigError, shown

__all__ = ["MmprojFile", "NotItsEncoder"]

_NUMBER = (int, float)
_KINDS = "tokenizer.ggml.token_type"
#: texts of tokens that no text has
_UNUSED = re.compile(r"\[PAD\d+\]|<unused\d+>")


class NotItsEncoder(ConfigError):
    """The file is whole, and its encoder is none for this text model, or none that is supported."""


class MmprojFile:
    """Both files. Its methods raise ConfigError."""

    def __init__(self, path: Path, text: GGUFFile) -> None:
        """``text``: of the text model."""
        self.path = path
        if not path.is_file():  # a pipe would keep its reader
            raise ConfigError(f"mmproj: there is no file {path}")
        try:
            self.file = GGUFFile(path)
        except ConfigError as error:
            raise ConfigError(f"mmproj: {str(error).removeprefix('model: ')}") from error
        self.text = text
        #: the config of the text model
        self.text_config = config_of(text)
        kind = self.value("general.architecture", str)
        if kind != "clip":
            raise ConfigError(
                f"mmproj: {path.name} holds a model of the architecture {shown(kind)}, no image encoder"
            )
        if not self.value("clip.has_vision_encoder", bool, False):
            raise NotItsEncoder(f"mmproj: {path.name} has no image encoder")

    @property
    def projector(self) -> str:
        """The type of what makes features of the encoder's results."""
        found: str = self.value("clip.projector_type", str, self.value("clip.vision.projector_type", str, ""))
        return found

    def value(self, name: str, kind: Any, default: Any = None) -> Any:
        """The metadata of a name."""
        try:
            return self.file.value(name, kind, default)
        except ConfigError as error:
            text = str(error).removeprefix("model: ").replace("the GGUF file", self.path.name)
            raise ConfigError(f"mmproj: {text}") from error

    def size(self, name: str, default: int | None = None) -> int:
        """A positive number of ``clip.vision``."""
        found: int = self.value(f"clip.vision.{name}", int, default)
        if found < 1:
            raise ConfigError(f"mmproj: clip.vision.{name} of {self.path.name} is {found}")
        return found

    def levels(self, name: str) -> list[float]:
        """Three numbers of ``clip.vision``, one of a colour each."""
        found: list[Any] = self.value(f"clip.vision.{name}", list)
        if len(found) != 3 or not all(isinstance(each, float) and math.isfinite(each) for each in found):
            raise ConfigError(f"mmproj: clip.vision.{name} of {self.path.name} is {shown(found)}")
        return [_decimal(each) for each in found]

    @property
    def epsilon(self) -> float:
        """Of its norms."""
        return _decimal(self.value("clip.vision.attention.layer_norm_epsilon", _NUMBER))

    def has(self, name: str) -> bool:
        """Whether the file has a tensor."""
        return name in self.file.tensors

    def token(self, text: str) -> int:
        """The id of a token of the text model."""
        tokens = self._tokens
        if text not in tokens:
            raise NotItsEncoder(f"mmproj: the vocabulary of the GGUF file has no token {text}")
        found: int = tokens.index(text)
        return found

    def add_token(self, text: str) -> None:
        """Have the vocabulary contain a token, in place of an unused one if converters left it out."""
        tokens, kinds = self._tokens, self.text.metadata.get(_KINDS, [])
        if text in tokens:
            return
        unused = [at for at, token in enumerate(tokens) if _UNUSED.fullmatch(str(token))]
        if not unused:
            raise NotItsEncoder(f"mmproj: the vocabulary of the GGUF file has no token {text}")
        tokens[unused[-1]] = text
        if len(kinds) == len(tokens):
            kinds[unused[-1]] = CONTROL

    @property
    def _tokens(self) -> list[Any]:
        found: list[Any] = self.text.value("tokenizer.ggml.tokens", list, [])
        return found


def _decimal(value: float) -> float:
    """The number of which a file has the float32."""
    return float(str(np.float32(value)))
