"""What a client sends is in the prompt, or the request is refused by name: templates of all kinds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from aioinfer.chat.messages import parse_messages
from aioinfer.errors import ConfigError, InvalidRequest
from aioinfer.text import template
from aioinfer.text.tokenizer import HFTokenizer

#: takes anything
CHATML = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
#: prints the roles that it knows, and leaves out all others
KNOWS = "{% for m in messages %}{% if m.role in ROLES %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
#: one system message, in front
FIRST = (
    "{% if messages[0].role == 'system' %}[system]{{ messages[0].content }}{% set messages = messages[1:] %}"
    "{% endif %}{% for m in messages %}{% if m.role == 'system' %}OTHERWISE"
    "{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)
RAISES = "{{ raise_exception('not here') }}"
ALTERNATES = (
    "{% set n = namespace(at=0) %}{% for m in messages %}"
    "{% if m.role in ('user', 'assistant') and not m.tool_calls %}"
    "{% if (m.role == 'user') != (n.at % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set n.at = n.at + 1 %}{% endif %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)
CALLS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<ONE>{% endfor %}{% endfor %}"
)


def knows(*roles: str) -> str:
    return KNOWS.replace("ROLES", str(roles))


def calls(one: str) -> str:
    return CALLS.replace("ONE", one)


def said(*messages: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in messages]


def call(name: str = "find", arguments: Any = '{"a": "b"}', id: Any = "abcdefghi") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def round_trip(*calls: Any, content: Any = None, **result: Any) -> list[dict[str, Any]]:
    """A user's question, calls, and the result of the first."""
    result = {"role": "tool", "content": "seven", "tool_call_id": calls[0].get("id"), **result}
    result = {key: value for key, value in result.items() if value is not None}
    return [
        *said(("user", "where")),
        {"role": "assistant", "content": content, "tool_calls": list(calls)},
        result,
    ]


class Prompt:
    """Prompts of chats through a template, as every protocol makes them."""

    def __init__(self, directory: Path, source: str) -> None:
        fast = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        fast.chat_template = source
        self._tokenizer = HFTokenizer(fast)

    def __call__(self, messages: Any, **variables: Any) -> str:
        parsed = parse_messages(messages, self._tokenizer.template_names)
        return self._tokenizer.render_chat(parsed, **variables)

    def refusal(self, messages: Any, **variables: Any) -> InvalidRequest:
        with pytest.raises(InvalidRequest) as caught:
            self(messages, **variables)
        return caught.value


@pytest.mark.parametrize(
    ("source", "messages", "prompt"),
    [
        (CHATML, [("developer", "a"), ("user", "b")], "[developer]a[user]b"),
        (knows("system", "user"), [("developer", "a"), ("user", "b")], "[system]a[user]b"),
        (knows("system", "user"), [("user", "a"), ("developer", "b")], "[user]a[system]b"),
        (FIRST.replace("OTHERWISE", ""), [("system", "a"), ("system", "b")], "[system]a\n\nb"),
        (FIRST.replace("OTHERWISE", ""), [("system", "a"), ("developer", "b")], "[system]a[developer]b"),
        (FIRST.replace("OTHERWISE", RAISES), [("system", "a"), ("system", "b")], "[system]a\n\nb"),
        (
            FIRST.replace("OTHERWISE", ""),
            [("system", "a"), ("user", "b"), ("assistant", "c"), ("system", "d"), ("user", "e")],
            "[system]a[user]b[assistant]c[user]d[user]e",
        ),
        (knows("user"), [("system", "a"), ("user", "b")], "[user]a\n\nb"),
        (knows("user", "assistant"), [("system", "a"), ("assistant", "b")], "[user]a[assistant]b"),
        (knows("user"), [("developer", "a"), ("system", "b"), ("user", "c")], "[user]a\n\nb\n\nc"),
        (CHATML, [("user", "a"), ("user", "b")], "[user]a[user]b"),
        (ALTERNATES, [("user", "a"), ("user", "b")], "[user]a\n\nb"),
        (
            ALTERNATES,
            [("user", "a"), ("assistant", "b"), ("assistant", "c"), ("user", "d")],
            "[user]a[assistant]b\n\nc[user]d",
        ),
        (ALTERNATES, [("assistant", "a"), ("user", "b")], "[user][assistant]a[user]b"),
        (ALTERNATES, [("system", "a"), ("assistant", "b")], "[system]a[user][assistant]b"),
    ],
)
def test_roles_and_places_that_a_template_does_not_know(
    directory: Path, source: str, messages: Any, prompt: str
) -> None:
    assert Prompt(directory, source)(said(*messages)) == prompt


