"""The table of settings in the documentation, made from the config dataclasses.

``python -m tests.docs.settings`` writes it into ``docs/settings.md``.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import types
import typing
from typing import Any

from aioinfer.config import GROUPS, EngineConfig, ReplicaConfig, ServerConfig
from aioinfer.config.values import shown_bound
from tests.docs.pages import ROOT

__all__ = ["PAGE", "rewritten"]

PAGE = ROOT / "docs" / "settings.md"
_NAMES = {
    str: "text",
    bool: "true, false",
    int: "integer",
    float: "number",
    type: "class",
    types.NoneType: "none",
}


def tables(cls: type[Any]) -> str:
    """One table per group of ``--help``, one row per field: name, values, default, meaning."""
    hints = typing.get_type_hints(cls)
    lines: list[str] = []
    for group, title in GROUPS.items():
        found = [item for item in dataclasses.fields(cls) if item.metadata["group"] == group]
        if not found:
            continue
        heading = title[0].upper() + title[1:]
        lines += ["", f"### {heading}", "", "| setting | values | default | meaning |", "|---|---|---|---|"]
        for item in found:
            values = _values(hints[item.name], item.metadata["bounds"])
            meaning = item.metadata["help"].replace("|", "\\|")
            lines.append(f"| `{item.name}` | {values} | `{_default(item.default)}` | {meaning} |")
    return "\n".join([*lines, ""])


def _default(value: Any) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _values(hint: Any, bounds: Any) -> str:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " or ".join(_values(part, bounds) for part in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(hint))
    if bounds is None or hint not in (int, float):
        return _NAMES[hint]
    low = f"{'above' if bounds.low_open else 'from'} {shown_bound(bounds.low)}"
    return f"{_NAMES[hint]} {low}" + (
        f" to {shown_bound(bounds.high)}" if bounds.high < sys.float_info.max else ""
    )


def rewritten(page: str) -> str:
    """The page with its tables made anew."""
    for cls in (EngineConfig, ServerConfig, ReplicaConfig):
        mark = re.escape(cls.__name__)
        parts = re.split(rf"(<!-- {mark} -->\n).*?(<!-- end -->)", page, flags=re.S)
        assert len(parts) == 4, f"docs/settings.md needs one place for {cls.__name__}"
        page = "".join((*parts[:2], tables(cls), *parts[2:]))
    return page


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text("utf-8")), "utf-8")
