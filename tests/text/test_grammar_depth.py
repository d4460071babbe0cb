"""The depth of rules and references is bounded before native code recurses into them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import suppress
from typing import Any

import pytest

from aioinfer.errors import InvalidRequest
from aioinfer.text.grammar_depth import MOST_DEEP
from aioinfer.text.grammar_spec import Grammar
from aioinfer.text.guidance import GuidanceBackend
from tests.text.grammar_shapes import SHAPES, backend, chain, deepest
from tests.tiers import SECONDS, nightly, rest, thinned

DEEPEST = "compiles or scans many grammars of the largest size"
TOO_DEEP = rf"rules or references more than {MOST_DEEP} levels deep"


@pytest.fixture(scope="module")
def guidance() -> GuidanceBackend:
    return backend()


@nightly(DEEPEST)
def test_the_deepest_grammars_are_compiled_on_half_the_stack_of_a_worker() -> None:
    program = [sys.executable, "-m", "tests.text.grammar_shapes"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert list(lines) == list(SHAPES)
    assert lines.pop("templates").endswith("template usage not supported yet")
    assert lines.pop("schema respelled").endswith("NoExtensionBias")  # it allows nothing
    for name, line in lines.items():
        assert re.fullmatch(r"\d\d+ levels: compiled", line), name


@rest(SECONDS)
@pytest.mark.parametrize("name", thinned(SHAPES, 4))
def test_one_level_more_and_many_more_are_refused(guidance: GuidanceBackend, name: str) -> None:
    levels = deepest(SHAPES[name], guidance)
    # What is merged level by level becomes too large first.
    refusals = rf"{TOO_DEEP}|parts when its schemas are merged"
    for more in (levels + 1, 3 * levels, 8 * levels):
        with pytest.raises(InvalidRequest, match=refusals) as refused:
            guidance.compile(SHAPES[name](more))
        assert refused.value.field == "grammar"


#: ways to write a rule that refers to the next one
HIDDEN = {
    "priority": ("r{}.1: r{}", ""),
    "parameter": ("r{}::_: r{}::_", ""),
    "attributes": ('r{}[capture, stop_capture="r0: x"]: r{}', ""),
    "prefix": ("!?r{}: r{}", ""),
    "next to a terminal": ("x{}A: B\nr{}: bC\nb: x{}", ""),
    "behind a text": ('r{}: ":" "\\\\" "\\": /\\"#(\\/" r{} "x"i', ""),
    "behind a regex": ('r{}: /"[\\/:({{]*"/s r{} "\'"', ""),
    "behind a comment": ('r{}: // "(\n  | # "[\n  | r{} // : "', ""),
    "on another line": ("r{}\n  : r{}".replace("\n  :", ":") + '\n  | "y"', ""),
    "behind a token": ('r{}: <[1-5]> <a"b> r{}', ""),
    "behind JSON": ('r{}: %json {{"const": "r1 : {{ \\" "}} r{}', ""),
    "behind a number": ('r{}: "x"~1..2 "y"{{1,2}} r{}', ""),
    "behind a statement": ("%ignore /x/\nr{}: r{}", ""),
    "dashes": ("r-{}: r-{}", "r-"),
}


@pytest.mark.parametrize("way", HIDDEN)
def test_no_way_to_write_a_rule_hides_it(guidance: GuidanceBackend, way: str) -> None:
    line, name = HIDDEN[way]
    if way == "next to a terminal":
        # One word for a reader, and two names for llguidance: "b" and "C".
        text = "start: aB\n" + 'a: r0X\nX: "x"\nB: "b"\n'
        text += "\n".join(f"r{at}: r{at + 1}X" for at in range(3000)) + '\nr3000: "x"'
    else:
        text = f"start: {name or 'r'}0\n" + "\n".join(line.format(at, at + 1) for at in range(3000))
        text += f'\n{name or "r"}3000: "x"'
    for grammar in (text, "start: %lark {\n" + text + "\n}"):
        with pytest.raises(InvalidRequest, match=TOO_DEEP):
            guidance.compile(Grammar("lark", grammar))


def schema(definitions: dict[str, Any], **root: Any) -> Grammar:
    return Grammar("json_schema", json.dumps({"$defs": definitions, "$ref": "#/$defs/d0", **root}))


def test_no_way_to_spell_a_reference_hides_it(guidance: GuidanceBackend) -> None:
    spelled: list[tuple[str, dict[str, Any]]] = [
        ("#/%24defs/d{}", {}),
        ("https://x.test/s#/$defs/d{}", {"$id": "https://x.test/s"}),
        ("s#/$defs/d{}", {"$id": "https://x.test/s"}),
        ("#/$defs/d{}", {"items": {"$id": "https://x.test/other"}}),
        ("d{}", {}),
        ("#d{}", {}),
    ]
    for form, root in spelled:
        definitions: dict[str, Any] = {
            f"d{at}": {"$id": f"d{at}", "$anchor": f"d{at}"} if form in ("d{}", "#d{}") else {}
            for at in range(1501)
        }
        for at in range(1500):
            definitions[f"d{at}"] |= {"type": "array", "items": {"$ref": form.format(at + 1)}}
        with pytest.raises(InvalidRequest, match=TOO_DEEP):
            guidance.compile(schema(definitions, **{"$ref": form.format(0), **root}))


def test_a_schema_of_many_references_that_are_not_deep_is_accepted(guidance: GuidanceBackend) -> None:
    definitions: dict[str, Any] = {f"d{at}": {"type": "array", "items": {"$ref": "#"}} for at in range(150)}
    several = {f"p{at}": {"$ref": f"#/$defs/d{at}"} for at in range(150)}
    several |= {f"any{at}": {"$ref": f"#/$defs/any{at}"} for at in range(150)}
    definitions |= {f"any{at}": True for at in range(150)}
    root = {"type": "object", "properties": several, "$defs": definitions}
    guidance.compile(Grammar("json_schema", json.dumps(root)))
    tree = {"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#/$defs/d0"}}}}
    guidance.compile(schema({"d0": tree}))


def test_a_grammar_of_many_rules_that_are_not_deep_is_accepted(guidance: GuidanceBackend) -> None:
    flat = "\n".join(f'r{at}: "x{at}" start | "y"' for at in range(600))
    guidance.compile(Grammar("lark", "start: " + " | ".join(f"r{at}" for at in range(600)) + "\n" + flat))
    several = "\n".join(f'r{at}: "x{at}" (t | T)\n' for at in range(3000))
    guidance.compile(Grammar("lark", f'start: r0 | r2999\nt: "t"\nT: "T"\n{several}'))


@pytest.mark.parametrize(
    "text",
    [
        'start: "',
        "start: (" * 9,
        'start: "a"\n%json [',
        "root ::= (a" * 9,
        "root ::= a",
        'root ::= "',
        "root ::= [",
        ":",
    ],
)
def test_what_ends_too_early_is_an_error_of_its_own(guidance: GuidanceBackend, text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        guidance.compile(Grammar("lark", text))
    assert refused.value.field == "grammar"


@nightly(DEEPEST)
def test_long_chains_are_refused_in_one_pass(guidance: GuidanceBackend) -> None:
    for equals, start in ((":", "start"), (" ::=", "root")):
        with pytest.raises(InvalidRequest, match=TOO_DEEP):
            guidance.compile(chain(50_000, equals=equals, start=start))
    for part in (
        "(",
        "[",
        "a{",
        ":",
        "a:",
        "a: b\n",
        '"',
        '"a',
        "/",
        "/a",
        "<",
        "%json",
        "%json ",
        "//",
        "\\",
    ):
        for before in ("start: ", 'start: "', "start: /", "root ::= ", 'root ::= "', "root ::= ["):
            with suppress(InvalidRequest):
                guidance.compile(Grammar("lark", before + part * (200_000 // len(part))))
