"""Images of one request: read from its body, or fetched before its prompt is made."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from yarl import URL

from aioinfer.chat.images import ImageReader
from aioinfer.client.engine_like import EngineLike
from aioinfer.errors import InvalidRequest
from aioinfer.images.encoded import from_file
from aioinfer.images.limits import ImageLimits
from aioinfer.images.source import ImageSource
from aioinfer.loop.given_images import image_processor
from aioinfer.server.http.bodies import BodyBytes
from aioinfer.server.http.fetching import Fetcher

__all__ = ["BodyImages", "reads_images"]

#: images of a request that are fetched at a time
_AT_ONCE = 4
#: stands in a part until its image is there
_PENDING = ImageSource(b"")


def reads_images(engine: EngineLike) -> bool:
    """A request may have images; False until the model is loaded."""
    return engine.ready and engine.info.images is not None and image_processor(engine.tokenizer) is not None


class BodyImages(ImageReader):
    """The images of one body, within the limits of a server."""

    def __init__(self, limits: ImageLimits, fetcher: Fetcher, refusal: str = "") -> None:
        """``refusal``: why the model reads no images; empty: it does."""
        super().__init__(limits)
        self._fetcher = fetcher
        self._refusal = refusal
        self._left = limits.most
        #: by URL, the fields and parts of its image
        self._remote: dict[URL, list[tuple[str, dict[str, Any]]]] = {}

    def admit(self, field: str) -> None:
        if self._refusal:
            raise InvalidRequest(field, self._refusal, code="unsupported_parameter")
        self._left -= 1
        if self._left < 0:
            message = f"is one image too many: {self.limits.most} are the most (max_images)"
            raise InvalidRequest(field, message)

    def remote(self, url: str, field: str) -> dict[str, Any]:
        part = {"type": "image", "image": _PENDING}
        self._remote.setdefault(self._fetcher.check(url, field), []).append((field, part))
        return part

    @property
    def complete(self) -> bool:
        """Every part has its image."""
        return not self._remote

    async def fetch(self, held: BodyBytes) -> None:
        """Fetch what is at URLs, each once; ``held`` counts its bytes. Raises InvalidRequest of the field of
        the first one that cannot be; Rejected."""
        works = iter(self._remote.items())
        count = min(_AT_ONCE, len(self._remote))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(count):
                    group.create_task(self._fetch(works, held))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        self._remote.clear()

    async def _fetch(
        self, works: Iterator[tuple[URL, list[tuple[str, dict[str, Any]]]]], held: BodyBytes
    ) -> None:
        for url, parts in works:
            field = parts[0][0]
            data = await self._fetcher.fetch(url, field, self.limits, held.add)
            image = ImageSource(from_file(data, field, self.limits))
            for _, part in parts:
                part["image"] = image
