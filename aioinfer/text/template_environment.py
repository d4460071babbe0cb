"""The environment of chat templates: the tags, filters and functions that transformers gives them.

transformers has them in a function of its own, whose import takes a second or more, because it reads the
source of all models. ``tests/text/test_template.py`` compares what both render.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

__all__ = ["environment", "rendered"]

#: what messages call the thoughts of a model, the name that most templates read first
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
#: stands where a message that is continued ends
_END = "THE MESSAGE GOES ON HERE "


def environment() -> Any:
    """A new environment of Jinja, which the caller may change."""
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation(), loopcontrols]
    )
    made.filters["tojson"] = _to_json
    made.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
        # Not the type: templates would reach its attributes.
        "dict": _Dicts(),
        "namespace": _namespace(),
    }
    return made


def rendered(
    template: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Any] | None = None,
    documents: Sequence[Any] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    **variables: Any,
) -> str:
    """The text of a conversation through a compiled template.

    Raises ValueError if the text of the last message, which is to be continued, is not in it; TypeError for
    tools and documents that are no objects; and whatever a template raises.
    """
    for name, objects in (("tools", tools), ("documents", documents)):
        if not all(isinstance(each, Mapping) for each in objects or ()):
            raise TypeError(f"{name} must be a list of objects")
    talk = [_with_thoughts(_plain(message)) for message in messages]
    last = talk[-1].get("content") if continue_final_message else None
    if continue_final_message:
        if not isinstance(last, str):
            raise ValueError("the last message has no text to continue")
        talk[-1]["content"] = last + _END
    text = str(
        template.render(
            messages=talk,
            tools=_plain(tools),
            documents=_plain(documents),
            add_generation_prompt=add_generation_prompt,
            **_plain(variables),
        )
    )
    return text if last is None else _until_end(text, last)


def _until_end(text: str, last: str) -> str:
    at = text.rfind(_END.strip())
    if at < 0 or last.strip() not in text:
        raise ValueError("the template leaves out some of the last message, which is to be continued")
    # A template that trims messages has trimmed what is before the mark, too, had the mark not been there.
    return text[:at] if text.startswith(_END, at) else text[:at].rstrip()


def _with_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its thoughts under the names that templates read them by."""
    thoughts = next((message[name] for name in _THOUGHTS if message.get(name) is not None), None)
    return message if thoughts is None else {"thinking": thoughts, **message, "reasoning_content": thoughts}


def _plain(value: Any) -> Any:
    """Values as JSON has them, without methods that a template could call; what is none, by its type."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind.__str__(value) if kind is str else kind(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value)) if type(value) in (list, tuple) else [*map(_plain, value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if callable(dump := getattr(value, "model_dump", None)):
        return _plain(dump())
    return f"<{type(value).__name__}>"


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes the characters of HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Dicts:
    """Makes dictionaries, as the function ``dict``."""

    def __call__(self, *given: Any, **named: Any) -> dict[Any, Any]:
        return dict(*given, **named)

    def fromkeys(self, *given: Any) -> dict[Any, Any]:
        return dict.fromkeys(*given)


def _namespace() -> Any:
    """Jinja's namespace, without names that begin with an underscore, which could be Python's own."""
    from jinja2.exceptions import SecurityError
    from jinja2.utils import Namespace

    def check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace of a chat template has no attribute {name!r}")

    class Names(Namespace):
        def __init__(*given: Any, **named: Any) -> None:
            own, *others = given
            values = dict(*others, **named)
            for name in values:
                check(name)
            Namespace.__init__(own, values)

        def __setitem__(self, name: str, value: Any) -> None:
            check(name)
            super().__setitem__(name, value)

    return Names


def _generation() -> Any:
    """The tag around what a model has written, which is rendered as if it were not there."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012  a member of the base

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

        def _written(self, caller: Any) -> Any:
            return caller()

    return Generation
