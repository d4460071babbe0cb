"""Texts with holes: what the grammar allows is split in one way, that in which it was written."""

from __future__ import annotations

import functools
import json
import random
from typing import Any

import pytest

from aioinfer.errors import InvalidRequest
from aioinfer.text.guidance import load_library
from aioinfer.text.text_template import TextTemplate


@functools.cache
def bytes_of() -> Any:
    return load_library().LLTokenizer("byte")


def accepts(template: TextTemplate, text: str) -> bool:
    library, tokenizer = load_library(), bytes_of()
    matcher = library.LLMatcher(tokenizer, library.LLMatcher.grammar_from_lark(template.lark()))
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())


@pytest.mark.parametrize("seed", range(2))
def test_every_text_that_is_allowed_is_split_as_it_was_written(seed: int) -> None:
    rng, allowed = random.Random(seed), 0
    for _ in range(200):
        texts = ["".join(rng.choices("ab", k=rng.randint(at in (1, 2), 2))) for at in range(4)]
        first, second = rng.choice([1, 3, "a|b+", ["ab", "b", "aab"]]), rng.choice([2, "[ab]b?"])
        holes: dict[str, Any] = {"x": first, "y": second, "z": 2}
        template = TextTemplate.of("{}{{x}}{}{{y}}{}{{z}}{}".format(*texts), holes)
        text = texts[0]
        for part in texts[1:]:
            text += "".join(rng.choices("ab", k=rng.randint(1, 3))) + part
        found = template.split(text)
        if accepts(template, text):
            allowed += 1
            assert text == "{}{x}{}{y}{}{z}{}".format(*texts, **found)
            assert all(found.values())
    assert allowed > 20


def test_braces_are_written_twice() -> None:
    template = TextTemplate.of('{{"name": "{name}"}}')
    assert template.texts == ('{"name": "', '"}')
    assert accepts(template, '{"name": "Ada"}')
    assert template.split('{"name": "Ada"}') == {"name": "Ada"}


def test_a_hole_is_one_line_of_bounded_length_and_not_empty() -> None:
    template = TextTemplate.of("a {b}!", {"b": 3})
    assert [accepts(template, text) for text in ("a !", "a x!", "a \n!", "a äöü!", "a xxxx!")] == [
        *(False, True, False, True, False)
    ]
    assert not accepts(TextTemplate.of("a {b}!", {"b": "x*"}), "a !")
    assert accepts(TextTemplate.of("a {b}", {"b": "x/\\/y"}), "a x//y")


def test_an_output_that_ended_early_has_the_holes_that_it_came_to() -> None:
    template = TextTemplate.of("I am {name}, {age} years old.")
    assert template.split("I am Ada, 3") == {"name": "Ada", "age": "3"}
    assert template.split("I am Ada, ") == {"name": "Ada"}
    assert template.split("I am ") == {}
    assert template.split("I") == {}


def test_a_grammar_is_the_template_again() -> None:
    template = TextTemplate.of("{a} and {b}", {"a": ["x", "y"], "b": "[0-9]+"})
    assert TextTemplate.read(template.grammar().text) == template
    for record in ("[]", "{}", '{"texts": ["a"], "holes": {"b": 1}}', '{"texts": [1, "a"], "holes": {}}'):
        with pytest.raises(ValueError, match=r"^(is no template|has no text)"):
            TextTemplate.read(record)
    with pytest.raises(ValueError, match="b"):
        TextTemplate.read(json.dumps({"texts": ["", ""], "holes": {"b": 0}}))


def test_all_characters_may_stand_in_a_text() -> None:
    text = '\x00\x7f\x85\u2028"\\/\n\r{}\ufffe\U0001f600'
    template = TextTemplate.of(text.replace("{}", "{{}}") + "{a}", {"a": [text]})
    assert accepts(template, text + text)


def test_a_template_that_is_too_large_is_refused_by_the_name_of_its_field() -> None:
    with pytest.raises(InvalidRequest, match="at most") as caught:
        TextTemplate.of("é" * 200_000 + "{a}").grammar("structured_outputs.template")
    assert caught.value.field == "structured_outputs.template"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *(("no hole", "holes"), ("{}", "name"), ("{a b}", "name"), ("{a}{b}", "no text between")),
        *(("{a} {a}", "twice"), ("{", "write it twice"), ("a}", "write it twice"), (3, "must be text")),
    ],
)
def test_a_bad_template_says_why(text: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        TextTemplate.of(text)
    assert caught.value.field == "template"


def test_every_ascii_character_may_be_part_of_a_text() -> None:
    for code in range(128):
        text = chr(code).replace("{", "{{").replace("}", "}}")
        assert accepts(TextTemplate.of(f"a{text}" + "{b}", {"b": ["c"]}), f"a{chr(code)}c"), code
