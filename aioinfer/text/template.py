"""Chat templates: the names that they read."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["names_read"]


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
