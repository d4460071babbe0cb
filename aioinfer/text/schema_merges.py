"""The size of a JSON schema with its merges made, before llguidance makes them.

``allOf``, and ``$ref`` or alternatives beside other keywords, are merged into one schema. llguidance does so
by copying: each alternative is merged with a copy of what is beside it, and a reference that is merged is
replaced by a copy of its target, with the copies in there. It counts merges, but not what they copy: 3 KB of
text can become gigabytes. :class:`Merges` makes the same merges on shapes that share their parts instead of
copying them, and counts what the copies would be::

    {"allOf": [A, {"anyOf": [B, C]}]}   ──►   A merged with B, a copy of A merged with C

The rules are those of llguidance's ``parser/src/json/schema.rs``. Where they need more than is known here
(which names match a pattern), the largest result counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from aioinfer.text.schema_references import inner, targets_of

__all__ = ["Merges"]

#: The most parts that may be copied, most of them to be dropped at once: half a second.
_MOST_COPIED = 2_000_000
#: The most parts of the result, 60 MB. Fewer are in a megabyte of text that merges nothing.
_MOST_PARTS = 250_000
#: The most merges. It is llguidance's limit too.
_MOST_MERGES = 50_000
#: characters of a text that count as one more part
_CHARACTERS = 256

_TYPES = ("null", "boolean", "number", "string", "array", "object")
_CHOICES = ("anyOf", "oneOf")
_IN_PLACE = {"const", "enum", "allOf", "anyOf", "oneOf", "$ref"}
_IGNORED = {"$anchor", "$comment", "$defs", "$id", "$schema", "contentEncoding", "contentMediaType"}
_IGNORED |= {"default", "definitions", "description", "examples", "id", "readOnly", "title", "writeOnly"}
_IGNORED |= {"x-guidance"}


class _Shape(NamedTuple):
    """A schema: what a merge needs of it."""

    #: one of ``_TYPES`` or ``_CHOICES``, "any", "never" or "ref"
    kind: str
    #: number of parts
    size: int = 1
    #: of a choice or an array
    items: tuple[_Shape, ...] = ()
    #: of an object
    names: Mapping[str, _Shape] = {}
    patterns: Mapping[str, _Shape] = {}
    #: the schema of further items or properties
    rest: _Shape | None = None
    #: of a reference
    reference: str = ""


_ANY, _NEVER = _Shape("any"), _Shape("never")


class Merges:
    """Counts the merges in the schemas of one grammar."""

    def __init__(self) -> None:
        self._merges = 0
        self._copied = 0
        self._parts = 0
        self._targets: Mapping[str, Any] = {}
        #: the shape of a target by its id; None: it is being worked out
        self._known: dict[int, _Shape | None] = {}
        #: the shape of a schema by its id
        self._shapes: dict[int, _Shape] = {}

    def check(self, schema: Any) -> None:
        """Raises ValueError for a JSON schema that would become too large, or merges too deep.

        A schema that merges a reference which is no JSON pointer into the schema is refused as well.
        """
        self._targets, elsewhere = targets_of(schema)
        self._known, self._shapes = {}, {}
        try:
            for reference in _innermost_first(self._targets):
                self._resolve(reference)
            # A target is compiled once for each way to spell a reference to it.
            for shape in (self._compile(schema), *map(self._resolve, self._targets)):
                self._parts += shape.size
                self._check_size(self._parts)
            if elsewhere:  # what is not understood may refer to any of them
                for value in _objects(schema):
                    self._compile(value)
        except RecursionError:
            raise ValueError("merges schemas within each other too deeply") from None

    def _check_size(self, parts: int) -> None:
        if parts > _MOST_PARTS:
            raise ValueError(f"has more than {_MOST_PARTS} parts when its schemas are merged")

    def _copy(self, parts: int) -> None:
        self._copied += parts
        if self._copied > _MOST_COPIED:
            raise ValueError(f"needs more than {_MOST_COPIED} parts copied to merge its schemas")

    def _merge(self, one: _Shape, other: _Shape) -> _Shape:
        """What both allow. Raises ValueError."""
        self._merges += 1
        if self._merges > _MOST_MERGES:
            raise ValueError(f"needs more than {_MOST_MERGES} merges of schemas")
        merged = self._normal(self._merged(one, other))
        self._check_size(merged.size)
        return merged

    def _merged(self, one: _Shape, other: _Shape) -> _Shape:
        if one.kind == "any" or other.kind == "never":
            return other
        if other.kind == "any" or one.kind == "never":
            return one
        for shape, beside in ((one, other), (other, one)):
            if shape.kind == "ref":
                target = self._resolve(shape.reference)
                self._copy(target.size)
                return self._merge(target, beside)
        for shape, beside in ((one, other), (other, one)):
            if shape.kind in _CHOICES:
                self._copy(len(shape.items) * beside.size)
                return _choice([self._merge(option, beside) for option in shape.items], shape.kind)
        if one.kind != other.kind:
            return _NEVER
        if one.kind == "array":
            return self._merge_arrays(one, other)
        if one.kind == "object":
            return self._merge_objects(one, other)
        return _Shape(one.kind, one.size + other.size - 1)

    def _merge_arrays(self, one: _Shape, other: _Shape) -> _Shape:
        length = max(len(one.items), len(other.items))
        items = [self._filled(shape, length) for shape in (one, other)]
        return _array([self._merge(*pair) for pair in zip(*items, strict=True)], self._rest(one, other))

    def _filled(self, array: _Shape, length: int) -> tuple[_Shape, ...]:
        rest, missing = array.rest or _ANY, length - len(array.items)
        self._copy(missing * rest.size)
        return array.items + (rest,) * missing

    def _merge_objects(self, one: _Shape, other: _Shape) -> _Shape:
        names = {name: self._named(shape, other, name) for name, shape in one.names.items()}
        names |= {
            name: self._named(shape, one, name) for name, shape in other.names.items() if name not in names
        }
        patterns = {name: self._matched(shape, other, name) for name, shape in one.patterns.items()}
        for name, shape in other.patterns.items():
            if name not in patterns:
                patterns[name] = self._matched(shape, one, name)
        own = one.size + other.size - _inner_size(one) - _inner_size(other) - 1
        return _object(names, patterns, self._rest(one, other), own)

    def _named(self, shape: _Shape, beside: _Shape, name: str) -> _Shape:
        """A property, merged with what another object says of it."""
        known = beside.names.get(name)
        candidates = [known] if known else [*beside.patterns.values(), beside.rest or _ANY]
        self._copy(max(each.size for each in candidates))
        return _largest(self._merge(shape, each) for each in candidates)

    def _matched(self, shape: _Shape, beside: _Shape, pattern: str) -> _Shape:
        """The schema of a pattern, merged with what another object says of it."""
        if (known := beside.patterns.get(pattern) or beside.rest) is None:
            return shape
        self._copy(known.size)
        return self._merge(shape, known)

    def _rest(self, one: _Shape, other: _Shape) -> _Shape | None:
        if one.rest is None or other.rest is None:
            return one.rest or other.rest
        return self._merge(one.rest, other.rest)

    def _normal(self, shape: _Shape) -> _Shape:
        """The same without alternatives that change nothing. Those of one keyword are merged as they are."""
        if shape.kind not in _CHOICES:
            return shape
        found: list[_Shape] = []
        for option in shape.items:
            if option.kind == "any" and shape.kind == "anyOf":
                return _ANY
            if option.kind != "never":
                found += option.items if option.kind == shape.kind else (option,)
        if shape.kind == "oneOf":  # each is compared with each
            self._copy(len(found) ** 2 // 64)
        if len(found) < 2:
            return found[0] if found else _NEVER
        return _choice(found, shape.kind)

    def _resolve(self, reference: str) -> _Shape:
        """Raises ValueError."""
        if reference not in self._targets:
            raise ValueError(f"merges {reference!r:.100}, which is not a JSON pointer into the schema")
        key = id(target := self._targets[reference])
        if key not in self._known:
            self._known[key] = None
            self._known[key] = self._compile(target)
        return self._known[key] or _ANY  # which is within itself; llguidance refuses it

    def _compile(self, schema: Any) -> _Shape:
        """The shape of a schema. What is malformed is left to llguidance."""
        if (shape := self._shapes.get(id(schema))) is None:
            shape = self._shapes[id(schema)] = self._normal(self._compiled(schema))
        return shape

    def _compiled(self, schema: Any) -> _Shape:
        if not isinstance(schema, dict):
            return _NEVER if schema is False else _ANY
        if schema.keys() <= _IGNORED:
            return _ANY
        result = _ANY
        simple: dict[str, Any] = {}
        for name, value in schema.items():
            if name in _IN_PLACE:
                if simple:
                    result = self._merge(result, self._simple(simple, schema))
                    simple = {}
                result = self._apply(result, name, value)
            elif name not in _IGNORED:
                simple[name] = value
                if name == "additionalProperties":  # it is about the names that are not there
                    simple.setdefault("properties", dict.fromkeys(_dict(schema.get("properties")), True))
                if name == "items":
                    simple.setdefault("prefixItems", [True] * len(_list(schema.get("prefixItems"))))
        return self._merge(result, self._simple(simple, schema)) if simple else result

    def _apply(self, result: _Shape, name: str, value: Any) -> _Shape:
        if name == "allOf":
            for each in _list(value):
                result = self._merge(result, self._compile(each))
            return result
        if name == "$ref":
            other = _Shape("ref", 1 + len(value) // _CHARACTERS, reference=value) if _is_text(value) else _ANY
        elif name == "const":
            other = _constant(value)
        elif name == "enum":
            other = _choice(map(_constant, _list(value)), "anyOf")
        else:
            other = _choice(map(self._compile, _list(value)), name)
        return other if name == "$ref" and result.kind == "any" else self._merge(result, other)

    def _simple(self, keywords: Mapping[str, Any], schema: Mapping[str, Any]) -> _Shape:
        """Keywords that say something of each type."""
        types = schema.get("type", _TYPES)
        shapes = [self._typed(each, keywords) for each in ([types] if _is_text(types) else _list(types))]
        return shapes[0] if len(shapes) == 1 else _choice(shapes, "anyOf")

    def _typed(self, kind: Any, keywords: Mapping[str, Any]) -> _Shape:
        if kind == "array":
            items, further = keywords.get("items"), keywords.get("additionalItems")
            if not isinstance(items, list) and further is None:
                items, further = keywords.get("prefixItems"), items
            rest = None if further is None else self._compile(further)
            return _array([self._compile(each) for each in _list(items)], rest)
        if kind == "object":
            return self._compile_object(keywords)
        text = sum(len(each) for each in keywords.values() if _is_text(each))
        return _Shape("number" if kind == "integer" else str(kind), 1 + text // _CHARACTERS)

    def _compile_object(self, keywords: Mapping[str, Any]) -> _Shape:
        names, patterns = (
            {name: self._compile(each) for name, each in _dict(keywords.get(keyword)).items()}
            for keyword in ("properties", "patternProperties")
        )
        if patterns:
            matched = _object({}, patterns, _ANY, 0)
            names = {name: self._named(shape, matched, name) for name, shape in names.items()}
        further = keywords.get("additionalProperties")
        required = [name for name in _list(keywords.get("required")) if _is_text(name)]
        own = sum(1 + len(name) // _CHARACTERS for name in (*names, *patterns, *required))
        return _object(names, patterns, None if further is None else self._compile(further), 1 + own)


def _innermost_first(targets: Mapping[str, Any]) -> Iterator[str]:
    """The references, each behind those within what it refers to, circles aside."""
    left = {id(target): target for target in targets.values()}
    for first, target in targets.items():
        if left.pop(id(target), None) is None:
            continue
        path: list[tuple[str, Iterator[str]]] = [(first, _references(target))]
        while path:
            for each in path[-1][1]:
                if (inside := left.pop(id(targets.get(each)), None)) is not None:
                    path.append((each, _references(inside)))
                    break
            else:
                yield path.pop()[0]


def _references(schema: Any) -> Iterator[str]:
    for value in _objects(schema):
        if isinstance(reference := value.get("$ref"), str):
            yield reference


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema and every object within it."""
    level = [schema]
    while level:
        yield from (value for value in level if isinstance(value, dict))
        level = [child for value in level for _, child in inner(value)]


