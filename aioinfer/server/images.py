"""Images of one request: read from its body, or fetched before its prompt is made."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from yarl import URL

from aioinfer.chat.images import ImageReader
from aioinfer.config import ServerConfig
from aioinfer.errors import InvalidRequest
from aioinfer.images.encoded import from_file
from aioinfer.server.http.bodies import BodyBytes
from aioinfer.server.http.fetching import Fetcher

__all__ = ["BodyImages"]

#: images of a request that are fetched at a time
_AT_ONCE = 4
#: stands in a part until its image is there
_PENDING = object()


class BodyImages(ImageReader):
    """The images of one body, within the limits of a server."""

    def __init__(self, config: ServerConfig, fetcher: Fetcher, *, reads: bool) -> None:
        """``reads``: the model reads images."""
        super().__init__(int(config.max_image_mib * (1 << 20)))
        self._fetcher = fetcher
        self._reads = reads
        self._left = config.max_images
        self._limit = f"at most {config.max_images} images a request (max_images)"
        #: by URL, the fields and parts of its image
        self._remote: dict[URL, list[tuple[str, dict[str, Any]]]] = {}

    def admit(self, field: str) -> None:
        if not self._reads:
            raise InvalidRequest(field, "the model reads no images", code="unsupported_parameter")
        self._left -= 1
        if self._left < 0:
            raise InvalidRequest(field, self._limit)

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
            most = self.most or 0
            image = from_file(await self._fetcher.fetch(url, field, most, held.add), field)
            for _, part in parts:
                part["image"] = image
