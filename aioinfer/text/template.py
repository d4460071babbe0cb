"""Chat templates: the names that they read, and a bound on the steps of one rendering.

A template is a program that comes with a model's files. Jinja's sandbox restricts what it can reach, not how
long it runs: loops within loops and recursive macros would hold a worker thread for the life of the process.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aioinfer.errors import ConfigError

__all__ = ["TooManySteps", "check", "limited", "names_read", "prepare", "read_template"]

#: maximum bytes of a template's file; the longest of models have some 20,000
_MOST_BYTES = 1 << 20
#: Maximum steps of one rendering, a second or so. A conversation has some per message.
MOST_STEPS = 1_000_000
#: steps of a call of a macro, a block or a recursive loop; all other calls and passes of loops are one
_CALL = 10
#: the filter that counts passes of loops
_FILTER = "aioinfer counts"

_local = threading.local()
#: held while a compiled template is changed
_preparing = threading.Lock()


class TooManySteps(Exception):
    """A template does not come to an end."""


@contextmanager
def limited(share: int = 1) -> Iterator[None]:
    """Prepared templates raise TooManySteps on this thread after ``MOST_STEPS`` steps, or a share of them."""
    _local.steps = MOST_STEPS // share
    try:
        yield
    finally:
        del _local.steps


def _count(steps: int) -> bool:
    """Take steps of those that are left, if there is a limit."""
    left = getattr(_local, "steps", None)
    if left is not None:
        if left < steps:
            raise TooManySteps(f"its loops and macros do not end within {MOST_STEPS} steps")
        _local.steps = left - steps
    return True


def read_template(setting: str) -> str:
    """The template that a setting names or is: a text with a tag of Jinja is one, anything else names a file.
    Blocks. Raises ConfigError."""
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
    return text


def check(template: str) -> None:
    """Raise ConfigError for a template that Jinja does not understand."""
    from jinja2 import TemplateError

    try:
        prepare(template)
    except TemplateError as error:
        at = f"line {line}: " if (line := getattr(error, "lineno", None)) else ""
        raise ConfigError(f"chat_template: {at}{error}; another one can be given as chat_template") from error


def prepare(template: str) -> None:
    """Have the compiled form of a template, which transformers keeps, count its steps."""
    from transformers.utils import chat_template_utils

    # Transformers sets up the environment (filters, the tag "generation") in this function only.
    compiled = chat_template_utils._compile_jinja_template(template)
    with _preparing:
        if _FILTER not in compiled.environment.filters:
            vars(compiled).update(vars(_counting(template, compiled.environment)))


def _counting(template: str, environment: Any) -> Any:
    """The template, compiled so that it counts passes and tests of loops, calls and elements of ranges."""
    from jinja2 import nodes, pass_context
    from jinja2.runtime import BlockReference, LoopContext, Macro

    call = environment.call

    def counted_call(context: Any, called: Any, *arguments: Any, **named: Any) -> Any:
        _count(_CALL if isinstance(called, (Macro, BlockReference, LoopContext)) else 1)
        result = call(context, called, *arguments, **named)
        if isinstance(result, range):
            _count(len(result))
        return result

    environment.call = counted_call
    # A filter is called without the checks of the sandbox; with the context, not while it is compiled.
    environment.filters[_FILTER] = pass_context(lambda _, steps: _count(steps))
    # Text without meaning, of any length.
    environment.globals.pop("lipsum", None)
    step = nodes.Filter(nodes.Const(1), _FILTER, [], [], None, None)
    tree = environment.parse(template)
    for loop in tree.find_all(nodes.For):
        loop.body.insert(0, nodes.ExprStmt(step))
        if loop.test is not None:
            loop.test = nodes.And(step, loop.test)
        loop.set_lineno(loop.lineno)
    tree.set_environment(environment)
    return environment.from_string(tree)


def names_read(templates: Iterable[str]) -> frozenset[str]:
    """The variables and the keys of messages that templates can read.

    Every name and every text constant counts: a template reads ``message["name"]`` as well as
    ``message.name``.
    """
    from jinja2 import nodes
    from transformers.utils import chat_template_utils

    found: set[str] = set()
    for template in templates:
        tree = chat_template_utils._compile_jinja_template(template).environment.parse(template)
        found |= {node.name for node in tree.find_all(nodes.Name)}
        found |= {node.attr for node in tree.find_all(nodes.Getattr)}
        found |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return frozenset(found)
