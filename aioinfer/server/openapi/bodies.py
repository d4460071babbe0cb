"""Schemas of request bodies, made from the tables of their fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aioinfer.chat.fields import Harmless, Honoured, Table, Unsupported
from aioinfer.chat.schemas import nullable, of_param
from aioinfer.server.openapi.endpoints import Body

__all__ = ["body_schema"]

#: objects whose further keys go to the chat template if that reads them
_OPEN = frozenset({"messages[]"})
#: objects of which the server reads these fields only
_UNREAD = frozenset({"tools[] hosted"})


def body_schema(body: Body) -> dict[str, Any]:
    """The JSON schema of a body. It admits what the server honours or accepts as without effect; which of
    its fields exclude each other, and what depends on the model, it does not say."""
    found = {**_object(body.table, body.nested, ""), **body.further}
    if body.examples:
        found["examples"] = [dict(each) for each in body.examples]
    return found


def _object(table: Table, nested: Mapping[str, Table], path: str) -> dict[str, Any]:
    open_ended = path.removesuffix(".") in _OPEN
    properties: dict[str, Any] = {}
    required: list[str] = []
    for name, rule in table.items():
        match rule:
            case Honoured():
                schema = _honoured(name, rule, nested, f"{path}{name}")
                if rule.required:
                    required.append(name)
                schema = {**schema, "description": rule.meaning}
            case Harmless():
                schema = {"description": f"has no effect: {rule.reason}"}
            case Unsupported():
                instead = f": {rule.instead}" if rule.instead else ""
                schema = {"description": f"other values are refused{instead}"}
                if not open_ended:
                    schema["enum"] = [*rule.neutral, None]
        properties[name] = schema
    return {
        "type": "object",
        "properties": properties,
        **({"required": required} if required else {}),
        **({} if open_ended else {"additionalProperties": False}),
    }


def _of_kind(kind: str, nested: Mapping[str, Table], path: str) -> dict[str, Any]:
    found = _object(nested[kind], nested, path)
    return {**found, "additionalProperties": True} if kind in _UNREAD else found


def _honoured(name: str, rule: Honoured, nested: Mapping[str, Table], path: str) -> dict[str, Any]:
    schema = dict(rule.schema)
    if not schema and rule.param is not None:
        schema = dict(of_param(rule.param))
    alternatives = [schema] if schema else []
    if path in nested:
        alternatives.append(_object(nested[path], nested, f"{path}."))
    kinds = [key for key in nested if key.startswith(f"{path}[] ")]
    if f"{path}[]" in nested or kinds:
        # Of one kind, or of several whose names stand behind the path.
        several = {"anyOf": [_of_kind(kind, nested, f"{path}[].") for kind in kinds]}
        items = several if kinds else _object(nested[f"{path}[]"], nested, f"{path}[].")
        if schema.get("type") == "array":
            alternatives[0] = {**schema, "items": items}
        else:
            alternatives.append({"type": "array", "items": items})
    found = alternatives[0] if len(alternatives) == 1 else {"anyOf": alternatives} if alternatives else {}
    return found if rule.required else nullable(found)
