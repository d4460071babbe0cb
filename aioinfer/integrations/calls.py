"""What the adapters have in common: chats with any kind of engine, on any loop and any thread."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeAlias

from pydantic import BaseModel, Field, PrivateAttr

from aioinfer.chat.results import ChatDelta, ChatFinishReason, ChatResult, ToolCall
from aioinfer.client.chats import ChatStream
from aioinfer.client.engine_like import EngineLike
from aioinfer.client.requests import refuse_names
from aioinfer.client.rows import ChatArguments
from aioinfer.client.threadsafe import RemoteStream, ThreadsafeEngine
from aioinfer.errors import ConfigError, InvalidRequest, WrongLoop, shown
from aioinfer.loop.belonging import running_loop
from aioinfer.outputs import Usage
from aioinfer.params import SamplingParams
from aioinfer.text.grammar_spec import closed
from aioinfer.text.tool_calls import ToolCallDelta

__all__ = [
    "NAMES", "AnyEngine", "Calls", "Chat", "HasCalls", "SoFar", "at_once", "chosen", "closed", "content",
    "counts", "ended", "message", "offer", "one_system", "parsed", "unread", "whole",
]  # fmt: skip

#: started before the first call
AnyEngine: TypeAlias = EngineLike | ThreadsafeEngine
#: awaited or iterated on the running loop, and entered: leaving it ends the request
Chat: TypeAlias = ChatStream | RemoteStream[ChatDelta, ChatResult]

_ARGUMENTS = frozenset(ChatArguments.__annotations__)
#: what a call may give
NAMES = _ARGUMENTS | SamplingParams.__dataclass_fields__.keys()
_DESCRIBED = ("name", "description", "parameters", "strict")
#: what no framework has a place for
_UNDELIVERED = ("logprobs", "prompt_logprobs")


class Calls:
    """An engine for an adapter, with arguments that all its chats have unless a call has others.

    Arguments are the fields of :class:`~aioinfer.SamplingParams`, the keyword arguments of
    :meth:`aioinfer.Engine.chat`, and options of requests, by their names; None: not given.
    """

    def __init__(self, taker: object, engine: AnyEngine, usual: Mapping[str, Any] | None = None) -> None:
        """``taker``: the adapter, in messages. Raises ConfigError and InvalidRequest, and TypeError for a
        name that is none."""
        if not isinstance(engine, AnyEngine):
            raise ConfigError(
                "engine must be an Engine, a Dispatcher, the threadsafe() of one, or an Engine.in_thread(), "
                f"got {shown(engine)}"
            )
        self._engine = engine
        #: the engine since its latest start, for other loops and threads
        self._far: ThreadsafeEngine | None = None
        self._taker = type(taker).__name__
        self._usual = dict(usual or {})
        self._arguments({})

    def chat(self, messages: Sequence[Mapping[str, Any]], **given: Any) -> Chat:
        """A chat for the running loop. Raises as :meth:`aioinfer.Engine.chat`."""
        engine, remote = self._engine, self._remote
        if isinstance(engine, EngineLike) and running_loop() is remote.serving.loop:
            return engine.chat(messages, **self._arguments(given))
        return remote.chat(messages, **self._arguments(given))

    def chat_here(
        self, messages: Sequence[Mapping[str, Any]], **given: Any
    ) -> RemoteStream[ChatDelta, ChatResult]:
        """A chat for which this thread waits. Raises as :meth:`aioinfer.Engine.chat`; WrongLoop on the
        engine's own loop."""
        self.refuse_own_loop()
        return self._remote.chat(messages, **self._arguments(given))

    def refuse_own_loop(self) -> None:
        """Raise WrongLoop on the engine's own loop, where neither this thread nor others that it waits for
        would have an answer."""
        if running_loop() is self._remote.serving.loop:
            raise WrongLoop(
                "a synchronous call would stop the engine's loop, on which it is made: await the asynchronous"
                " one, or make it in a thread (asyncio.to_thread)"
            )

    def are_for(self, engine: object, usual: Mapping[str, Any] | None) -> bool:
        """These were made with this engine and these arguments."""
        return self._engine is engine and self._usual == (usual or {})

    @property
    def model_name(self) -> str:
        """The name of the model."""
        engine = self._engine
        return (engine if isinstance(engine, EngineLike) else engine.serving).config.model_name

    @property
    def context_length(self) -> int:
        """Most tokens of a prompt and its output. Raises EngineClosed before the start."""
        return self._remote.serving.info.max_model_len

    @property
    def has_tools(self) -> bool:
        """The model's format of calls of tools is known. Raises EngineClosed before the start."""
        return self._remote.chat_format.tools is not None

    @property
    def _remote(self) -> ThreadsafeEngine:
        if isinstance(self._engine, ThreadsafeEngine):
            return self._engine
        if self._far is None or self._far.serving.closed:
            self._far = self._engine.threadsafe()
        return self._far

    def __deepcopy__(self, _: object) -> Self:
        return self  # a copy of an adapter has the same engine

    def _arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        kept = self._usual | {name: value for name, value in given.items() if value is not None}
        kept = {name: value for name, value in kept.items() if value is not None}
        params = {name: kept.pop(name) for name in SamplingParams.__dataclass_fields__ if name in kept}
        refuse_names(self._taker, kept.keys() - _ARGUMENTS)
        for name in _UNDELIVERED:
            if name in params:
                raise InvalidRequest(name, f"has no place in the answers of {self._taker}: use engine.chat")
        if isinstance(bias := params.get("logit_bias"), Mapping):  # OpenAI's has texts
            params["logit_bias"] = {int(each) if str(each).isdigit() else each: bias[each] for each in bias}
        return {"params": SamplingParams(**params), **kept}


