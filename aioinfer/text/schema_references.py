"""References within a JSON schema."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import unquote

__all__ = ["inner", "targets_of"]


def targets_of(schema: Any) -> tuple[dict[str, Any], int]:
    """What the references of a schema refer to, by their text; and the number of those not understood."""
    found: set[str] = set()
    names: set[str] = set()
    old = False
    level = [schema]
    while level:
        for value in level:
            if isinstance(value, dict):
                if isinstance(reference := value.get("$ref"), str):
                    found.add(reference)
                if isinstance(draft := value.get("$schema"), str):
                    old |= "draft-04" in draft
                if value is not schema:
                    names |= {name for name in ("$id", "id") if isinstance(value.get(name), str)}
        level = [child for value in level for _, child in inner(value)]
    based = "$id" in names or (old and "id" in names)  # references within such a schema are relative to it
    targets = {reference: None if based else _pointed(schema, reference) for reference in found}
    within = {text: target for text, target in targets.items() if isinstance(target, (dict, list, bool))}
    return within, sum(target is None for target in targets.values())


def _pointed(schema: Any, reference: str) -> Any:
    """What a JSON pointer within the document points to; None for other references."""
    root, *names = unquote(reference).split("/")
    if root != "#":
        return None
    value = schema
    for name in names:
        if isinstance(value, dict):
            value = value.get(name.replace("~1", "/").replace("~0", "~"))
        elif isinstance(value, list) and re.fullmatch(r"[0-9]{1,9}", name) and int(name) < len(value):
            value = value[int(name)]
        else:
            return None
    return value


def inner(value: Any) -> Iterator[tuple[str, Any]]:
    """The objects and lists directly within a value, with their names."""
    if isinstance(value, dict):
        items: Iterable[tuple[str, Any]] = value.items()
    else:
        items = (("", child) for child in (value if isinstance(value, list) else ()))
    return ((name, child) for name, child in items if isinstance(child, (dict, list)))
