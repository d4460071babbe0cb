"""Tools as Python has them: functions with annotations, and pydantic's models, in OpenAI's form."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

from aioinfer.errors import InvalidRequest
from aioinfer.inputs import freeze
from aioinfer.text.grammar_spec import closed, model_schema

__all__ = ["Tool", "form_of", "is_model", "model_of", "parser_of", "tool_of"]

#: OpenAI's object, a function whose parameters have annotations, or a class with ``model_json_schema``
Tool: TypeAlias = "Mapping[str, Any] | Callable[..., Any]"

_NAMED = {str: "string", int: "integer", float: "number", bool: "boolean", types.NoneType: "null"}
#: classes that say nothing of what is in them
_BARE = (object, list, dict, tuple, set, frozenset)
_REFUSED_KINDS = (
    inspect.Parameter.VAR_POSITIONAL,
    inspect.Parameter.VAR_KEYWORD,
    inspect.Parameter.POSITIONAL_ONLY,
)


def is_model(value: Any) -> bool:
    """A class that has a JSON schema: one of pydantic's models."""
    return isinstance(value, type) and callable(getattr(value, "model_json_schema", None))


def model_of(field: str, given: Any) -> Any:
    """A class that has a JSON schema: as it is, or made of a dataclass or a ``TypedDict``; None: it is no
    class of these. Raises InvalidRequest."""
    if is_model(given):
        return given
    # ``typing.is_typeddict`` does not know those of ``typing_extensions``
    if not (isinstance(given, type) and (dataclasses.is_dataclass(given) or hasattr(given, "__total__"))):
        return None
    try:
        return _described(given)
    except Exception as error:
        raise InvalidRequest(field, f"{given.__name__} has no JSON schema: {error}"[:400]) from None


@functools.lru_cache(maxsize=64)  # making one takes a millisecond
def _described(given: type) -> Any:
    from pydantic import TypeAdapter

    adapter: TypeAdapter[Any] = TypeAdapter(given)
    return types.SimpleNamespace(
        model_json_schema=adapter.json_schema, model_validate_json=adapter.validate_json
    )


def tool_of(field: str, given: Any) -> dict[str, Any]:
    """A tool in OpenAI's form. Arguments of functions and models are held to their schema (``strict``).

    A function's schema follows from its signature: text, numbers, booleans, None, ``Literal``, ``list[...]``,
    ``dict[str, ...]``, unions of these, ``Annotated`` with a text that describes the parameter, and classes
    of which pydantic knows the schema: enums, dates, dataclasses, ``TypedDict``, its own models. A parameter
    with a default may be missing. The docstring is the description. Raises InvalidRequest for any other
    annotation, none at all, ``*args``, ``**kwargs`` and parameters without a name.
    """
    if isinstance(given, Mapping):
        copied: dict[str, Any] = freeze(field, given, lists=True)
        return copied
    if is_model(given):
        parameters = form_of(field, given)
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


def parser_of(tool: Any) -> Callable[[str], Any] | None:
    """What makes of the text of arguments an instance of a model, or the objects that a function's
    annotations name. None: they are what their JSON says."""
    if is_model(tool):
        parse: Callable[[str], Any] = tool.model_validate_json
        return parse
    if isinstance(tool, Mapping):
        return None
    properties, required, classes = _parameters("tools", tool)
    if not classes:
        return None
    from typing import NotRequired

    from pydantic import TypeAdapter
    from typing_extensions import TypedDict

    hints = typing.get_type_hints(tool, include_extras=True)
    items = {name: hints[name] if name in required else NotRequired[hints[name]] for name in properties}
    return TypeAdapter(TypedDict("Arguments", items)).validate_json  # type: ignore[operator]


def form_of(field: str, model: Any) -> dict[str, Any]:
    """The JSON schema of such a class. Raises InvalidRequest."""
    found = freeze(field, model_schema(field, model))
    if not isinstance(found, dict):
        raise InvalidRequest(field, "model_json_schema must return an object")
    return found


def _signature(field: str, function: Callable[..., Any]) -> dict[str, Any]:
    properties, required, classes = _parameters(field, function)
    schema = {"type": "object", "properties": properties, "required": required}
    found: dict[str, Any] = closed(schema | _fill(field, classes))
    return found


def _fill(field: str, classes: list[tuple[dict[str, Any], Any]]) -> dict[str, Any]:
    """Complete the schemas of classes; returns the definitions that they share."""
    if not classes:
        return {}
    from pydantic import TypeAdapter

    mode: Literal["validation"] = "validation"
    try:
        adapters = [(at, mode, TypeAdapter(hint)) for at, (_, hint) in enumerate(classes)]
        schemas, shared = TypeAdapter.json_schemas(adapters)
    except Exception as error:
        names = ", ".join(hint.__qualname__ for _, hint in classes)
        raise InvalidRequest(field, f"one of {names} has no JSON schema: {error}"[:400]) from None
    for at, (schema, _) in enumerate(classes):
        schema.update(schemas[at, mode] | schema)
    return shared


def _parameters(
    field: str, function: Callable[..., Any]
) -> tuple[dict[str, Any], list[str], list[tuple[dict[str, Any], Any]]]:
    """Schemas by name; the names that must be given; schemas that are to be filled, with their classes."""
    try:
        parameters = inspect.signature(function).parameters
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception as error:  # annotations are evaluated: they may raise anything
        raise InvalidRequest(field, f"its signature cannot be read: {error!r}") from error
    properties: dict[str, Any] = {}
    classes: list[tuple[dict[str, Any], Any]] = []
    for name, parameter in parameters.items():
        if parameter.kind in _REFUSED_KINDS:
            raise InvalidRequest(field, f"its parameter {parameter} cannot be given by name")
        if name not in hints:
            raise InvalidRequest(field, f"its parameter {name} has no annotation")
        properties[name] = _schema(f"its parameter {name}", field, hints[name], classes)
    required = [name for name, each in parameters.items() if each.default is inspect.Parameter.empty]
    return properties, required, classes


def _schema(where: str, field: str, hint: Any, classes: list[tuple[dict[str, Any], Any]]) -> dict[str, Any]:
    if hint in _NAMED:
        return {"type": _NAMED[hint]}
    kind, arguments = typing.get_origin(hint), typing.get_args(hint)
    if kind is typing.Annotated:
        described = next((each for each in arguments[1:] if type(each) is str), None)
        schema = _schema(where, field, arguments[0], classes)
        if described is not None:
            schema["description"] = described
        return schema
    if kind is typing.Literal and all(type(each) in _NAMED for each in arguments):
        return {"enum": list(arguments)}
    if kind in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(where, field, each, classes) for each in arguments]}
    if kind is list:
        return {"type": "array", "items": _schema(where, field, arguments[0], classes)}
    if kind is dict and arguments[0] is str:
        return {"type": "object", "additionalProperties": _schema(where, field, arguments[1], classes)}
    if isinstance(hint, type) and hint not in _BARE:
        classes.append(({}, hint))
        return classes[-1][0]
    raise InvalidRequest(field, f"{where} has a type without a JSON schema: {hint}"[:400])