def whole(answer: ChatResult) -> ChatDelta:
    """An answer as its only delta."""
    parts = [ToolCallDelta(at, e.id, e.name, e.arguments) for at, e in enumerate(answer.tool_calls)]
    return ChatDelta(answer.content or "", answer.reasoning or "", parts, answer.finish_reason, answer.usage)


async def at_once(chat: Chat) -> AsyncIterator[ChatDelta]:
    """The deltas of a chat that is not streamed."""
    yield whole(await chat)


class HasCalls(BaseModel):
    """Adapters that are pydantic models, with ``extra="allow"``: what is no field is an argument of chats."""

    engine: Any = Field(exclude=True, repr=False)
    _latest: Calls = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)
        self._latest = Calls(self, self.engine, self.model_extra)

    @property
    def _calls(self) -> Calls:
        """With the engine and the arguments that the model has now: assigned, or those of an updated copy."""
        if not self._latest.are_for(self.engine, self.model_extra):
            self._latest = Calls(self, self.engine, self.model_extra)
        return self._latest

    def __deepcopy__(self, _: object = None) -> Self:
        return self.model_copy()


@dataclass(slots=True)
class SoFar:
    """An answer as far as its deltas have come, as a :class:`~aioinfer.ChatResult` has it."""

    content: str = ""
    reasoning: str = ""
    finish_reason: ChatFinishReason | None = None
    usage: Usage | None = None
    #: ids, names and arguments
    _called: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def tool_calls(self) -> list[ToolCall]:
        return [ToolCall(*each) for each in self._called]

    def add(self, delta: ChatDelta) -> Self:
        self.content += delta.content
        self.reasoning += delta.reasoning
        for each in delta.tool_calls:
            last = self._called.pop() if each.id is None else (each.id, each.name or "", "")
            self._called.append((*last[:2], last[2] + each.arguments))
        self.finish_reason, self.usage = delta.finish_reason, delta.usage
        return self


def message(
    role: str,
    content: str | list[dict[str, Any]] | None,
    called: Iterable[tuple[str | None, str, Any]] = (),
    call_id: str | None = None,
    reasoning: str | None = None,
) -> dict[str, Any]:
    """A message in OpenAI's form. ``called``: ids, names and arguments of its calls; ``call_id``: in the role
    "tool", the call whose outcome it is."""
    found: dict[str, Any] = {"role": role, "content": content}
    if reasoning:
        found["reasoning_content"] = reasoning
    if role == "tool":
        found["tool_call_id"] = call_id
    for at, (id_, name, given) in enumerate(called):
        text = given if isinstance(given, str) else json.dumps(given)
        call = {"id": id_ or f"call_{at}", "type": "function", "function": {"name": name, "arguments": text}}
        found.setdefault("tool_calls", []).append(call)
    return found


