"""Schemas: the JSON schemas of the values of fields, and of objects that a table describes.

The bounds are those that :mod:`aioinfer.params` checks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeAlias

from aioinfer import plugins
from aioinfer.params import BOUNDS, MOST, DiffusionParams, SamplingParams

__all__ = [
    "ANY",
    "FLAG",
    "OBJECT",
    "TEXT",
    "Schema",
    "array",
    "choice",
    "closed",
    "diffusion",
    "either",
    "integer",
    "nullable",
    "of_param",
    "text",
]

Schema: TypeAlias = Mapping[str, Any]

ANY: Schema = {}
TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}


def text(least: int = 0, most: int | None = None, pattern: str | None = None) -> Schema:
    """Text of so many characters, which ``pattern`` matches as a whole."""
    found: dict[str, Any] = {"type": "string"}
    if least:
        found["minLength"] = least
    if most is not None:
        found["maxLength"] = most
    if pattern is not None:
        found["pattern"] = f"^{pattern}$"
    return found


def integer(low: int | None = None, high: int | None = None) -> Schema:
    bounds = {"minimum": low, "maximum": high}
    return {"type": "integer", **{key: value for key, value in bounds.items() if value is not None}}


def choice(*values: Any) -> Schema:
    """One of these values."""
    return {"enum": list(values)}


def array(items: Schema, least: int = 0, most: int | None = None) -> Schema:
    found: dict[str, Any] = {"type": "array", "items": dict(items)}
    if least:
        found["minItems"] = least
    if most is not None:
        found["maxItems"] = most
    return found


def either(*schemas: Schema) -> Schema:
    return {"anyOf": [dict(each) for each in schemas]}


def nullable(schema: Schema) -> dict[str, Any]:
    """The schema, or null."""
    found = dict(schema)
    if "enum" in found:
        return {**found, "enum": [*found["enum"], *([] if None in found["enum"] else [None])]}
    if isinstance(found.get("type"), str):
        return {**found, "type": [found["type"], "null"]}
    if "anyOf" in found:
        return {**found, "anyOf": [*found["anyOf"], {"type": "null"}]}
    if "$ref" in found:
        return {"anyOf": [found, {"type": "null"}]}
    return found


def _bounded(name: str) -> Schema:
    low, high, whole, low_open = BOUNDS[name]
    kind = "integer" if whole else "number"
    return {"type": kind, "exclusiveMinimum" if low_open else "minimum": low, "maximum": high}


def of_param(name: str) -> Schema:
    """The schema of a field of SamplingParams, as it stands in a body. Raises KeyError for ``grammar``."""
    if name in BOUNDS:
        return _bounded(name)
    default = SamplingParams.__dataclass_fields__[name].default
    if isinstance(default, bool):
        return FLAG
    if name == "diffusion":
        return diffusion()
    most, longest = MOST[name]
    match name:
        case "stop" | "stop_regex":
            one = text(1, longest)
            return either(one, array(one, 0, most))
        case "bad_words":
            return array(either(text(1, longest), array(_bounded("token_id"), 1, longest)), 0, most)
        case "logit_bias":
            return {
                "type": "object",
                "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
                "additionalProperties": _bounded("bias"),
                "maxProperties": most,
            }
        case "allowed_token_ids":
            return array(_bounded("token_id"), 1, most)
    return array(_bounded("token_id"), 0, most)


def diffusion() -> Schema:
    """The object ``diffusion``: the fields of DiffusionParams, and ``step_map``."""
    known: dict[str, Schema] = {"algorithm": choice(*plugins.names(plugins.ALGORITHMS))}
    for each in fields(DiffusionParams):
        if each.name in BOUNDS:
            known[each.name] = _bounded(each.name)
    known |= {"draft": FLAG, "step_map": FLAG}
    return closed({name: nullable(each) for name, each in known.items()}, required=())


def closed(properties: Mapping[str, Schema], required: Sequence[str] | None = None) -> Schema:
    """An object with these properties, all of them required unless ``required`` names those that are."""
    found = {"type": "object", "properties": {name: dict(each) for name, each in properties.items()}}
    return {
        **found,
        "required": list(properties if required is None else required),
        "additionalProperties": False,
    }
