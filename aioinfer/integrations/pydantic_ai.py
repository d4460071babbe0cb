"""pydantic-ai's model over a running engine; needs pydantic-ai-slim."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pydantic_ai import messages as ai
from pydantic_ai.models import Model, StreamedResponse
from pydantic_ai.profiles import ModelProfile
from pydantic_ai.usage import RequestUsage

from aioinfer.integrations import calls

__all__ = ["AioInferModel"]
#: read below, or by pydantic-ai; others that are no arguments of chats are refused
_READ = {"extra_body", "first_event_timeout", "framing_announcement", "request_timeout", "stop_sequences"}


class AioInferModel(Model[None]):
    """A model. Its keywords, settings and their ``extra_body`` are those of :class:`.calls.Calls`."""

    unsupported_settings = frozenset({"extra_headers", "max_retries", "timeout"})
    system, model_name = "aioinfer", ""

    def __init__(self, engine: Any, *, settings: Any = None, profile: Any = None, **usual: Any) -> None:
        own = ModelProfile(supports_json_schema_output=True, default_structured_output_mode="native")
        super().__init__(settings=settings, profile=own | (profile or {}))
        self._calls = calls.Calls(self, engine, usual)
        self.model_name = self._calls.model_name

    async def request(self, *asked: Any, **named: Any) -> ai.ModelResponse:
        async with self.request_stream(*asked, **named) as response:
            response.deltas = calls.at_once(response.deltas)
            _ = [event async for event in response]
            return response.get()

    @asynccontextmanager
    async def request_stream(
        self, messages: Any, model_settings: Any, model_request_parameters: Any, run_context: Any = None
    ) -> AsyncGenerator[Any]:
        settings = {**(self.settings or {}), **(model_settings or {})}
        _, asked = self.prepare_request(model_settings, model_request_parameters)
        given = {name: settings[name] for name in settings.keys() - _READ - self.unsupported_settings}
        given |= {"stop": settings.get("stop_sequences", given.get("stop")), **settings.get("extra_body", {})}
        tools, outputs = asked.declared_tool_defs, [each.name for each in asked.output_tools]
        choice, left = calls.chosen(given.get("tool_choice"), [*tools], outputs, text=asked.allow_text_output)
        told = [{**vars(tools[e]), "parameters": tools[e].parameters_json_schema} for e in tools if e in left]
        given |= calls.offer(told, choice)
        if asked.output_mode == "native":
            given["response_format"] = calls.closed(asked.output_object.json_schema)
        found = [each for message in messages for each in _read(message)]
        parts = self._get_instruction_parts(messages, asked) or ()
        found += [calls.message("system", part.content) for part in parts]
        async with self._calls.chat(calls.one_system(found), **given) as chat:
            yield _Response(asked, chat, self.model_name, datetime.now(UTC))


def _read(message: ai.ModelMessage) -> Iterator[dict[str, Any]]:
    if isinstance(message, ai.ModelResponse):
        called = [(e.tool_call_id, e.tool_name, e.args_as_json_str()) for e in message.tool_calls]
        yield calls.message("assistant", message.text, called, reasoning=message.thinking)
    for part in message.parts if isinstance(message, ai.ModelRequest) else ():
        if isinstance(part, ai.ToolReturnPart) and not part.files:
            yield calls.message("tool", part.model_response_str(), call_id=part.tool_call_id)
        elif isinstance(part, ai.SystemPromptPart | ai.UserPromptPart):
            yield calls.message(part.part_kind.removesuffix("-prompt"), calls.content(part.content))
        else:
            raise calls.unread(part)


@dataclass
class _Response(StreamedResponse):
    deltas: Any
    model_name: str = ""
    timestamp: datetime = datetime.min
    provider_name, provider_url = "aioinfer", None

    def _get_event_iterator(self) -> AsyncIterator[ai.ModelResponseStreamEvent]:
        return (event async for delta in self.deltas for event in self._events(delta))

    def _events(self, delta: Any) -> Iterator[ai.ModelResponseStreamEvent]:
        made = self._parts_manager
        if delta.reasoning:
            yield from made.handle_thinking_delta(vendor_part_id="reasoning", content=delta.reasoning)
        if delta.content:
            yield from made.handle_text_delta(vendor_part_id="content", content=delta.content)
        for each in delta.tool_calls:
            own = {"vendor_part_id": each.index, "tool_name": each.name, "tool_call_id": each.id}
            yield from made.handle_tool_call_delta_events(**own, args=each.arguments or None)
        if (usage := delta.usage) is not None:
            self._usage = RequestUsage(**calls.counts(usage), cache_read_tokens=usage.cached_tokens)
            self.finish_reason = calls.ended(delta)

    async def close_stream(self) -> None:
        self.deltas.close()
