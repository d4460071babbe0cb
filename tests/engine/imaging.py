"""Images in random lifetimes: some of few, so that they are met again, of one or several units."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aioinfer.engine import Engine
from aioinfer.images.formats.base import ImageParts, UnitPixels
from aioinfer.images.processor import ImageProcessor
from aioinfer.images.prompt import shown
from aioinfer.images.source import ImageSource
from aioinfer.images.support import ImageSupport
from aioinfer.loop.options import PromptSource
from aioinfer.text.detokenizer import Detokenizer
from tests.toys import ToyTokenizer

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["LONGEST", "PLACE", "Imaging"]

#: stands for a position of an image: no letter, and its token is none of theirs
PLACE = "\x7f"
#: positions of the largest unit
LONGEST = 9


class _Settings:
    def to_dict(self) -> dict[str, Any]:
        return {}


class _ToyImages:
    """A row of pixels is a unit, of as many positions."""

    placeholder = PLACE
    reserved: tuple[str, ...] = ()

    def __init__(self, token_id: int) -> None:
        self.token_id = token_id
        self.processor: Any = _Settings()

    def parts(self, image: Image) -> ImageParts:
        units = (UnitPixels(image.width, 3 * image.width, {}),) * image.height
        return ImageParts(PLACE * image.width * image.height, units)


class _Tokenizer(ToyTokenizer):
    def render_chat(self, messages: Sequence[Mapping[str, Any]], /, **template_kwargs: Any) -> str:
        return "".join(PLACE if part["type"] == "image" else part["text"] for part in messages[0]["content"])

    def detokenizer(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> Detokenizer:
        assert self.images is not None
        return super().detokenizer(
            shown(prompt_ids, self.images.token_id), skip_special_tokens=skip_special_tokens
        )


@dataclass
class Imaging:
    """What the images of a world are like."""

    dice: random.Random
    two_way: bool

    @classmethod
    def of(cls, seed: int) -> Imaging:
        dice = random.Random(seed + 13)
        return cls(dice, dice.random() < 0.5)

    def settings(self, running: int) -> dict[str, Any]:
        """Settings of the engine."""
        # Features take a byte per position.
        rooms = self.dice.choice([0, 10, 40, 1000]) / 2**30
        given: dict[str, Any] = {
            "max_encoder_tokens": self.dice.choice([5, 20, 100]), "encoder_cache_gib": rooms
        }  # fmt: skip
        if self.two_way:
            given["max_step_tokens"] = running + LONGEST + self.dice.choice([0, 3, 30])
        return given

    def tokenizer(self, vocab_size: int, *, looks_up: bool) -> ToyTokenizer:
        made = _Tokenizer(vocab_size, looks_up=looks_up)
        made.images = ImageProcessor(_ToyImages(made.encode(PLACE)[0]))
        return made

    def support(self, tokenizer: ToyTokenizer) -> ImageSupport:
        return ImageSupport(token_id=tokenizer.encode(PLACE)[0], two_way=self.two_way, longest=LONGEST)

    def prompt(self, engine: Engine) -> PromptSource | None:
        """A prompt with images; None if it came out longer than the engine's context, or by chance."""
        dice, length = self.dice, 0
        parts: list[dict[str, Any]] = []
        if dice.random() < 0.2:
            return None
        for _ in range(dice.randint(1, 5)):
            if dice.random() < 0.5:
                text = "".join(dice.choices("abc", k=dice.choice([1, 4, 11])))
                parts.append({"type": "text", "text": text})
                length += len(text)
                continue
            size = dice.randint(1, LONGEST), dice.choice([1, 1, 2, 3])
            pixels = bytes([dice.randrange(3)]) * (3 * size[0] * size[1])
            parts.append({"type": "image", "image": ImageSource(pixels, size)})
            length += size[0] * size[1]
        if length + 1 >= engine.info.max_model_len:
            return None
        return engine.prompt([{"role": "user", "content": parts}])
