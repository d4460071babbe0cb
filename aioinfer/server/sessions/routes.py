"""Routes of sessions: make, list, read, fork, save, load and delete them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web

from aioinfer.chat.door import conversation
from aioinfer.chat.variables import Variables
from aioinfer.client.engine_like import EngineLike
from aioinfer.config import ServerConfig
from aioinfer.errors import InvalidRequest, RequestError, renamed
from aioinfer.loop.options import Prompt
from aioinfer.loop.waiting import NamedLocks
from aioinfer.params import SamplingParams
from aioinfer.server.generation import Generation
from aioinfer.server.http.failures import Failure, Refused
from aioinfer.server.http.records import Record, record_of
from aioinfer.server.openai.protocol import Served, chat_messages, read
from aioinfer.server.openapi.endpoints import Endpoint, Route
from aioinfer.server.sessions import turns
from aioinfer.server.sessions.bodies import (
    DeletedSavedSession,
    DeletedSession,
    LoadedBody,
    NamedBody,
    SavedSession,
    SavedSessionList,
    SessionBody,
    SessionList,
    SessionObject,
)
from aioinfer.server.sessions.saved import SavedSessions
from aioinfer.server.sessions.table import ServedSession, Sessions

__all__ = ["SessionRoutes"]

_MADE = {501: "The engine of this server has no sessions."}
_LIMITED = {429: "The key is at one of its limits."}
_NONE = {404: "The key has no such session, or it has been deleted."}
_FILES = {403: "The server has no `sessions_dir`, or the `Host` or the `Origin` is not allowed.", **_LIMITED}


def _endpoint(method: str, path: str, summary: str, answer: Any, **more: Any) -> Endpoint:
    return Endpoint(method, f"/sessions{path}", summary, answer=answer, tag="sessions", **more)


_CREATE = _endpoint(
    "POST",
    "",
    "Make a session",
    SessionObject,
    body=SessionBody,
    example={"ttl": 600, "messages": [{"role": "system", "content": "Be brief."}]},
    statuses=_MADE,
    generates=True,
)
_LIST = _endpoint("GET", "", "The sessions of the key", SessionList)
_READ = _endpoint("GET", "/{session}", "A session", SessionObject, statuses=_NONE)
_DELETE = _endpoint("DELETE", "/{session}", "Delete a session", DeletedSession, statuses=_NONE)
_FORK = _endpoint(
    "POST",
    "/{session}/fork",
    "Make a session that goes on from here, too",
    SessionObject,
    statuses=_LIMITED | _NONE,
)
_SAVE = _endpoint(
    "POST",
    "/{session}/save",
    "Save a session by a name",
    SavedSession,
    body=NamedBody,
    example={"name": "monday"},
    statuses=_FILES | _NONE,
)
_LOAD = _endpoint(
    "POST",
    "/load",
    "Make a session of a saved one",
    SessionObject,
    body=LoadedBody,
    example={"name": "monday"},
    statuses=_FILES | _MADE | {404: "The key has saved none by this name."},
    generates=True,
)
_SAVED = Endpoint("GET", "/saved_sessions", "What the key has saved", answer=SavedSessionList, tag="sessions")
_DELETE_SAVED = Endpoint(
    "DELETE",
    "/saved_sessions/{name}",
    "Delete a saved session",
    answer=DeletedSavedSession,
    statuses={400: "The name is none."},
    tag="sessions",
)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A body of ``/v1/sessions``, checked: what it begins with is a prompt, or messages for a template."""

    model: str
    adapter: str | None
    cache_salt: str
    ttl: float | None
    messages: list[dict[str, Any]] | None
    prompt: Prompt | None
    kwargs: Mapping[str, Any] | None
    #: argument of the engine -> field of the body
    names: Mapping[str, str]


