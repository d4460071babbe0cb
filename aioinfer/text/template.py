"""Chat templates: the names that they read, and a bound on the steps of one rendering.

A template is a program that comes with a model's files. Jinja's sandbox restricts what it can reach, not how
long it runs: loops within loops and recursive macros would hold a worker thread for the life of the process,
and so would constants, which Jinja works out while it compiles. Here nothing is worked out before it is
rendered, and steps are counted for passes, calls, and the characters and elements of what is made.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from aioinfer.errors import ConfigError
from aioinfer.text.template_costs import CHARACTERS, made

__all__ = ["TooManySteps", "check", "limited", "names_read", "prepare", "read_template"]

#: maximum bytes of a template's file; the longest of models have some 20,000
_MOST_BYTES = 1 << 20
#: Maximum steps of one rendering, a second or so. A conversation has some per message.
MOST_STEPS = 1_000_000
#: steps of a call of a macro, a block or a recursive loop; all other calls and passes of loops are one
_CALL = 10
#: the filter that counts passes of loops
_FILTER = "aioinfer counts"

#: filters that write all that is in a value
_WRITING = frozenset({"tojson", "string", "pprint", "join", "xmlattr", "urlencode", "format"})

_local = threading.local()


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


def _counted(value: Any) -> Any:
    """What was made, whose size is counted."""
    if isinstance(value, (str, list, tuple, dict)):
        _count(len(value) // CHARACTERS)
    return value


def _written(value: Any) -> Any:
    """What is about to become text, with all that is within: the same list can be in it many times over."""
    level = [value]
    while level:
        each = level.pop()
        if isinstance(each, (list, tuple, dict)):
            _count(1 + len(each))
            level += [*each.keys(), *each.values()] if isinstance(each, dict) else each
        else:
            _counted(each)
    return value


def _counted_filter(name: str, function: Any) -> Any:
    """A filter that counts what it makes."""
    from jinja2 import pass_context
    from jinja2.utils import _PassArg

    wanted = _PassArg.from_obj(function)

    @pass_context
    def counted(context: Any, value: Any, *arguments: Any, **named: Any) -> Any:
        if name in _WRITING:
            _written(value)
        _count(made(name, value, [*arguments, *named.values()]))
        first = {
            _PassArg.context: [context],
            _PassArg.eval_context: [context.eval_ctx],
            _PassArg.environment: [context.environment],
        }.get(wanted, [])  # type: ignore[arg-type]
        return _counted(function(*first, value, *arguments, **named))

    return counted


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


@lru_cache
def prepare(template: str) -> Any:
    """A compiled template of Jinja, in the environment of chat templates, that counts its steps. Raises
    jinja2.TemplateError."""
    from aioinfer.text.template_environment import environment

    return _counting(template, environment())


def _counting(template: str, environment: Any) -> Any:
    """The template, compiled so that it counts its steps."""
    from jinja2 import nodes, pass_context
    from jinja2.runtime import BlockReference, LoopContext, Macro
    from jinja2.visitor import NodeTransformer

    class _Joining(NodeTransformer):
        """Has ``~`` be a filter, which is counted."""

        def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
            self.generic_visit(node)
            joined = nodes.Filter(nodes.List(node.nodes), "join", [], [], None, None)
            return joined.set_lineno(node.lineno)  # type: ignore[return-value]

    call = environment.call

    def counted_call(context: Any, called: Any, *arguments: Any, **named: Any) -> Any:
        _count(_CALL if isinstance(called, (Macro, BlockReference, LoopContext)) else 1)
        # The sandbox wraps the methods that format.
        receiver = getattr(getattr(called, "__wrapped__", called), "__self__", None)
        if isinstance(receiver, str):
            _count(made(called.__name__, receiver, [*arguments, *named.values()]))
        result = call(context, called, *arguments, **named)
        if isinstance(result, range):
            _count(len(result))
        return _counted(result)

    def binop(context: Any, operator: str, left: Any, right: Any) -> Any:
        _count(made(operator, left, [right]))
        return _counted(environment.binop_table[operator](left, right))

    environment.call = counted_call
    environment.optimized = False
    # Neither these nor filters that are called with the context are worked out while it is compiled.
    environment.intercepted_binops = frozenset(environment.binop_table)
    environment.call_binop = binop
    environment.finalize = pass_context(lambda _, value: _written(value))
    for name, function in environment.filters.items():
        environment.filters[name] = _counted_filter(name, function)
    environment.filters[_FILTER] = pass_context(lambda _, steps: _count(steps))
    # Text without meaning, of any length.
    environment.globals.pop("lipsum", None)

    tree = _Joining().visit(environment.parse(template))
    for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)):
        text = sum(len(each.data) for each in node.find_all(nodes.TemplateData))
        step = nodes.Filter(nodes.Const(1 + text // CHARACTERS), _FILTER, [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(step))
        if isinstance(node, nodes.For) and node.test is not None:
            node.test = nodes.And(step, node.test)
        node.set_lineno(node.lineno)
    tree.set_environment(environment)
    return environment.from_string(tree)


def names_read(templates: Iterable[str]) -> frozenset[str]:
    """The variables and the keys of messages that templates can read.

    Every name and every text constant counts: a template reads ``message["name"]`` as well as
    ``message.name``.
    """
    from jinja2 import nodes

    found: set[str] = set()
    for template in templates:
        tree = prepare(template).environment.parse(template)
        found |= {node.name for node in tree.find_all(nodes.Name)}
        found |= {node.attr for node in tree.find_all(nodes.Getattr)}
        found |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return frozenset(found)
