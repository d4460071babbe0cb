"""The door of every chat: what an application or a body of any protocol asks, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aioinfer.chat.answers import ChatFormat
from aioinfer.chat.messages import parse_messages
from aioinfer.chat.results import ChatRequest, Parse
from aioinfer.chat.tools import Tools, parse_tools
from aioinfer.chat.variables import Variables
from aioinfer.errors import InvalidRequest, renamed
from aioinfer.params import SamplingParams

__all__ = ["ask", "conversation"]


def ask(
    chat: ChatFormat,
    messages: Any,
    params: SamplingParams,
    variables: Variables,
    names: Mapping[str, str],
    *,
    tools: Any = None,
    tool_choice: Any = None,
    parallel_tool_calls: Any = None,
    separate: bool = True,
    shown: bool = True,
    parse: Parse | None = None,
    parse_arguments: Mapping[str, Parse] | None = None,
) -> ChatRequest:
    """The chat of these plain values, which are not copied.

    ``names``: field of ``params`` -> where it comes from. Without ``separate``, the reasoning stays in the
    content; without ``shown``, it is left out. Raises InvalidRequest of ``messages``, ``tools``,
    ``tool_choice``, ``parallel_tool_calls``, of a field of ``names`` or of one of ``variables``.
    """
    parsed, kwargs, found = conversation(chat, messages, variables, tools, tool_choice, parallel_tool_calls)
    begins = chat.continued(parsed[-1]) if kwargs.get("continue_final_message") else None
    names = {"prompt": "messages", **names}
    grammar = params.structure
    within = grammar is None or grammar.kind in ("json_schema", "json_object")  # what is not has no thoughts
    if variables.budget is not None and params.thinking_budget is None and within:
        tokens, names["thinking_budget"] = variables.budget
        params = params.changed(thinking_budget=tokens)
    try:
        params, answer = chat.apply(params, found, separate=separate, shown=shown, begins=begins)
    except InvalidRequest as refused:
        raise renamed(refused, names) from None
    if answer is not None and answer.constrained:
        names["grammar"] = "tools"  # the grammar was built from their schemas
    return ChatRequest(parsed, kwargs or None, params, answer, names, parse, parse_arguments or {})


def conversation(
    chat: ChatFormat,
    messages: Any,
    variables: Variables,
    tools: Any = None,
    tool_choice: Any = None,
    parallel_tool_calls: Any = None,
) -> tuple[list[dict[str, Any]], dict[str, Any], Tools | None]:
    """The messages of a chat, the variables of its template, and its tools. Raises as :func:`ask`."""
    found = parse_tools(tools, tool_choice, parallel_tool_calls)
    kwargs = variables.checked()
    told = None if chat.tools is None else chat.tools.told
    parsed = parse_messages(messages, chat.template_names, told)
    if found is not None:
        kwargs[chat.tools_variable] = chat.offered(found)
    return parsed, kwargs, found