def _choice(options: Iterable[_Shape], kind: str) -> _Shape:
    options = tuple(options)
    return _Shape(kind, 1 + sum(each.size for each in options), options)


def _array(items: Iterable[_Shape], rest: _Shape | None) -> _Shape:
    items = tuple(items)
    return _Shape(
        "array", 1 + sum(each.size for each in items) + (rest.size if rest else 0), items, rest=rest
    )


def _object(
    names: Mapping[str, _Shape], patterns: Mapping[str, _Shape], rest: _Shape | None, own: int
) -> _Shape:
    shape = _Shape("object", 0, (), names, patterns, rest)
    return shape._replace(size=own + _inner_size(shape))


def _inner_size(shape: _Shape) -> int:
    inner = (*shape.names.values(), *shape.patterns.values(), *filter(None, [shape.rest]))
    return sum(each.size for each in inner)


def _constant(value: Any) -> _Shape:
    if isinstance(value, dict):
        names = {name: _constant(each) for name, each in value.items()}
        own = sum(2 + len(name) // _CHARACTERS for name in names)
        return _object(names, {}, _NEVER, 1 + own)
    if isinstance(value, list):
        return _array(map(_constant, value), _NEVER)
    if _is_text(value):
        return _Shape("string", 1 + len(value) // _CHARACTERS)
    return _Shape("null" if value is None else "boolean" if isinstance(value, bool) else "number")


def _largest(shapes: Iterable[_Shape]) -> _Shape:
    return max(shapes, key=lambda shape: shape.size)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else []


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
