"""References within a JSON schema."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any
from urllib.parse import unquote

__all__ = ["Pointers", "inner"]


class Pointers:
    """The targets of references that are JSON pointers into a schema: ``#/$defs/name``."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[str, Any] = {}

    @cached_property
    def rebased(self) -> bool:
        """A schema within the schema has an ``$id``: references within it would be relative to that."""
        names = {"$id"}
        level = [self._root]
        while level:
            for value in level:
                if isinstance(value, dict):
                    if "draft-04" in str(value.get("$schema"))[:256]:
                        names.add("id")
                    if value is not self._root and any(isinstance(value.get(name), str) for name in names):
                        return True
            level = [child for value in level for child in inner(value)]
        return False

    def target(self, reference: str) -> Any:
        """The schema that a reference refers to; None if it is no pointer into the schema."""
        if reference not in self._known:
            target = None if self.rebased else self._pointed(reference)
            self._known[reference] = target if isinstance(target, (dict, list, bool)) else None
        return self._known[reference]

    def _pointed(self, reference: str) -> Any:
        root, *names = unquote(reference).split("/")
        if root != "#":
            return None
        value = self._root
        for name in names:
            if isinstance(value, dict):
                value = value.get(name.replace("~1", "/").replace("~0", "~"))
            elif isinstance(value, list) and re.fullmatch(r"[0-9]{1,9}", name) and int(name) < len(value):
                value = value[int(name)]
            else:
                return None
        return value


def inner(value: Any) -> Iterator[Any]:
    """The objects and lists directly within a value."""
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (child for child in values if isinstance(child, (dict, list)))
