"""Adapters: routes that load and unload LoRA adapters, with vLLM's paths, for servers with ``lora_root``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Annotated
from weakref import WeakKeyDictionary

from aiohttp import web
from pydantic import Field

from aioinfer.chat.bodies import Object, field
from aioinfer.checkpoint.adapter import ADAPTER_FILES
from aioinfer.client.engine_like import EngineLike
from aioinfer.config import ServerConfig
from aioinfer.errors import ConfigError, InvalidRequest, OutOfMemory, RequestError, renamed, shown
from aioinfer.loop.waiting import NamedLocks
from aioinfer.scheduling.adapters import ADAPTER_NOT_FOUND, LONGEST_NAME
from aioinfer.server.confinement import LONGEST_PATH, Confined
from aioinfer.server.generation import Generation
from aioinfer.server.http.failures import Failure, Refused
from aioinfer.server.http.records import record_of
from aioinfer.server.openai.protocol import read
from aioinfer.server.openapi.endpoints import Endpoint, Route

__all__ = ["AdapterRoutes", "Adapters", "LoadBody", "UnloadBody"]

#: argument of the engine -> field of the body
_NAMES = {"name": "lora_name", "path": "lora_path"}

_Name = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]


class UnloadBody(Object):
    """A body of ``/v1/unload_lora_adapter``."""

    lora_name: _Name = field("its name, by which requests select it", ...)


class LoadBody(UnloadBody):
    """A body of ``/v1/load_lora_adapter``."""

    lora_path: Annotated[str, Field(min_length=1, max_length=LONGEST_PATH)] = field(
        "a directory in the server's `lora_root`; a relative path begins there", ...
    )
    load_inplace: bool = field(
        "replace an adapter of this name; requests that it has already keep it to their ends", False
    )


_OFF = {
    403: "The server has no `lora_root`, or the `Host` or the `Origin` is not allowed.",
    429: "The key is at its limit: try again after `Retry-After` seconds.",
}
_LOAD = Endpoint(
    "POST",
    "/load_lora_adapter",
    "Load a LoRA adapter",
    body=LoadBody,
    example={"lora_name": "sql", "lora_path": "sql-v2"},
    media="text/plain",
    statuses=_OFF,
    tag="adapters",
)
_UNLOAD = Endpoint(
    "POST",
    "/unload_lora_adapter",
    "Unload a LoRA adapter",
    body=UnloadBody,
    example={"lora_name": "sql"},
    media="text/plain",
    statuses=_OFF | {404: "There is no such adapter or path."},
    tag="adapters",
)


#: by engine, and by name
_turns: WeakKeyDictionary[EngineLike, NamedLocks] = WeakKeyDictionary()


class Adapters:
    """The work of the routes, on any socket."""

    def __init__(self, engine: EngineLike, config: ServerConfig, models: Sequence[str]) -> None:
        """``models``: names that no adapter may have."""
        self._engine = engine
        self._root = config.lora_root
        self._models = frozenset(models)

    async def load(self, body: LoadBody) -> str:
        """Returns what the answer says. Raises Refused, InvalidRequest, and what the engine raises."""
        root = self._enabled()
        name = body.lora_name
        if name in self._models:
            raise InvalidRequest("lora_name", f"{shown(name)} is the name of the model")
        within = Confined(root, "lora_root", "lora_path")
        path = await asyncio.to_thread(within.directory, body.lora_path, ADAPTER_FILES)
        try:
            async with self._turn(name):
                replaces = any(each.name == name for each in self._engine.adapters())
                if replaces and not body.load_inplace:
                    message = f"{shown(name)} is loaded already: load_inplace replaces it"
                    raise InvalidRequest("lora_name", message)
                await self._engine.load_adapter(name, path)
        except ConfigError as error:
            raise InvalidRequest("lora_path", within.said(error)) from error
        except OutOfMemory as error:
            raise InvalidRequest("lora_path", f"there is no memory for it: {within.said(error)}") from error
        except RequestError as error:
            raise renamed(error, _NAMES) from error.__cause__
        return f"Success: the LoRA adapter {name!r} was {'replaced' if replaces else 'added'}."

    async def unload(self, body: UnloadBody) -> str:
        """As :meth:`load`."""
        self._enabled()
        name = body.lora_name
        try:
            await self._engine.unload_adapter(name)
        except InvalidRequest as error:
            if error.code == ADAPTER_NOT_FOUND:
                kind, message = "invalid_request_error", f"lora_name: {error.message}"
                failure = Failure(404, kind, message, param="lora_name", code=error.code)
                raise Refused(failure) from error
            raise renamed(error, _NAMES) from error.__cause__
        return f"Success: the LoRA adapter {name!r} was removed."

    def _turn(self, name: str) -> asyncio.Lock:
        """The lock that loads of a name hold, on any socket."""
        return _turns.setdefault(self._engine, NamedLocks())[name]

    def _enabled(self) -> str:
        if self._root is None:
            message = "this server loads no adapters for requests: its lora_root is not set"
            raise Refused(Failure(403, "permission_error", message, code="lora_root_not_set"))
        return self._root


class AdapterRoutes:
    """The handlers of a server's own routes, of one engine."""

    def __init__(
        self, engine: EngineLike, config: ServerConfig, models: Sequence[str], generation: Generation
    ) -> None:
        self._adapters = Adapters(engine, config, models)
        self._generation = generation

    def routes(self) -> list[Route]:
        return [_LOAD.route(self.load), _UNLOAD.route(self.unload)]

    async def load(self, request: web.Request) -> web.StreamResponse:
        with record_of(request).admitted():
            body, _ = await self._generation.parsed(request, partial(read, LoadBody))
            return web.Response(text=await self._adapters.load(body))

    async def unload(self, request: web.Request) -> web.StreamResponse:
        with record_of(request).admitted():
            body, _ = await self._generation.parsed(request, partial(read, UnloadBody))
            return web.Response(text=await self._adapters.unload(body))
