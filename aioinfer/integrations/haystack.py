"""Haystack's chat generator over a running engine; needs haystack-ai."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import haystack.dataclasses as data
from haystack import component
from haystack.dataclasses import ChatMessage, StreamingCallbackT, StreamingChunk, select_streaming_callback
from haystack.tools import ToolsType, flatten_tools_or_toolsets

from aioinfer.chat.results import ChatDelta
from aioinfer.integrations import calls

__all__ = ["AioInferChatGenerator"]


@component
class AioInferChatGenerator:
    """A chat generator. ``generation_kwargs``, here and of each call, are those of
    :class:`aioinfer.integrations.calls.Calls`."""

    def __init__(
        self, engine: Any, generation_kwargs: dict[str, Any] | None = None, *, tools_strict: bool = True,
        streaming_callback: StreamingCallbackT | None = None, tools: ToolsType | None = None,
    ) -> None:  # fmt: skip
        self._calls = calls.Calls(self, engine, generation_kwargs)
        self._callback, self._tools, self._strict = streaming_callback, tools, tools_strict

    @component.output_types(replies=list[ChatMessage])
    def run(
        self, messages: list[ChatMessage] | str, streaming_callback: StreamingCallbackT | None = None,
        generation_kwargs: dict[str, Any] | None = None, *, tools: ToolsType | None = None,
    ) -> dict[str, list[ChatMessage]]:  # fmt: skip
        tell = select_streaming_callback(self._callback, streaming_callback, requires_async=False)
        with self._calls.chat_here(**self._asked(messages, generation_kwargs, tools)) as chat:
            if tell is None:
                return self._replies(chat.result())
            said, blocks = calls.SoFar(), list[Any]()
            for delta in chat:
                said.add(delta)
                for chunk in self._chunks(delta, blocks):
                    tell(chunk)
            return self._replies(said)

    @component.output_types(replies=list[ChatMessage])
    async def run_async(
        self, messages: list[ChatMessage] | str, streaming_callback: StreamingCallbackT | None = None,
        generation_kwargs: dict[str, Any] | None = None, *, tools: ToolsType | None = None,
    ) -> dict[str, list[ChatMessage]]:  # fmt: skip
        tell = select_streaming_callback(self._callback, streaming_callback, requires_async=True)
        async with self._calls.chat(**self._asked(messages, generation_kwargs, tools)) as chat:
            said, blocks = calls.SoFar(), list[Any]()
            async for delta in chat:
                said.add(delta)
                for chunk in self._chunks(delta, blocks) if tell else ():
                    if inspect.isawaitable(told := tell(chunk)):
                        await told
            return self._replies(said)

    def _asked(self, messages: Any, given: dict[str, Any] | None, tools: Any) -> dict[str, Any]:
        read = [ChatMessage.from_user(messages)] if isinstance(messages, str) else messages
        found = flatten_tools_or_toolsets(self._tools if tools is None else tools)
        own = {"tool_choice": None, **(given or {})}
        own |= calls.offer([each.tool_spec for each in found], own["tool_choice"], strict=self._strict)
        return own | {"messages": [each.to_openai_dict_format(require_tool_call_ids=False) for each in read]}

    def _replies(self, answer: Any) -> dict[str, list[ChatMessage]]:
        """Calls that are not complete are left out, as by other generators."""
        parsed = [(each, calls.parsed(each)) for each in answer.tool_calls]
        made = [data.ToolCall(each.name, given, each.id) for each, given in parsed if isinstance(given, dict)]
        own = {"tool_calls": made, "reasoning": answer.reasoning or None, "meta": self._meta(answer)}
        return {"replies": [ChatMessage.from_assistant(answer.content or None, **own)]}

    def _meta(self, part: Any) -> dict[str, Any]:
        usage = part.usage and {**asdict(part.usage), "total_tokens": part.usage.total_tokens}
        told = {"finish_reason": part.finish_reason, "usage": usage}
        return {"model": self._calls.model_name, "index": 0, **told}

    def _chunks(self, delta: ChatDelta, blocks: list[Any]) -> Iterator[StreamingChunk]:
        """``blocks``: what has begun, by the name of its field or the number of the call."""
        parts: list[Any] = []
        if delta.reasoning:
            parts.append(("reasoning", "reasoning", data.ReasoningContent(delta.reasoning)))
        if delta.content or not (parts or delta.tool_calls):
            parts.append(("content", "content", delta.content))
        for each in delta.tool_calls:
            part = data.ToolCallDelta(each.index, each.name, each.arguments, each.id)
            parts.append((each.index, "tool_calls", [part]))
        told = {"component_info": data.ComponentInfo.from_component(self), "meta": self._meta(delta)}
        for block, field, part in parts:
            start = block not in blocks
            blocks += [block] if start else []
            own = {"content": "", field: part, "index": blocks.index(block), "start": start}
            yield StreamingChunk(**own, **told, finish_reason=delta.finish_reason)