def test_a_late_system_message_between_turns_that_must_alternate(directory: Path) -> None:
    source = ALTERNATES.replace(
        "[{{ m.role }}]",
        "{% if m.role in ('system', 'developer') and not loop.first %}"
        + RAISES
        + "{% endif %}[{{ m.role }}]",
    )
    prompt = Prompt(directory, source)
    late = said(("user", "a"), ("assistant", "b"), ("developer", "c"), ("user", "d"))
    assert prompt(late) == "[user]a[assistant]b[user]c\n\nd"
    assert prompt(said(("user", "a"), ("system", "b"))) == "[user]a\n\nb"


def test_what_a_template_takes_is_not_changed(directory: Path) -> None:
    """Not even where it refuses others of the kind: the second system message in front of this one."""
    source = (
        "{% set n = namespace(s='') %}{% for m in messages if m.role == 'system' %}{% set n.s = m.content %}"
        "{% endfor %}[system]{{ n.s }}{% for m in messages if m.role != 'system' %}"
        "[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    prompt = Prompt(directory, source)
    assert prompt(said(("user", "a"), ("system", "b"))) == "[system]b[user]a"
    two = said(("system", "a"), ("user", "b"), ("system", "c"))
    assert prompt(two) == "[system]a[user]b[user]c"


@pytest.mark.parametrize("bad", ["asistant", "usr", "User", "human", ""])
@pytest.mark.parametrize("source", [CHATML, knows("user", "assistant")])
def test_a_role_that_nobody_knows_is_refused(directory: Path, source: str, bad: str) -> None:
    refused = Prompt(directory, source).refusal(said(("user", "a"), (bad, "b")))
    assert refused.field == "messages[1].role"


def test_a_role_of_the_templates_own(directory: Path) -> None:
    prompt = Prompt(directory, knows("user", "observation"))
    assert prompt(said(("observation", "a"), ("user", "b"))) == "[observation]a[user]b"
    named = "{% set known = ['critic'] %}" + knows("user")
    refused = Prompt(directory, named).refusal(said(("user", "a"), ("critic", "a")))
    assert refused.field == "messages[1].content"
    assert (
        Prompt(directory, knows("user", "tool"))(said(("user", "a"), ("function", "b"))) == "[user]a[tool]b"
    )


def test_texts_that_no_change_brings_into_the_prompt_are_refused(directory: Path) -> None:
    short = "{% for m in messages %}[{{ m.role }}]{{ m.content[:20] }}{% endfor %}"
    prompt = Prompt(directory, short)
    assert prompt(said(("user", "a"))) == "[user]a"
    last = Prompt(directory, "[{{ messages[-1].role }}]{{ messages[-1].content }}")
    refused = last.refusal(said(("user", "one"), ("assistant", "two"), ("user", "three")))
    assert (refused.field, refused.code) == ("messages[0].content", "unsupported_parameter")
    assert last(said(("user", "three"))) == "[user]three"


@pytest.mark.parametrize(
    "shown",
    ["m.content | trim", "m.content | upper", "m.content | tojson", "m.content.split('</think>')[-1]"],
)
def test_texts_may_change_on_their_way(directory: Path, shown: str) -> None:
    prompt = Prompt(directory, CHATML.replace("m.content", shown))
    text = prompt(said(("user", ' say "hé" \n'), ("assistant", "<think>hm</think>\nyes")))
    assert '"hé' in text or '"hé'.upper() in text or "h\\u00e9" in text
    moved = CHATML.replace("messages", "messages[1:] + messages[:1]")
    assert Prompt(directory, moved)(said(("system", "a"), ("user", "b"))) == "[user]b[system]a"


def test_an_empty_text_needs_no_place(directory: Path) -> None:
    assert Prompt(directory, knows("user"))(said(("assistant", " "), ("user", ""))) == "[user]"


# -- calls --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shown", "arguments", "expected"),
    [
        ("c.function.arguments | tojson", '{"a": "b"}', '<{"a": "b"}>'),
        ("c.function.arguments", '{"a": ["é", 1]}', '<{"a": ["é", 1]}>'),
        ("'' + c.function.arguments", {"a": "b"}, '<{"a": "b"}>'),
        ("'' + c.function.arguments", None, "<{}>"),
        ("'' + c.function.arguments", '{"a', '<{"a>'),
        ("c.function.name ~ c.function.arguments | items | list | length", "", "<find0>"),
        ("c.function.arguments | items | map('join', '=') | join", '{"a": "b"}', "<a=b>"),
        ("c.function.arguments | items | map('join', '=') | join", '{"a": "b', '<arguments={"a": "b>'),
        ("c.function.arguments | items | map('join', '=') | join", "[1]", "<arguments=[1]>"),
        ("c.function.arguments.items() | map('join', '=') | join", " null", "<>"),
    ],
)
def test_arguments_as_the_template_reads_them(
    directory: Path, shown: str, arguments: Any, expected: str
) -> None:
    prompt = Prompt(directory, calls(f"{{{{ {shown} }}}}"))
    text = prompt(round_trip(call(arguments=arguments)))
    assert text == f"[user]where[assistant]{expected}[tool]seven"


