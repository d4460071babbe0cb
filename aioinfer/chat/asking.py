"""What an application asks of a chat, checked as the HTTP API checks it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aioinfer.chat.answers import AnswerFormat, ChatFormat
from aioinfer.chat.functions import Tool, is_model, model_schema, tool_of
from aioinfer.chat.messages import check_variables, parse_messages
from aioinfer.chat.results import Parse
from aioinfer.chat.structured import parse_grammar
from aioinfer.chat.tools import parse_tools
from aioinfer.errors import InvalidRequest, renamed
from aioinfer.inputs import freeze
from aioinfer.params import SamplingParams

__all__ = ["ChatRequest", "chat_request"]

_FORMATS = ("text", "json_object", "json_schema")


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat, checked and copied."""

    messages: list[dict[str, Any]]
    template_kwargs: dict[str, Any] | None
    params: SamplingParams
    #: parsers of the answer; None: all of it is content
    answer: AnswerFormat | None
    #: argument of ``generate`` -> argument of ``chat``, where the names differ
    names: Mapping[str, str]
    #: of the content
    parse: Parse | None = None
    #: of the arguments of calls, by the name of the function
    parse_arguments: Mapping[str, Parse] = field(default_factory=dict)


def chat_request(
    chat: ChatFormat,
    messages: Sequence[Mapping[str, Any]],
    params: SamplingParams,
    *,
    tools: Sequence[Tool] | None = None,
    tool_choice: Any = None,
    parallel_tool_calls: bool | None = None,
    response_format: Any = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> ChatRequest:
    """The arguments of :meth:`aioinfer.Engine.chat`. Raises InvalidRequest, by their names."""
    given = freeze("messages", messages, lists=True)
    variables = _variables(chat_template_kwargs, chat.template_names)
    names = {"prompt": "messages"}
    offered, models = _tools(tools)
    body = {
        "tools": offered,
        "tool_choice": _choice(tool_choice),
        "parallel_tool_calls": parallel_tool_calls,
    }
    found = parse_tools(body)
    if found is not None:
        variables["tools"] = chat.offered(found)
    parse: Parse | None = None
    if response_format is not None:
        form, parse = _format(response_format)
        grammar = parse_grammar({"response_format": form})
        if grammar is not None:
            if params.grammar is not None:
                raise InvalidRequest("response_format", "cannot be combined with a grammar")
            params, names["grammar"] = params.changed(grammar=grammar[1]), "response_format"
        else:
            parse = None
    try:
        params, answer = chat.apply(params, found)
    except InvalidRequest as refused:
        raise renamed(refused, names) from None
    if answer is not None and answer.constrained:
        names["grammar"] = "tools"  # the grammar was built from their schemas
    return ChatRequest(
        parse_messages(given, chat.template_names),
        variables or None,
        params,
        answer,
        names,
        parse,
        models,
    )


def _variables(given: Any, template_names: frozenset[str] | None) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InvalidRequest("chat_template_kwargs", f"must be a mapping, got {type(given).__name__}")
    kwargs: dict[str, Any] = freeze("chat_template_kwargs", given)
    check_variables(
        kwargs, {name: f"chat_template_kwargs.{str(name)[:80]}" for name in kwargs}, template_names
    )
    return kwargs


def _tools(tools: Any) -> tuple[list[dict[str, Any]] | None, dict[str, Parse]]:
    """The tools in OpenAI's form; what parses the arguments of models, by name."""
    if tools is None:
        return None, {}
    if not isinstance(tools, Sequence) or isinstance(tools, (str, bytes)):
        raise InvalidRequest("tools", "must be a list")
    given = list(tools)
    offered = [tool_of(f"tools[{at}]", tool) for at, tool in enumerate(given)]
    parsers = {tool.__name__: tool.model_validate_json for tool in given if is_model(tool)}
    return offered, parsers


def _choice(choice: Any) -> Any:
    """``tool_choice``; a function or a model among the tools stands for itself."""
    if isinstance(choice, Mapping):
        return freeze("tool_choice", choice)
    if callable(choice) and hasattr(choice, "__name__"):
        return {"type": "function", "function": {"name": choice.__name__}}
    return choice


def _format(given: Any) -> tuple[dict[str, Any], Parse]:
    """``response_format`` in OpenAI's form, and what parses an answer in it."""
    if is_model(given):
        return _wrapped(model_schema("response_format", given)), given.model_validate_json
    if not isinstance(given, Mapping):
        kind = type(given).__name__
        raise InvalidRequest("response_format", f"must be an object or a pydantic model, got {kind}")
    form = freeze("response_format", given, lists=True)
    return form if form.get("type") in _FORMATS else _wrapped(form), json.loads


def _wrapped(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": schema}}
