"""Bodies and answers of the routes of sessions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypedDict

from aioinfer.chat.bodies import Object, field, later
from aioinfer.chat.fields import Message, Tool
from aioinfer.chat.tools import MAX_TOOLS
from aioinfer.server.openai.fields import Label, Model, Seconds, prompts

__all__ = [
    "DeletedSavedSession",
    "DeletedSession",
    "LoadedBody",
    "NamedBody",
    "SavedSession",
    "SavedSessionList",
    "SessionBody",
    "SessionList",
    "SessionObject",
]


class SessionBody(Object):
    """A body of ``/v1/sessions``."""

    model: Model = field("name of the served model (the default), or of an adapter: that of all its turns")
    ttl: Seconds | None = field("seconds without use until it is deleted; at most the server's `session_ttl`")
    cache_salt: Label = field("of all its turns", "")
    messages: Annotated[Any, later(Annotated[list[Message], Field(min_length=1)])] = field(
        "messages that the first turn begins with; they are computed at once"
    )
    tools: Annotated[Any, later(Annotated[list[Tool], Field(max_length=MAX_TOOLS)])] = field(
        "those that the first turn will have, so that its prompt begins as `messages` do"
    )
    chat_template_kwargs: dict[str, Any] | None = field("the same of variables of the chat template")
    prompt: Annotated[Any, prompts(1)] = field("text or token ids that it begins with, in place of messages")


class NamedBody(Object):
    """A body of ``/v1/sessions/{session}/save``."""

    name: str = field("1 to 64 letters, digits, `_` and `-`, the first no sign", ...)


class LoadedBody(NamedBody):
    """A body of ``/v1/sessions/load``."""

    ttl: Seconds | None = field("seconds without use until it is deleted; at most the server's `session_ttl`")


class SessionObject(TypedDict):
    """A session. Times in seconds; of `held_tokens`, the KV is in memory."""

    id: str
    object: Literal["session"]
    created_at: int
    expires_at: int
    model: str
    busy: bool
    num_tokens: int
    held_tokens: int


class SessionList(TypedDict):
    object: Literal["list"]
    data: list[SessionObject]


class DeletedSession(TypedDict):
    id: str
    object: Literal["session"]
    deleted: Literal[True]


class SavedSession(TypedDict):
    """The file of a session."""

    name: str
    object: Literal["saved_session"]


class SavedSessionList(TypedDict):
    object: Literal["list"]
    data: list[SavedSession]


class DeletedSavedSession(TypedDict):
    name: str
    object: Literal["saved_session"]
    deleted: Literal[True]