def test_content_that_is_null_beside_calls(directory: Path) -> None:
    """Some templates know a message of calls by it, of which some read arguments as text."""
    for shown in ("{{ c.function.arguments | tojson }}", "{{ '' + c.function.arguments }}"):
        source = calls("{{ c.function.name }}" + shown).replace(
            "{{ m.content }}", "{{ m.content if m.content is not none }}"
        )
        only = source.replace("in m.tool_calls or []", "in (m.tool_calls if m.content is none else []) or []")
        expected = '[user]where[assistant]<find{"a": "b"}>[tool]seven'
        for content in (None, ""):
            assert Prompt(directory, source)(round_trip(call(), content=content)) == expected
            assert Prompt(directory, only)(round_trip(call(), content=content)) == expected
        beside = round_trip(call(), content="look")
        split = '[user]where[assistant]look[assistant]<find{"a": "b"}>[tool]seven'
        assert Prompt(directory, only)(beside) == split
        missing = round_trip(call())
        del missing[1]["content"]
        assert Prompt(directory, only)(missing) == expected
    concatenates = CHATML.replace(
        "{{ m.content }}", "{{ '' + m.content }}{{ m.tool_calls[0].function.name if m.tool_calls }}"
    )
    assert (
        Prompt(directory, concatenates)(round_trip(call(), content=None))
        == "[user]where[assistant]find[tool]seven"
    )
    assert Prompt(directory, CHATML)([*said(("user", "a")), {"role": "assistant"}]) == "[user]a[assistant]"


def test_a_result_without_content_is_empty(directory: Path) -> None:
    conversation = round_trip(call())
    conversation[-1]["content"] = None
    assert (
        Prompt(directory, calls("{{ c.function.name }}"))(conversation)
        == "[user]where[assistant]<find>[tool]"
    )
    refused = Prompt(directory, CHATML).refusal([{"role": "user", "content": None}])
    assert refused.field == "messages[0].content"


