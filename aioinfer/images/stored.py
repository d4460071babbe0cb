"""Images in JSON, as records of streams and sessions have them."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from aioinfer.errors import InvalidRequest
from aioinfer.images.base64 import decoded_base64
from aioinfer.images.source import ImageSource

__all__ = ["StoredImage", "restored", "stored"]

_Size = Annotated[int, Meta(ge=1, lt=1 << 31)]


class StoredImage(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON of an image: its bytes in base64, and width and height of pixels."""

    data: str
    size: tuple[_Size, _Size] | None = None


def stored(images: Iterable[ImageSource]) -> list[dict[str, Any]]:
    """The JSON of images."""
    return [{"data": base64.b64encode(each.data).decode(), "size": each.size} for each in images]


def restored(images: Iterable[StoredImage], field: str) -> list[ImageSource]:
    """The images of a JSON. Raises InvalidRequest, by the name ``field``."""
    try:
        return [ImageSource(decoded_base64(each.data, field), each.size) for each in images]
    except InvalidRequest as error:
        raise InvalidRequest(field, f"images: {error.message}") from None


def with_stored(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with the JSON of their images."""
    return _changed(messages, ImageSource, lambda image: stored([image])[0])


def with_restored(
    messages: Iterable[Mapping[str, Any]], field: str
) -> tuple[list[dict[str, Any]], list[ImageSource]]:
    """The messages that :func:`with_stored` was given, and their images. Raises InvalidRequest, by the name
    ``field``."""
    found: list[ImageSource] = []

    def image_of(value: Any) -> ImageSource:
        try:
            found.extend(restored([msgspec.convert(value, StoredImage)], field))
        except msgspec.ValidationError as error:
            raise InvalidRequest(field, f"images: {error}") from None
        return found[-1]

    return _changed(messages, dict, image_of), found


def _changed(
    messages: Iterable[Mapping[str, Any]], kind: type, change: Callable[[Any], Any]
) -> list[dict[str, Any]]:
    """The messages with other values of this ``kind`` in their images."""
    changed = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content = [
                {**part, "image": change(part["image"])}
                if isinstance(part, Mapping) and isinstance(part.get("image"), kind)
                else part
                for part in content
            ]
            message = {**message, "content": content}
        changed.append({**message})
    return changed
