"""Turns: the calls that go on with a session, and all that the server asks of the sessions of an engine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aioinfer.client.engine_like import EngineLike
from aioinfer.errors import InvalidRequest
from aioinfer.server.http.failures import Failure, Refused

if TYPE_CHECKING:
    from aioinfer.chat.answers import AnswerReader
    from aioinfer.chat.results import ChatRequest
    from aioinfer.client.sessions import Answer, HeldPrefix, Session, State
    from aioinfer.loop.options import Prompt, PromptSource
    from aioinfer.params import SamplingParams
    from aioinfer.server.sessions.table import ServedSession
    from aioinfer.stream import Stream

__all__ = ["Prompted", "Turn", "load", "make", "options_of", "warm"]

#: fields of bodies that a turn cannot have, and the values that change nothing
_NOT_IN_TURNS: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "use_beam_search": (False,),
    "echo": (False,),
    "suffix": ("",),
    "prompt_logprobs": (None,),
    "truncate_prompt_tokens": (None,),
    "add_special_tokens": (None,),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
}
#: of all turns of a session
_FIXED = frozenset({"adapter", "cache_salt"})


class Prompted:
    """The prompt of a stream, which knows it once it is accepted."""

    __slots__ = ("_stream",)

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def shown(self) -> Sequence[int]:
        """Its token ids, as callers see them."""
        return self._stream.cell.output.shown_ids


class Turn:
    """A call that goes on with a session, as it was when this was made: with messages, or with a text."""

    __slots__ = ("_answer", "_before", "_new", "_seen", "_stream", "earlier", "served")

    def __init__(self, served: ServedSession) -> None:
        """On any thread."""
        self.served = served
        self._seen = served.turns
        #: of a chat, the messages before those of the call
        self.earlier = served.messages
        self._new: list[Mapping[str, Any]] | None = None
        #: the session's state, while the turn is under way
        self._before: State | None = None
        self._stream: Stream | None = None
        self._answer: Answer | None = None

    def begin(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The call has these messages, which are new; returns them behind those before."""
        self._new = [*self.served.first, *messages]
        return [*self.earlier, *messages]

    def check(self, body: Any, adapter: str | None) -> None:
        """Raise InvalidRequest for a field of a body that a turn cannot have, or a session has otherwise."""
        for name, neutral in _NOT_IN_TURNS.items():
            if getattr(body, name, neutral[0]) not in neutral:
                message = "is not supported with a session"
                raise InvalidRequest(name, message, code="unsupported_parameter")
        if body.model is not None and adapter != self.served.adapter:
            raise InvalidRequest("model", f"is not that of the session, {self.served.model!r}")
        if body.cache_salt not in ("", self.served.cache_salt):
            raise InvalidRequest("cache_salt", "is not that of the session")

    def chat(self, asked: ChatRequest, prompt: PromptSource, options: Mapping[str, Any]) -> Stream:
        """Queue the call, whose ``prompt`` has all messages. Raises Refused: the session is gone (404), or
        answers or has answered another call (409); and as :meth:`aioinfer.Engine.generate`."""
        assert self._new is not None
        session = self._enter()
        stream, self._answer = session.turn(asked, prompt, self._new, **_own(options))
        self._stream = stream
        return stream

    def text(self, prompt: Prompt, params: SamplingParams, options: Mapping[str, Any]) -> Stream:
        """The same of a new text, or of its tokens. Raises InvalidRequest: the session is a chat."""
        if self.served.first:
            raise InvalidRequest("session", "is a chat, which is continued with messages")
        return self._enter().generate(prompt, params, **_own(options))

    def _enter(self) -> Session:
        served = self.served
        served.enter(self._seen)
        self._before = served.session.state
        return served.session

    def read(self, readers: Sequence[AnswerReader | None]) -> None:
        """The answer has been read to its end, by these readers, which remember it: the session may go on."""
        (reader,) = readers
        if self._answer is not None and self._stream is not None:
            message = {"role": "assistant", "content": self._stream.result().text}
            if reader is not None:
                message = {name: value for name, value in reader.message().items() if name != "refusal"}
            self._answer.answered(message)
            self.served.first = []
        if self._before is not None:
            self._before = None
            self.served.leave()

    def leave(self) -> None:
        """The call has ended; if its answer was not read, the session is as it was. Idempotent."""
        if self._before is not None:
            # The model may have come to the end that its client did not wait for.
            self.served.session.rewind(self._before)
            self._before = None
            self.served.leave()


def _own(options: Mapping[str, Any]) -> Any:
    """The options of a turn."""
    return {name: value for name, value in options.items() if name not in _FIXED}


def make(engine: EngineLike, *, adapter: str | None, cache_salt: str) -> Session:
    """A new session. Raises Refused (501), and what the engine raises."""
    made: Session = _of(engine, "session")(adapter=adapter, cache_salt=cache_salt)
    return made


async def load(engine: EngineLike, path: str | os.PathLike[str]) -> Session:
    """A session from its file. Raises as :func:`make`."""
    loaded: Session = await _of(engine, "load_session")(path)
    return loaded


def options_of(session: Session) -> tuple[str | None, str]:
    """The adapter and the salt of all turns of a session that was loaded."""
    options = session.options
    return options.get("adapter"), options.get("cache_salt") or ""


async def warm(engine: EngineLike, served: ServedSession, prompt: PromptSource) -> HeldPrefix:
    """Compute a prompt that the first turn of a session begins with, and hold it until then."""
    options = {"adapter": served.adapter, "cache_salt": served.cache_salt}
    held: HeldPrefix = await _of(engine, "warm")(prompt, ttl=served.ttl, **options)
    return held


def _of(engine: EngineLike, name: str) -> Any:
    found = getattr(engine, name, None)
    if found is None:
        message = f"this server has no sessions: a {type(engine).__name__} does not support them"
        raise Refused(Failure(501, "invalid_request_error", message, code="sessions_not_supported"))
    return found
