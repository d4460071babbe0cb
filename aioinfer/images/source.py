"""ImageSource: an image as its caller gave it, copied."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from aioinfer.checkpoint.regular import read_regular
from aioinfer.errors import InvalidRequest, shown
from aioinfer.images.encoded import from_data_uri
from aioinfer.images.limits import DEFAULT_LIMITS, ImageLimits
from aioinfer.images.pixels import pillow, upright

__all__ = ["ImageSource", "images_in", "sourced", "taken"]

_FORMS = "an image of Pillow, bytes, a path, a data: URI or an array of uint8 [height, width, 1 to 4]"
_SCHEME = "data:"


@dataclass(frozen=True, slots=True)
class ImageSource:
    """The bytes of an image."""

    #: an image file; with ``size``, pixels of RGB in 8 bits, row by row
    data: bytes
    #: width and height
    size: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.size is not None and len(self.data) != 3 * self.size[0] * self.size[1]:
            raise InvalidRequest("image", "the size is not that of the data")

    @classmethod
    def of(cls, value: Any, field: str, limits: ImageLimits = DEFAULT_LIMITS) -> Self:
        """The image in any form that a caller may give, copied: an image of Pillow, a file as bytes, the path
        of a file (also as text), the text of a ``data:`` URI, or an array of uint8 [height, width] or
        [height, width, 1 to 4] of grey, grey with alpha, RGB or RGBA.

        Files are read here, and decoded later, on another thread; images of Pillow are decoded here if they
        are not. URLs are never fetched. Raises InvalidRequest, by the name ``field``.
        """
        if isinstance(value, cls):
            found = value
        elif isinstance(value, (bytes, bytearray, memoryview)):
            limits.check_bytes(memoryview(value).nbytes, field)
            found = cls(bytes(value))
        elif isinstance(value, str) and value[: len(_SCHEME)].lower() == _SCHEME:
            found = cls(from_data_uri(value, field, limits))
        elif isinstance(value, (str, os.PathLike)):
            found = cls(_read(value, field, limits))
        else:
            found = cls._of_pixels(value, field, limits)
        if found.size is None:
            limits.check_bytes(len(found.data), field)
        else:
            limits.check_size(found.size, field)
        return found

    @classmethod
    def _of_pixels(cls, value: Any, field: str, limits: ImageLimits) -> Self:
        image = value
        if type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "dtype"):
            grid = value.ndim == 2 or (value.ndim == 3 and 1 <= value.shape[2] <= 4)
            if str(value.dtype) != "uint8" or not grid:
                told = f"{value.dtype} {list(value.shape)}"
                raise InvalidRequest(field, f"must be {_FORMS}, got an array of {told}")
            limits.check_size((value.shape[1], value.shape[0]), field)
            if value.shape[2:] == (3,):
                return cls(value.tobytes(), value.shape[1::-1])
            mode = "L" if value.ndim == 2 else ("L", "LA", "RGB", "RGBA")[value.shape[2] - 1]
            image = pillow(field).frombytes(mode, value.shape[1::-1], value.tobytes())
        elif "PIL.Image" not in sys.modules or not isinstance(value, sys.modules["PIL.Image"].Image):
            raise InvalidRequest(field, f"must be {_FORMS}, got {type(value).__name__}")
        limits.check_size(image.size, field)
        try:
            rgb = upright(image)
            return cls(rgb.tobytes(), rgb.size)
        except Exception as error:
            raise InvalidRequest(field, f"the image cannot be decoded: {error}") from error


def _read(path: str | os.PathLike[Any], field: str, limits: ImageLimits) -> bytes:
    if isinstance(path, str) and "://" in path[:32]:
        raise InvalidRequest(field, "is a URL, which is not fetched: give the image itself")
    try:
        return read_regular(Path(os.fsdecode(path)), limits.max_bytes)
    except (OSError, ValueError) as error:
        raise InvalidRequest(field, f"{shown(os.fsdecode(path))} cannot be read: {error}") from error


def taken(
    messages: list[Any], limits: ImageLimits | None, refusal: str
) -> tuple[list[Any], list[tuple[str, ImageSource]]]:
    """The messages of a chat with parts ``{"type": "image"}`` in place of those with an image, and the names
    of these parts with the images, in their order; the messages are not changed themselves.

    ``limits``: None: no image is read, because of the ``refusal``. Raises InvalidRequest, by the name of the
    part.
    """
    found: list[tuple[str, ImageSource]] = []

    def without(part: Mapping[str, Any], field: str) -> dict[str, Any]:
        if limits is None:
            raise InvalidRequest(field, refusal, code="unsupported_parameter")
        found.append((field, _image_of(part, field, limits, len(found))))
        return {"type": "image"}

    return _changed(messages, without), found


def sourced(messages: Any, limits: ImageLimits) -> Any:
    """The messages of a chat with every image as an :class:`ImageSource`; the messages are not changed
    themselves. What is no list stays as it is. Raises InvalidRequest, by the name of the part."""
    count = 0

    def with_source(part: Mapping[str, Any], field: str) -> dict[str, Any]:
        nonlocal count
        count += 1
        return {"type": "image", "image": _image_of(part, field, limits, count - 1)}

    return _changed(messages, with_source) if isinstance(messages, (list, tuple)) else messages


def images_in(messages: Iterable[Any]) -> list[ImageSource]:
    """The images in messages that :func:`sourced` returned."""
    return [
        part["image"]
        for message in messages
        if isinstance(content := message.get("content"), (list, tuple))
        for part in content
        if _is_image(part)
    ]


def _image_of(part: Mapping[str, Any], field: str, limits: ImageLimits, before: int) -> ImageSource:
    if before >= limits.most:
        raise InvalidRequest(field, f"is one image too many: {limits.most} are the most (max_images)")
    if part.keys() != {"type", "image"}:
        raise InvalidRequest(field, "must have the keys type and image, and no others")
    return ImageSource.of(part["image"], field, limits)


def _changed(
    messages: Sequence[Any], change: Callable[[Mapping[str, Any], str], dict[str, Any]]
) -> list[Any]:
    """The messages with other parts in place of those with images."""
    changed = []
    for at, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, (list, tuple)) and any(map(_is_image, content)):
            field = f"messages[{at}].content"
            parts = [
                change(part, f"{field}[{number}]") if _is_image(part) else part
                for number, part in enumerate(content)
            ]
            message = {**message, "content": parts}
        changed.append(message)
    return changed


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image"
