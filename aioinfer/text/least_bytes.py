"""The least bytes that a grammar allows, as far as its source tells without compiling it."""

from __future__ import annotations

import json
from typing import Any

from aioinfer.text.closed_answers import closed_texts
from aioinfer.text.grammar_spec import Grammar
from aioinfer.text.schema_references import Pointers

__all__ = ["least_bytes"]

#: references within each other that are followed
_MOST_LEVELS = 32
#: "null" is the longest of the least
_TYPES = {"object": 2, "array": 2, "string": 2, "number": 1, "integer": 1, "boolean": 4, "null": 4}


def least_bytes(grammar: Grammar) -> int:
    """The output of a grammar that was compiled has so many bytes or more. It may have to have more: of
    regular expressions and rules nothing is known here, and of a JSON schema only what its values need by
    their types, lengths and required names."""
    if grammar.kind == "json_object":
        return 2
    texts = closed_texts(grammar)
    if texts is not None:
        return min(len(text.encode(errors="replace")) for text in texts)
    if grammar.kind == "choice":
        return min(len(text.encode(errors="replace")) for text in json.loads(grammar.text))
    if grammar.kind != "json_schema":
        return 0
    schema = json.loads(grammar.text)
    try:
        return _Least(schema).of(schema, 0)
    except RecursionError:
        return 0


class _Least:
    def __init__(self, schema: Any) -> None:
        self._pointers = Pointers(schema)
        self._known: dict[str, int] = {}

    def of(self, schema: Any, level: int) -> int:
        if not isinstance(schema, dict) or level > _MOST_LEVELS:
            return 0
        found = [self._own(schema, level)]
        for name in ("anyOf", "oneOf"):
            if isinstance(options := schema.get(name), list) and options:
                found.append(min(self.of(option, level) for option in options))
        if isinstance(every := schema.get("allOf"), list):
            found += [self.of(each, level) for each in every]
        values = schema["enum"] if isinstance(schema.get("enum"), list) else []
        values = [schema["const"]] if "const" in schema else values
        if values:
            found.append(min(map(_least_written, values)))
        if isinstance(reference := schema.get("$ref"), str):
            found.append(self._target(reference, level))
        return max(found)

    def _target(self, reference: str, level: int) -> int:
        if reference not in self._known:
            self._known[reference] = 0  # within itself
            self._known[reference] = self.of(self._pointers.target(reference), level + 1)
        return self._known[reference]

    def _own(self, schema: dict[str, Any], level: int) -> int:
        """By type, which may be one of several."""
        kinds = schema.get("type", list(_TYPES))
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not isinstance(kinds, list):
            return 0
        return min((self._of_type(schema, kind, level) for kind in kinds), default=0)

    def _of_type(self, schema: dict[str, Any], kind: Any, level: int) -> int:
        least = _TYPES.get(kind, 0) if isinstance(kind, str) else 0
        if kind == "string":
            return least + _number(schema.get("minLength"))
        if kind == "array" and (count := _number(schema.get("minItems"))):
            first = schema.get("prefixItems")
            items = [self.of(each, level) for each in (first if isinstance(first, list) else [])[:count]]
            rest = (count - len(items)) * self.of(schema.get("items"), level)
            return least + sum(items) + rest + count - 1
        names = schema.get("required")
        if kind != "object" or not isinstance(names, list):
            return least
        known = schema.get("properties")
        known = known if isinstance(known, dict) else {}
        names = {name for name in names if isinstance(name, str)}
        least += max(0, len(names) - 1)
        return least + sum(
            len(name.encode(errors="replace")) + 3 + self.of(known.get(name), level) for name in names
        )


def _number(value: Any) -> int:
    return int(value) if isinstance(value, (int, float)) and 0 < value < 1e9 else 0


def _least_written(value: Any) -> int:
    """Of a value in JSON, which may be written in several ways."""
    if isinstance(value, str):
        return 2 + len(value.encode(errors="replace"))
    if isinstance(value, bool) or value is None:
        return 4
    return 1 if isinstance(value, (int, float)) else 2
