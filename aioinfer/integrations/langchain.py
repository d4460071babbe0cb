"""LangChain's chat model over a running engine; needs langchain-core."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from operator import itemgetter
from typing import Any

from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages import convert_to_openai_messages as converted
from langchain_core.messages.tool import default_tool_parser, tool_call_chunk
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from pydantic import BaseModel

from aioinfer.chat import results
from aioinfer.integrations import calls

__all__ = ["ChatAioInfer"]


class ChatAioInfer(calls.HasCalls, BaseChatModel, extra="allow"):
    """A chat model. Keywords, also of calls, are those of :class:`aioinfer.integrations.calls.Calls`."""

    _llm_type = property(lambda self: "aioinfer")

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model": self._calls.model_name, **(self.model_extra or {})}

    def batch(self, *asked: Any, **given: Any) -> Any:
        self._calls.refuse_own_loop()  # its threads are on none
        return super().batch(*asked, **given)

    def batch_as_completed(self, *asked: Any, **given: Any) -> Any:
        self._calls.refuse_own_loop()
        return super().batch_as_completed(*asked, **given)

    def _generate(self, messages: Any, stop: Any = None, *_: Any, **given: Any) -> ChatResult:
        return self._result(self._calls.chat_here(converted(messages), stop=stop, **given).result())

    async def _agenerate(self, messages: Any, stop: Any = None, *_: Any, **given: Any) -> ChatResult:
        return self._result(await self._calls.chat(converted(messages), stop=stop, **given))

    def _stream(self, messages: Any, stop: Any = None, *_: Any, **given: Any) -> Iterator[Any]:
        with self._calls.chat_here(converted(messages), stop=stop, **given) as chat:
            yield from map(self._chunk, chat)

    async def _astream(self, messages: Any, stop: Any = None, *_: Any, **given: Any) -> AsyncIterator[Any]:
        async with self._calls.chat(converted(messages), stop=stop, **given) as chat:
            async for delta in chat:
                yield self._chunk(delta)

    def _result(self, answer: results.ChatResult) -> ChatResult:
        called, invalid = default_tool_parser(answer.message.get("tool_calls", []))
        message = AIMessage(tool_calls=called, invalid_tool_calls=invalid, **self._said(answer))
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _chunk(self, part: results.ChatDelta) -> ChatGenerationChunk:
        told = part.tool_calls
        made = [tool_call_chunk(name=c.name, args=c.arguments, id=c.id, index=c.index) for c in told]
        return ChatGenerationChunk(message=AIMessageChunk(tool_call_chunks=made, **self._said(part)))

    def _said(self, part: results.ChatResult | results.ChatDelta) -> dict[str, Any]:
        said: dict[str, Any] = {"content": part.content or ""}
        if part.reasoning:
            said["additional_kwargs"] = {"reasoning_content": part.reasoning}
        if (usage := part.usage) is not None:
            name = self._calls.model_name
            said["response_metadata"] = {"finish_reason": part.finish_reason, "model_name": name}
            said["usage_metadata"] = calls.counts(usage) | {
                "total_tokens": usage.total_tokens,
                "input_token_details": {"cache_read": usage.cached_tokens},
                "output_token_details": {"reasoning": usage.reasoning_tokens},
            }
        return said

    def bind_tools(
        self, tools: Sequence[Any], *, tool_choice: Any = None, strict: bool | None = None, **given: Any
    ) -> Runnable[LanguageModelInput, AIMessage]:
        told = [convert_to_openai_tool(each)["function"] for each in tools]
        return self.bind(**calls.offer(told, tool_choice, strict=strict), **given)

    def with_structured_output(
        self, schema: Any, *, include_raw: bool = False, method: str = "json_schema", **given: Any
    ) -> Runnable[LanguageModelInput, Any]:
        if method != "json_schema":
            return super().with_structured_output(schema, include_raw=include_raw, **given)
        model = isinstance(schema, type) and issubclass(schema, BaseModel)
        parser: Any = PydanticOutputParser(pydantic_object=schema) if model else JsonOutputParser()
        form = schema if isinstance(schema, type) else convert_to_json_schema(schema)
        llm = self.bind(response_format=form, **given)
        parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
        failed = RunnablePassthrough.assign(parsed=lambda _: None)
        raw = RunnableMap(raw=llm) | parsed.with_fallbacks([failed], exception_key="parsing_error")
        return raw if include_raw else llm | parser
