"""Calls whose values are between tags: tags that models leave out, damage or write within a value."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from aioinfer.text.tool_calls import PARSERS, Parsed
from aioinfer.text.tool_calls.base import LONGEST_EARLY
from tests.text.call_formats import FORMATS, Calls, collect

TAGGED = ("qwen3-coder", "seed-oss", "glm45", "minimax-m2")
every_format = pytest.mark.parametrize("name", TAGGED)
PROPERTIES = {
    "city": {"type": "string"},
    "note": {"type": "string"},
    "days": {"type": "integer"},
    "list": {"type": "array"},
    "map": {"type": "object"},
    "maybe": {"anyOf": [{"type": "array"}, {"type": "string"}]},
    "flag": {"type": "boolean"},
}
FUNCTIONS: Any = {name: {"type": "object", "properties": PROPERTIES} for name in ("f", "g")}
#: by format: the tag of a parameter, that behind a value, those of a function and the tag behind a call
KEY: dict[str, Callable[[str], str]] = {
    "qwen3-coder": "<parameter={}>\n".format,
    "seed-oss": "<parameter={}>".format,
    "glm45": "<arg_key>{}</arg_key>\n<arg_value>".format,
    "minimax-m2": '<parameter name="{}">'.format,
}
VALUE_END = {
    "qwen3-coder": "\n</parameter>\n", "seed-oss": "</parameter>\n",
    "glm45": "</arg_value>\n", "minimax-m2": "</parameter>\n",
}  # fmt: skip
HEAD = {
    "qwen3-coder": "<tool_call>\n<function=f>\n", "seed-oss": "<seed:tool_call>\n<function=f>\n",
    "glm45": "<tool_call>f\n", "minimax-m2": '<minimax:tool_call>\n<invoke name="f">\n',
}  # fmt: skip
END = {
    "qwen3-coder": "</function>\n</tool_call>", "seed-oss": "</function>\n</seed:tool_call>",
    "glm45": "</tool_call>", "minimax-m2": "</invoke>\n</minimax:tool_call>",
}  # fmt: skip


def read(name: str, text: str, functions: Any = None) -> tuple[str, Calls, bool]:
    """Content, calls and whether they are complete, the same whole and by character."""
    found = []
    for parts in ([text], list(text), [text[at : at + 7] for at in range(0, len(text), 7)]):
        parser = PARSERS[name](FUNCTIONS if functions is None else functions)
        deltas: list[Parsed] = [*(parser.push(part) for part in parts), parser.finish()]
        content, calls = collect(deltas)
        found.append((content, calls, bool(calls) and not parser.unfinished))
    assert found[0] == found[1] == found[2]
    return found[0]


def values(name: str, text: str, functions: Any = None) -> list[Any]:
    """The arguments of an answer that is complete calls."""
    content, calls, complete = read(name, text, functions)
    assert (content, complete) == ("", True), (content, calls)
    return [json.loads(arguments) for _, arguments in calls]


def call(name: str, *parameters: tuple[str, str]) -> str:
    told = "".join(f"{KEY[name](key)}{value}{VALUE_END[name]}" for key, value in parameters)
    return f"{HEAD[name]}{told}{END[name]}"


BARE = [name for name in TAGGED if name != "glm45"]


@pytest.mark.parametrize("name", BARE)
def test_a_call_may_begin_without_the_opening_tag(name: str) -> None:
    told = call(name, ("days", "4"))
    bare = told[told.index("\n") + 1 :]
    alone = bare.rpartition("\n")[0]
    for text, content, count in (
        (bare, "", 1), (alone, "", 1), (f"I look.\n\n{bare}", "I look.", 1), (f"{alone}\n{bare}", "", 2),
        (f"{bare}\n{told}", "", 2), (f"{told}\n{alone}\n{alone}", "", 3), (f"Hm. {alone} So.", "Hm.  So.", 1),
    ):  # fmt: skip
        assert read(name, text) == (content, [("f", '{"days": 4}')] * count, True), text


@pytest.mark.parametrize("name", BARE)
def test_what_is_told_about_a_call_is_text(name: str) -> None:
    told = call(name, ("days", "4"))
    tag, function, *_ = told.split("\n")
    unknown = told.replace("f", "h", 1).replace("=f", "=h").replace('"f', '"h').partition("\n")[2]
    for text in (f"Write {function} first.", f"Write {tag} and then {function}, then more.", f"{function}\n",
                 f"{tag}\n{function}\nWait.", unknown.replace("hunction", "function")):  # fmt: skip
        assert read(name, text) == (text, [], False)
    text = f"Use {tag}\n{function}\nWait, via {tag}:\n"
    assert read(name, text + told) == (text.rstrip("\n"), [("f", '{"days": 4}')], True)


def test_a_name_between_tags_is_a_call_of_a_known_function_only() -> None:
    assert values("glm45", "<tool_call>f</tool_call><tool_call>g\n</tool_call>") == [{}, {}]
    for text in (
        "Write <tool_call>NAME</tool_call>.",
        "<tool_call>f now</tool_call>",
        "<tool_call></tool_call>",
    ):
        assert read("glm45", text) == (text, [], False)
    assert values("glm45", call("glm45", ("days", "4")).replace("f", "h", 1)) == [{"days": "4"}]


@every_format
def test_white_space_around_tags_may_be_any(name: str) -> None:
    told = call(name, ("city", "Rome"), ("days", "4")).replace("\n", "")
    for text in (told, told.replace("><", "> \n  <").replace("<arg_value> \n  ", "<arg_value>")):
        assert values(name, text) == [{"city": "Rome", "days": 4}]
    for quote in "\"'":
        told = call(name, ("city", "Rome"))
        told = told.replace(KEY[name]("city"), KEY[name]("city").replace("city", f"{quote}city{quote}"))
        assert values(name, told.replace('""', '"').replace("\"'", "'").replace("'\"", "'")) == [
            {"city": "Rome"}
        ]


@every_format
def test_values_keep_their_white_space(name: str) -> None:
    for value in ("", " a ", "\na", "a\n", "\n", "\n\n a\n\n", "\ta\r\n"):
        assert values(name, call(name, ("city", value), ("note", value))) == [{"city": value, "note": value}]


@every_format
def test_a_value_without_its_closing_tag_ends_where_the_next_begins(name: str) -> None:
    closing = VALUE_END[name].strip()
    for first, wanted in (
        ("Rome", "Rome"),
        ("", ""),
        ("a <b> c", "a <b> c"),
        ("a\n<td", "a\n<td"),
    ):
        told = call(name, ("city", first), ("days", "4"), ("note", "x"))
        for count in (1, 2, 3):
            # Where a value has no break behind it, the next parameter begins a line all the same.
            text = told.replace("\n" + closing, "", count).replace(closing, "", count)
            assert values(name, text) == [{"city": wanted, "days": 4, "note": "x"}], text
    first, second = KEY[name]("city"), KEY[name]("days")
    text = call(name, ("days", "4")).replace(second, first + second)
    assert values(name, text) == [{"city": "", "days": 4}]
    assert values(name, call(name, ("days", "4"), ("city", "Rome")).replace(closing, "")) == [
        {"days": 4, "city": "Rome"}
    ]


@every_format
def test_a_value_without_its_closing_tag_may_end_within_a_line(name: str) -> None:
    told = call(name, ("city", "Rome"), ("days", "4"), ("note", "x")).replace("\n", "")
    text = told.replace(VALUE_END[name].strip(), "", 1)
    assert values(name, text) == [{"city": "Rome", "days": 4, "note": "x"}]
    for wrong in (text.replace(">4", "> is a tag"), text.replace("days", "city", 1)):
        assert not read(name, wrong)[2]
    # It may be a text about the tag of a text.
    told = (
        call(name, ("city", "Rome"), ("note", "x")).replace("\n", "").replace(VALUE_END[name].strip(), "", 1)
    )
    assert read(name, told)[2] == (name == "glm45")


@every_format
def test_a_value_without_its_closing_tag_ends_with_the_call(name: str) -> None:
    closing = VALUE_END[name].strip()
    for key, value, wanted in (
        ("city", "Rome", "Rome"),
        ("days", "4", 4),
        ("list", "[1]", [1]),
        ("maybe", "[", "["),
    ):
        told = call(name, (key, value)).replace(closing, "")
        assert values(name, told) == [{key: wanted}]
        assert values(name, f"{told}\n") == [{key: wanted}]
        assert values(name, f"{told}\n{call(name, ('days', '1'))}") == [{key: wanted}, {"days": 1}]
        content, _, complete = read(name, f"{told}\nDone.")
        assert (complete, content) == (False, "") or key == "list"
        for cut in range(len(HEAD[name]) + 2, len(told) - len(END[name])):
            assert not read(name, told[:cut])[2]


@every_format
def test_the_tags_of_a_call_in_a_closed_value_belong_to_it(name: str) -> None:
    head, end = HEAD[name], END[name]
    other = KEY[name]("width").rstrip("\n")
    for value in (
        f"Write {head}", f"a {end} b", f"{end}\nmore", f"{head}{end}\nx", f"{other}", f"see {other} there",
        f"see\n{other}\nthere", f"{END[name].split(chr(10))[0]} x", VALUE_END[name].strip()[:-1], "</", "<",
    ):  # fmt: skip
        assert values(name, call(name, ("city", value), ("days", "4"))) == [{"city": value, "days": 4}], value
    known = KEY["qwen3-coder"]("days").strip()
    value = f"see {known} there"
    assert values("qwen3-coder", call("qwen3-coder", ("city", value))) == [{"city": value}]
    for value in (known, f"see\n{known}\nfor more"):
        # The text between is no number.
        assert not read("qwen3-coder", call("qwen3-coder", ("city", value)))[2]


@every_format
def test_a_value_that_may_have_been_longer_leaves_the_call_unfinished(name: str) -> None:
    inner = call(name, ("width", "4"))
    content, [(_, arguments), *_], complete = read(name, call(name, ("city", f"Example:\n{inner}\nEnd.")))
    assert not complete
    assert "End." in content + arguments
    closing = VALUE_END[name].strip()
    twice = call(name).replace("f", "g", 1) if name == "glm45" else call(name)
    assert not read(name, call(name, ("city", f"Example:\n{twice}\n{twice}\nEnd.")))[2]
    for text in (
        call(name, ("city", f"a{closing}b")), call(name, ("days", f"4{VALUE_END[name]}{closing}")),
        call(name, ("city", "a")).replace("a", f"a{KEY[name]('days').strip()}4") if name in BARE[1:] else "",
    ):  # fmt: skip
        assert not read(name, text)[2]


@every_format
@pytest.mark.parametrize("damage", [">", "<", "=", "", " x", "text\n"])
def test_a_damaged_parameter_leaves_the_call_unfinished(name: str, damage: str) -> None:
    """Whatever comes between or in tags, arguments that are complete are those that were written."""
    told = call(name, ("city", "Fjord"), ("days", "4"))
    tag = KEY[name]("city").strip()
    damaged = {
        told.replace(tag, tag[:-1] + damage, 1), told.replace(tag, tag.replace("city", f"city={damage}"), 1),
        told.replace(tag, damage + tag, 1), told.replace(tag, tag.replace("city", f"<{damage}"), 1),
        told.replace(VALUE_END[name].lstrip(), VALUE_END[name].lstrip() + (damage or "-"), 1),
    }  # fmt: skip
    for text in damaged - {told}:
        content, calls, complete = read(name, text)
        assert not complete or json.loads(calls[0][1]) == {"city": "Fjord", "days": 4}, text
        assert "Fjord" in content + "".join(arguments for _, arguments in calls)


@every_format
def test_a_parameter_twice_leaves_the_call_unfinished(name: str) -> None:
    assert not read(name, call(name, ("city", "a"), ("days", "1"), ("city", "b")))[2]
    assert not read(name, call(name, ("city", "a"), ("city", "a")))[2]


@every_format
def test_a_call_that_is_cut_off_is_unfinished(name: str) -> None:
    told = call(name, ("city", "Rome"), ("list", "[1]"))
    complete = [read(name, told[:cut])[2] for cut in range(len(told) + 1)]
    last = told.index(END[name]) + len(END[name].split("\n")[0])
    assert complete == [False] * last + [True] * (len(told) + 1 - last)


PYTHON = [
    ("list", "['a', 'b']", ["a", "b"]),
    ("list", "('a', 1.5)", ["a", 1.5]),
    ("list", " [True, False, None] ", [True, False, None]),
    ("list", "[{'a': 'it is \"so\"'}, \"it's\", '</parameter></arg_value>', ']']",
     [{"a": 'it is "so"'}, "it's", "</parameter></arg_value>", "]"]),
    ("list", "['\\'', '\\n', 'ü']", ["'", "\n", "ü"]),
    ("map", "{'a': [1, -2e3], 'b': {}}", {"a": [1, -2000.0], "b": {}}),
    ("map", "{1: (2, 3)}", {"1": [2, 3]}),
    ("map", '{"a": None}', {"a": None}),
    ("flag", "True", True),
    ("maybe", "['a']", "['a']"),
    ("maybe", '["a"]', ["a"]),
]  # fmt: skip


@every_format
@pytest.mark.parametrize(("key", "text", "value"), PYTHON)
def test_lists_and_objects_may_be_in_pythons_notation(name: str, key: str, text: str, value: Any) -> None:
    assert values(name, call(name, (key, text), ("days", "4"))) == [{key: value, "days": 4}]


@every_format
@pytest.mark.parametrize(
    "text",
    ["[1, 2", "['a', b]", "{'a', 'b'}", "[1e999]", "[b'a']", "[f'a']", "[1 2]", "['a\nb']", "{[1]: 2}",
     f"{'[' * 300}{']' * 300}",
     "[" + "-" * 900 + "1]", "[__import__('os')]", "['\\x']", "[1] + [2]", "[...]", "['a' 'b"],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_a_list_that_is_neither_json_nor_python_leaves_the_call_unfinished(name: str, text: str) -> None:
    _, calls, complete = read(name, call(name, ("list", text)))
    assert not complete or json.loads(calls[0][1]) == {"list": json.loads(text)}


@every_format
def test_long_lists_are_passed_on_and_complete_if_they_are_json(name: str) -> None:
    for count in (LONGEST_EARLY - 8, LONGEST_EARLY - 5, LONGEST_EARLY):
        for quote, more in (("'", ""), ('"', ", None"), ('"', "")):
            told = f"[{quote}{'x' * count}{quote}{more}]"
            _, [(_, arguments)], complete = read(name, call(name, ("list", told)))
            assert complete == (more + quote == '"' or len(told) <= LONGEST_EARLY)
            assert not complete or len(json.loads(arguments)["list"][0]) == count


@every_format
def test_white_space_before_a_list_is_held_back_alike_whole_and_by_character(name: str) -> None:
    for length in (LONGEST_EARLY - 1, LONGEST_EARLY, LONGEST_EARLY + 1, 3 * LONGEST_EARLY):
        read(name, call(name, ("list", " " * length + "[1]"), ("days", "4")))


@every_format
def test_functions_that_are_not_known_have_values_that_are_text(name: str) -> None:
    told = call(name, ("city", "Rome"), ("days", "4"), ("list", "[1"))
    assert values(name, told, {}) == [{"city": "Rome", "days": "4", "list": "[1"}]
    missing = told.replace("\n" + VALUE_END[name].strip(), "", 1).replace(VALUE_END[name].strip(), "", 1)
    if name == "qwen3-coder":
        assert values(name, missing, {}) == [{"city": "Rome", "days": "4", "list": "[1"}]


@every_format
def test_text_similar_to_the_end_of_a_value_is_passed_on_soon(name: str) -> None:
    parser = PARSERS[name](FUNCTIONS)
    parser.push(HEAD[name] + KEY[name]("city"))
    for text in (
        f"a{END[name]}b",
        f"a\n{KEY[name]('x' * 400)}",
        "\n" * 200 + "c",
        f"{END[name]}{' ' * 200}d",
    ):
        parser.push(text)
        held = len(parser._held)
        assert held <= 80, (text, held)


def test_formats_are_those_of_this_kind() -> None:
    assert set(TAGGED) <= set(FORMATS)


@every_format
def test_a_damaged_closing_tag_is_no_part_of_a_value(name: str) -> None:
    closing = VALUE_END[name].strip()
    told = call(name, ("city", "Rome"), ("days", "4"))
    last = call(name, ("city", "Rome"))
    for damaged in (closing[:-1], closing[:-4] + ">", closing[:-3] + ">", "<" + closing[2:], closing[:5],
                    closing[1:], closing[2:], "</" + closing[4:]):  # fmt: skip
        for text in (
            told.replace(closing, damaged, 1),
            told.replace(closing, damaged),
            last.replace(closing, damaged),
        ):
            content, calls, complete = read(name, text)
            assert not complete, (text, content, calls)
        number = call(name, ("days", f"4{damaged}"))
        assert not read(name, number)[2]
    for odd in (closing.replace("</", "</ "), closing.replace(">", "=city>"), closing.replace(">", " >")):
        assert values(name, told.replace(closing, odd)) == [{"city": "Rome", "days": 4}]
    for tag in ("</td>", "</parameters>" if name != "glm45" else "</arg_values>", "<p", "</p"):
        assert values(name, call(name, ("city", f"a{tag}"))) == [{"city": f"a{tag}"}]
