"""Chat templates that do not come to an end are refused; all others render what transformers renders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from aioinfer.errors import InvalidRequest
from aioinfer.text import template
from aioinfer.text.template import limited, prepare
from aioinfer.text.template_environment import rendered
from aioinfer.text.tokenizer import HFTokenizer
from tests.tiers import SECONDS, rest, thinned

MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "héllo  "},
    {"role": "assistant", "content": "  yes"},
    {"role": "user", "content": "and?"},
]
ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in messages * 99999 %}{% endfor %}{% endfor %}",
    "ranges": "{% for a in range(99999) %}{{ range(99999) | sum }}{% endfor %}",
    "tests": "{% for a in messages * 999 %}{% for b in messages * 999 if not b %}{% endfor %}{% endfor %}",
    "macros": (
        "{% macro twice(n) %}{% if n %}{{ twice(n - 1) }}{{ twice(n - 1) }}{% endif %}{% endmacro %}"
        "{{ twice(60) }}"
    ),
    "callers": (
        "{% macro twice(n) %}{% if n %}{% call twice(n - 1) %}{% endcall %}{% call twice(n - 1) %}"
        "{% endcall %}{% endif %}{{ caller() }}{% endmacro %}{% call twice(60) %}{% endcall %}"
    ),
    "recursive loops": (
        "{% set deep = namespace(l=[1]) %}{% for a in range(60) %}{% set deep.l = [deep.l, deep.l] %}"
        "{% endfor %}{% for each in deep.l recursive %}{{ loop(each) if each is not number }}{% endfor %}"
    ),
    "blocks": (
        "{% set deep = namespace(n=0) %}{% block twice %}{% set deep.n = deep.n + 1 %}{% if deep.n < 60 %}"
        "{{ self.twice() }}{{ self.twice() }}{% endif %}{% set deep.n = deep.n - 1 %}{% endblock %}"
    ),
    "powers": "{{ 2 ** (2 ** 32) }}",
    "products": "{% set n = namespace(x=9) %}{% for a in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "repeats": "{{ messages * 10 ** 9 }}",
    "sums": "{% set many = [[1] * 1000] * 99999 %}{{ many | sum(start=[]) | length }}",
    "slices": "{{ 'abc' | slice(10 ** 9) | list | length }}",
    "batches": "{{ 'abc' | batch(10 ** 9, 'x') | list | length }}",
    "indents": "{{ ('\n' * 99999) | indent(99999) }}",
    "widths": "{{ '%1000000000d' % 1 }}",
    "given widths": "{{ '%*d' % (10 ** 9, 1) }}",
    "format": "{{ '{:>1000000000}'.format(1) }}",
    "nested format": "{{ '{:{}}'.format(1, 10 ** 9) }}",
    "format filter": "{{ '%0999999999d' | format(1) }}",
    "centres": "{{ 'x' | center(10 ** 9) }}",
    "methods": "{{ 'x'.ljust(10 ** 9) }}",
    "mapped": "{{ ['x'] | map('center', 10 ** 9) | list }}",
    "joins": "{{ (('a' * 9999) | list) | join('b' * 99999) }}",
    "joining methods": "{{ ('b' * 99999).join(('a' * 9999) | list) }}",
    "replaced": "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
    "doubled": "{% set n = namespace(x='x') %}{% for a in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "added": "{% set n = namespace(x='x') %}{% for a in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "nested": (
        "{% set n = namespace(x=[1]) %}{% for a in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
        "{{ n.x }}"
    ),
    "nested as JSON": (
        "{% set n = namespace(x=[1]) %}{% for a in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
        "{{ n.x | tojson }}"
    ),
    "indented JSON": "{{ messages | tojson(indent=10 ** 9) }}",
    "the same text": "{% set x = 'x' * 999999 %}{% for a in range(99999) %}{{ x }}{% endfor %}",
    "text": "{% for a in range(99999) %}" + "x" * 99999 + "{% endfor %}",
    "autoescape": "{% autoescape 'x' | center(10 ** 9) %}{% endautoescape %}",
    "macros without end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
}
#: everything that templates use whose output depends on white space, scopes or the environment
RICH = """
  {%- macro show(message, depth) %}
    <{{ message.role }}|{{ depth }}>{% if depth %}{{ show(message, depth - 1) }}{% endif %}
  {% endmacro -%}
  {% set seen = namespace(last=none, n=0) %}
  {% for message in messages[::-1] if message.role != "system" %}
    {%- if loop.first and seen.last is none %}{% set seen.last = loop.index0 %}{% endif %}
    {{ loop.index }}/{{ loop.length }} {{ message.content | trim }}
    {% for number in range(3) -%}
      {{ number }}
      {%- if number == 1 %}{% break %}{% endif +%}
    {% else %}
      none
    {% endfor %}
{% endfor %}
{% generation %}kept{{ show(messages[0], 2) }}{% endgeneration %}
{% for each in [[1, [2]], [3]] recursive %}({{ loop(each) if each is not number else each }}){% endfor %}
{{ messages | map(attribute="role") | join(",") }} {{ tools | tojson }} {{ bos_token }}
{% if add_generation_prompt %}go{% endif %}

