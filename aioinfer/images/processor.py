"""ImageProcessor: what a model's files make of images, up to the pixels that its encoder computes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from traceback import clear_frames
from typing import Any, Self

from aioinfer.checkpoint.files import Checkpoint
from aioinfer.checkpoint.libraries import importing_transformers
from aioinfer.errors import ConfigError, InvalidRequest, OutOfMemory, Rejected
from aioinfer.images.decoding import decoded, told
from aioinfer.images.formats import format_of
from aioinfer.images.formats.base import FormatFacts, ImageFormat, ImageParts
from aioinfer.images.limits import DEFAULT_LIMITS, ImageLimits
from aioinfer.images.pixels import pillow
from aioinfer.images.prompt import ImageUnit, PromptImages, words
from aioinfer.images.rotary import rotary_positions
from aioinfer.images.source import ImageSource
from aioinfer.ledger import LEDGER, Share
from aioinfer.system.memory import give_back

__all__ = ["ImageProcessor", "ProcessedImage"]

#: pixels of an image that takes a tenth of a second and more
_LARGE = 1 << 23


@dataclass(frozen=True, slots=True, eq=False)
class ProcessedImage:
    """An image as the encoder takes it."""

    source: ImageSource
    #: names it: a function of the image and of the processor
    digest: bytes
    parts: ImageParts
    #: of the memory, for its bytes and pixels
    share: Share

    @property
    def length(self) -> int:
        """Its positions."""
        return sum(unit.length for unit in self.parts.units)


class ImageProcessor:
    """The images of a model. Its methods block, and may be called on any thread.

    Attributes:
        placeholder: the text that the chat template writes for an image.
        token_id: the token that stands for a position of an image.
        reserved: texts that no part of a chat with images may contain.
        fingerprint: names the processor with its settings.
        limits: what the images of a prompt may have at most.
    """

    def __init__(self, form: ImageFormat, limits: ImageLimits = DEFAULT_LIMITS) -> None:
        self._format = form
        self.limits = limits
        self.placeholder, self.token_id = form.placeholder, form.token_id
        self.reserved = (form.placeholder, *form.reserved)
        self.fingerprint = _fingerprint(form)

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, tokens: Mapping[str, int], limits: ImageLimits = DEFAULT_LIMITS
    ) -> Self | None:
        """That of a checkpoint whose tokenizer has these added ``tokens``; None: none of its images are read.
        Raises ConfigError."""
        files = checkpoint.processor()
        if files is None:
            return None
        stated = checkpoint.config()
        form = format_of(next(iter(stated.get("architectures") or ()), ""))
        if form is None:
            return None
        try:
            pillow("images")
            with importing_transformers():
                from transformers import CONFIG_MAPPING

                config = CONFIG_MAPPING[stated["model_type"]].from_dict(stated)
            return cls(form(FormatFacts(config, *files, tokens)), limits)
        except ConfigError:
            raise
        except InvalidRequest as error:
            raise ConfigError(error.message) from error
        except Exception as error:
            raise ConfigError(f"model: its images cannot be processed: {error}") from error

    def process(self, source: ImageSource, field: str = "images") -> ProcessedImage:
        """Decode an image and prepare it. Raises InvalidRequest, by the name ``field``, and Rejected:
        there is no memory left for its pixels."""
        try:
            parts, pixels = self._parts(source, field)
        except InvalidRequest as error:
            _let_go(error)
            raise
        if pixels > _LARGE:
            give_back()  # The C library keeps some copies of so large an image for every thread.
        taken = len(source.data)
        taken += sum(array.nbytes for unit in parts.units for array in unit.pixels.values())
        share = Share("images of prompts")
        try:
            LEDGER.claim(share, taken)
        except OutOfMemory as error:
            raise Rejected(str(error)) from error
        share.taken = taken
        return ProcessedImage(source, self._digest(source), parts, share)

    def _parts(self, source: ImageSource, field: str) -> tuple[ImageParts, int]:
        """Those of an image, and the number of its pixels."""
        image = decoded(source, self.limits, field)
        try:
            return self._format.parts(image), image.width * image.height
        except Exception as error:
            size = f"{image.width} x {image.height} pixels"
            raise InvalidRequest(field, f"the model takes no image of {size}: {told(error)}") from error

    def expand(self, text: str, processed: Sequence[ProcessedImage]) -> str:
        """A text with what stands for the images in place of its placeholders. Raises InvalidRequest."""
        pieces = text.split(self.placeholder)
        if len(pieces) - 1 != len(processed):
            count = f"the chat template writes {len(pieces) - 1} images of {len(processed)}"
            raise InvalidRequest("messages", f"{count}: this model takes none in this place")
        images = [image.parts.text for image in processed]
        return "".join(piece + image for piece, image in zip(pieces, [*images, ""], strict=True))

    def fold(self, ids: Sequence[int], processed: Sequence[ProcessedImage]) -> tuple[list[int], PromptImages]:
        """The ids with words in place of image tokens, and where the images are. Raises InvalidRequest."""
        places = [at for at, token in enumerate(ids) if token == self.token_id]
        return self._placed(ids, places, processed)

    def restore(self, ids: Sequence[int], sources: Sequence[ImageSource]) -> PromptImages:
        """Where these images are in a prompt that has their words. Raises InvalidRequest: it has others."""
        processed = [self.process(source) for source in sources]
        places = [at for at, token in enumerate(ids) if token < 0]
        found, images = self._placed(ids, places, processed)
        if found != list(ids):
            raise InvalidRequest("images", "are not those of the prompt, or another processor's")
        return images

    def _placed(
        self, ids: Sequence[int], places: Sequence[int], processed: Sequence[ProcessedImage]
    ) -> tuple[list[int], PromptImages]:
        total = sum(image.length for image in processed)
        if len(places) != total:
            raise InvalidRequest("messages", f"have {len(places)} positions of images, which need {total}")
        found, units, grids, at = list(ids), [], [], 0
        for image in processed:
            for place, word in zip(places[at:], words(image.digest, image.length), strict=False):
                found[place] = word
            for number, unit in enumerate(image.parts.units):
                start, last = places[at], places[at + unit.length - 1]
                if last - start != unit.length - 1:
                    raise InvalidRequest("messages", "the positions of an image are not beside each other")
                key = hashlib.blake2b(image.digest + number.to_bytes(4, "little"), digest_size=16).digest()
                units.append(ImageUnit(start, unit.length, key, unit.patches, unit.pixels))
                if unit.grid is not None:
                    grids.append((start, unit.grid))
                at += unit.length
        sources = tuple(image.source for image in processed)
        rotary, delta = rotary_positions(len(ids), grids) if grids else (None, 0)
        shares = tuple(image.share for image in processed)
        return found, PromptImages(sources, tuple(units), rotary, delta, self.token_id, shares)

    def _digest(self, source: ImageSource) -> bytes:
        digest = hashlib.blake2b(self.fingerprint, digest_size=32)
        digest.update(repr(source.size).encode() + b"\0")
        digest.update(source.data)
        return digest.digest()


def _fingerprint(form: ImageFormat) -> bytes:
    settings: dict[str, Any] = form.processor.to_dict()
    facts = [type(form).__name__, type(form.processor).__name__, settings]
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _let_go(error: InvalidRequest) -> None:
    """Give back the memory of an image that was refused: tracebacks refer to it."""
    each: BaseException | None = error
    while each is not None:
        clear_frames(each.__traceback__)
        each = each.__context__
    give_back()
