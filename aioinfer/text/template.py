"""Chat templates: the names that they read, and a bound on what they compute.

A template is a program that comes with a model's files. Jinja's sandbox keeps it from everything but the
messages, and not from loops within loops or macros that call each other: they would hold a worker thread for
as long as the process lives. So every pass of a loop, every test in the head of a loop, every call of a macro
and every element of a ``range`` is counted, and one rendering may have so many of them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aioinfer.errors import ConfigError

__all__ = ["TooManySteps", "counted", "limited", "names_read", "prepare", "read_template"]

#: bytes of a template's file; the longest of models have some 20,000
_MOST_BYTES = 1 << 20

#: of one rendering: a second or so. A conversation has a few per message.
MOST_STEPS = 1_000_000
#: steps of a call of a macro or a recursive loop, which takes so much longer than the pass of a loop
_CALL = 10
#: the name of :func:`_counted` among the filters of a template's environment
_FILTER = "aioinfer counts"
#: in front of the templates that are counted, so that what transformers compiles of them is no one else's;
#: the newline is the tag's, and not part of the output.
_MARK = "{# counted #}\n"


class TooManySteps(Exception):
    """A template does not come to an end."""


class _Left(threading.local):
    """Steps that the rendering on this thread may still have; None where nothing is rendered."""

    steps: int | None = None


_left = _Left()


@contextmanager
def limited(steps: int | None = None) -> Iterator[None]:
    """Templates on this thread raise TooManySteps after so many steps, by default MOST_STEPS."""
    _left.steps = MOST_STEPS if steps is None else steps
    try:
        yield
    finally:
        _left.steps = None


def _count(steps: int) -> None:
    if _left.steps is not None:
        _left.steps -= steps
        if _left.steps < 0:
            raise TooManySteps(f"its loops and macros do not end within {MOST_STEPS} steps")


def _counted(_: Any, steps: int) -> bool:
    """As a filter: a call without the checks of the sandbox. True, so that it can stand in a condition."""
    _count(steps)
    return True


def read_template(setting: str) -> str:
    """The template that a setting names or is: a text with a tag of Jinja is one, anything else names a file.
    Blocks. Raises ConfigError, also for a template that Jinja does not understand."""
    from jinja2 import TemplateError

    text = setting
    if not any(tag in setting for tag in ("{{", "{%", "{#")):
        try:
            with Path(setting).expanduser().open("rb") as file:
                raw = file.read(_MOST_BYTES + 1)
            text = raw.decode()
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(f"chat_template: {setting[:200]!r} cannot be read: {error}") from error
        if len(raw) > _MOST_BYTES:
            raise ConfigError(f"chat_template: {setting[:200]!r} has more than {_MOST_BYTES} bytes")
    try:
        prepare(_MARK + text)
    except TemplateError as error:
        raise ConfigError(f"chat_template: {error}") from error
    return text


def counted(templates: str | dict[str, str]) -> str | dict[str, str]:
    """A tokenizer's template, or its templates by name, as :func:`prepare` knows them."""
    if isinstance(templates, str):
        return _MARK + templates
    return {name: _MARK + template for name, template in templates.items()}


def prepare(template: str) -> None:
    """Have transformers' compiled form of a template, which it keeps, count its steps."""
    from jinja2 import pass_context
    from transformers.utils import chat_template_utils

    # Transformers sets up the environment (filters, the tag "generation") in this function only.
    compiled = chat_template_utils._compile_jinja_template(template)
    if not template.startswith(_MARK) or "counts" in vars(compiled):
        return
    environment = compiled.environment
    tree = environment.parse(template)
    _count_all(tree)
    sandboxed = environment.globals["range"]

    def counted_range(*bounds: int) -> range:
        numbers: range = sandboxed(*bounds)
        _count(len(numbers))
        return numbers

    # With the context, it is not evaluated when the template is compiled.
    environment.filters[_FILTER] = pass_context(_counted)
    environment.globals["range"] = counted_range
    # Text without meaning, of any length.
    environment.globals.pop("lipsum", None)
    vars(compiled).update(vars(environment.from_string(tree)), counts=True)


def _count_all(tree: Any) -> None:
    """Add the filter to every loop and every macro."""
    from jinja2 import nodes

    def step(steps: int) -> nodes.Filter:
        return nodes.Filter(nodes.Const(steps), _FILTER, [], [], None, None)

    for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
        loop = isinstance(node, nodes.For)
        node.body.insert(0, nodes.ExprStmt(step(1 if loop and not node.recursive else _CALL)))
        if loop and node.test is not None:
            node.test = nodes.And(step(1), node.test)
        node.set_lineno(node.lineno)
    tree.set_environment(tree.environment)


def names_read(templates: Iterable[str]) -> frozenset[str] | None:
    """The variables and the keys of messages that templates in Jinja can read; None if they cannot be parsed.

    Every name and every text constant counts: a template reads ``message["name"]`` as well as
    ``message.name``.
    """
    from jinja2 import Environment, TemplateError, nodes

    environment = Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=False)
    found: set[str] = set()
    for template in templates:
        try:
            tree = environment.parse(template)
        except TemplateError:
            return None
        found |= {node.name for node in tree.find_all(nodes.Name)}
        found |= {node.attr for node in tree.find_all(nodes.Getattr)}
        found |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return frozenset(found)
