"""GivenImages: the images of a prompt, as its caller gave them, on their way into its token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

from aioinfer.errors import InvalidRequest
from aioinfer.images.limits import DEFAULT_LIMITS, ImageLimits
from aioinfer.images.prompt import PromptImages, shown
from aioinfer.images.source import ImageSource, taken
from aioinfer.text.tokenizer import NO_IMAGES

if TYPE_CHECKING:
    from aioinfer.execution.device import DeviceInfo
    from aioinfer.images.processor import ImageProcessor
    from aioinfer.text.tokenizer import Tokenizer

__all__ = ["GivenImages", "image_limits", "image_processor"]

#: characters that take as long to tokenize as an image takes to be processed
_SIZE = 1 << 16


class GivenImages:
    """Images that were checked and copied. The methods block, all but the constructors."""

    __slots__ = ("_fields", "_processor", "sources")

    def __init__(
        self, sources: Sequence[ImageSource], fields: Sequence[str], processor: ImageProcessor
    ) -> None:
        """``fields``: where they were, for messages."""
        self.sources = sources
        self._fields = fields
        self._processor = processor

    @classmethod
    def of(
        cls, messages: list[Any], tokenizer: Tokenizer | None, info: DeviceInfo
    ) -> tuple[list[Any], Self | None]:
        """The messages of a chat without what images they have, and these. Raises InvalidRequest."""
        processor = None if info.images is None else image_processor(tokenizer)
        refusal = getattr(tokenizer, "no_images", NO_IMAGES)
        messages, found = taken(messages, None if processor is None else processor.limits, refusal)
        if not found or processor is None:
            return messages, None
        return messages, cls([source for _, source in found], [field for field, _ in found], processor)

    @classmethod
    def again(cls, sources: Sequence[ImageSource], tokenizer: Tokenizer | None, info: DeviceInfo) -> Self:
        """The images of a prompt that was encoded before. Raises InvalidRequest."""
        processor = None if info.images is None else image_processor(tokenizer)
        if processor is None:
            raise InvalidRequest("images", NO_IMAGES, code="unsupported_parameter")
        return cls(sources, ["images"] * len(sources), processor)

    @property
    def size(self) -> int:
        """Characters that take as long to tokenize."""
        return _SIZE * len(self.sources)

    def encoded(
        self,
        text: str,
        encode: Callable[[str], list[int]],
        checked: Callable[[list[int]], list[int]],
        begin: Callable[[int], None],
    ) -> tuple[list[int], PromptImages]:
        """The token ids of a text with placeholders, ``checked`` before they have words. ``begin`` is told
        before each image how many positions those before it have, and may raise. Raises InvalidRequest,
        Rejected."""
        processor, processed, positions = self._processor, [], 0
        for source, field in zip(self.sources, self._fields, strict=True):
            begin(positions)
            processed.append(processor.process(source, field))
            positions += processed[-1].length
        return processor.fold(checked(encode(processor.expand(text, processed))), processed)

    def restored(self, ids: list[Any], checked: Callable[[list[int]], list[int]]) -> PromptImages:
        """The images of a prompt whose ids have their words. Raises as :meth:`encoded`."""
        if not all(type(token) is int and token >= -(1 << 31) for token in ids):
            raise InvalidRequest("prompt", "has something that is no token id, and no word of an image")
        checked(shown(ids, self._processor.token_id))
        return self._processor.restore(ids, self.sources)


def image_processor(tokenizer: Tokenizer | None) -> ImageProcessor | None:
    """What reads the images of a tokenizer's prompts; None: nothing does."""
    return getattr(tokenizer, "images", None)


def image_limits(tokenizer: Tokenizer | None) -> ImageLimits:
    """What the images of a tokenizer's prompts may have at most."""
    processor = image_processor(tokenizer)
    return DEFAULT_LIMITS if processor is None else processor.limits
