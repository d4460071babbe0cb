"""Arguments that are written as raw text: their JSON, which depends on the types that a schema allows."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import regex

from aioinfer.text.schema_references import Pointers
from aioinfer.text.tool_calls.base import LONGEST_EARLY, JsonObject

if TYPE_CHECKING:
    from aioinfer.text.rules import Rules

__all__ = [
    "ANY",
    "LIST_LIKE",
    "Literal",
    "References",
    "Signatures",
    "as_json",
    "count_of",
    "parameters_of",
    "quoted",
    "raw_text",
]

#: a schema that allows anything: one object, so that its id is its own
ANY: Mapping[str, Any] = {}
#: what lists and objects begin with, tuples of Python among them
LIST_LIKE = ("{", "[", "(")
_STRING = frozenset({"string"})
_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
#: names of other languages that clients send
_ALIASES = {"float": "number", "double": "number", "int": "integer", "bool": "boolean", "list": "array",
            "dict": "object", "str": "string"}  # fmt: skip
#: Python's names for them: the templates write values of earlier calls so. "null" of JSON is read without it.
_LITERALS = {"true": "true", "false": "false", "none": "null", "null": "null"}
#: references that lead to each other
_MOST_REFERENCES = 16
#: schemas of a union in which a property is looked for
_MOST_SEARCHED = 32
#: keyword -> the type that has it
_IMPLIED = {"properties": "object", "items": "array", "prefixItems": "array"}
_UNIONS = ("anyOf", "oneOf", "allOf")
#: A union of more schemas is taken to allow any type: they are read on the event loop.
_MOST_UNITED = 1024
#: Lists, objects and constants as Python writes them, without what JSON has no counterpart of.
_PYTHON = regex.compile(
    r"""(?:[\s\[\]{}(),:]++|-?\d[\d.eE+-]*+|(?:True|False|None)\b"""
    r"""|'(?:[^'\\\n]|\\[\\'"abfnrtv0])*+'|"(?:[^"\\\n]|\\[\\'"abfnrtv0])*+")++"""
)
_ANYTHING = "(.|\\n)"
_SLASH = re.compile(r"(\\.)|/|\n", re.DOTALL)
_SPECIAL = re.compile(r"[^\w<>\"\s\u0080-\U0010ffff]")


class References:
    """The targets and types of the references within a schema."""

    def __init__(self, root: Any) -> None:
        self._pointers = Pointers(root)
        #: by the id of a schema, which is a part of the root
        self._named: dict[int, frozenset[str]] = {}
        self._known: dict[int, frozenset[str]] = {}

    def prepare(self) -> None:
        """Read the whole schema, once."""
        _ = self._pointers.rebased

    def resolved(self, schema: Any) -> Mapping[str, Any]:
        """The target of a schema that is a reference; an empty schema if it leads nowhere."""
        for _ in range(_MOST_REFERENCES):
            if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
                break
            schema = self._pointers.target(schema["$ref"])
        return schema if isinstance(schema, Mapping) else ANY

    def part(self, schema: Any, key: str | None) -> Any:
        """The schema of a property, or without a key of items; None if the schema names none."""
        left = [schema]
        for at in range(_MOST_SEARCHED):
            if at == len(left):
                break
            each = self.resolved(left[at])
            if key is None and "items" in each:
                return each["items"]
            properties = each.get("properties")
            if key is not None and isinstance(properties, Mapping) and key in properties:
                return properties[key]
            for union in _UNIONS:
                left += each[union][:_MOST_SEARCHED] if isinstance(each.get(union), list) else []
        return None if key is None else self.resolved(schema).get("additionalProperties")

    def types_of(self, schema: Any) -> frozenset[str]:
        """The types that a schema allows, as far as it names them; a string if it names none."""
        return self.named(schema) or _STRING

    def named(self, schema: Any) -> frozenset[str]:
        """The types that a schema names.

        ``schema``: a part of the root. Its types are found once.
        """
        schema = self.resolved(schema)
        if (known := self._known.get(id(schema))) is None:
            known = self._known[id(schema)] = self._found(schema)
        return known

    def _found(self, schema: Mapping[str, Any]) -> frozenset[str]:
        found: set[str] = set()
        seen: set[int] = set()
        left = [schema]
        while left:
            if len(seen) + len(left) > _MOST_UNITED:
                return _TYPES
            each = self.resolved(left.pop())
            if id(each) in seen:
                continue
            seen.add(id(each))
            if id(each) not in self._named:
                self._named[id(each)] = _named(each)
            found |= self._named[id(each)]
            if "type" in each and self._named[id(each)]:
                continue
            for key in _UNIONS:
                left += each[key][: _MOST_UNITED + 1] if isinstance(each.get(key), list) else []
        return frozenset(found)


