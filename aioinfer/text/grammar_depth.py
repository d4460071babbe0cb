"""The depth of a grammar's rules and references, before llguidance follows them.

llguidance compiles a rule where it first meets its name, and a JSON schema where it first meets a ``$ref`` to
it, by recursion in native code: a chain of thousands of them overflows the thread's stack, which ends the
process. It follows each once, in an order that is not known here, so rules that refer to each other in a
circle count as if each were within the one before it. The depth is then that of the deepest path, where

* a rule counts 1, and 1 more for each of its brackets that are within each other
* a schema that ``$ref`` refers to counts its brackets that are within each other.

All of it is linear in the size of the grammar, and without recursion.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Container, Mapping
from typing import Any, TypeVar

from aioinfer.text.schema_references import inner, targets_of

__all__ = ["MOST_DEEP", "check_gbnf", "check_lark", "check_schema"]

#: The deepest rules and references. llguidance uses 4 KiB of stack for each; workers have four times that.
MOST_DEEP = 1000

#: Lark as llguidance reads it; only what may hide names, colons and brackets is told apart. What has no end
#: is an error there, and is skipped here, so that a search never goes back.
_LARK = re.compile(
    r"""(?:\#|//)[^\n]*
    | "(?:\\.|[^"\\\x00-\x1f\x7f])*+(?:"i?)?
    | /(?:\\.|[^/\\])++(?:/[imslux]*)?
    | <[^<>\s]+>
    | @[a-zA-Z0-9_-]+
    | [+-]?[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?
    | ::
    | %(?P<json>json|regex|llguidance)\s*+(?=[\[{])
    | %[a-z]+
    | !?\??(?P<name>_?[a-z][_a-z0-9-]*|_?[A-Z][_A-Z0-9-]*)
    | (?P<colon>:)
    | (?P<open>[(\[{])
    | (?P<close>[)\]}])""",
    re.VERBOSE,
)
_GBNF = re.compile(
    r"""\#[^\r\n]*
    | "(?:\\.|[^"\\])*+"?
    | \[(?:\\.|[^\]\\])*+\]?
    | (?P<name>[\w-]+)
    | (?P<colon>::=)
    | (?P<open>\()
    | (?P<close>\))
    | (?P<json>(?!))""",
    re.VERBOSE | re.DOTALL,
)

_Key = TypeVar("_Key", str, int)


def check_lark(text: str, json_begins: Callable[[int], int]) -> None:
    """Raises ValueError for rules that are too deep. ``json_begins`` is called with each place where JSON
    begins, and returns where it ends."""
    _check_rules(text, _LARK, json_begins)


def check_gbnf(text: str) -> None:
    """Raises ValueError for rules that are too deep."""
    _check_rules(text, _GBNF, lambda start: start)


def check_schema(schema: Any) -> None:
    """Raises ValueError for references that are too deep in a JSON schema, whose brackets are bounded."""
    targets, elsewhere = targets_of(schema)
    units = {id(unit): unit for unit in (schema, *targets.values()) if not isinstance(unit, bool)}
    # A schema is compiled once for each way to spell a reference to it.
    spellings = Counter(map(id, targets.values()))
    sizes: dict[int, int] = {}
    edges: dict[int, set[int]] = {}
    for key, unit in units.items():
        # Definitions are compiled where something refers to them.
        apart = ("$defs", "definitions") if unit is schema and not elsewhere else ()
        depth, edges[key] = _extent(unit, apart, units, targets)
        sizes[key] = depth * max(1, spellings[key])
    # A reference that is not understood may lead anywhere, but is followed once.
    _check(_deepest(sizes, edges) * (1 + elsewhere))


def _check(depth: int) -> None:
    if depth > MOST_DEEP:
        raise ValueError(f"has rules or references more than {MOST_DEEP} levels deep")


def _check_rules(text: str, syntax: re.Pattern[str], json_begins: Callable[[int], int]) -> None:
    rule, begin, last = "", 0, ""
    #: for each open bracket: the rule that it is in, the brackets around that, and the name before it
    outer: list[tuple[str, int, str]] = []
    sizes = {rule: 1}
    edges: dict[str, set[str]] = {rule: set()}
    at = 0
    while (found := syntax.search(text, at)) is not None:
        at = found.end()
        if found["name"]:
            edges[rule].add(last)
            last = found["name"]
        elif found["colon"] and last:  # otherwise it is between the bits of a parameter
            rule, begin, last = last, len(outer), ""
            sizes.setdefault(rule, 1)
            edges.setdefault(rule, set())
        elif found["open"]:
            outer.append((rule, begin, last))
            last = ""
            sizes[rule] = max(sizes[rule], 1 + len(outer) - begin)
        elif found["close"] and outer:
            edges[rule].add(last)
            rule, begin, last = outer.pop()
        elif found["json"]:
            at = json_begins(at)
    edges[rule].add(last)
    for each, _, name in outer:
        edges[each].add(name)
    for names in edges.values():
        names.discard("")
    _check(_deepest(sizes, edges))


def _extent(
    unit: Any, apart: Container[str], units: Mapping[int, Any], targets: Mapping[str, Any]
) -> tuple[int, set[int]]:
    """The depth of a schema without other units within it, and the units that it leads to."""
    leads: set[int] = set()
    depth, level = 0, [unit]
    while level:
        depth += 1
        below = []
        for value in level:
            if isinstance(value, dict) and isinstance(reference := value.get("$ref"), str):
                leads.update([id(targets[reference])] if reference in targets else [])
            for name, child in inner(value):
                if id(child) in units:
                    leads.add(id(child))
                elif value is not unit or name not in apart:
                    below.append(child)
        level = below
    return depth, leads


def _deepest(sizes: Mapping[_Key, int], edges: Mapping[_Key, set[_Key]]) -> int:
    """The size of the largest path. What is on a circle together counts together (Tarjan's algorithm)."""
    order: dict[_Key, int] = {}
    low: dict[_Key, int] = {}
    depths: dict[_Key, int] = {}
    open_: list[_Key] = []
    for first in sizes:
        if first in order:
            continue
        path = [(first, iter(edges[first]))]
        order[first] = low[first] = len(order)
        open_.append(first)
        while path:
            key, rest = path[-1]
            for other in rest:
                if other not in sizes:
                    continue
                if other not in order:
                    order[other] = low[other] = len(order)
                    open_.append(other)
                    path.append((other, iter(edges[other])))
                    break
                if other not in depths:
                    low[key] = min(low[key], order[other])
            else:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[key])
                if low[key] == order[key]:
                    _close(key, open_, sizes, edges, depths)
    return max(depths.values(), default=0)


def _close(
    key: _Key,
    open_: list[_Key],
    sizes: Mapping[_Key, int],
    edges: Mapping[_Key, set[_Key]],
    depths: dict[_Key, int],
) -> None:
    """Give the circle that ``key`` closes its depth."""
    at = len(open_) - 1
    while open_[at] != key:
        at -= 1
    circle = open_[at:]
    del open_[at:]
    below = max((depths[other] for each in circle for other in edges[each] if other in depths), default=0)
    size = sum(sizes[each] for each in circle)
    depths.update(dict.fromkeys(circle, size + below))
