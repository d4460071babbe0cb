"""Grammars that nest, in every form. As a program: compile the deepest of each that is accepted.

In a process of its own, since native code that recurses too deeply ends the process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

from aioinfer.errors import InvalidRequest
from aioinfer.execution import workers
from aioinfer.text.grammar import GrammarState
from aioinfer.text.grammar_bounds import MOST_RULES, GrammarBounds
from aioinfer.text.grammar_spec import Grammar
from aioinfer.text.guidance import GuidanceBackend
from tests.text.vocabulary import Vocabulary

__all__ = ["SHAPES", "VOCABULARY", "backend", "chain", "deepest"]

#: of the bundled model
VOCABULARY = 839
#: a number of levels -> a grammar of a depth that grows with it
Shape = Callable[[int], Grammar]


def chain(
    count: int,
    body: str = "{}",
    *,
    end: str = '"a"',
    name: str = "r{}",
    equals: str = ":",
    start: str = "start",
) -> Grammar:
    """Rules, each with the next in place of ``{}``."""
    names = [name.format(at) for at in range(count + 1)]
    lines = [f"{one}{equals} {body.format(other)}" for one, other in pairwise([start, *names])]
    return Grammar("lark", "\n".join([*lines, f"{names[-1]}{equals} {end}"]))


def references(count: int, body: Callable[[Any], Any], *, last: str = "string", prefix: str = "") -> Grammar:
    """Definitions, each with a reference to the next in its ``body``."""
    definitions = {f"d{at}": body({"$ref": f"#/$defs/d{at + 1}"}) for at in range(count)}
    definitions[f"d{count}"] = {"type": last}
    text = json.dumps({"$defs": definitions, "$ref": "#/$defs/d0"})
    return Grammar("lark", prefix + text) if prefix else Grammar("json_schema", text)


def _nested(reference: Any, levels: int, wrap: Callable[[Any], Any]) -> Any:
    for _ in range(levels):
        reference = wrap(reference)
    return reference


def _respelled(count: int) -> Grammar:
    """One definition that refers to itself by as many spellings of its name."""
    names = [
        "".join(f"%{ord(c):02x}" if at >> bit & 1 else c for bit, c in enumerate("definition"))
        for at in range(count)
    ]
    options = [{"$ref": f"#/$defs/{name}"} for name in names]
    return Grammar("json_schema", json.dumps({"$defs": {"definition": {"anyOf": options}}, **options[0]}))


def _clique(count: int) -> Grammar:
    """Each rule refers to all others nearby: followed one after another, whichever comes first."""
    lines = [
        f"r{at}: " + " | ".join(f'"{other}" r{other % count}' for other in range(at - 3, at + 4)) + ' | "x"'
        for at in range(count)
    ]
    return Grammar("lark", "\n".join(["start: r0", *lines]).replace("r-", "r"))


_ITEMS = partial(dict[str, Any], type="array")
_TERMINAL: dict[str, Any] = {"name": "T{}", "start": "start: T0\nUNUSED"}
_GBNF: dict[str, Any] = {"equals": " ::=", "start": "root"}

SHAPES: dict[str, Shape] = {
    "rules": chain,
    "rules in sequence": partial(chain, body='"x" {} "y"'),
    "rules in alternatives": partial(chain, body='"x" {} | "y"'),
    "rules repeated": partial(chain, body='("x" {})~1..2 "y"?'),
    "rules with attributes": partial(chain, equals='[capture="x"]:', start="start: r0\nr"),
    "rules in parentheses": partial(chain, body="(" * 26 + "{}" + ")" * 26),
    "rules in brackets": partial(chain, body='"x" ' + "[" * 26 + "{}" + "]" * 26),
    "rules in a circle": partial(chain, body='"x" {}', end='"a" start | "b"'),
    "rules in a circle to the left": partial(chain, body='{} "x"', end='start "a" | "b"'),
    "rules that all refer to others": _clique,
    "rules of GBNF": partial(chain, body='"x" {} | root', end="[()]", **_GBNF),
    "terminals of GBNF": partial(chain, body='("x" {})', end="[()]", **_GBNF),
    "terminals": partial(chain, **_TERMINAL),
    "terminals in sequence": partial(chain, body="{} /b/", **_TERMINAL),
    "terminals in alternatives": partial(chain, body='"x" {} | "y"', **_TERMINAL),
    "terminals in brackets": partial(chain, body="[" * 26 + "{}" + "]" * 26 + ' "b"', **_TERMINAL),
    "terminals in conjunctions": partial(chain, body="{} & /[a-z]*/", end="/a+/", **_TERMINAL),
    "terminals negated": partial(chain, body="~{}", end="/a+/", **_TERMINAL),
    "terminals repeated": partial(chain, body='"x" {}?', **_TERMINAL),
    "conditions": lambda n: Grammar(
        "lark", 'start: a::0\na::_: "x" a::incr(_) %if ' + "not(" * n + "eq([0:3],1)" + ")" * n + ' | "y"'
    ),
    "templates": lambda n: Grammar("lark", "start: " + "a{" * n + "b" + "}" * n + '\na: "x"\nb: "y"'),
    "references": partial(references, body=lambda r: r),
    "references beside others": partial(references, body=lambda r: {**r, "minLength": 1}),
    "arrays": partial(references, body=lambda r: _ITEMS(items=r)),
    "arrays of anything": partial(references, body=lambda r: {"items": r}),
    "arrays of merged arrays": partial(
        references, body=lambda r: _ITEMS(items={**r, "minItems": 1}), last="array"
    ),
    "arrays in arrays": partial(references, body=lambda r: _nested(r, 50, lambda i: {"items": i})),
    "objects": partial(
        references, body=lambda r: {"type": "object", "properties": {"a": r}, "required": ["a"]}
    ),
    "maps": partial(references, body=lambda r: {"type": "object", "additionalProperties": r}),
    "choices": partial(references, body=lambda r: {"anyOf": [r, {"type": "null"}]}),
    "choices in choices": partial(
        references, body=lambda r: _nested(r, 20, lambda i: {"anyOf": [i, {"type": "null"}]})
    ),
    "merged": partial(references, body=lambda r: {"allOf": [r, {"minLength": 1}]}),
    "schema respelled": _respelled,
    "schema within Lark": partial(references, body=lambda r: _ITEMS(items=r), prefix='start: "x" %json '),
}


def backend() -> GuidanceBackend:
    return Vocabulary(max_depth=120).backend


def deepest(shape: Shape, guidance: GuidanceBackend) -> int:
    """The number of levels of the deepest grammar that may be compiled."""
    least, most = 1, MOST_RULES + 10
    while most - least > 1:
        middle = (least + most) // 2
        try:
            guidance._text(shape(middle), GrammarBounds(120))
        except ValueError:
            most = middle
        else:
            least = middle
    return least


def _course(shape: Shape) -> str:
    """Compile, start and go on for some tokens."""
    guidance = backend()
    levels = deepest(shape, guidance)
    try:
        matcher = guidance.compile(shape(levels))
        state = GrammarState(guidance, matcher.copy(), 1, VOCABULARY, 3).start()
    except InvalidRequest as refused:
        return f"{levels} levels: {refused}"
    for _ in range(5):
        allowed = [token for token in range(VOCABULARY) if state.mask[token // 32] >> (token % 32) & 1]
        if state.failed or state.matcher.stopped or not allowed:
            break
        state.accept([allowed[-1]])
        guidance.fill([state.matcher], [state.mask])
    return f"{levels} levels: compiled"


def _main() -> None:
    # Half of what a thread has must do.
    workers._STACK //= 2
    executor = workers.WorkerExecutor(1, "compiler")
    for name, shape in SHAPES.items():
        sys.stdout.write(f"{name}: {executor.submit(_course, shape).result()}\n")
        sys.stdout.flush()
    executor.shutdown()


if __name__ == "__main__":
    _main()