@pytest.mark.parametrize("none", [[], None])
def test_a_list_of_no_calls_is_as_good_as_none(directory: Path, none: Any) -> None:
    asks = "{% for m in messages %}{{ m.tool_calls[0].id if 'tool_calls' in m else m.content }}{% endfor %}"
    conversation = said(("user", "a"), ("assistant", "b"))
    conversation[1]["tool_calls"] = none
    assert Prompt(directory, asks)(conversation) == "ab"


NINE = "{{ raise_exception('nine') if c.id is not defined or c.id | length != 9 }}{{ c.id }}"


def test_ids_are_made_to_fit(directory: Path) -> None:
    source = calls("{{ c.function.name }}" + NINE).replace(
        "[{{ m.role }}]", "[{{ m.role }}]{{ m.tool_call_id }}"
    )
    prompt = Prompt(directory, source)
    assert prompt(round_trip(call())) == "[user]where[assistant]<findabcdefghi>[tool]abcdefghiseven"
    for foreign in ("call_6d1f0a52", "toolu_01A", "a-b-c-d-e", "x" * 40):
        text = prompt(round_trip(call(id=foreign)))
        made = text.partition("<find")[2].partition(">")[0]
        assert made.isalnum()
        assert text == f"[user]where[assistant]<find{made}>[tool]{made}seven"
        assert text == prompt(round_trip(call(id=foreign)))
    two = [
        *round_trip(call(id="one"), call(id="two")),
        {"role": "tool", "content": "8", "tool_call_id": "two"},
    ]
    first, second = (each.partition(">")[0] for each in prompt(two).split("<find")[1:])
    assert first != second
    assert prompt(two).endswith(f"[tool]{first}seven[tool]{second}8")


def test_ids_that_are_too_short_are_made_to_fit(directory: Path) -> None:
    prompt = Prompt(directory, calls("{{ c.function.name }}" + NINE.replace("!=", "<")))
    for given in ("0", "call_1"):
        text = prompt(round_trip(call(id=given)))
        assert re.fullmatch(r"\[user]where\[assistant]<find[0-9A-Za-z]{9}>\[tool]seven", text)


def test_a_conversation_that_begins_with_a_call(directory: Path) -> None:
    source = calls("{{ c.function.name }}{{ c.function.arguments.a }}").replace(
        "{% for m in messages %}",
        "[user]{{ messages[0].content or '' }}{% for m in messages[1:] %}",
        1,
    )
    conversation = [*round_trip(call())[1:], *said(("user", "so"))]
    assert Prompt(directory, source)(conversation) == "[user][assistant]<findb>[tool]seven[user]so"


def test_calls_without_ids_get_some(directory: Path) -> None:
    for one in (NINE, "{{ c.id + '' }}"):
        source = calls("{{ c.function.name }}" + one).replace(
            "[{{ m.role }}]", "[{{ m.role }}]{{ m.tool_call_id }}"
        )
        calls_ = [{"type": "function", "function": {"name": name, "arguments": {}}} for name in ("a", "b")]
        conversation = [*round_trip(*calls_), {"role": "tool", "content": "eight"}]
        text = Prompt(directory, source)(conversation)
        first, second = (each.partition(">")[0][1:] for each in text.split("<")[1:])
        assert first != second
        assert text.endswith(f"[tool]{first}seven[tool]{second}eight")
    plain = Prompt(directory, calls("{{ c.function.name }}{{ c.id }}"))
    assert plain(conversation) == "[user]where[assistant]<a><b>[tool]seven[tool]eight"


def test_several_calls_where_the_template_takes_one(directory: Path) -> None:
    first_only = CHATML.replace(
        "{{ m.content }}",
        "{{ m.content }}{% if m.tool_calls %}<{{ m.tool_calls[0].function.name }}>{% endif %}",
    )
    raises = first_only.replace(
        "{% if m.tool_calls %}",
        "{% if m.tool_calls | length > 1 %}" + RAISES + "{% endif %}{% if m.tool_calls %}",
    )
    for source in (first_only, raises):
        prompt = Prompt(directory, source)
        asked = round_trip(call("a", id="1"), call("b", id="2"), call("c", id="3"))
        assert prompt(asked).endswith("[assistant]<a>[tool]seven[assistant]<b>[assistant]<c>")
        late = {"role": "tool", "content": "nine", "tool_call_id": "3"}
        early = {"role": "tool", "content": "eight", "tool_call_id": "2"}
        expected = "[assistant]<a>[tool]seven[assistant]<b>[tool]eight[assistant]<c>[tool]nine[user]so"
        assert prompt([*asked, late, early, *said(("user", "so"))]).endswith(expected)


