"""LlamaIndex's LLM over a running engine; needs llama-index-core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms import generic_utils, types
from llama_index.core.base.llms.types import ChatMessage, ChatResponse
from llama_index.core.base.llms.types import ToolCallBlock as Call
from llama_index.core.llms import callbacks, function_calling, llm

from aioinfer.integrations import calls

__all__ = ["AioInfer"]


class AioInfer(calls.HasCalls, function_calling.FunctionCallingLLM, extra="allow"):
    """An LLM. Keyword arguments, also of calls, are those of :class:`aioinfer.integrations.calls.Calls`."""

    @property
    def metadata(self) -> types.LLMMetadata:
        own = {"context_window": self._calls.context_length, "model_name": self._calls.model_name}
        return types.LLMMetadata(**own, is_chat_model=True, is_function_calling_model=self._calls.has_tools)

    @callbacks.llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **given: Any) -> ChatResponse:
        return _response(self._calls.chat_here([*map(_message, messages)], **given).result())

    @callbacks.llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **given: Any) -> ChatResponse:
        return _response(await self._calls.chat([*map(_message, messages)], **given))

    @callbacks.llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **given: Any) -> types.ChatResponseGen:
        chat, said = self._calls.chat_here([*map(_message, messages)], **given), calls.SoFar()
        return (_response(said.add(delta), delta.content) for delta in chat)

    @callbacks.llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **given: Any) -> types.ChatResponseAsyncGen:
        chat, said = self._calls.chat([*map(_message, messages)], **given), calls.SoFar()
        return (_response(said.add(delta), delta.content) async for delta in chat)

    def complete(self, prompt: str, formatted: bool = False, **given: Any) -> Any:
        return generic_utils.chat_to_completion_decorator(self.chat)(prompt, **given)

    async def acomplete(self, prompt: str, formatted: bool = False, **given: Any) -> Any:
        return await generic_utils.achat_to_completion_decorator(self.achat)(prompt, **given)

    def stream_complete(self, prompt: str, formatted: bool = False, **given: Any) -> Any:
        return generic_utils.stream_chat_to_completion_decorator(self.stream_chat)(prompt, **given)

    async def astream_complete(self, prompt: str, formatted: bool = False, **given: Any) -> Any:
        return await generic_utils.astream_chat_to_completion_decorator(self.astream_chat)(prompt, **given)

    def structured_predict(self, output_cls: Any, prompt: Any, llm_kwargs: Any = (), **of: Any) -> Any:
        messages = self._extend_messages(prompt.format_messages(llm=self, **of))
        answer = self.chat(messages, response_format=output_cls, **(llm_kwargs or {}))
        return output_cls.model_validate_json(answer.message.content)

    async def astructured_predict(self, output_cls: Any, prompt: Any, llm_kwargs: Any = (), **of: Any) -> Any:
        messages = self._extend_messages(prompt.format_messages(llm=self, **of))
        answer = await self.achat(messages, response_format=output_cls, **(llm_kwargs or {}))
        return output_cls.model_validate_json(answer.message.content)

    def _prepare_chat_with_tools(
        self, tools: Any, user_msg: Any = None, chat_history: Any = None, verbose: bool = False,
        allow_parallel_tool_calls: bool = False, tool_required: bool = False, **given: Any,
    ) -> dict[str, Any]:  # fmt: skip
        asked = [ChatMessage(user_msg) if isinstance(user_msg, str) else user_msg] if user_msg else []
        told = [each.metadata.to_openai_tool(skip_length_check=True)["function"] for each in tools]
        own = calls.offer(told, given.pop("tool_choice", None) or tool_required or None)
        own |= {"messages": [*(chat_history or []), *asked], "parallel_tool_calls": allow_parallel_tool_calls}
        return own | given

    def get_tool_calls_from_response(
        self, response: Any, error_on_no_tool_call: bool = True, **_: Any
    ) -> Any:
        found = [e for e in response.message.blocks if isinstance(getattr(e, "tool_kwargs", None), dict)]
        if error_on_no_tool_call and not found:
            raise ValueError(f"the answer calls no tool: {response.message.content!r}")
        return [llm.ToolSelection(**each.model_dump(), tool_id=each.tool_call_id or "") for each in found]


def _message(given: ChatMessage) -> dict[str, Any]:
    called = [(e.tool_call_id, e.tool_name, e.tool_kwargs) for e in given.blocks if isinstance(e, Call)]
    blocks = [each for each in given.blocks if each.block_type not in ("thinking", "tool_call")]
    said = calls.content(blocks, given.content)
    return calls.message(given.role.value, said, called, given.additional_kwargs.get("tool_call_id"))


def _response(answer: Any, delta: str | None = None) -> ChatResponse:
    blocks: list[Any] = [types.ThinkingBlock(content=answer.reasoning)] if answer.reasoning else []
    blocks += [types.TextBlock(text=answer.content)] if answer.content else []
    for each in answer.tool_calls:
        blocks.append(Call(tool_call_id=each.id, tool_name=each.name, tool_kwargs=calls.parsed(each)))
    raw = {"finish_reason": answer.finish_reason, "usage": calls.counts(answer.usage)}
    return ChatResponse(message=ChatMessage(role="assistant", blocks=blocks), delta=delta, raw=raw)
