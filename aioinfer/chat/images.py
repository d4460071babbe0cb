"""Images of a chat in OpenAI's form, ``image_url``, as the images themselves."""

from __future__ import annotations

from typing import Any

from aioinfer.chat.bodies import admit
from aioinfer.chat.fields import ImageURLPart
from aioinfer.errors import InvalidRequest, shown
from aioinfer.images.encoded import from_base64, from_data_uri
from aioinfer.images.limits import DEFAULT_LIMITS, ImageLimits
from aioinfer.images.source import ImageSource

__all__ = ["ImageReader", "with_images"]

#: whose messages may have images
_ROLES = ("user", "tool", "function")


class ImageReader:
    """Makes parts of messages of images. Raises InvalidRequest, by the field that an image comes from."""

    def __init__(self, limits: ImageLimits = DEFAULT_LIMITS) -> None:
        self.limits = limits
        #: path of a part in the messages -> path of its image in what the caller gave
        self.names: dict[str, str] = {}

    def at(self, url: str, field: str) -> dict[str, Any]:
        """The part of a message with the image of a data URI or another URL."""
        self.admit(field)
        if url[:5].lower() != "data:":
            return self.remote(url, field)
        return {"type": "image", "image": ImageSource(from_data_uri(url, field, self.limits))}

    def encoded(self, text: str, kind: str, field: str) -> dict[str, Any]:
        """The part of a message with the image of a text in base64; ``kind``: its media type."""
        self.admit(field)
        return {"type": "image", "image": ImageSource(from_base64(text, kind, field, self.limits))}

    def admit(self, field: str) -> None:
        """There is a further image."""

    def remote(self, url: str, field: str) -> dict[str, Any]:
        """The part of a message with an image of another host."""
        message = f"must be a data URI: a server fetches images, an engine does not; got {shown(url)}"
        raise InvalidRequest(field, message)


def with_images(messages: Any, reader: ImageReader, before: int = 0) -> Any:
    """The messages, plain data that may be malformed, with images in place of parts ``image_url``.

    ``before``: messages that come before them. Raises InvalidRequest of a malformed part, or of an image that
    the message may not have.
    """
    if not isinstance(messages, list):
        return messages
    return [_message(message, reader, at, before + at) for at, message in enumerate(messages)]


def _message(message: Any, reader: ImageReader, number: int, place: int) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    parts = list(content)
    for at, part in enumerate(parts):
        if not isinstance(part, dict) or part.get("type") != "image_url":
            continue
        field = f"messages[{number}].content[{at}]"
        if message.get("role") not in _ROLES:
            raise InvalidRequest(f"{field}.type", "images are of user and tool messages")
        given = admit(ImageURLPart, part, field).image_url
        field = f"{field}.image_url"
        url, field = (given, field) if isinstance(given, str) else (given.url, f"{field}.url")
        reader.names[f"messages[{place}].content[{at}]"] = field
        parts[at] = reader.at(url, field)
    return {**message, "content": parts}
