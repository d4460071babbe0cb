"""Tools as Python has them: functions with annotations, and pydantic's models, in OpenAI's form."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from aioinfer.errors import InvalidRequest
from aioinfer.inputs import freeze

__all__ = ["Tool", "is_model", "model_schema", "tool_of"]

#: OpenAI's object, a function whose parameters have annotations, or a class with ``model_json_schema``
Tool: TypeAlias = "Mapping[str, Any] | Callable[..., Any]"

_NAMED = {str: "string", int: "integer", float: "number", bool: "boolean", types.NoneType: "null"}
_REFUSED_KINDS = (
    inspect.Parameter.VAR_POSITIONAL,
    inspect.Parameter.VAR_KEYWORD,
    inspect.Parameter.POSITIONAL_ONLY,
)


def is_model(value: Any) -> bool:
    """A class that has a JSON schema: one of pydantic's models."""
    return isinstance(value, type) and callable(getattr(value, "model_json_schema", None))


def model_schema(field: str, model: Any) -> dict[str, Any]:
    """The JSON schema of such a class. Raises InvalidRequest."""
    try:
        schema = model.model_json_schema()
    except Exception as error:
        raise InvalidRequest(field, f"model_json_schema raised: {error!r}") from error
    found = freeze(field, schema)
    if not isinstance(found, dict):
        raise InvalidRequest(field, "model_json_schema must return an object")
    return found


def tool_of(field: str, given: Any) -> dict[str, Any]:
    """A tool in OpenAI's form. Arguments of functions and models are held to their schema (``strict``).

    A function's schema follows from its signature: text, numbers, booleans, None, ``Literal``, ``list[...]``,
    ``dict[str, ...]``, unions of these, and ``Annotated`` with a text that describes the parameter; a
    parameter with a default may be missing. Its docstring is the description. Raises InvalidRequest for any
    other annotation, none at all, ``*args``, ``**kwargs`` and parameters without a name.
    """
    if isinstance(given, Mapping):
        copied: dict[str, Any] = freeze(field, given, lists=True)
        return copied
    if is_model(given):
        parameters = model_schema(field, given)
    elif callable(given) and not isinstance(given, type):
        parameters = _signature(field, given)
    else:
        raise InvalidRequest(
            field, f"must be an object, a function or a pydantic model, got {type(given).__name__}"
        )
    function = {"name": getattr(given, "__name__", None), "parameters": parameters, "strict": True}
    if described := inspect.getdoc(given):
        function["description"] = described
    return {"type": "function", "function": function}


def _signature(field: str, function: Callable[..., Any]) -> dict[str, Any]:
    try:
        parameters = inspect.signature(function).parameters
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception as error:  # annotations are evaluated: they may raise anything
        raise InvalidRequest(field, f"its signature cannot be read: {error!r}") from error
    properties: dict[str, Any] = {}
    for name, parameter in parameters.items():
        if parameter.kind in _REFUSED_KINDS:
            raise InvalidRequest(field, f"its parameter {parameter} cannot be given by name")
        if name not in hints:
            raise InvalidRequest(field, f"its parameter {name} has no annotation")
        properties[name] = _schema(f"its parameter {name}", field, hints[name])
    required = [name for name, each in parameters.items() if each.default is inspect.Parameter.empty]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _schema(where: str, field: str, hint: Any) -> dict[str, Any]:
    if hint in _NAMED:
        return {"type": _NAMED[hint]}
    kind, arguments = typing.get_origin(hint), typing.get_args(hint)
    if kind is typing.Annotated:
        described = next((each for each in arguments[1:] if type(each) is str), None)
        schema = _schema(where, field, arguments[0])
        return schema if described is None else {**schema, "description": described}
    if kind is typing.Literal and all(type(each) in _NAMED for each in arguments):
        return {"enum": list(arguments)}
    if kind in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(where, field, each) for each in arguments]}
    if kind is list:
        return {"type": "array", "items": _schema(where, field, arguments[0])}
    if kind is dict and arguments[0] is str:
        return {"type": "object", "additionalProperties": _schema(where, field, arguments[1])}
    raise InvalidRequest(field, f"{where} has a type without a JSON schema: {hint}"[:400])
