"""Parsing: the bodies of ``/v1/messages`` and ``/v1/messages/count_tokens`` become checked calls."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from aioinfer.chat.fields import Table, check
from aioinfer.chat.tools import parse_tools
from aioinfer.errors import InvalidRequest, renamed_field, shown
from aioinfer.server.anthropic.conversation import Conversation
from aioinfer.server.anthropic.fields import (
    COUNT,
    DISPLAYS,
    EFFORTS,
    MESSAGES,
    NESTED,
    SEARCH_TOOL,
    SERVER_TOOL,
)
from aioinfer.server.openai.protocol import Call, Served, flag_of, object_of
from aioinfer.server.translation import ChatBody, given_list, given_object

__all__ = ["parse_count", "parse_message"]

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def parse_message(raw: bytes, served: Served) -> Call:
    """A body of ``/v1/messages``. Raises InvalidRequest, and Refused for another model."""
    return _parse(raw, served, MESSAGES)


def parse_count(raw: bytes, served: Served) -> Call:
    """A body of ``/v1/messages/count_tokens``, of which the prompt counts. Raises as
    :func:`parse_message`."""
    return _parse(raw, served, COUNT)


def _parse(raw: bytes, served: Served, table: Table) -> Call:
    body = object_of(raw, served, table)
    chat = ChatBody(body, served)
    if table is MESSAGES and body.get("max_tokens") is None:
        raise InvalidRequest("max_tokens", "is missing")
    for name, source in (("max_tokens", "max_tokens"), ("stop", "stop_sequences"), ("stream", "stream")):
        chat.put(name, body.get(source), source)
    if body.get("stop_sequences") is not None:
        given_list("stop_sequences", body["stop_sequences"])
    conversation = _conversation(body, chat, served)
    _tools(body, chat, conversation.loaded)
    _choice(body, chat)
    display = _thinking(body, chat)
    _output(body, chat, conversation.efforts)
    return replace(chat.call("msg_"), repeated={"display": display})


def _conversation(body: Mapping[str, Any], chat: ChatBody, served: Served) -> Conversation:
    """Puts the messages in, and returns what was read."""
    messages = body.get("messages")
    if isinstance(messages, list) and len(messages) > served.max_messages:
        most = f"at most {served.max_messages} (max_messages), got {len(messages)}"
        raise InvalidRequest("messages", most)
    conversation = Conversation(served.chat.order)
    conversation.read(body.get("system"), messages)
    chat.put("messages", conversation.messages, "messages")
    chat.names.update(conversation.names)
    if conversation.continues:
        last = conversation.messages[-1]
        if last.get("tool_calls"):
            raise InvalidRequest("messages", "must not end with a call: its result is missing")
        chat.put("continue_final_message", True, "messages")
    return conversation


def _tools(body: Mapping[str, Any], chat: ChatBody, loaded: set[str]) -> None:
    """Puts in the functions that the model learns of: the deferred ones among them are ``loaded``."""
    tools = given_list("tools", body.get("tools"), [])
    searched = any(isinstance(each, dict) and _matches(SEARCH_TOOL, each.get("type")) for each in tools)
    wanted = body.get("tool_choice")
    named = wanted.get("name") if isinstance(wanted, dict) else None
    functions: list[dict[str, Any]] = []
    for number, tool in enumerate(tools):
        field = f"tools[{number}]"
        kind = given_object(field, tool).get("type")
        if _matches(SERVER_TOOL, kind):
            continue
        if kind not in (None, "custom"):
            message = f"must be 'custom' or a tool of Anthropic's, got {shown(kind)}"
            raise InvalidRequest(f"{field}.type", message, code="unsupported_parameter")
        check(tool, NESTED["tools[] custom"], f"{field}.")
        deferred = flag_of(tool, "defer_loading", f"{field}.") and not searched
        described = {name: tool.get(name) for name in ("name", "description", "strict")}
        function = {"type": "function", "function": {**described, "parameters": _schema(field, tool)}}
        if deferred and tool.get("name") not in (*loaded, named):
            _check_deferred(field, function)
            continue
        chat.names |= _names(f"tools[{len(functions)}]", field)
        functions.append(function)
    chat.put("tools", functions or None, "tools")


def _matches(pattern: re.Pattern[str], kind: Any) -> bool:
    return isinstance(kind, str) and pattern.fullmatch(kind) is not None


def _names(at: str, field: str) -> dict[str, str]:
    """Where the parts of a function come from."""
    return {at: field, f"{at}.function": field, f"{at}.function.parameters": f"{field}.input_schema"}


def _check_deferred(field: str, function: Mapping[str, Any]) -> None:
    """Checks a function that the model does not learn of. Raises InvalidRequest."""
    try:
        parse_tools({"tools": [function]})
    except InvalidRequest as refused:
        named = renamed_field(refused.field, _names("tools[0]", field))
        raise InvalidRequest(named, refused.message, code=refused.code) from None


def _schema(field: str, tool: Mapping[str, Any]) -> Any:
    if tool.get("input_schema") is None:
        raise InvalidRequest(f"{field}.input_schema", "is missing")
    return tool["input_schema"]


def _choice(body: Mapping[str, Any], chat: ChatBody) -> None:
    given = body.get("tool_choice")
    if given is None:
        return
    check(given_object("tool_choice", given), NESTED["tool_choice"], "tool_choice.")
    kind, name, alone = given.get("type"), given.get("name"), given.get("disable_parallel_tool_use")
    if name is not None and kind != "tool":
        raise InvalidRequest("tool_choice.name", "needs the type tool")
    if alone is not None:
        if not isinstance(alone, bool):
            raise InvalidRequest("tool_choice.disable_parallel_tool_use", "must be true or false")
        chat.put("parallel_tool_calls", not alone, "tool_choice.disable_parallel_tool_use")
    if kind == "tool":
        chat.put("tool_choice", {"type": "function", "function": {"name": name}}, "tool_choice")
        chat.names["tool_choice.function"] = "tool_choice"
    elif not isinstance(kind, str) or kind not in _CHOICES:
        raise InvalidRequest("tool_choice.type", f"must be auto, any, tool or none, got {shown(kind)}")
    elif kind != "auto" or chat.fields.get("tools"):
        chat.put("tool_choice", _CHOICES[kind], "tool_choice")


def _thinking(body: Mapping[str, Any], chat: ChatBody) -> str | None:
    """Switches thinking; returns how it is displayed."""
    given = body.get("thinking")
    if given is None:
        return None
    check(given_object("thinking", given), NESTED["thinking"], "thinking.")
    kind = given.get("type")
    if kind not in ("enabled", "disabled", "adaptive"):
        message = f"must be enabled, disabled or adaptive, got {shown(kind)}"
        raise InvalidRequest("thinking.type", message)
    if kind != "adaptive":
        chat.think(kind == "enabled", "thinking.type")
    display: str | None = given.get("display")
    if display not in (None, *DISPLAYS):
        raise InvalidRequest(
            "thinking.display", f"must be one of {', '.join(DISPLAYS)}, got {shown(display)}"
        )
    return display


def _output(body: Mapping[str, Any], chat: ChatBody, later: Iterable[tuple[Any, str]]) -> None:
    """``later``: efforts that messages ask for, and their paths; the last one counts."""
    config = given_object("output_config", body.get("output_config"), {})
    check(config, NESTED["output_config"], "output_config.")
    for effort, field in ((config.get("effort"), "output_config.effort"), *later):
        chat.effort(effort, field, EFFORTS)
    wanted = config.get("format")
    if wanted is None:
        return
    field = "output_config.format"
    check(given_object(field, wanted), NESTED[field], f"{field}.")
    if wanted.get("type") != "json_schema":
        raise InvalidRequest(f"{field}.type", "must be 'json_schema'")
    schema = given_object(f"{field}.schema", wanted.get("schema"))
    chat.put("response_format", {"type": "json_schema", "json_schema": {"schema": schema}}, field)
    chat.names["response_format.json_schema"] = field
