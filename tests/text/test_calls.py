"""The parsers of tool calls, format by format: calls, what is nearly one, and the text around them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from aioinfer.text.tool_calls import PARSERS
from aioinfer.text.tool_calls.base import LONGEST_EARLY, ToolCallParser
from tests.text.call_formats import Calls, collect, parse
from tests.tiers import SECONDS, rest

FOUND = [("f", "{}")]
ONE = [("f", '{"a": 1}')]
COUNT = [("f", '{"count": 1}')]


def hermes(arguments: str = "{}", name: str = "f") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def coder(*parameters: tuple[str, str], name: str = "f") -> str:
    told = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{told}</function>\n</tool_call>"


def gemma(arguments: str = "", name: str = "f") -> str:
    return f"<|tool_call>call:{name}{{{arguments}}}<tool_call|>"


LLAMA = '{"name": "f", "parameters": {"a": 1}}'
BARE = '[TOOL_CALLS]f[ARGS]{"a": 1}'
LISTED = '{"name": "f", "arguments": {"a": 1}}'
CODER = coder(("count", "1"))
THOUGHT = "<|channel|>analysis<|message|>Hm.\n<|end|><|start|>assistant"
MESSAGE = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"
TO_F = " to=functions.f<|channel|>commentary json<|message|>{}"

HERMES = [
    ("Let me look.\n" + hermes(), "Let me look.", FOUND),
    (hermes() + "\n" + hermes(name="g"), "", [("f", "{}"), ("g", "{}")]),
    (f"a\n\n{hermes()}\n b {hermes(name='g')}c\n", "a b c\n", [("f", "{}"), ("g", "{}")]),
    (hermes('{"a": "}<\\"</tool_call>{["}'), "", [("f", '{"a": "}<\\"</tool_call>{["}')]),
    ('<tool_call>{"arguments":{"a":{}} , "name":"f"}</tool_call>', "", [("f", '{"a":{}}')]),
    ('<tool_call>{"name":"\\u00fc\\n","arguments":{}}</tool_call>', "", [("ü\n", "{}")]),
    # missing or truncated parts of the closing tag
    ('<tool_call>{"name":"f","arguments":{"a": 1}</tool_call>', "", ONE),
    (hermes('{"a": 1}')[:-4], "", ONE),
    (hermes('{"a": 1}')[:-14], "", ONE),
    # the length is reached within the arguments
    ('<tool_call>{"name":"f","arguments":{"a":[1', "", [("f", '{"a":[1')]),
    # calls behind what is none
    ("<tool_call> so " + hermes(), "<tool_call> so ", FOUND),
    ('<tool_call>{"name": ' + hermes(), '<tool_call>{"name": ', FOUND),
    ('<tool_call>{"arguments":{ ' + hermes(), '<tool_call>{"arguments":{ ', FOUND),
    # unexpected text behind the arguments
    ('<tool_call>{"name":"f","arguments":{},id:1}</tool_call>', ",id:1}</tool_call>", FOUND),
    ('<tool_call>{"name":"f","arguments":{"a": x</tool_call>b', "b", [("f", '{"a": x')]),
    # line breaks, space and arguments before their name are held back, but not for ever
    ("a" + "\n" * 64 + hermes() + "\n" * 99 + "b", "ab", FOUND),
    ("a" + "\n" * 99 + hermes() + "b", "a" + "\n" * 35 + "b", FOUND),
    ('<tool_call>{"name": "f", "arguments": {}' + " " * 1000 + "}</tool_call>", "", FOUND),
    ('<tool_call>{"name": "f", "arguments": {}' + " " * 1100 + "}", " " * 1100 + "}", FOUND),
]
QWEN3_CODER = [
    (coder(), "", FOUND),
    (f"Let me see.\n\n{CODER}\n{CODER}\n", "Let me see.", COUNT * 2),
    (f"a{CODER}b", "ab", COUNT),
    (coder(("text", "1"), ("count", "2")), "", [("f", '{"text": "1", "count": 2}')]),
    ("<tool_call><function=f><parameter=count>1</parameter></function></tool_call>", "", COUNT),
    (coder(("text", '\n a\\\n"b"\n')), "", [("f", json.dumps({"text": '\n a\\\n"b"\n'}))]),
    (coder(("text", "</tool_call><p></function>")), "", [("f", '{"text": "</tool_call><p></function>"}')]),
    (coder(("map", '{"a": "</parameter>"}')), "", [("f", '{"map": {"a": "</parameter>"}}')]),
    # tags that models omit
    (CODER.replace("</function>\n", ""), "", COUNT),
    (CODER.removesuffix("</tool_call>"), "", COUNT),
    # the length is reached
    ("<tool_call>\n<function=f>\n<parameter=co", "", [("f", '{"co')]),
    (CODER[: CODER.index("1") + 3], "", [("f", '{"count": 1')]),
    (coder(("text", "ab"))[: -len("er>\n</function>\n</tool_call>")], "", [("f", '{"text": "ab')]),
    (coder(("list", "[1, 2]")).partition("]")[0], "", [("f", '{"list": [1, 2')]),
    # what is neither a parameter nor an end
    (
        CODER.replace("</function>", "so </function>"),
        "\nso </function>\n</tool_call>",
        [("f", '{"count": 1')],
    ),
    # JSON that does not end with its value
    (coder(("list", "[1] 2")), " 2\n</parameter>\n</function>\n</tool_call>", [("f", '{"list": [1]')]),
    (coder(("list", "[1")), "", [("f", '{"list": [1\n}')]),
    (f"<tool_call>\n<function=>\n{CODER}", "<tool_call>\n<function=>", COUNT),
]
GEMMA4 = [
    (f"Hm.\n{gemma('a:1')}{gemma(name='g')} so", "Hm. so", [*ONE, ("g", "{}")]),
    (gemma("a:1").removesuffix("<tool_call|>"), "", ONE),
    (gemma("a:1").removesuffix("l|>"), "", ONE),
    # the length is reached
    ("<|tool_call>call:f{ke", "", [("f", '{"ke')]),
    ('<|tool_call>call:f{<|"|>[ke', "", [("f", '{"[ke')]),
    ("<|tool_call>call:f{a:1,b", "", [("f", '{"a": 1, "b')]),
    ("<|tool_call>call:f{a:12", "", [("f", '{"a": 12')]),
    ('<|tool_call>call:f{a:[1,<|"|>b<|', "", [("f", '{"a": [1, "b')]),
    # brackets that do not fit, and what is no value
    ("<|tool_call>call:f{a:[1}<tool_call|>", "", [("f", '{"a": [1')]),
    ("<|tool_call>call:f{a:}<tool_call|>", "", [("f", '{"a": ')]),
    (gemma("a:1") + "}", "}", ONE),
    (f"<|tool_call>call:{gemma()}", "<|tool_call>call:", FOUND),
]
LLAMA3 = [
    (LLAMA, "", ONE),
    (f"\n<|python_tag|> {LLAMA}\n", "", ONE),
    (f"{LLAMA}; {LLAMA}", "", ONE * 2),
    (f"{LLAMA};\n<|python_tag|>{LLAMA};", "", ONE * 2),
    (f"{LLAMA}\n{LLAMA}", "", ONE * 2),
    ('{"type": "function", "name": "f", "parameters": {"a": 1}}', "", ONE),
    ('{"name":"f","arguments":{"a": 1} }', "", ONE),
    ('{"parameters": {"a": 1}, "name": "f"}', "", ONE),
    # what follows a call
    (f"{LLAMA} and", " and", ONE),
    (f"{LLAMA}; {{", "; {", ONE),
    (f'{LLAMA}; {{"name": "g"', '; {"name": "g"', ONE),
    (LLAMA[:-1] + ', "born": 1}', ', "born": 1}', ONE),
    # the length is reached within the arguments, or behind them
    (LLAMA[:-3], "", [("f", '{"a": ')]),
    (LLAMA[:-1], "", ONE),
]
#: of both formats, which read each other's calls
MISTRAL = [
    (f"[TOOL_CALLS][{LISTED}]", "", ONE),
    (f"Hm.\n[TOOL_CALLS] [ {LISTED} , {LISTED} ]\nSo", "Hm.So", ONE * 2),
    ('[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "a1B2c3D4e"}]', "", ONE),
    ('[TOOL_CALLS][{"arguments": {"a": 1}, "name": "f"}]', "", ONE),
    ('[TOOL_CALLS][{"arguments": {"a": 1}, "name": "f", "id": "a1B2c3D4e"}]', "", ONE),
    ('[TOOL_CALLS][{"id": "a1B2c3D4e", "name": "f", "arguments": {"a": 1}}]', "", ONE),
    (f'[TOOL_CALLS][{LISTED}, {{"id": "b", "arguments": {{"a": 1}}, "name": "f"}}]', "", ONE * 2),
    (BARE + BARE, "", ONE * 2),
    ('[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{"a": 1}', "", ONE),
    ('[TOOL_CALLS]f{"a": 1}', "", ONE),
    ('[TOOL_CALLS]a.b-c[ARGS] {"a": 1}', "", [("a.b-c", '{"a": 1}')]),
    # the length is reached
    (f"[TOOL_CALLS][{LISTED}", "", ONE),
    (f"[TOOL_CALLS][{LISTED}, ", "", ONE),
    (f'[TOOL_CALLS][{LISTED}, {{"name": "g"', ', {"name": "g"', ONE),
    ('[TOOL_CALLS]f[ARGS]{"a": ', "", [("f", '{"a": ')]),
    # unexpected text behind a call
    (f"[TOOL_CALLS][{LISTED} and", " and", ONE),
    (f"[TOOL_CALLS][{LISTED}, 2] {BARE}", ", 2] ", ONE * 2),
    (f"[TOOL_CALLS]f[{BARE}", "[TOOL_CALLS]f[", ONE),
]
HARMONY = [
    (MESSAGE, "", FOUND),
    (f"<|start|>assistant{MESSAGE}<|end|>", "", FOUND),
    (f"<|start|>assistant{TO_F}<|call|>", "", FOUND),
    (TO_F, "", FOUND),  # the prompt ends with the role
    ("<|channel|>commentary to=functions.f<|constrain|>json<|message|>\n{}\n<|call|>", "", FOUND),
    ("<|channel|>commentary to=functions.f <|constrain|> json<|message|>{}", "", FOUND),
    ("<|channel|>commentary to=f<|message|>{}", "", FOUND),
    ("<|channel|>analysis to=browser.search code<|message|>{}", "", [("browser.search", "{}")]),
    ("<|start|>assistant<|channel|>analysis to=functions.f code<|message|>\n{}<|call|>", "", FOUND),
    ("<|channel|>commentary to=functions.f<|channel|>commentary json<|message|>{}", "", FOUND),
    (f"I ask.\n{MESSAGE}", "I ask.", FOUND),
    (f"{MESSAGE}<|call|><|start|>assistant{MESSAGE}", "", FOUND * 2),
    (f"{MESSAGE}{MESSAGE} so<|call|>", "so", FOUND * 2),
    (MESSAGE[:-1], "", [("f", "{")]),
    (f"<|channel|>final{MESSAGE}", "", FOUND),
    (" to=functions.f <|constrain|>json<|message|>{}", "", FOUND),
    # none, and what is no object
    (f"{MESSAGE[:-2]}<|call|>", "", FOUND),
    (MESSAGE[:-2], "", [("f", "")]),
    (f"{MESSAGE[:-2]}Rome<|call|>", "", [("f", "Rome")]),
]
CALLS: dict[str, list[tuple[str, str, Calls]]] = {
    "hermes": HERMES,
    "qwen3-coder": QWEN3_CODER,
    "gemma4": GEMMA4,
    "mistral": MISTRAL,
    "mistral-v11": MISTRAL,
    "llama3": LLAMA3,
    "harmony": HARMONY,
}
LONG = "x" * 2000
OF_MISTRAL = [
    '[TOOL_CALLS] a b [ARGS]{"a": 1}', "[TOOL_CALLS]", "[TOOL_CALLS][]", "[TOOL_CALLS]f[ARGS]1",
    "[TOOL_CALLS]f[CALL_ID", LISTED,
]  # fmt: skip
#: texts that are content to their end
NONE = {
    "hermes": [
        "<tool_call>",
        "\n<tool_call>\n[]</tool_call>\n",
        '<tool_call>{"name": "f", "arguments": "{}"',
        '<tool_call>{"name": "", "arguments": {}}',
        '<tool_call>{"arguments":{}, "x":1}',
        # what takes too long to become a call
        hermes().replace("\n{", " " * 2000 + "{"),
        hermes(name=LONG),
        f'<tool_call>{{"arguments": {{"a": "{LONG * 9}"}}, "name": "f"}}</tool_call>',
        f'<tool_call>{{"arguments": {{"a": 1}}, "name": "{LONG}"}}</tool_call>',
    ],
    "qwen3-coder": [
        "<tool_call>",
        '<tool_call>\n{"name": "f", "arguments": {}}',
        "<tool_call>\n<function=f",
        "<tool_call>\n<function=f>\n",
        '<tool_call>\n<function=f>\n{"a": 1}\n</function>',
        "<function=h>\n</function>",
    ],
    "gemma4": ["<|tool_call>", '<|tool_call>{"name": "f"}', "call:f{a:1}", "<|tool_call>call:f"],
    "mistral": OF_MISTRAL,
    "mistral-v11": OF_MISTRAL,
    "llama3": [
        "",
        f"So: {LLAMA}".replace('"f"', '"h"'),
        f"<|python_tag|>print({LLAMA})".replace('"f"', '"h"'),
        '{"name": "Ada", "born": 1815}',
        '{"name": "f"',
        "<|python",
    ],
    "harmony": [
        f"{THOUGHT}<|channel|>final<|message|>{{}}",
    ],
}


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"), [(n, *each) for n in CALLS for each in CALLS[n]]
)
def test_calls_are_found_among_content(name: str, text: str, content: str, calls: Calls) -> None:
    assert parse(name, [text]) == parse(name, list(text)) == (content, calls)


@pytest.mark.parametrize(("name", "text"), [(name, text) for name in NONE for text in NONE[name]])
def test_text_similar_to_calls_is_content(name: str, text: str) -> None:
    assert parse(name, [text]) == parse(name, list(text)) == (text, [])


def test_the_name_may_follow_long_arguments() -> None:
    early = f'<tool_call>{{"arguments": {{"a": "{LONG * 8}"}}, "name": "f"}}</tool_call>'
    assert parse("hermes", [early]) == ("", [("f", json.dumps({"a": LONG * 8}))])


def quoted(value: str) -> str:
    return f'<|"|>{value}<|"|>'


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ("", {}),
        (f"a:{quoted('')},b:{quoted('{}[],:' + chr(10) + chr(34))}", {"a": "", "b": '{}[],:\n"'}),
        ("a:1,b:-2.5e3,c:true,d:false,e:null", {"a": 1, "b": -2500.0, "c": True, "d": False, "e": None}),
        ("a:True,b:False,c:None", {"a": True, "b": False, "c": None}),
        (f"a:{{b:{{c:{quoted('d')}}},e:{{}}}},f:[]", {"a": {"b": {"c": "d"}, "e": {}}, "f": []}),
        (f"a:[1,{quoted('b')},[true],{{c:2}}]", {"a": [1, "b", [True], {"c": 2}]}),
        (f"{quoted('a b')}:1,{quoted('c')}:2", {"a b": 1, "c": 2}),
        (" a : 1 ,\n b : [ 1 , 2 ] , ", {"a": 1, "b": [1, 2]}),
        ("a:hello there", {"a": "hello there"}),
        ('a:"b"', {"a": "b"}),
        ("a:[1,]", {"a": [1]}),
        ("a:x<y,b:<,c:[1<2,<|]", {"a": "x<y", "b": "<", "c": ["1<2", "<|"]}),
    ],
)
def test_arguments_in_gemmas_notation_become_json(arguments: str, value: Any) -> None:
    for parts in ([gemma(arguments)], list(gemma(arguments))):
        content, [(_, found)] = parse("gemma4", parts)
        assert (content, json.loads(found)) == ("", value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mistral-v11", '[TOOL_CALLS]f[ARGS]{"b": <y>}'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"b": <y>}}</tool_call>'),
        *(("qwen3-coder", coder(("list", value))) for value in ("[1, 2", "[[1]", "[<")),
        *(("gemma4", gemma(value)) for value in ("a:[1}", "a:", "a:1<|tool_call>", f"a:{quoted('b')}c", "a")),
    ],
)
def test_arguments_that_break_off_stay_unfinished_whatever_follows(name: str, text: str) -> None:
    further = {"qwen3-coder": coder(), "gemma4": gemma()}.get(name, "")
    for parts in ([text], list(text), [text, further]):
        parser = PARSERS[name]({"f": {"properties": {"list": {"type": "array"}}}})
        _, calls = collect([*(parser.push(part) for part in parts), parser.finish()])
        assert calls
        assert parser.unfinished


@rest(SECONDS)
@pytest.mark.parametrize(
    ("name", "piece"),
    [("mistral", '[TOOL_CALLS][{"arguments":{'), ("hermes", '<tool_call>{"arguments":{"')],
)
def test_arguments_without_a_name_are_parsed_again_a_few_times_only(
    name: str, piece: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    again: list[int] = []
    plain = ToolCallParser._no_call

    def watch(parser: ToolCallParser) -> bool:
        again.append(len(parser._tentative))
        return plain(parser)

    monkeypatch.setattr(ToolCallParser, "_no_call", watch)
    text = piece * 4000
    for parts in ([text], list(text)):
        again.clear()
        assert parse(name, parts) == (text, [])
        assert sum(again) < 8 * LONGEST_EARLY + 300 * 4000


def test_ids_of_mistral_are_such_as_the_templates_demand() -> None:
    parsed = PARSERS["mistral"]().push(BARE)
    assert re.fullmatch("[A-Za-z0-9]{9}", parsed.calls[0].id or "")
