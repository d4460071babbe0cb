"""The tables of request fields in the documentation, made from the server's tables.

``python -m tests.docs.fields`` writes them into ``docs/fields.md``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from aioinfer.chat.fields import Harmless, Honoured, Table, Unsupported
from aioinfer.server.anthropic import fields as anthropic
from aioinfer.server.openai.embeddings import EMBEDDING, RERANK, SCORE
from aioinfer.server.openai.fields import CHAT, COMPLETION, NESTED
from aioinfer.server.responses import fields as responses
from aioinfer.server.translation import EXTENSIONS
from tests.docs.pages import ROOT

__all__ = ["PAGE", "rewritten"]

PAGE = ROOT / "docs" / "fields.md"


def _body() -> str:
    """The tables of both endpoints in one."""
    both = {**CHAT, **{name: rule for name, rule in COMPLETION.items() if name not in CHAT}}
    where = {
        name: "" if CHAT.get(name) == COMPLETION.get(name) else "chat" if name in CHAT else "completions"
        for name in both
    }
    lines = ["", "### Honoured", "", "| field | endpoint | meaning |", "|---|---|---|"]
    for table, endpoint in ((CHAT, "chat"), (COMPLETION, "completions")):
        for name, rule in table.items():
            if not isinstance(rule, Honoured) or (where[name] == "" and table is COMPLETION):
                continue
            lines.append(f"| `{name}` | {endpoint if where[name] else 'both'} | {rule.meaning} |")
    lines += ["", "### Accepted, because they cannot change an answer", "", "| field | why |", "|---|---|"]
    lines += [f"| `{name}` | {rule.reason} |" for name, rule in both.items() if isinstance(rule, Harmless)]
    lines += [
        "",
        "### Refused, unless they change nothing",
        "",
        "| field | endpoint | accepted values | instead |",
    ]
    lines += ["|---|---|---|---|"]
    for table, endpoint in ((CHAT, "chat"), (COMPLETION, "completions")):
        for name, rule in table.items():
            if not isinstance(rule, Unsupported) or (where[name] == "" and table is COMPLETION):
                continue
            lines.append(
                f"| `{name}` | {endpoint if where[name] else 'both'} | {_values(rule)} | {rule.instead} |"
            )
    return "\n".join([*lines, ""])


def _nested() -> str:
    lines: list[str] = []
    for path, table in NESTED.items():
        lines += ["", f"### `{path}`", "", "| field | |", "|---|---|"]
        lines += _rows(table)
    return "\n".join([*lines, ""])


def _rows(table: Table) -> list[str]:
    rows: list[str] = []
    for name, rule in table.items():
        match rule:
            case Honoured():
                said = rule.meaning
            case Harmless():
                said = f"accepted: {rule.reason}"
            case Unsupported():
                instead = f": {rule.instead}" if rule.instead else ""
                said = f"refused, except {_values(rule)}{instead}"
        rows.append(f"| `{name}` | {said} |")
    return rows


def _values(rule: Unsupported) -> str:
    return ", ".join(f"`{json.dumps(value)}`" for value in (*rule.neutral, None))


def _others(title: str, table: Table, nested: Mapping[str, Table]) -> str:
    """The tables of another protocol: the fields of chats that it has, too, are named only."""
    own = {name: rule for name, rule in table.items() if EXTENSIONS.get(name) != rule}
    shared = ", ".join(f"`{name}`" for name in table if name not in own)
    lines = ["", f"As in [the body](#the-body) of a chat: {shared}.", "", "| field | |", "|---|---|"]
    lines += _rows(own)
    for path, each in nested.items():
        lines += ["", f"### `{path}` of {title}", "", "| field | |", "|---|---|"]
        lines += _rows(each)
    return "\n".join([*lines, ""])


def _pooling() -> str:
    """The tables of embeddings and scores, what all three have first."""
    tables = {"embeddings": EMBEDDING, "score": SCORE, "rerank": RERANK}
    shared = {name: rule for name, rule in EMBEDDING.items() if SCORE.get(name) == rule == RERANK.get(name)}
    lines = ["", "### Of all three", "", "| field | |", "|---|---|", *_rows(shared)]
    for title, table in tables.items():
        own = {name: rule for name, rule in table.items() if name not in shared}
        lines += ["", f"### Of `/v1/{title}`", "", "| field | |", "|---|---|", *_rows(own)]
    return "\n".join([*lines, ""])


def rewritten(page: str) -> str:
    """The page with its tables made anew."""
    made = {
        "body": _body(),
        "nested": _nested(),
        "responses": _others("responses", responses.RESPONSES, responses.NESTED),
        "messages": _others("messages", anthropic.MESSAGES, anthropic.NESTED),
        "pooling": _pooling(),
    }
    for mark, table in made.items():
        parts = re.split(rf"(<!-- {mark} -->\n).*?(<!-- end -->)", page, flags=re.S)
        assert len(parts) == 4, f"docs/fields.md needs one place for {mark}"
        page = "".join((*parts[:2], table, *parts[2:]))
    return page


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text("utf-8")), "utf-8")
