"""Bounds on grammars, checked before llguidance compiles them in native code.

llguidance follows rules and references by recursion, which could overflow its thread's stack and end the
process. And it merges the schemas of ``allOf``, and those beside ``$ref`` and alternatives, by copying: it
limits the number of merges, not what they copy, and 3 KB of text can become gigabytes. So
:class:`GrammarBounds` makes the same merges on shapes that share their parts, and counts the copies::

    {"allOf": [A, {"anyOf": [B, C]}]}   ──►   A merged with B, a copy of A merged with C

The rules are those of llguidance's ``parser/src/json/schema.rs``. Where they need more than is known here
(which names match a pattern), the largest result counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from itertools import product
from typing import Any, NamedTuple

from aioinfer.text.costs import Multiple, common_multiple, multiple_of, remainders, written_out
from aioinfer.text.schema_references import Pointers, inner

__all__ = ["MOST_LEVELS", "MOST_RULES", "GrammarBounds"]

#: Maximum rules and opening brackets of a Lark grammar, and maximum nesting of a schema, summed over all that
#: it refers to. Each takes up to 4 KiB of stack: both together less than a worker has (execution/workers.py).
MOST_RULES, MOST_LEVELS = 2000, 1500
#: maximum parts that may be copied, most of them to be dropped at once: half a second
_MOST_COPIED = 4_000_000
#: maximum parts of the merged schemas, 60 MB; a megabyte of text that merges nothing has fewer
_MOST_PARTS = 250_000
#: maximum merges, as in llguidance
_MOST_MERGES = 50_000
#: Maximum regular expressions that a text has to match, all of them. With 20, llguidance takes up to 10 s,
#: with 40 hours.
_MOST_TOGETHER = 17
_TOGETHER = {"pattern", "format"}
#: Maximum repeats, classes and escapes of all different regular expressions: each can take 5 KB, and the time
#: can grow with their square, to a second.
_MOST_OPERATORS, _OPERATORS = 4096, "?*+{[.\\"
#: Maximum cost of comparing ``patternProperties``, each with each, at each merge: llguidance copies all the
#: patterns and all comparisons so far for each pair. About a second.
_MOST_COMPARED = 4_000_000
#: nodes of a pattern, unrolled, at which llguidance gives up comparing
_COMPARABLE = 10_000
#: maximum texts and regular expressions of a Lark grammar: the time grows with their square, to a second
_MOST_QUOTED = 10_000
#: characters of a text that count as one more part
_CHARACTERS = 256

_JSON = re.compile(r"%json\s*+(?=[{\[])")
#: a text or regular expression of Lark
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*+"|/(?:[^/\\\n]|\\.)++/|//.*')
_LEVEL = re.compile(r"[:(\[{]")
#: any number stands for itself: Python refuses to read an integer of many digits
_decoder = json.JSONDecoder(parse_int=float)

_TYPES = ["null", "boolean", "number", "string", "array", "object"]
#: keywords of arrays and numbers that become many rules, or a long regular expression: each is so many parts
_BOUNDED, _PER_BOUND = (
    {"minItems", "maxItems", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    12,
)
_NUMBERS = ("integer", "number")
_CHOICES = ("anyOf", "oneOf")
_IN_PLACE = {"const", "enum", "allOf", "anyOf", "oneOf", "$ref"}
_IGNORED = {"$anchor", "$comment", "$defs", "$id", "$schema", "contentEncoding", "contentMediaType"}
_IGNORED |= {"default", "definitions", "description", "examples", "id", "readOnly", "title", "writeOnly"}
_IGNORED |= {"x-guidance"}
#: the key of the schema for further items or properties
_REST = object()


class _Shape(NamedTuple):
    """A schema: the parts that a merge needs."""

    #: one of ``_TYPES`` or ``_CHOICES``, "any", "never" or "ref"
    kind: str
    #: number of parts, with those within
    size: int = 1
    #: by the number of an option or an item, the name of a property, a pattern as a tuple, or ``_REST``
    parts: Mapping[Any, _Shape] = {}
    reference: str = ""
    #: of a number, and of alternatives with numbers: a text is compared with all of them at once
    multiple: Multiple = None
    #: of a text: the regular expressions that it has to match
    together: int = 0


_ANY, _NEVER = _Shape("any"), _Shape("never")


class GrammarBounds:
    """The bounds of one grammar. The sizes of all schemas in it count together. Methods raise ValueError."""

    def __init__(self, max_depth: int) -> None:
        """``max_depth``: maximum nesting of a schema, references not counted."""
        self._max_depth = max_depth
        self._levels = self._merges = self._copied = self._compared = self._parts = 0
        self._patterns: set[str] = set()
        self._operators = 0
        self._pointers = Pointers(None)
        #: the shape of a schema by its id
        self._shapes: dict[int, _Shape] = {}
        #: the depth of a target by its id
        self._depths: dict[int, int] = {}
        #: the shape of a target by its reference; None: it is being worked out
        self._targets: dict[str, _Shape | None] = {}
        #: references whose targets are compiled apart
        self._left: list[str] = []

    @property
    def parts(self) -> int:
        """The parts of all schemas that were checked, merged."""
        return self._parts

    def check_lark(self, text: str, *, rules: bool = True) -> None:
        """Check a Lark grammar and the schemas within it; its rules only if ``rules``."""
        count = at = 0
        for found in _JSON.finditer(text):
            if found.start() < at:
                continue  # in the JSON before
            count += len(_LEVEL.findall(text, at, found.start()))
            try:
                schema, at = _decoder.raw_decode(text, found.end())
            except (ValueError, RecursionError):
                raise ValueError("has a %json that cannot be read, or that is nested too deeply") from None
            self.check_schema(schema)
        count += len(_LEVEL.findall(text, at))
        if rules:
            self._check_quoted(text)
        if rules and count > MOST_RULES:
            raise ValueError(f"has more than {MOST_RULES} rules and brackets")

    def _check_quoted(self, text: str) -> None:
        rest = _QUOTED.sub("", text)
        if rest.count("&") > _MOST_TOGETHER:
            raise ValueError(f"has more than {_MOST_TOGETHER} times &")
        if sum(map(rest.count, "?*+")) > MOST_RULES:
            raise ValueError(f"has more than {MOST_RULES} repeats")
        quoted = _QUOTED.findall(text)
        if len(quoted) > _MOST_QUOTED:
            raise ValueError(f"has more than {_MOST_QUOTED} texts and regular expressions")
        self.check_patterns(each for each in quoted if each[0] == "/")

    def check_patterns(self, patterns: Iterable[str]) -> None:
        """Check the size of regular expressions, all of them together."""
        new = {*patterns} - self._patterns
        self._patterns |= new
        self._operators += sum(pattern.count(each) for pattern in new for each in _OPERATORS)
        if self._operators > _MOST_OPERATORS:
            raise ValueError(f"has regular expressions with more than {_MOST_OPERATORS} repeats and classes")

    def check_nesting(self, schema: Any) -> None:
        """Check how deep the brackets of a schema are."""
        if isinstance(schema, dict):  # without the options that are written beside it
            schema = {name: value for name, value in schema.items() if name != "x-guidance"}
        if _depth(schema) > self._max_depth:
            raise ValueError(f"has JSON nested more than {self._max_depth} levels deep (max_grammar_depth)")

    def check_schema(self, schema: Any) -> None:
        """Check a JSON schema. Malformed ones are left to llguidance."""
        self.check_nesting(schema)
        self._pointers, self._left, self._levels = Pointers(schema), [], 0
        self._shapes, self._depths, self._targets = {}, {}, {}
        try:
            self._keep(self._compile(schema))
            while self._left:
                reference = self._left.pop()
                if reference not in self._targets:
                    self._resolve(reference)
        except RecursionError:
            raise ValueError("merges schemas within each other too deeply") from None

    def _resolve(self, reference: str) -> _Shape:
        """The shape of a target, which is compiled once for each way to write the reference."""
        if reference not in self._targets:
            if (target := self._pointers.target(reference)) is None:
                raise ValueError(f"has the reference {reference!r:.100}, no JSON pointer into the schema")
            if id(target) not in self._depths:
                self._depths[id(target)] = _depth(target)
            self._levels += self._depths[id(target)]
            if self._levels > MOST_LEVELS:
                raise ValueError(f"refers to schemas of more than {MOST_LEVELS} levels together")
            self._targets[reference] = None
            shape = self._targets[reference] = self._compile(target)
            self._keep(shape)
        return self._targets[reference] or _ANY  # within itself, which llguidance refuses

    def _keep(self, shape: _Shape) -> None:
        self._parts += shape.size
        _check_size(self._parts)

    # -- merging ----------------------------------------------------------------------------------

    def _merge(self, one: _Shape, other: _Shape) -> _Shape:
        """The shape of a schema that allows what both allow."""
        self._merges += 1
        if self._merges > _MOST_MERGES:
            raise ValueError(f"needs more than {_MOST_MERGES} merges of schemas")
        if one.kind == "any" or other.kind == "never":
            return other
        if other.kind == "any" or one.kind == "never":
            return one
        self._copy(one.size + other.size)
        merged = self._normal(self._merged(one, other))
        _check_size(merged.size)
        return merged

    def _copy(self, parts: int) -> None:
        self._copied += parts
        if self._copied > _MOST_COPIED:
            raise ValueError(f"needs more than {_MOST_COPIED} parts copied to merge its schemas")

    def _compare(self, names: Iterable[Any]) -> None:
        """Count what the patterns among ``names`` of an object cost: the square of what they are."""
        sizes = [min(written_out(name[0]), _COMPARABLE) for name in names if isinstance(name, tuple)]
        pairs = len(sizes) ** 2 // 2
        self._compared += pairs * (64 + (4 * sum(sizes) + pairs) // 40)
        if self._compared > _MOST_COMPARED:
            raise ValueError("the keyword 'patternProperties' has too many patterns, or too long ones")

    def _merged(self, one: _Shape, other: _Shape) -> _Shape:
        for shape, beside in ((one, other), (other, one)):
            if shape.kind == "ref":
                return self._merge(self._resolve(shape.reference), beside)
        for shape, beside in ((one, other), (other, one)):
            if shape.kind in _CHOICES:
                return _numbered(shape.kind, [self._merge(each, beside) for each in shape.parts.values()])
        if one.kind != other.kind:
            return _NEVER
        if one.kind == "number":
            own = one.size + other.size - remainders(one.multiple) - remainders(other.multiple) - 1
            return _number(common_multiple((one.multiple, other.multiple)), own)
        if one.kind == "string":
            return _string(one.together + other.together, one.size + other.size - 1)
        parts: dict[Any, _Shape] = {}
        unnamed, others = _unnamed(one), _unnamed(other)
        for key in {**one.parts, **other.parts}:
            if key is _REST and not (_REST in one.parts and _REST in other.parts):
                parts[key] = one.parts.get(key) or other.parts[key]
            else:
                left = [one.parts[key]] if key in one.parts else unnamed
                right = [other.parts[key]] if key in other.parts else others
                parts[key] = self._largest(product(left, right))
        self._compare(parts)
        own = one.size + other.size - _inner_size(one.parts) - _inner_size(other.parts) - 1
        return _with_parts(one.kind, parts, own)

    def _largest(self, pairs: Iterable[tuple[_Shape, _Shape]]) -> _Shape:
        return max((self._merge(*pair) for pair in pairs), key=lambda shape: shape.size)

    def _normal(self, shape: _Shape) -> _Shape:
        """Drop alternatives that change nothing, and flatten those of one keyword."""
        if shape.kind not in _CHOICES:
            return shape
        found: list[_Shape] = []
        for option in shape.parts.values():
            if option.kind == "any" and shape.kind == "anyOf":
                return _ANY
            if option.kind != "never":
                found += option.parts.values() if option.kind == shape.kind else (option,)
        if shape.kind == "oneOf":  # each is compared with each
            self._copy(len(found) ** 2 // 64)
        if len(found) < 2:
            return found[0] if found else _NEVER
        return _numbered(shape.kind, found)

    # -- shapes of schemas ------------------------------------------------------------------------

    def _compile(self, schema: Any) -> _Shape:
        if (shape := self._shapes.get(id(schema))) is None:
            shape = self._shapes[id(schema)] = self._normal(self._compiled(schema))
        return shape

    def _compiled(self, schema: Any) -> _Shape:
        if not isinstance(schema, dict):
            return _NEVER if schema is False else _ANY
        result = _ANY
        if schema.keys() - _IN_PLACE - _IGNORED:
            types = schema.get("type", _TYPES)
            options = [self._typed(each, schema) for each in ([types] if _is_text(types) else _list(types))]
            result = options[0] if len(options) == 1 else _numbered("anyOf", options)
        for name in _IN_PLACE & schema.keys():
            for other in self._in_place(name, schema[name]):
                result = self._merge(result, other)
        return result

    def _in_place(self, name: str, value: Any) -> list[_Shape]:
        """The schemas that a keyword merges with the one that it is in."""
        if name == "allOf":
            return [self._compile(each) for each in _list(value)]
        if name == "const":
            return [_constant(value)]
        if name == "enum":
            return [_numbered("anyOf", map(_constant, _list(value)))]
        if name != "$ref":
            return [_numbered(name, map(self._compile, _list(value)))]
        if not _is_text(value):
            return []
        self._left.append(value)
        return [_Shape("ref", 1 + len(value) // _CHARACTERS, reference=value)]

    def _typed(self, kind: Any, schema: Mapping[str, Any]) -> _Shape:
        """The keywords that say something of one type."""
        if kind == "array":
            items, further = schema.get("items"), schema.get("additionalItems")
            if not isinstance(items, list) and further is None:
                items, further = schema.get("prefixItems"), items
            parts = dict(enumerate(map(self._compile, _list(items))))
            own = 1 + _PER_BOUND * len(schema.keys() & _BOUNDED)
            return _with_parts("array", parts | self._rest(further), own)
        if kind == "object":
            patterns: dict[Any, _Shape] = {
                (name,): self._compile(each) for name, each in _items(schema, "patternProperties")
            }
            matched = [*patterns.values(), _ANY]
            required = {name for name in _list(schema.get("required")) if _is_text(name)}
            # Names are compared, each with each.
            count = len(required | dict(_items(schema, "properties")).keys())
            self._copy(count**2 // 4)
            self._compare(patterns)
            self.check_patterns(pattern for (pattern,) in patterns)
            names: dict[Any, _Shape] = {
                name: self._largest((self._compile(each), other) for other in matched)
                for name, each in _items(schema, "properties")
            }
            texts = [*names, *required, *(pattern for (pattern,) in patterns)]
            own = sum(1 + len(text) // _CHARACTERS for text in texts)
            rest = self._rest(schema.get("additionalProperties"))
            return _with_parts("object", {**patterns, **names, **rest}, 1 + own)
        text = sum(len(each) for each in schema.values() if _is_text(each))
        size = 1 + text // _CHARACTERS
        if kind == "string":
            if isinstance(pattern := schema.get("pattern"), str):
                self.check_patterns([pattern])
            return _string(len(schema.keys() & _TOGETHER), size)
        if kind in _NUMBERS:
            return _number(multiple_of(schema), size + _PER_BOUND * len(schema.keys() & _BOUNDED))
        return _Shape(str(kind), size)

    def _rest(self, schema: Any) -> dict[Any, _Shape]:
        return {} if schema is None else {_REST: self._compile(schema)}


def _depth(value: Any) -> int:
    """The depth of the brackets in JSON."""
    depth, level = 0, [value] if isinstance(value, (dict, list)) else []
    while level:
        depth += 1
        level = [child for each in level for child in inner(each)]
    return depth


def _check_size(parts: int) -> None:
    if parts > _MOST_PARTS:
        raise ValueError(f"has more than {_MOST_PARTS} parts when its schemas are merged")


def _unnamed(shape: _Shape) -> list[_Shape]:
    """The schemas of items or properties that have none of their own: one of them holds."""
    patterns = [each for name, each in shape.parts.items() if isinstance(name, tuple)]
    return [*patterns, shape.parts.get(_REST, _ANY)]


def _numbered(kind: str, options: Iterable[_Shape]) -> _Shape:
    found = dict(enumerate(options))
    return _with_parts(kind, found)._replace(
        multiple=common_multiple(each.multiple for each in found.values())
    )


def _string(together: int, size: int) -> _Shape:
    if together > _MOST_TOGETHER:
        raise ValueError(f"has a text with more than {_MOST_TOGETHER} patterns merged")
    return _Shape("string", size, together=together)


def _number(multiple: Multiple, size: int) -> _Shape:
    return _Shape("number", size + remainders(multiple), multiple=multiple)


def _with_parts(kind: str, parts: Mapping[Any, _Shape], own: int = 1) -> _Shape:
    return _Shape(kind, own + _inner_size(parts), parts)


def _inner_size(parts: Mapping[Any, _Shape]) -> int:
    return sum(each.size for each in parts.values())


def _constant(value: Any) -> _Shape:
    if isinstance(value, dict):
        parts = {name: _constant(each) for name, each in value.items()}
        own = sum(2 + len(name) // _CHARACTERS for name in parts)
        return _with_parts("object", parts | {_REST: _NEVER}, 1 + own)
    if isinstance(value, list):
        return _with_parts("array", dict(enumerate(map(_constant, value))) | {_REST: _NEVER})
    if _is_text(value):
        return _Shape("string", 1 + len(value) // _CHARACTERS)
    return _Shape("null" if value is None else "boolean" if isinstance(value, bool) else "number")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _items(schema: Mapping[str, Any], keyword: str) -> Collection[tuple[str, Any]]:
    value = schema.get(keyword)
    return value.items() if isinstance(value, dict) else ()
