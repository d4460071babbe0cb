"""The tables of metrics in the documentation, made from the catalogue.

``python -m tests.docs.metrics`` writes them into ``docs/monitoring.md``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from aioinfer.observe.metrics.catalogue import OWN, VLLM, Distribution, Value
from tests.docs.pages import ROOT

__all__ = ["PAGE", "rewritten"]

PAGE = ROOT / "docs" / "monitoring.md"


def table(entries: Sequence[Value | Distribution]) -> str:
    """One row per metric: name as it is queried, type and labels, meaning."""
    lines = ["", "| metric | type | meaning |", "|---|---|---|"]
    for entry in entries:
        if isinstance(entry, Value):
            name = f"{entry.name}_total" if entry.kind == "counter" else entry.name
            kind = entry.kind if entry.label is None else f"{entry.kind} by `{entry.label}`"
        else:
            name, kind = entry.name, "histogram"
        lines.append(f"| `{name}` | {kind} | {entry.help.removesuffix('.')} |")
    return "\n".join([*lines, ""])


def rewritten(page: str) -> str:
    """The page with its tables made anew."""
    for mark, entries in (("own", OWN), ("vllm", VLLM)):
        parts = re.split(rf"(<!-- {mark} -->\n).*?(<!-- end -->)", page, flags=re.S)
        assert len(parts) == 4, f"docs/monitoring.md needs one place for {mark}"
        page = "".join((*parts[:2], table(entries), *parts[2:]))
    return page


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text("utf-8")), "utf-8")
