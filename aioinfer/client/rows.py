"""Rows: what calls with many requests are given, and how each becomes a request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, TypedDict

from aioinfer.chat.functions import Tool
from aioinfer.errors import InvalidRequest, shown
from aioinfer.loop.options import is_one
from aioinfer.params import SamplingParams, Schema
from aioinfer.request import RequestOptions

__all__ = ["ChatArguments", "ChatRow", "Chats", "Params", "ParamsOf", "kept", "rows_of", "split_chat"]


@dataclass(frozen=True, slots=True)
class ChatRow:
    """One chat of many, with arguments of its own, for :meth:`aioinfer.Engine.map` and
    :meth:`aioinfer.LLM.chat`. Its result is a :class:`~aioinfer.ChatResult`.

    The fields are the arguments of :meth:`aioinfer.Engine.chat`; None: that of the call. Nothing is checked
    or copied before the row is read, and what is wrong with a field is the error of its row, also where many
    rows share it; what all rows have belongs into the call, which raises what is wrong with it.
    """

    messages: Sequence[Mapping[str, Any]]
    params: SamplingParams | None = None
    #: the caller's name for the row, which ``ChatResult.result`` and errors have as ``request_id``
    id: str | None = None
    tools: Sequence[Tool] | None = None
    tool_choice: str | Tool | None = None
    parallel_tool_calls: bool | None = None
    response_format: Schema | type[Any] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None

    def asked(self, usual: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of a chat besides messages and parameters; ``usual``: where the row has none."""
        own = {name: getattr(self, name) for name in _ChatOptions.__annotations__}
        return {name: usual.get(name) if value is None else value for name, value in own.items()}


#: one chat, or several
Chats: TypeAlias = "ChatRow | Sequence[Mapping[str, Any]] | Sequence[ChatRow | Sequence[Mapping[str, Any]]]"
#: those of all rows, or of each
Params: TypeAlias = SamplingParams | Sequence[SamplingParams | None] | None


def rows_of(chats: Any) -> list[ChatRow]:
    """One chat, or several, as rows."""
    several = isinstance(chats, (list, tuple)) and bool(chats) and isinstance(chats[0], ChatRow)
    one = isinstance(chats, ChatRow) or (is_one(chats) and not several)
    return [each if isinstance(each, ChatRow) else ChatRow(each) for each in ([chats] if one else chats)]


class _ChatOptions(TypedDict, total=False):
    """Fields of :class:`ChatRow` for rows that have none."""

    tools: Sequence[Tool] | None
    tool_choice: str | Tool | None
    parallel_tool_calls: bool | None
    response_format: Schema | type[Any] | None
    chat_template_kwargs: Mapping[str, Any] | None


class ChatArguments(_ChatOptions, RequestOptions, total=False):
    """These, and options of all requests."""


def split_chat(given: ChatArguments) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of chats, and the options of requests."""
    names = _ChatOptions.__annotations__.keys()
    parts: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for name, value in given.items():
        parts[name not in names][name] = value
    return parts


@contextmanager
def kept(found: list[Any]) -> Iterator[None]:
    """Have whatever ends a call early take along what is done, as ``results``."""
    try:
        yield
    except BaseException as error:
        error.results = found  # type: ignore[attr-defined]
        raise


class ParamsOf:
    """The parameters of each row of a call, which has one for all or a list with one for each."""

    def __init__(self, given: SamplingParams | Sequence[SamplingParams | None] | None, rows: Any) -> None:
        """Raises InvalidRequest for what is neither, and for lists of different lengths."""
        self._each: list[SamplingParams | None] | None = None
        self._all: SamplingParams | None = None
        if isinstance(given, (list, tuple)):
            self._each = list(given)
            wrong = next((at for at, each in enumerate(given) if not _fits(each)), None)
            if wrong is not None:
                raise InvalidRequest(f"params[{wrong}]", f"must be SamplingParams, got {shown(given[wrong])}")
            if hasattr(rows, "__len__") and len(rows) != len(given):
                raise InvalidRequest("params", f"are {len(given)}, for {len(rows)} prompts")
        elif _fits(given):
            self._all = given  # type: ignore[assignment]
        else:
            raise InvalidRequest("params", f"must be SamplingParams, or a list of them, got {shown(given)}")

    @property
    def common(self) -> SamplingParams | None:
        """Those of all rows, if these are the same."""
        return self._all

    def of(self, index: int) -> SamplingParams | None:
        """Those of a row. Raises InvalidRequest."""
        if self._each is None:
            return self._all
        if index >= len(self._each):
            raise InvalidRequest("params", f"are {len(self._each)}, for more prompts")
        return self._each[index]


def _fits(given: Any) -> bool:
    return given is None or isinstance(given, SamplingParams)
