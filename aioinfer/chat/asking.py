"""Arguments of ``engine.chat`` as the plain values that the door of all chats takes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from aioinfer.chat.answers import ChatFormat
from aioinfer.chat.functions import Tool, form_of, model_of, parser_of, tool_of
from aioinfer.chat.results import ChatRequest, Parse
from aioinfer.chat.variables import Variables
from aioinfer.errors import InvalidRequest
from aioinfer.images.limits import DEFAULT_LIMITS, ImageLimits
from aioinfer.images.source import ImageSource, sourced
from aioinfer.inputs import freeze
from aioinfer.params import SamplingParams

__all__ = ["ChatRequest", "chat_request", "import_chats"]

_CLASSES = ", a pydantic model, a dataclass or a TypedDict"
_FORMATS = ("text", "json_object", "json_schema")


def import_chats() -> None:
    """Import what chats need: the first one would hold the event loop for the time that pydantic takes."""
    import aioinfer.chat.door
    import aioinfer.chat.structured  # noqa: F401


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
    limits: ImageLimits = DEFAULT_LIMITS,
) -> ChatRequest:
    """The arguments of :meth:`aioinfer.Engine.chat`; ``limits``: of images in the messages. Raises
    InvalidRequest, by their names."""
    from aioinfer.chat.door import ask  # these import pydantic
    from aioinfer.chat.images import ImageReader, with_images
    from aioinfer.chat.structured import format_grammar

    names: dict[str, str] = {}
    parse: Parse | None = None
    if response_format is not None:
        form, parse = _format(response_format)
        grammar = format_grammar(form)
        if grammar is None:
            parse = None
        elif params.grammar is not None:
            raise InvalidRequest("response_format", "cannot be combined with a grammar")
        else:
            params, names["grammar"] = params.changed(grammar=grammar), "response_format"
    offered, parsers = _tools(tools)
    return ask(
        chat,
        with_images(
            freeze("messages", sourced(messages, limits), lists=True, kept=(ImageSource,)),
            ImageReader(limits),
        ),
        params,
        Variables(chat, _mapping(chat_template_kwargs)),
        names,
        tools=offered,
        tool_choice=_choice(tool_choice),
        parallel_tool_calls=parallel_tool_calls,
        parse=parse,
        parse_arguments=parsers,
    )


def _mapping(given: Any) -> dict[str, Any] | None:
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise InvalidRequest("chat_template_kwargs", f"must be a mapping, got {type(given).__name__}")
    kwargs: dict[str, Any] = freeze("chat_template_kwargs", given)
    return kwargs


def _tools(tools: Any) -> tuple[list[dict[str, Any]] | None, dict[str, Parse]]:
    """The tools in OpenAI's form; what parses the arguments of models, by name."""
    if tools is None:
        return None, {}
    if not isinstance(tools, Sequence) or isinstance(tools, (str, bytes)):
        raise InvalidRequest("tools", "must be a list")
    given = list(tools)
    offered = [tool_of(f"tools[{at}]", tool) for at, tool in enumerate(given)]
    parsers = {tool.__name__: parse for tool in given if (parse := parser_of(tool)) is not None}
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
    if (model := model_of("response_format", given)) is not None:
        return _wrapped(form_of("response_format", model)), model.model_validate_json
    if not isinstance(given, Mapping):
        kind = type(given).__name__
        raise InvalidRequest("response_format", f"must be an object{_CLASSES}, got {kind}")
    form = freeze("response_format", given, lists=True)
    return form if form.get("type") in _FORMATS else _wrapped(form), json.loads


def _wrapped(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": schema}}