class SessionRoutes:
    """The handlers."""

    def __init__(
        self,
        engine: EngineLike,
        config: ServerConfig,
        model: str,
        sessions: Sessions,
        generation: Generation,
    ) -> None:
        """``model``: the name of the model without an adapter."""
        self._engine = engine
        self._model = model
        self._sessions = sessions
        self._saved = SavedSessions(config.sessions_dir, config.max_sessions_per_key)
        #: a key saves one session at a time, so that its files are counted
        self._saving = NamedLocks()
        self._generation = generation
        self._ttl = config.session_ttl

    def routes(self) -> list[Route]:
        return [
            _CREATE.route(self.create),
            _LIST.route(self.list),
            _LOAD.route(self.load),
            _READ.route(self.read),
            _DELETE.route(self.delete),
            _FORK.route(self.fork),
            _SAVE.route(self.save),
            _SAVED.route(self.saved),
            _DELETE_SAVED.route(self.delete_saved),
        ]

    async def create(self, request: web.Request) -> web.StreamResponse:
        record = record_of(request)
        with record.admitted():
            asked, _ = await self._generation.parsed(request, _parse)
            self._sessions.check_room(record.owner)
            session = ServedSession(
                self._sessions,
                record.owner,
                turns.make(self._engine, adapter=asked.adapter, cache_salt=asked.cache_salt),
                model=asked.model,
                adapter=asked.adapter,
                cache_salt=asked.cache_salt,
                ttl=self._lifetime(asked.ttl),
                first=asked.messages or (),
            )
            try:
                async with self._generation.watched(request):
                    await self._warm(session, asked, record)
            except RequestError as error:
                session.end()
                raise renamed(error, asked.names) from None
            except BaseException:
                session.end()
                raise
            return self._answer(self._sessions.add(session))

    async def _warm(self, session: ServedSession, asked: _Asked, record: Record) -> None:
        """Compute what the session begins with. Its tokens count if the client leaves meanwhile, too."""
        if asked.prompt is not None:
            async with session.session.generate(asked.prompt, SamplingParams(max_tokens=0)) as stream:
                with record.counting([stream], 1):
                    await stream
        if asked.messages is not None:
            prompt = self._engine.prompt(asked.messages, chat_template_kwargs=asked.kwargs)
            record.prompt_tokens = len(await self._engine.tokenize(prompt))
            session.warmed = await turns.warm(self._engine, session, prompt)

    async def list(self, request: web.Request) -> web.StreamResponse:
        found = [self._object(each) for each in self._sessions.of(record_of(request).owner)]
        return web.json_response({"object": "list", "data": found})

    async def read(self, request: web.Request) -> web.StreamResponse:
        return self._answer(self._found(request))

    async def delete(self, request: web.Request) -> web.StreamResponse:
        session = self._found(request)
        self._sessions.remove(session)
        return web.json_response({"id": session.id, "object": "session", "deleted": True})

    async def fork(self, request: web.Request) -> web.StreamResponse:
        session = self._found(request)
        self._sessions.check_room(session.owner)
        return self._answer(self._sessions.add(session.fork()))

    # -- files ----------------------------------------------------------------------------------

    async def save(self, request: web.Request) -> web.StreamResponse:
        self._found(request)
        record = record_of(request)
        with record.admitted():
            body, _ = await self._generation.parsed(request, partial(read, NamedBody))
            self._saved.check(body.name)
            async with self._saving[record.owner]:
                path = await asyncio.to_thread(self._saved.place, record.owner, body.name)
                # It may have been deleted meanwhile.
                session = self._found(request).session
                if not session.num_tokens:
                    raise InvalidRequest("session", "has no turn yet that could be saved")
                try:
                    await session.save(path)
                except InvalidRequest as error:
                    message = f"the session could not be saved: {error.message.replace(str(path), body.name)}"
                    raise Refused(Failure(500, "server_error", message, code="session_not_saved")) from error
        return web.json_response({"name": body.name, "object": "saved_session"})

    async def load(self, request: web.Request) -> web.StreamResponse:
        record = record_of(request)
        with record.admitted():
            body, _ = await self._generation.parsed(request, partial(read, LoadedBody))
            self._saved.check(body.name)
            ttl = self._lifetime(body.ttl)
            self._sessions.check_room(record.owner)
            path = await asyncio.to_thread(self._saved.find, record.owner, body.name)
            try:
                async with self._generation.watched(request):
                    loaded = await turns.load(self._engine, path)
                record.prompt_tokens = loaded.num_tokens
            except InvalidRequest as error:
                message = error.message.replace(str(path), body.name)
                raise InvalidRequest("name", message, code=error.code) from None
            adapter, salt = turns.options_of(loaded)
            session = ServedSession(
                self._sessions,
                record.owner,
                loaded,
                model=adapter or self._model,
                adapter=adapter,
                cache_salt=salt,
                ttl=ttl,
            )
            return self._answer(self._sessions.add(session))

    async def saved(self, request: web.Request) -> web.StreamResponse:
        names = await asyncio.to_thread(self._saved.names, record_of(request).owner)
        found = [{"name": name, "object": "saved_session"} for name in names]
        return web.json_response({"object": "list", "data": found})

    async def delete_saved(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        self._saved.check(name)
        await asyncio.to_thread(self._saved.remove, record_of(request).owner, name)
        return web.json_response({"name": name, "object": "saved_session", "deleted": True})

    # -- parts ----------------------------------------------------------------------------------

    def _lifetime(self, ttl: float | None) -> float:
        if ttl is not None and ttl > self._ttl:
            raise InvalidRequest("ttl", f"may be {self._ttl:g} at most (session_ttl)")
        return ttl or self._ttl

    def _found(self, request: web.Request) -> ServedSession:
        return self._sessions.find(record_of(request).owner, request.match_info["session"])

    def _answer(self, session: ServedSession) -> web.Response:
        return web.json_response(self._object(session))

    def _object(self, session: ServedSession) -> SessionObject:
        held = session.session
        return {
            "id": session.id,
            "object": "session",
            "created_at": session.created,
            "expires_at": int(time.time() + self._sessions.left(session)),
            "model": session.model,
            "busy": session.busy,
            "num_tokens": held.num_tokens,
            "held_tokens": held.held_tokens,
        }


def _parse(raw: bytes, served: Served) -> _Asked:
    body = read(SessionBody, raw, served)
    messages, kwargs = None, None
    if body.messages is None:
        for name in ("tools", "chat_template_kwargs"):
            if getattr(body, name) is not None:
                raise InvalidRequest(name, "needs messages")
    else:
        if body.prompt is not None:
            raise InvalidRequest("prompt", "cannot be combined with messages")
        given = chat_messages(body.messages, served)
        variables = Variables(served.chat, body.chat_template_kwargs)
        # What comes next is not known: the begin of an answer is no part of it.
        variables.put("add_generation_prompt", False, "add_generation_prompt")
        messages, kwargs, _ = conversation(served.chat, given, variables, body.tools)
    return _Asked(
        model=served.name(body.model),
        adapter=served.adapter(body.model),
        cache_salt=body.cache_salt,
        ttl=body.ttl,
        messages=messages,
        prompt=body.prompt,
        kwargs=kwargs or None,
        names={} if messages is None else {"prompt": "messages", **served.images.names},
    )
