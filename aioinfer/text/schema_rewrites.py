"""Keywords of JSON schemas that llguidance does not know, in terms of those that it knows.

:func:`rewritten` gives a schema that allows the same instances. A keyword that others can express becomes a
further part of ``allOf``, so that the targets of references keep their places; any other keyword is an error
that names it and its place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import permutations
from typing import Any

from aioinfer.text import formats
from aioinfer.text.patterns import without_lookahead
from aioinfer.text.schema_references import Pointers

__all__ = ["UnsupportedKeyword", "rewritten"]

#: values of which every order is written out: 326 lists
_MOST_UNIQUE = 5
#: entries of a list of which each may be the one that is contained
_MOST_CONTAINING = 32
_MOST_DEPENDENT = 6
#: parts that may be added to one schema, or read to find what is to be added
_MOST_ADDED = 50_000
#: characters of a text that count as one more part
_CHARACTERS = 64

_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")

#: keywords with a schema, with a list of schemas, with schemas by name
_ONE = ("additionalProperties", "additionalItems", "items")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_UNKNOWN = (
    *("if", "then", "else", "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems"),
    *("maxContains", "$dynamicRef", "$recursiveRef"),
)


#: a place in a schema as the one around it and a name: written out for errors only, as it may be long
_Place = tuple["_Place", str] | None


class UnsupportedKeyword(ValueError):
    """A keyword that no other keywords can express."""


def rewritten(schema: Any) -> Any:
    """A schema that allows the same and has no keyword that llguidance does not know; the same object if
    nothing has to be changed. What is malformed is left as it is.

    Raises UnsupportedKeyword for a keyword that others cannot express; the message names it and its place.
    """
    return _Rewriting(schema).schema(schema, None)


class _Rewriting:
    """Rewrites one schema."""

    def __init__(self, root: Any) -> None:
        self._pointers = Pointers(root)
        self._added = 0

    def schema(self, given: Any, place: _Place) -> Any:
        """The schema rewritten. ``place``: where it is, for errors."""
        if not isinstance(given, dict):
            return given
        found = self._inner(given, place)
        for name in _UNKNOWN:
            if name in given:
                raise _refused(name, place)
        for name, rewrite in _REWRITES.items():
            if name in given:
                further = rewrite(self, given, place)
                found = {key: value for key, value in found.items() if key != name}
                if further is not None:
                    self._add(further)
                    found = _and(found, further)
        return self._with_text(found, place)

    def _inner(self, given: dict[str, Any], place: _Place) -> dict[str, Any]:
        """The schema with the schemas within it rewritten."""
        changed: dict[str, Any] = {}
        for name in _ONE:
            if isinstance(given.get(name), dict):
                changed[name] = self.schema(given[name], (place, name))
        for name in _LISTS:
            if isinstance(given.get(name), list):
                inside = (place, name)
                changed[name] = [self.schema(each, (inside, str(at))) for at, each in enumerate(given[name])]
        for name in _NAMED:
            if isinstance(given.get(name), dict):
                inside = (place, name)
                changed[name] = {key: self.schema(each, (inside, key)) for key, each in given[name].items()}
        if all(_same(value, given[name]) for name, value in changed.items()):
            return given
        return {**given, **changed}

    def _with_text(self, found: dict[str, Any], place: _Place) -> dict[str, Any]:
        """The schema with its formats and patterns of texts rewritten."""
        form = found.get("format")
        if isinstance(form, str) and form not in formats.KNOWN and _has_text(found):
            found = {key: value for key, value in found.items() if key != "format"}
            if form in formats.PARTS:
                found = _and(found, *formats.PARTS[form])
            elif form not in formats.ANY_TEXT:
                raise _refused("format", place, f"with the value {form!r:.60}")
        patterns = found.get("patternProperties")
        if isinstance(patterns, dict):
            split = [_split(name, "patternProperties", place) for name in patterns]
            if any(further for _, *further in split):
                raise _refused("patternProperties", place, "with lookahead")
            names = [name for (name,) in split]
            if names != list(patterns):
                found = {**found, "patternProperties": dict(zip(names, patterns.values(), strict=True))}
        pattern = found.get("pattern")
        if isinstance(pattern, str):
            parts = _split(pattern, "pattern", place)
            if parts != [pattern]:
                found = _and({**found, "pattern": parts[0]}, *({"pattern": each} for each in parts[1:]))
        return found

    def _add(self, part: Any) -> None:
        self._added += _parts(part)
        if self._added > _MOST_ADDED:
            raise UnsupportedKeyword(f"needs more than {_MOST_ADDED} parts to write its keywords as others")

    def _resolved(self, given: Any) -> Any:
        """The target of a schema that is only a reference."""
        if not isinstance(given, dict) or not isinstance(given.get("$ref"), str):
            return given
        target = self._pointers.target(given["$ref"])
        return given if target is None else target

    def _values(self, schema: Any) -> list[Any] | None:
        """All values that a schema allows, each once, if it names them."""
        if not isinstance(schema, dict):
            return None
        if "const" in schema:
            return [schema["const"]]
        if isinstance(schema.get("enum"), list):
            self._add(schema["enum"])  # many references may lead to one long list
            return list({_canonical(each): each for each in schema["enum"]}.values())
        return [False, True] if schema.get("type") == "boolean" else None

    # -- one keyword each, as a further schema; None if it changes nothing ----------------------

    def unique_items(self, given: dict[str, Any], place: _Place) -> dict[str, Any] | None:
        if given["uniqueItems"] is not True:
            return None
        most = given.get("maxItems")
        if isinstance(most, int) and most <= 1:
            return None
        values = self._values(self._resolved(given.get("items")))
        if values is None or len(values) > _MOST_UNIQUE or "prefixItems" in given:
            why = f"unless the items are an enum of at most {_MOST_UNIQUE} values"
            raise _refused("uniqueItems", place, why)
        lists = []
        for count in range(min(len(values), most if isinstance(most, int) else len(values)) + 1):
            for chosen in permutations(values, count):
                entries = [{"const": each} for each in chosen]
                lists.append({"prefixItems": entries, "items": False, "minItems": count})
        return {"anyOf": lists}

    def property_names(self, given: dict[str, Any], place: _Place) -> dict[str, Any] | None:
        rule = self._resolved(given["propertyNames"])
        if rule is True or rule == {}:
            return None
        if not isinstance(rule, dict):
            raise _refused("propertyNames", place)
        rule = {key: value for key, value in rule.items() if key not in ("title", "description")}
        if rule.get("type") == "string":
            del rule["type"]
        names = self._values(rule) if rule else None
        if names is not None and rule.keys() <= {"enum", "const"}:
            allowed = dict.fromkeys((name for name in names if isinstance(name, str)), True)
            return {"properties": allowed, "additionalProperties": False}
        if rule.keys() <= {"minLength", "maxLength"} and rule:
            least, most = rule.get("minLength", 0), rule.get("maxLength", "")
            pattern = f"^(?s:.{{{least},{most}}})$"
        elif rule.keys() == {"pattern"}:
            pattern = rule["pattern"]
        elif not rule:
            return None
        else:
            raise _refused(
                "propertyNames", place, "with other keywords than enum, const, pattern and lengths"
            )
        return {"patternProperties": {pattern: True}, "additionalProperties": False}

    def contains(self, given: dict[str, Any], place: _Place) -> dict[str, Any] | None:
        least, most = given.get("minContains", 1), given.get("maxItems")
        if least == 0:
            return None
        if least != 1 or not isinstance(most, int) or most > _MOST_CONTAINING:
            raise _refused("contains", place, f"without maxItems of at most {_MOST_CONTAINING}")
        inner = self.schema(given["contains"], (place, "contains"))
        lists = [{"prefixItems": [True] * at + [inner], "minItems": at + 1} for at in range(most)]
        return {"anyOf": lists} if lists else {"type": [each for each in _TYPES if each != "array"]}

    def dependent_required(self, given: dict[str, Any], place: _Place) -> dict[str, Any] | None:
        rules = given["dependentRequired"]
        if not isinstance(rules, dict) or not all(isinstance(each, list) for each in rules.values()):
            raise _refused("dependentRequired", place)
        rules = {name: needed for name, needed in rules.items() if needed}
        if len(rules) > _MOST_DEPENDENT:
            raise _refused("dependentRequired", place, f"for more than {_MOST_DEPENDENT} properties")
        parts = []
        for name, needed in rules.items():
            absent = {"properties": {name: False}}
            parts.append({"anyOf": [absent, {"required": [name, *needed]}]})
        return {"allOf": parts} if parts else None

    def negated(self, given: dict[str, Any], place: _Place) -> dict[str, Any] | None:
        rule = self._resolved(given["not"])
        if rule is False:
            return None
        if isinstance(rule, dict) and rule.keys() == {"type"}:
            return self._other_types(rule["type"], place)
        if isinstance(rule, dict) and rule.keys() == {"required"} and isinstance(rule["required"], list):
            absent = [{"properties": {name: False}} for name in rule["required"]]
            return {"type": "object", "anyOf": absent} if absent else _nothing(place)
        excluded = self._values(rule) if isinstance(rule, dict) and rule.keys() <= {"enum", "const"} else None
        known = self._values(self._resolved(given)) if excluded is not None else None
        if excluded is None or known is None:
            raise _refused("not", place, "other than of types, of required, or of values beside an enum")
        texts = {_canonical(each) for each in excluded}
        left = [each for each in known if _canonical(each) not in texts]
        return {"enum": left} if left else _nothing(place)

    def _other_types(self, types: Any, place: _Place) -> dict[str, Any]:
        excluded = {types} if isinstance(types, str) else set(types if isinstance(types, list) else ())
        if not excluded or ("integer" in excluded and "number" not in excluded):
            raise _refused("not", place, "of integers")
        if "number" in excluded:
            excluded.add("integer")
        left = [each for each in _TYPES if each not in excluded]
        return {"type": left} if left else _nothing(place)


_Rewrite = Callable[[_Rewriting, dict[str, Any], _Place], dict[str, Any] | None]
_REWRITES: Mapping[str, _Rewrite] = {
    "uniqueItems": _Rewriting.unique_items,
    "propertyNames": _Rewriting.property_names,
    "contains": _Rewriting.contains,
    "minContains": lambda *_: None,  # without "contains" it says nothing
    "dependentRequired": _Rewriting.dependent_required,
    "not": _Rewriting.negated,
}


def _and(schema: dict[str, Any], *further: dict[str, Any]) -> dict[str, Any]:
    """The schema, and these."""
    known = schema.get("allOf")
    parts = [*(known if isinstance(known, list) else ()), *further]
    return {**schema, "allOf": parts} if parts else schema


def _refused(keyword: str, place: _Place, why: str = "") -> UnsupportedKeyword:
    return UnsupportedKeyword(
        f"the keyword {keyword!r}{_at(place)} is not supported{' ' if why else ''}{why}"
    )


def _at(place: _Place) -> str:
    """A place as a JSON pointer, cut."""
    names: list[str] = []
    while place is not None:
        place, name = place
        names.append(f"/{name[:200]}")
    return f" at {''.join(reversed(names))[:200]}" if names else ""


def _split(pattern: str, keyword: str, place: _Place) -> list[str]:
    """The pattern as patterns without lookahead. Raises UnsupportedKeyword."""
    try:
        return without_lookahead(pattern)
    except ValueError as error:
        raise _refused(keyword, place, str(error)) from None


def _nothing(place: _Place) -> Any:
    raise UnsupportedKeyword(f"the keyword 'not'{_at(place)} allows nothing")


def _canonical(value: Any) -> str:
    """Equal texts for equal values of JSON: 1 is 1.0, and is not true."""
    return json.dumps(_whole(value), sort_keys=True)


def _whole(value: Any) -> Any:
    """The value with numbers like 1.0 as integers."""
    if isinstance(value, list):
        return [_whole(each) for each in value]
    if isinstance(value, dict):
        return {name: _whole(each) for name, each in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _has_text(schema: Mapping[str, Any]) -> bool:
    """The schema may allow texts, for which a format has a meaning."""
    types = schema.get("type", "string")
    return types == "string" or (isinstance(types, list) and "string" in types)


def _same(one: Any, other: Any) -> bool:
    """The parts are the same objects."""
    if isinstance(one, list):
        return all(new is old for new, old in zip(one, other, strict=True))
    if isinstance(one, dict) and one is not other:
        return one.keys() == other.keys() and all(one[key] is other[key] for key in one)
    return one is other


def _parts(value: Any) -> int:
    """The parts of a schema. A long text counts as several: what is added is written out as text."""
    if isinstance(value, str):
        return 1 + len(value) // _CHARACTERS
    inner = (*value, *value.values()) if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(_parts, inner))
