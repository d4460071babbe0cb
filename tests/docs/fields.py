"""The tables of request fields in the documentation, made from the models of bodies.

``python -m tests.docs.fields`` writes them into ``docs/fields.md``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from aioinfer.chat.bodies import Object, Refused
from aioinfer.server.anthropic.fields import MessagesBody
from aioinfer.server.openai.embeddings import EmbeddingBody, RerankBody, ScoreBody
from aioinfer.server.openai.fields import ChatBody, CompletionBody, Extensions
from aioinfer.server.openapi.document import body_schema
from aioinfer.server.responses.fields import ResponsesBody
from aioinfer.server.sessions.bodies import LoadedBody, NamedBody, SessionBody
from tests.docs.pages import ROOT

__all__ = ["PAGE", "rewritten"]

PAGE = ROOT / "docs" / "fields.md"


def _table(kind: type[BaseModel], base: type[BaseModel] = Object) -> list[str]:
    """The fields of a class that ``base`` does not have."""
    meanings: dict[str, list[str]] = {}
    for name, field in kind.model_fields.items():
        if name not in base.model_fields:
            meanings.setdefault(field.description or "", []).append(f"`{field.alias or name}`")
    rows = [f"| {', '.join(names)} | {meaning} |" for meaning, names in meanings.items()]
    lines = ["", "| field | meaning |", "|---|---|", *rows] if rows else []
    if not issubclass(kind, Object):
        return lines
    assert issubclass(base, Object)
    accepted: dict[str, list[str]] = {}
    for name, reason in kind.harmless.items():
        if name not in base.harmless:
            accepted.setdefault(reason, []).append(f"`{name}`")
    if accepted:
        said = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in accepted.items())
        lines += ["", f"Accepted, because they cannot change an answer: {said}."]
    refused = [(name, rule) for name, rule in kind.refused.items() if name not in base.refused]
    if refused:
        said = "; ".join(f"`{name}`{_unless(rule)}" for name, rule in refused)
        lines += ["", f"Refused: {said}."]
    return lines


def _unless(rule: Refused) -> str:
    values = ", ".join(f"`{json.dumps(value)}`" for value in rule.neutral)
    return f"{f' except {values}' if values else ''}{f': {rule.instead}' if rule.instead else ''}"


def _models(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for each in kind.__subclasses__():
        yield each
        yield from _models(each)


def _objects(kind: type[Object]) -> list[tuple[str, type[BaseModel]]]:
    """The objects in a body, by their paths; where there may be several, with their types."""
    components: dict[str, Any] = {}
    schema = body_schema(kind, components)
    # Client libraries, if they have been imported, have models of the same names.
    own = [each for each in _models(BaseModel) if each.__module__.startswith("aioinfer.")]
    models = {f"{each.__name__}-Input": each for each in own}
    found: list[tuple[str, type[BaseModel]]] = []

    def walk(given: Any, path: str) -> None:
        for name, each in given.get("properties", {}).items():
            paths = list(dict.fromkeys(references(each, f"{path}{name}")))
            for where, component in paths:
                several = sum(other == where for other, _ in paths) > 1
                kinds = components[component]["properties"].get("type", {})
                label = kinds.get("const") or (
                    "other" if "enum" in kinds or "pattern" in kinds else "message"
                )
                if (entry := (f"{where} {label}" if several else where, models[component])) not in found:
                    found.append(entry)
                    walk(components[component], f"{where}.")

    def references(schema: Any, path: str) -> Iterator[tuple[str, str]]:
        if "$ref" in schema:
            yield path, schema["$ref"].rsplit("/", 1)[1]
        for each in schema.get("anyOf", ()):
            yield from references(each, path)
        if isinstance(schema.get("items"), dict):
            yield from references(schema["items"], f"{path}[]")

    walk(schema, "")
    return found


def _nested(kind: type[Object], title: str = "") -> list[str]:
    lines: list[str] = []
    for path, each in _objects(kind):
        lines += ["", f"### `{path}`{title}", *_table(each)]
    return lines


def _sections(first: str, **kinds: type[Object]) -> list[str]:
    """What some bodies have in common, and what each has besides."""
    models = list(kinds.values())
    base = next(each for each in models[0].__mro__ if all(issubclass(kind, each) for kind in models))
    lines = ["", f"### {first}", *_table(base)]
    for path, kind in kinds.items():
        lines += ["", f"### Of `/v1/{path.replace('_', '/')}`", *_table(kind, base)]
    return lines


def _other(kind: type[Object], title: str) -> list[str]:
    """The fields of another protocol: those of chats that it has, too, are named only."""
    shared = ", ".join(f"`{name}`" for name in Extensions.model_fields)
    lines = ["", f"As in [the body](#the-body) of a chat: {shared}.", *_table(kind, Extensions)]
    return [*lines, *_nested(kind, f" of {title}")]


def rewritten(page: str) -> str:
    """The page with its tables made anew."""
    made = {
        "body": _sections("Of both", chat_completions=ChatBody, completions=CompletionBody),
        "nested": _nested(ChatBody),
        "responses": _other(ResponsesBody, "responses"),
        "messages": _other(MessagesBody, "messages"),
        "sessions": [
            *("", "### Of `/v1/sessions`", *_table(SessionBody)),
            *("", "### Of `/v1/sessions/{session}/save`", *_table(NamedBody)),
            *("", "### Of `/v1/sessions/load`", *_table(LoadedBody)),
        ],
        "pooling": _sections("Of all three", embeddings=EmbeddingBody, score=ScoreBody, rerank=RerankBody),
    }
    for mark, lines in made.items():
        parts = re.split(rf"(<!-- {mark} -->\n).*?(<!-- end -->)", page, flags=re.S)
        assert len(parts) == 4, f"docs/fields.md needs one place for {mark}"
        page = "".join((*parts[:2], "\n".join([*lines, "", ""]), *parts[2:]))
    return page


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text("utf-8")), "utf-8")
