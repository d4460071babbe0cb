"""DSPy's language model over a running engine; needs dspy."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from dspy import LM, lm15
from dspy.clients.lm15_boundary import request_kwargs

from aioinfer.chat.results import ChatDelta, ChatResult
from aioinfer.errors import AioInferError, InvalidRequest, Rejected, TimedOut
from aioinfer.integrations import calls

__all__ = ["AioInferLM"]

_CONFIG = ("temperature", "max_tokens", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty")
_ERRORS: Any = {Rejected: lm15.RateLimitError, TimedOut: lm15.TimeoutError}
_ERRORS |= {InvalidRequest: lm15.InvalidRequestError, "context_length_exceeded": lm15.ContextLengthError}


class AioInferLM(LM):
    """A language model. Keywords are those of ``LM``, with no cache by default, and of :class:`.Calls`."""

    def __init__(self, engine: Any, *, cache: bool = False, **given: Any) -> None:
        usual = {name: given.pop(name) for name in calls.NAMES - {*_CONFIG, "stop"} if name in given}
        own = calls.Calls(self, engine, usual)
        model = f"aioinfer/{own.model_name}"
        super().__init__(model, engine=_Engine(own), async_engine=_AsyncEngine(own), cache=cache, **given)


@dataclass
class _Engine:
    own: calls.Calls
    supports_response_schema = True
    supported_params = frozenset({"response_format", "tools", "tool_choice", "stop", *_CONFIG})
    supports_function_calling = property(lambda self: self.own.has_tools)

    def complete(self, request: lm15.Request) -> lm15.Response:
        with _told():
            return _response(request, self.own.chat_here(**_asked(request)).result())

    def stream(self, request: lm15.Request) -> Any:
        yield lm15.StreamStartEvent(model=request.model)
        with _told(), self.own.chat_here(**_asked(request)) as chat:
            for delta in chat:
                yield from _events(delta)


class _AsyncEngine(_Engine):
    async def complete(self, request: lm15.Request) -> lm15.Response:
        with _told():
            return _response(request, await self.own.chat(**_asked(request)))

    async def stream(self, request: lm15.Request) -> AsyncIterator[Any]:
        yield lm15.StreamStartEvent(model=request.model)
        with _told():
            async with self.own.chat(**_asked(request)) as chat:
                async for delta in chat:
                    for event in _events(delta):
                        yield event


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except AioInferError as error:
        kind = _ERRORS.get(getattr(error, "code", None)) or _ERRORS.get(type(error), lm15.ProviderError)
        raise kind(str(error), retry_after=getattr(error, "retry_after", None)) from error


def _asked(request: lm15.Request) -> dict[str, Any]:
    kept = [[e for e in each.parts if e.type != "thinking"] or each.parts for each in request.messages]
    told = [replace(each, parts=parts) for each, parts in zip(request.messages, kept, strict=True)]
    given: dict[str, Any] = request_kwargs(replace(request, messages=told), "chat")
    given["max_tokens"] = given.pop("max_completion_tokens", given.get("max_tokens"))
    functions = [{**each["function"], "strict": None} for each in given.pop("tools", ())]
    return given | calls.offer(functions, given.get("tool_choice"))


def _response(request: lm15.Request, answer: ChatResult) -> lm15.Response:
    events = [lm15.StreamStartEvent(model=request.model), *_events(calls.whole(answer))]
    return lm15.materialize_response(iter(events), request)


def _events(delta: ChatDelta) -> Iterator[Any]:
    if delta.reasoning:
        yield lm15.StreamDeltaEvent(lm15.ThinkingDelta(delta.reasoning))
    if delta.content:
        yield lm15.StreamDeltaEvent(lm15.TextDelta(delta.content, part_index=1))
    for each in delta.tool_calls:
        own = {"part_index": 2 + each.index, "id": each.id, "name": each.name}
        yield lm15.StreamDeltaEvent(lm15.ToolCallDelta(each.arguments, **own))
    if (usage := delta.usage) is not None:
        counted = lm15.Usage(**calls.counts(usage), cache_read_tokens=usage.cached_tokens)
        yield lm15.StreamEndEvent(calls.ended(delta), counted)