def content(given: str | Iterable[Any], text: str | None = None) -> str | list[dict[str, Any]] | None:
    """The content of a message: a text, or texts and images as LlamaIndex and pydantic-ai have them; ``text``
    is what it is without images. Raises InvalidRequest for what else there is."""
    if isinstance(given, str):
        return given
    parts = [_part(each) for each in given]
    images = any(each["type"] == "image" for each in parts)
    return parts if images or (parts and text is None) else text


def _part(given: Any) -> dict[str, Any]:
    text = given if isinstance(given, str) else getattr(given, "text", None)
    if isinstance(text, str):
        return {"type": "text", "text": text}
    if getattr(given, "block_type", "") == "image" and given.url is given.detail is None:
        return {"type": "image", "image": given.resolve_image().read()}
    if getattr(given, "is_image", False) and not given.vendor_metadata:
        return {"type": "image", "image": given.data}
    raise unread(given)


def ended(delta: ChatDelta) -> Any:
    """Why an answer has ended, by words that most frameworks have."""
    reason = delta.finish_reason
    return {"tool_calls": "tool_call", "abort": "error"}.get(reason or "", reason)


def unread(part: object) -> InvalidRequest:
    """The error for a part of a message that the engine does not read."""
    return InvalidRequest("messages", f"{type(part).__name__} is not read here, or not with all that it has")


def one_system(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with what the system says in one at the front, as chat templates have it."""
    found = [*messages]
    told = [each["content"] for each in found if each["role"] == "system"]
    others = [each for each in found if each["role"] != "system"]
    return [message("system", "\n\n".join(told)), *others] if told else others


def chosen(
    choice: Any, tools: Sequence[str], outputs: Sequence[str], *, text: bool
) -> tuple[str | None, Sequence[str]]:
    """What "tool_choice" of pydantic-ai asks for: a choice of :func:`offer`, and the names of tools that it
    leaves. ``outputs``: those of them by which an agent has its answer; ``text``: it may have text instead.
    Raises InvalidRequest if a call is required, and no tool left."""
    mode = "auto" if text and choice != "required" else "required"
    if (functions := getattr(choice, "function_tools", None)) is not None:  # ToolOrOutput
        tools = [each for each in tools if each in functions or each in outputs]
    elif choice in ("none", []):
        tools, mode = (outputs, mode) if outputs else (tools, "none")
    elif isinstance(choice, list):
        tools, mode = [each for each in tools if each in choice], "required"
    if mode == "required" and not tools:
        raise InvalidRequest("tool_choice", f"no tool is left to call: {shown(choice)}")
    return mode if tools else None, tools


def offer(
    functions: Sequence[Mapping[str, Any]], choice: Any = None, *, strict: bool | None = None
) -> dict[str, Any]:
    """The arguments ``tools`` and ``tool_choice`` for functions, each with a name, a description, parameters.

    ``choice`` may be the name of one, "any" or True. A grammar holds arguments to their schema, and to the
    members that it names, unless ``strict`` is False, of the call or of a function.
    """
    tools = []
    for each in functions:
        found = {name: each[name] for name in _DESCRIBED if each.get(name) is not None}
        found.setdefault("strict", strict is not False)
        found["parameters"] = found.get("parameters") or {"type": "object", "properties": {}}
        if found["strict"]:
            found["parameters"] = closed(found["parameters"])
        tools.append({"type": "function", "function": found})
    if choice in [each["name"] for each in functions]:
        choice = {"type": "function", "function": {"name": choice}}
    return {
        "tools": tools or None,
        "tool_choice": "required" if choice is True or choice == "any" else choice,
    }


def parsed(call: ToolCall) -> Any:
    """The arguments of a call: an object, or their text while or where that is none."""
    try:
        found = json.loads(call.arguments)
    except ValueError:
        return call.arguments
    return found if isinstance(found, dict) else call.arguments


def counts(usage: Usage | None) -> dict[str, int]:
    """Counts of tokens by the names that most frameworks have for them; none before the end."""
    if usage is None:
        return {}
    return {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens}