def test_text_beside_calls_where_the_template_prints_calls_only(directory: Path) -> None:
    source = ALTERNATES.replace("{{ m.content }}", "{{ m.content if not m.tool_calls }}")
    conversation = [*round_trip(call(), content="look"), *said(("assistant", "there"), ("user", "so"))]
    one = 'find{"a": "b"}'
    assert Prompt(directory, source)(conversation) == (
        f"[user]where[assistant]look[assistant]{one}[tool]seven[user][assistant]there[user]so"
    )


@pytest.mark.parametrize("empty", ["", " "])
def test_a_message_of_the_user_behind_a_result(directory: Path, empty: str) -> None:
    source = ALTERNATES
    if empty:
        source = (
            "{% for m in messages if m.content == '' and not m.tool_calls %}"
            + RAISES
            + "{% endfor %}"
            + source
        )
    conversation = [*round_trip(call()), *said(("user", "so"))]
    prompt = Prompt(directory, source)
    one = 'find{"a": "b"}'
    assert prompt(conversation) == f"[user]where[assistant]{one}[tool]seven[assistant]{empty}[user]so"
    del conversation[2]  # the user did not wait for it
    assert prompt(conversation) == f"[user]where[assistant]{one}[assistant]{empty}[user]so"
    strict = calls("{{ c.function.name }}").replace(
        "[{{",
        "{% if m.role == 'user' and loop.previtem and loop.previtem.role == 'tool' %}"
        + RAISES
        + "{% endif %}[{{",
    )
    conversation = [*said(("user", "a"), ("assistant", "b")), *round_trip(call())[1:], *said(("user", "so"))]
    expected = "[user]a[assistant]b[assistant]<find>[tool]seven[assistant][user]so"
    assert Prompt(directory, strict)(conversation) == expected


def test_calls_that_a_template_does_not_print_are_refused(directory: Path) -> None:
    """This one reads them for chats with tools only."""
    source = calls("{{ c.function.name }}").replace(
        "m.tool_calls or []", "(m.tool_calls if tools else []) or []"
    )
    prompt = Prompt(directory, source)
    assert prompt.refusal(round_trip(call())).field == "messages[1].tool_calls"
    assert prompt(said(("user", "a"))) == "[user]a"
    tools = [{"type": "function", "function": {"name": "find", "parameters": {}}}]
    assert prompt(round_trip(call()), tools=tools) == "[user]where[assistant]<find>[tool]seven"


# -- thoughts and parts -------------------------------------------------------------------------


def test_thoughts_go_where_the_template_reads_them(directory: Path) -> None:
    answer = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    read = CHATML.replace("{{ m.content }}", "({{ m.reasoning_content }}){{ m.content }}")
    assert Prompt(directory, read)([answer]) == "[assistant](hm)yes"
    parts = CHATML.replace(
        "{{ m.content }}",
        "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        "{{ '(' + p.thinking + ')' if p.type == 'thinking' else p.text }}{% endfor %}{% endif %}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}",
    )
    assert Prompt(directory, parts)([answer]) == "[assistant](hm)yes"
    assert Prompt(directory, parts)([{**answer, "reasoning_content": ""}]) == "[assistant]yes"
    assert Prompt(directory, CHATML)([answer]) == "[assistant]yes"


