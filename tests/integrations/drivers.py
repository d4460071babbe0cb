"""The adapters behind one surface, for what must hold for all of them.

A driver imports its framework when it is made: without ``--rest`` none is imported.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.integrations.libraries import require

__all__ = ["DRIVERS", "Driver", "Said", "weather"]


def weather(city: str) -> str:
    """The weather of a city."""
    return f"{city}: rain"


@dataclass
class Said:
    """A whole answer."""

    text: str
    tokens: tuple[int, int]
    reason: Any


class Driver(ABC):
    """``given``: keyword arguments of the adapter."""

    def __init__(self, engine: Any, **given: Any) -> None:
        self.ours = require(type(self).__name__)
        self.model = self.make(engine, given)

    @abstractmethod
    def make(self, engine: Any, given: dict[str, Any]) -> Any: ...

    @abstractmethod
    async def ask(self, text: str, **given: Any) -> Said: ...

    @abstractmethod
    def ask_here(self, text: str) -> str:
        """From a thread, which it blocks."""

    @abstractmethod
    def stream(self, text: str) -> AsyncIterator[str]: ...

    @abstractmethod
    def stream_here(self, text: str) -> Iterator[str]: ...

    @abstractmethod
    async def typed(self, text: str, kind: Any) -> Any:
        """An instance of a pydantic model."""

    @abstractmethod
    async def turns(self, text: str, *, streamed: bool) -> tuple[str, Any, str]:
        """The name and the arguments of the call that the first answer makes of :func:`weather`, and the
        second answer, to what that returned."""


class langchain(Driver):
    def make(self, engine: Any, given: dict[str, Any]) -> Any:
        return self.ours.ChatAioInfer(engine=engine, **given)

    async def ask(self, text: str, **given: Any) -> Said:
        found = await self.model.ainvoke(text, **given)
        usage = found.usage_metadata
        reason = found.response_metadata["finish_reason"]
        return Said(found.content, (usage["input_tokens"], usage["output_tokens"]), reason)

    def ask_here(self, text: str) -> str:
        found: str = self.model.invoke(text).content
        return found

    async def stream(self, text: str) -> AsyncIterator[str]:
        async for each in self.model.astream(text):
            yield each.content

    def stream_here(self, text: str) -> Iterator[str]:
        return (each.content for each in self.model.stream(text))

    async def typed(self, text: str, kind: Any) -> Any:
        return await self.model.with_structured_output(kind).ainvoke(text)

    async def turns(self, text: str, *, streamed: bool) -> tuple[str, Any, str]:
        from langchain_core.messages import HumanMessage, ToolMessage

        bound, messages = self.model.bind_tools([weather]), [HumanMessage(text)]
        if streamed:
            pieces = [each async for each in bound.astream(messages)]
            assert len([part for each in pieces for part in each.tool_call_chunks]) > 3
            answer = pieces[0]
            for each in pieces[1:]:
                answer += each
        else:
            answer = await bound.ainvoke(messages)
        (call,) = answer.tool_calls
        messages += [answer, ToolMessage(weather(**call["args"]), tool_call_id=call["id"])]
        return call["name"], call["args"], (await bound.ainvoke(messages)).content


class llama_index(Driver):
    def make(self, engine: Any, given: dict[str, Any]) -> Any:
        return self.ours.AioInfer(engine=engine, **given)

    def _messages(self, text: str) -> list[Any]:
        from llama_index.core.llms import ChatMessage

        return [ChatMessage(text)]

    async def ask(self, text: str, **given: Any) -> Said:
        found = await self.model.achat(self._messages(text), **given)
        usage = found.raw["usage"]
        tokens = usage["input_tokens"], usage["output_tokens"]
        return Said(found.message.content, tokens, found.raw["finish_reason"])

    def ask_here(self, text: str) -> str:
        found: str = self.model.complete(text).text
        return found

    async def stream(self, text: str) -> AsyncIterator[str]:
        async for each in await self.model.astream_chat(self._messages(text)):
            yield each.delta

    def stream_here(self, text: str) -> Iterator[str]:
        return (each.delta for each in self.model.stream_complete(text))

    async def typed(self, text: str, kind: Any) -> Any:
        from llama_index.core.prompts import PromptTemplate

        return await self.model.astructured_predict(kind, PromptTemplate(text))

    async def turns(self, text: str, *, streamed: bool) -> tuple[str, Any, str]:
        from llama_index.core.llms import ChatMessage
        from llama_index.core.tools import FunctionTool

        tools = [FunctionTool.from_defaults(weather)]
        if streamed:
            found = [each async for each in await self.model.astream_chat_with_tools(tools, text)]
            assert len({str(each.message.blocks) for each in found}) > 3
            answer = found[-1]
        else:
            answer = await self.model.achat_with_tools(tools, text)
        (call,) = self.model.get_tool_calls_from_response(answer)
        outcome = ChatMessage(
            role="tool",
            content=weather(**call.tool_kwargs),
            additional_kwargs={"tool_call_id": call.tool_id},
        )
        history = [*self._messages(text), answer.message, outcome]
        last = await self.model.achat_with_tools(tools, chat_history=history)
        return call.tool_name, call.tool_kwargs, last.message.content


class haystack(Driver):
    def make(self, engine: Any, given: dict[str, Any]) -> Any:
        return self.ours.AioInferChatGenerator(engine, given)

    async def ask(self, text: str, **given: Any) -> Said:
        (reply,) = (await self.model.run_async(text, generation_kwargs=given))["replies"]
        usage = reply.meta["usage"]
        tokens = usage["prompt_tokens"], usage["completion_tokens"]
        return Said(reply.text, tokens, reply.meta["finish_reason"])

    def ask_here(self, text: str) -> str:
        found: str = self.model.run(text)["replies"][0].text
        return found

    async def stream(self, text: str) -> AsyncIterator[str]:
        """Haystack streams by a callback, which is told here by way of a queue."""
        pieces: asyncio.Queue[str | None] = asyncio.Queue(1)

        async def tell(chunk: Any) -> None:
            await pieces.put(chunk.content)

        async def run() -> None:
            try:
                await self.model.run_async(text, tell)
            finally:
                if not asyncio.current_task().cancelling():  # type: ignore[union-attr]
                    await pieces.put(None)

        task = asyncio.create_task(run())
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
            await task
        finally:
            task.cancel()

    def stream_here(self, text: str) -> Iterator[str]:
        pieces: list[str] = []
        self.model.run(text, lambda chunk: pieces.append(chunk.content))
        return iter(pieces)

    async def typed(self, text: str, kind: Any) -> Any:
        said = await self.ask(text, response_format=kind)
        return kind.model_validate_json(said.text)

    async def turns(self, text: str, *, streamed: bool) -> tuple[str, Any, str]:
        from haystack.dataclasses import ChatMessage
        from haystack.tools import create_tool_from_function

        tools, parts = [create_tool_from_function(weather)], list[Any]()

        async def tell(chunk: Any) -> None:
            parts.extend(chunk.tool_calls or ())

        messages = [ChatMessage.from_user(text)]
        answer = await self.model.run_async(messages, tell if streamed else None, tools=tools)
        messages += answer["replies"]
        call = messages[-1].tool_call
        assert not streamed or "".join(each.arguments for each in parts) == '{"city": "Rome"}'
        messages.append(ChatMessage.from_tool(weather(**call.arguments), origin=call))
        last = await self.model.run_async(messages, tools=tools)
        return call.tool_name, call.arguments, last["replies"][0].text


class dspy(Driver):
    def make(self, engine: Any, given: dict[str, Any]) -> Any:
        return self.ours.AioInferLM(engine, num_retries=0, **given)

    def _request(self, *messages: Any, tools: tuple[Any, ...] = (), **given: Any) -> Any:
        from dspy.lm15 import Config, Message, Request

        asked = tuple(Message.user(each) if isinstance(each, str) else each for each in messages)
        return Request(self.model.model, asked, tools=tools, config=Config(**{**self.model.kwargs, **given}))

    async def ask(self, text: str, **given: Any) -> Said:
        found = await self.model.acall(self._request(text, **given))
        return Said(found.text, (found.usage.input_tokens, found.usage.output_tokens), found.finish_reason)

    def ask_here(self, text: str) -> str:
        found: str = self.model(text)[0]
        return found

    async def stream(self, text: str) -> AsyncIterator[str]:
        from contextlib import aclosing

        async with aclosing(self.model._async_engine_spec.stream(self._request(text))) as events:
            async for each in events:
                if each.type == "delta":
                    yield each.delta.text

    def stream_here(self, text: str) -> Iterator[str]:
        events = self.model._engine_spec.stream(self._request(text))
        return (each.delta.text for each in events if each.type == "delta")

    async def typed(self, text: str, kind: Any) -> Any:
        (answer,) = await self.model.acall(text, response_format=kind)
        return kind.model_validate_json(answer)

    async def turns(self, text: str, *, streamed: bool) -> tuple[str, Any, str]:
        from dspy.lm15 import FunctionTool, Message, TextPart, ToolResultPart, amaterialize_response

        schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
        tools = (FunctionTool("weather", "The weather of a city.", schema),)
        request = self._request(text, tools=tools)
        if streamed:
            answer = await amaterialize_response(self.model._async_engine_spec.stream(request), request)
        else:
            answer = await self.model.acall(request)
        (call,) = answer.tool_calls
        outcome = ToolResultPart(call.id, (TextPart(weather(**call.input)),))
        messages = text, answer.message, Message.tool(outcome)
        last = await self.model.acall(self._request(*messages, tools=tools))
        return call.name, call.input, last.text


class pydantic_ai(Driver):
    def make(self, engine: Any, given: dict[str, Any]) -> Any:
        return self.ours.AioInferModel(engine, **given)

    def _agent(self, **given: Any) -> Any:
        from pydantic_ai import Agent

        return Agent(self.model, **given)

    async def ask(self, text: str, **given: Any) -> Said:
        if "stop" in given:
            given["stop_sequences"] = given.pop("stop")
        found = await self._agent().run(text, model_settings=given)
        usage = found.usage
        return Said(found.output, (usage.input_tokens, usage.output_tokens), found.response.finish_reason)

    def ask_here(self, text: str) -> str:
        return asyncio.run(self.ask(text)).text  # as ``run_sync`` does, on a loop of its thread

    async def stream(self, text: str) -> AsyncIterator[str]:
        async with self._agent().run_stream(text) as found:
            async for each in found.stream_text(delta=True, debounce_by=None):
                yield each

    def stream_here(self, text: str) -> Iterator[str]:
        async def pieces() -> list[str]:
            return [each async for each in self.stream(text)]

        return iter(asyncio.run(pieces()))

    async def typed(self, text: str, kind: Any) -> Any:
        return (await self._agent(output_type=kind).run(text)).output

    async def turns(self, text: str, *, streamed: bool) -> tuple[str, Any, str]:
        from pydantic_ai.messages import PartDeltaEvent, ToolCallPart, ToolCallPartDelta

        parts: list[Any] = []

        async def see(_: Any, events: AsyncIterator[Any]) -> None:
            async for each in events:
                if isinstance(each, PartDeltaEvent) and isinstance(each.delta, ToolCallPartDelta):
                    parts.append(each.delta.args_delta)

        agent = self._agent(tools=[weather])
        found = await agent.run(text, event_stream_handler=see if streamed else None)
        assert not streamed or "".join(filter(None, parts)) == '{"city": "Rome"}'
        (call,) = (
            part for each in found.all_messages() for part in each.parts if isinstance(part, ToolCallPart)
        )
        return call.tool_name, call.args_as_dict(), found.output


DRIVERS: list[Callable[..., Driver]] = [langchain, llama_index, haystack, dspy, pydantic_ai]