"""


def render(source: str, **named: Any) -> str:
    texts, _ = render_jinja_template([MESSAGES], chat_template=source, bos_token="<s>", **named)
    return str(texts[0])


def put(directory: Path, source: str) -> None:
    (directory / "chat_template.jinja").write_text(source)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": source}))


@rest(SECONDS)
@pytest.mark.parametrize("kind", thinned(ENDLESS, 3))
def test_a_template_without_end_refuses_the_messages(
    directory: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template, "MOST_STEPS", template.MOST_STEPS // 50)  # which take seconds
    put(directory, ENDLESS[kind])
    tokenizer = HFTokenizer.load(directory)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=r"refused them: (its loops|maximum)") as no:
            tokenizer.encode_chat(MESSAGES)
        assert no.value.field == "messages"


@pytest.mark.parametrize("prefix", ["", "\n", "text\n"])
@pytest.mark.parametrize("tools", [None, [{"name": "f"}]])
def test_counting_changes_no_output(prefix: str, tools: Any) -> None:
    source = prefix + RICH
    named: list[dict[str, Any]] = [{"tools": tools, "add_generation_prompt": each} for each in (True, False)]
    before = [render(source, **each) for each in named]
    counted = prepare(source)
    with limited():
        assert [rendered(counted, MESSAGES, bos_token="<s>", **each) for each in named] == before
    assert [rendered(counted, MESSAGES, bos_token="<s>", **each) for each in named] == before
    assert "kept" in before[0]


@pytest.mark.parametrize(
    "last",
    [
        {"content": "  well, "},
        {"content": "well", "reasoning_content": "hm"},
        {"content": "well", "thinking": "hm", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
    ],
)
@pytest.mark.parametrize("trims", [True, False])
@pytest.mark.parametrize("continues", [True, False])
def test_messages_documents_and_variables_are_those_of_transformers(
    last: dict[str, Any], trims: bool, continues: bool
) -> None:
    source = (
        "{% for m in messages %}[{{ m.role }}:{{ m.content" + " | trim" * trims + " }}{{ m.thinking }}"
        "{{ m.reasoning_content }}{{ m.tool_calls | tojson if m.tool_calls }}]{% endfor %}"
        "{{ documents | tojson }}{{ what }}{{ dict(a=1) }}{{ dict.fromkeys([2]) }}{{ made.x }}"
    )
    named: dict[str, Any] = {
        "documents": [{"title": "t", "text": "é"}],
        "what": ("a", Path("b"), 1.5, None, {2: True}),
        "made": {"x": "y"},
        "continue_final_message": continues,
        "bos_token": "<s>",
    }
    talk = [*MESSAGES, {"role": "assistant", **last}]
    texts, _ = render_jinja_template([talk], chat_template=source, **named)
    assert rendered(prepare(source), talk, **named) == texts[0]


@pytest.mark.parametrize(
    "source",
    [
        "{{ namespace(_x=1) }}",
        "{% set n = namespace() %}{% set n._x = 1 %}",
        "{{ raise_exception('no') }}",
        "{{ dict.fromkeys.__globals__.x }}",
        "{{ messages.append(1) }}",
    ],
)
def test_what_transformers_refuses_is_refused(source: str) -> None:
    with pytest.raises(TemplateError):
        render(source)
    with pytest.raises(TemplateError):
        rendered(prepare(source), MESSAGES)


def test_a_message_that_the_template_leaves_out_cannot_be_continued() -> None:
    for content in ("no", None):
        with pytest.raises(ValueError, match=r"(be continued|to continue)"):
            rendered(prepare("x"), [{"role": "user", "content": content}], continue_final_message=True)


def test_every_rendering_has_its_own_steps(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    fast.chat_template = {
        "default": "{{ messages }}",
        "tool_use": "{{ messages }}{% for a in range(9) %}{{ a }}{% endfor %}",
    }
    tokenizer = HFTokenizer(fast)
    monkeypatch.setattr(template, "MOST_STEPS", 35)
    assert "brief" in tokenizer.render_chat(MESSAGES)
    with pytest.raises(InvalidRequest, match="35 steps"):
        tokenizer.render_chat(MESSAGES, tools=[{"name": "f"}])
    monkeypatch.setattr(template, "MOST_STEPS", 36)
    for _ in range(2):
        assert tokenizer.render_chat(MESSAGES, tools=[{"name": "f"}]).endswith("]012345678")