def test_contents_as_parts_where_the_template_reads_no_text(directory: Path) -> None:
    source = CHATML.replace("{{ m.content }}", "{% for p in m.content %}{{ p.text }}{% endfor %}")
    prompt = Prompt(directory, source)
    assert prompt(said(("system", "a"), ("user", "b"))) == "[system]a[user]b"
    assert (
        prompt([{"role": "user", "content": [{"type": "text", "text": each} for each in "ab"]}]) == "[user]ab"
    )


def test_the_last_message_can_be_continued(directory: Path) -> None:
    prompt = Prompt(directory, ALTERNATES + "{% if add_generation_prompt %}[assistant]{% endif %}")
    conversation = said(("user", "a"), ("user", "b"), ("assistant", "c"), ("assistant", "d "))
    assert prompt(conversation, continue_final_message=True) == "[user]a\n\nb[assistant]c\n\nd "
    assert prompt(conversation).endswith("d [assistant]")
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert prompt.refusal(conversation, **both).field == "chat_template_kwargs"


# -- templates ----------------------------------------------------------------------------------


def test_a_template_that_needs_variables_is_not_tried(directory: Path) -> None:
    prompt = Prompt(directory, "{{ date + '' }}" + CHATML)
    assert prompt(said(("user", "a"), ("developer", "b")), date="1") == "1[user]a[developer]b"


def test_a_template_that_is_no_jinja_is_an_error_at_the_start(directory: Path) -> None:
    for source in (
        "{% for m in messages %}{{ m.content }",
        "{{ messages | nothing }}",
        {"default": "a", "b": "{%"},
    ):
        with pytest.raises(ConfigError, match=r"^chat_template: line 1: .*; another one can be given"):
            Prompt(directory, source)  # type: ignore[arg-type]


def test_trying_a_template_takes_few_steps(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    limited = template.limited
    monkeypatch.setattr(template, "limited", lambda share=1: (taken.append(share), limited(share))[1])
    prompt = Prompt(directory, ALTERNATES)
    prompt(said(("user", "a")))
    assert len(taken) < 150
    assert taken.count(1) == 1
    del taken[:]
    prompt(said(("user", "a"), ("assistant", "b"), ("user", "c")))
    assert taken == [1]


def test_long_conversations_take_time_for_each_message_once(directory: Path) -> None:
    """Quadratic ones would take many minutes."""
    many = 5_000
    split = CHATML.replace("m.content", "m.content.split('</think>')[-1]")
    thoughts = said(*[("assistant", f"<think>{at}</think>{at}") for at in range(many)])
    assert Prompt(directory, split)(thoughts).endswith(f"[assistant]{many - 1}")
    users = said(*[("user", f"{at} " * 9) for at in range(many)])
    assert Prompt(directory, ALTERNATES)(users).count("[user]") == 1
    one = CHATML.replace(
        "{{ m.content }}", "{{ m.content }}{{ m.tool_calls[0].function.name if m.tool_calls }}"
    )
    asked = {
        "role": "assistant",
        "content": None,
        "tool_calls": [call(f"<{at}>", id=f"<{at}>") for at in range(many)],
    }
    results = [{"role": "tool", "content": "7", "tool_call_id": f"<{at}>"} for at in reversed(range(many))]
    text = Prompt(directory, one)([asked, *results])
    assert text.startswith("[assistant]<0>[tool]7[assistant]<1>[tool]7[assistant]<2>")
    assert text.count("[tool]7") == many


@pytest.mark.parametrize("calls_", ["find", {"id": "a"}, ["find"], 7])
def test_calls_that_are_no_list_are_refused(directory: Path, calls_: Any) -> None:
    fast = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    fast.chat_template = calls("{{ c.function }}")
    message = {"role": "assistant", "content": "a", "tool_calls": calls_}
    with pytest.raises(InvalidRequest) as caught:
        HFTokenizer(fast).render_chat([message])
    assert caught.value.field == "messages[0].tool_calls"
    # Its function is the template's business.
    text = HFTokenizer(fast).render_chat([{**message, "tool_calls": [{"function": "find"}]}])
    assert text == "[assistant]a<find>"