class Signatures(dict[str, Mapping[str, Any]]):
    """Name -> JSON schema of the arguments, with the types of their values.

    Made once for all the answers to a request: large schemas take long to read.
    """

    def __init__(self, functions: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(functions)
        self._references = {name: References(schema) for name, schema in functions.items()}

    def prepare(self) -> None:
        """Do the slow part of the work."""
        for references in self._references.values():
            references.prepare()

    def references(self, function: str) -> References:
        """Those within a function's schema."""
        return self._references.get(function) or References(ANY)

    def declares(self, function: str, key: str) -> bool:
        """The function's schema names the key, or none at all."""
        properties = self._properties(function)
        return not properties or key in properties

    def _properties(self, function: str) -> Mapping[str, Any]:
        if (references := self._references.get(function)) is None:
            return {}
        properties = references.resolved(self[function]).get("properties")
        return properties if isinstance(properties, Mapping) else {}

    def types_of(self, function: str, key: str) -> frozenset[str]:
        """The types that the function's schema allows for the value of a key."""
        if (references := self._references.get(function)) is None:
            return _STRING
        declared = self._properties(function).get(key)
        if declared is None:
            declared = references.resolved(self[function]).get("additionalProperties")
        return references.types_of(declared)


class Literal(JsonObject):
    """Finds the end of a list or an object in JSON or in Python's notation."""

    _OUTSIDE = regex.compile(r"""["'{}\[\]()<TFN]""")

    def __init__(self) -> None:
        super().__init__()
        #: it is not JSON
        self.foreign = False

    def _other(self, found: str) -> None:
        self.foreign |= found != '"'
        if found not in "TFN":
            super()._other(found)


def parameters_of(schema: Mapping[str, Any]) -> tuple[dict[Any, Any], frozenset[str]]:
    """The properties of an object, and the names of the required ones. Raises ValueError."""
    declared, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(declared, Mapping) or not isinstance(required, list):
        raise ValueError("is not a schema of an object")
    if not all(isinstance(name, str) for name in required):
        raise ValueError("is not a schema of an object: required is not a list of names")
    more = schema.get("additionalProperties", True)
    names = {**declared, **{name: more for name in required if name not in declared}}
    return names, frozenset(required)


def count_of(schema: Mapping[str, Any], key: str) -> int | None:
    """A length that a schema names. Raises ValueError for what cannot be one."""
    value = schema.get(key)
    if key not in schema:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0 or value % 1:
        raise ValueError(f"has a {key} that is not a number of items or characters")
    return int(value)


def as_json(text: str, types: frozenset[str]) -> str:
    """The JSON of a value: a string if the types allow no other, or if the text is not JSON of one of them.

    Text that is JSON of a type that is not allowed is left to the receiver, unless a string is allowed. What
    begins like a list or an object, where no string is allowed, may be in Python's notation.
    """
    if types == _STRING:
        return f'"{quoted(text)}"'
    written = text.strip()
    written = _LITERALS.get(written.lower(), written)
    try:
        type_ = _type_of(json.loads(written, parse_int=_small, parse_constant=_no_constant))
    except (ValueError, RecursionError):
        found = None if "string" in types else _from_python(written)
        return f'"{quoted(text)}"' if found is None else found
    allowed = type_ in types or (type_ == "integer" and "number" in types)
    return written if allowed or "string" not in types else f'"{quoted(text)}"'


def _from_python(text: str) -> str | None:
    """The JSON of a list or an object in Python's notation; None if it is none, or long."""
    if not text.startswith(LIST_LIKE) or len(text) > LONGEST_EARLY or not _PYTHON.fullmatch(text):
        return None
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def quoted(text: str) -> str:
    """The part of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _named(schema: Mapping[str, Any]) -> frozenset[str]:
    """The types that a schema itself names."""
    named = schema.get("type")
    given = named if isinstance(named, list) else [named]
    if types := _TYPES.intersection(_ALIASES.get(name, name) for name in given if isinstance(name, str)):
        return types
    values = schema["enum"] if isinstance(schema.get("enum"), list) else []
    # One value of each Python type.
    one_each = {type(value): value for value in [*values, *([schema["const"]] if "const" in schema else [])]}
    # An object or a list whose type is left out.
    implied = {type_ for key, type_ in _IMPLIED.items() if key in schema} if not one_each else set()
    return frozenset(map(_type_of, one_each.values())) | implied


def _type_of(value: Any) -> str:
    match value:
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case dict():
            return "object"
    return "null"


def _small(digits: str) -> int:
    """Any integer: only the type counts, and Python refuses to read one of many digits."""
    return 0


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def raw_text(schema: Mapping[str, Any], closing: str, end: str, rules: Rules) -> str:
    """A terminal for strings with the lengths and the pattern of a schema, followed by the text ``end``.

    ``closing``: the tag that ends them, which they do not contain.
    """
    least, most = count_of(schema, "minLength") or 0, count_of(schema, "maxLength")
    limited = least or most is not None
    text = f"/{_ANYTHING}{{{least},{'' if most is None else most}}}/" if limited else "TEXT"
    if isinstance(pattern := schema.get("pattern"), str):
        text += f" & {_regex(pattern)}"
    closed = _SPECIAL.sub(lambda found: f"\\{found[0]}", closing)
    without = f"~/{_ANYTHING}*{closed}{_ANYTHING}*/"
    return rules.shared("RAW", f"({text} & {without}) {rules.text(end) if end else ''}")


def _regex(pattern: str) -> str:
    """Texts in which a pattern is found, as a terminal. Its anchors are those of the text."""
    begin, end = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern[begin : len(pattern) - end]
    inner = _SLASH.sub(lambda found: found[1] or {"/": "\\/", "\n": "\\n"}[found[0]], inner)
    return f"/{'' if begin else f'{_ANYTHING}*'}({inner}){'' if end else f'{_ANYTHING}*'}/"
