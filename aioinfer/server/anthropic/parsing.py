"""Parsing: the bodies of ``/v1/messages`` and ``/v1/messages/count_tokens`` become checked calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aioinfer.chat.tools import parse_tools
from aioinfer.chat.variables import Variables
from aioinfer.errors import InvalidRequest, renamed
from aioinfer.server.anthropic.conversation import Conversation
from aioinfer.server.anthropic.fields import (
    SEARCH_TOOL,
    CountTokensBody,
    CustomTool,
    MessagesBody,
    ToolChoice,
)
from aioinfer.server.openai.protocol import Call, Served, chat_call, check_count, format_beside, read

__all__ = ["parse_count", "parse_message"]

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def parse_message(raw: bytes, served: Served) -> Call:
    """A body of ``/v1/messages``. Raises InvalidRequest, and Refused for another model."""
    return _call(read(MessagesBody, raw, served), served)


def parse_count(raw: bytes, served: Served) -> Call:
    """A body of ``/v1/messages/count_tokens``, of which the prompt counts. Raises as
    :func:`parse_message`."""
    body = read(CountTokensBody, raw, served)
    given = {name: getattr(body, name) for name in body.model_fields_set}
    return _call(MessagesBody.model_construct(**given), served)


def _call(body: MessagesBody, served: Served) -> Call:
    check_count("messages", body.messages, served)
    conversation = Conversation(images=served.images)
    conversation.read(body.system, body.messages)
    variables = Variables(served.chat, body.chat_template_kwargs)
    if conversation.continues:
        if conversation.messages[-1].get("tool_calls"):
            raise InvalidRequest("messages", "must not end with a call: its result is missing")
        variables.put("continue_final_message", True, "messages")
    names = {**conversation.names, "max_tokens": "max_tokens", "stop": "stop_sequences"}
    tools = _tools(body, conversation.loaded, names)
    choice, parallel = _choice(body.tool_choice, tools, names)
    thinking, output = body.thinking, body.output_config
    if thinking is not None and thinking.type != "adaptive":
        variables.think(thinking.type == "enabled", "thinking.type", wish=True)
        if thinking.type == "enabled":
            variables.limit(thinking.budget_tokens, "thinking.budget_tokens")
    for effort, field in (*reversed(conversation.efforts), (output.effort, "output_config.effort")):
        if effort is not None:
            variables.effort(effort, field, wish=True)
            break
    wanted = None
    if output.format is not None:
        wanted = {"type": "json_schema", "json_schema": {"schema": output.format.schema_}}
        names["response_format"] = names["response_format.json_schema"] = "output_config.format"
    call = chat_call(
        body,
        served,
        "msg_",
        conversation.messages,
        variables,
        response_format=format_beside(choice, wanted),
        names=names,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=parallel,
    )
    return replace(call, repeated={"display": None if thinking is None else thinking.display})


def _tools(body: MessagesBody, loaded: set[str], names: dict[str, str]) -> list[dict[str, Any]] | None:
    """The functions that the model learns of: the deferred ones among them are ``loaded``. Enters where they
    come from."""
    searched = any(SEARCH_TOOL.fullmatch(tool.type or "") for tool in body.tools)
    named = None if body.tool_choice is None else body.tool_choice.name
    functions: list[dict[str, Any]] = []
    for number, tool in enumerate(body.tools):
        if not isinstance(tool, CustomTool):
            continue
        described = {name: getattr(tool, name) for name in ("name", "description", "strict")}
        function = {"type": "function", "function": {**described, "parameters": tool.input_schema}}
        field = f"tools[{number}]"
        if tool.defer_loading and not searched and tool.name not in (*loaded, named):
            try:
                parse_tools([function])
            except InvalidRequest as refused:
                raise renamed(refused, _names("tools[0]", field)) from None
            continue
        names |= _names(f"tools[{len(functions)}]", field)
        functions.append(function)
    return functions or None


def _names(at: str, field: str) -> dict[str, str]:
    """The fields of the body that the parts of a function come from."""
    return {at: field, f"{at}.function": field, f"{at}.function.parameters": f"{field}.input_schema"}


def _choice(given: ToolChoice | None, tools: Any, names: dict[str, str]) -> tuple[Any, bool | None]:
    """``tool_choice`` and ``parallel_tool_calls`` in OpenAI's form. Enters where they come from."""
    if given is None:
        return None, None
    if given.name is not None and given.type != "tool":
        raise InvalidRequest("tool_choice.name", "needs the type tool")
    names |= {
        "tool_choice.function": "tool_choice",
        "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    }
    alone = given.disable_parallel_tool_use
    parallel = None if alone is None else not alone
    if given.type == "tool":
        return {"type": "function", "function": {"name": given.name}}, parallel
    # Clients send "auto" whether they have tools or not.
    return None if given.type == "auto" and not tools else _CHOICES[given.type], parallel
