"""TextTemplate: a text with named holes, ``"{name} lives in {city}."``, as a grammar and back.

A hole ends where the text behind it begins for the first time. So an output is split in one way only, the one
in which it was written. ``{{`` and ``}}`` stand for braces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

from aioinfer.errors import InvalidRequest, shown
from aioinfer.inputs import plain
from aioinfer.text.grammar_spec import Grammar

__all__ = ["Hole", "TextTemplate", "lark_regex", "lark_text"]

#: what a hole may be: one line of so many characters, a regular expression, or one of some texts
Hole: TypeAlias = "int | str | Sequence[str]"
#: characters of a hole, unless it says otherwise, and at most
_USUAL, _LONGEST = 80, 4096
_MOST_HOLES = 256
_PART = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_SLASH, _ESCAPED = re.compile(r"(\\.)|/", re.DOTALL), r"\/"


@dataclass(frozen=True, slots=True)
class TextTemplate:
    """A template that was checked: ``texts[0]``, the first hole, ``texts[1]``, the second ..."""

    texts: tuple[str, ...]
    holes: Mapping[str, int | str | tuple[str, ...]]

    @classmethod
    def of(cls, text: Any, holes: Mapping[str, Hole] | None = None, field: str = "template") -> Self:
        """The template with this text; ``holes``: by name, those that are not usual. Raises InvalidRequest of
        ``field``, or of ``holes``."""
        text = plain(text)
        if type(text) is not str:
            raise InvalidRequest(field, f"must be text, got {shown(text)}")
        _check_surrogates(field, text)
        texts, names, at = [""], list[str](), 0
        for part in _PART.finditer(text):
            texts[-1] += text[at : part.start()]
            at, name = part.end(), part[1]
            if part[0] in ("{{", "}}"):
                texts[-1] += part[0][0]
            elif name is None:
                raise InvalidRequest(field, f"has a {part[0]!r} that is no hole's: write it twice")
            elif not name.isidentifier():
                raise InvalidRequest(field, f"{shown(name)} is no name of a hole: one is letters and digits")
            elif name in names:
                raise InvalidRequest(field, f"has the hole {shown(name)} twice")
            elif names and not texts[-1]:
                raise InvalidRequest(field, f"has no text between the holes {shown(names[-1])} and {name!r}")
            else:
                names.append(name)
                texts.append("")
        texts[-1] += text[at:]
        if not 1 <= len(names) <= _MOST_HOLES:
            most = f"1 to {_MOST_HOLES} holes, as {{name}}"
            raise InvalidRequest(field, f"must have {most}, got {len(names)}")
        own = "holes" if field == "template" else f"{field}.holes"
        return cls(tuple(texts), _holes(own, {} if holes is None else holes, names))

    def grammar(self, field: str = "template") -> Grammar:
        """The constraint on an output. Raises InvalidRequest of ``field``."""
        try:
            return Grammar("template", json.dumps({"texts": self.texts, "holes": self.holes}))
        except InvalidRequest as refused:
            raise InvalidRequest(field, refused.message) from None

    @classmethod
    def read(cls, source: str) -> Self:
        """The template of such a grammar. Raises ValueError."""
        record = json.loads(source)
        if not isinstance(record, dict) or record.keys() != {"texts", "holes"}:
            raise ValueError("is no template: engine.fill makes one")
        texts, holes = record["texts"], record["holes"]
        if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
            raise ValueError("has no texts")
        if not isinstance(holes, dict) or len(texts) != len(holes) + 1 or not all(texts[1:-1]):
            raise ValueError("has no text between two holes")
        try:
            return cls(tuple(texts), _holes("holes", holes, list(holes)))
        except InvalidRequest as error:
            raise ValueError(str(error)) from None

    def lark(self) -> str:
        """In llguidance's dialect. A rule that is lazy ends with its first match."""
        rules, order = [], list[str]()
        if self.texts[0]:
            order.append(lark_text(self.texts[0]))
        for at, (hole, behind) in enumerate(zip(self.holes.values(), self.texts[1:], strict=True)):
            order.append(f"h{at}")
            rules.append(f"H{at}: {_terminal(hole)}")
            rules.append(f"h{at}[lazy]: H{at} {lark_text(behind)}" if behind else f"h{at}: H{at}")
        return "\n".join([f"start: {' '.join(order)}", *rules])

    def split(self, text: str) -> dict[str, str]:
        """What an output has in the holes, by name; of one that ended early, as far as it came."""
        found: dict[str, str] = {}
        if not text.startswith(self.texts[0]):
            return found
        at = len(self.texts[0])
        for (name, hole), behind in zip(self.holes.items(), self.texts[1:], strict=True):
            end = text.find(behind, at + 1) if behind else len(text)
            while end >= 0 and not _fits(hole, text[at:end]):
                end = text.find(behind, end + 1) if behind else -1
            if end < 0:
                if at < len(text):
                    found[name] = text[at:]
                break
            found[name] = text[at:end]
            at = end + len(behind)
        return found


def _holes(field: str, given: Any, names: Sequence[str]) -> dict[str, int | str | tuple[str, ...]]:
    if not isinstance(given, Mapping):
        raise InvalidRequest(field, f"must map names of holes to what they may be, got {shown(given)}")
    if unknown := next((name for name in given if name not in names), None):
        raise InvalidRequest(field, f"{shown(unknown)} is no hole of the template")
    return {name: _hole(f"{field}.{name}", plain(given.get(name, _USUAL))) for name in names}


def _hole(field: str, given: Any) -> int | str | tuple[str, ...]:
    if type(given) is int:
        if not 1 <= given <= _LONGEST:
            raise InvalidRequest(field, f"must have 1 to {_LONGEST} characters, got {shown(given)}")
        return given
    if type(given) is str:
        if not given:
            raise InvalidRequest(field, "must be a regular expression, got an empty text")
        _check_surrogates(field, given)
        return given
    choices = tuple(map(plain, given)) if isinstance(given, (list, tuple)) else ()
    if not choices or not all(type(each) is str and each for each in choices):
        kinds = "a number of characters, a regular expression or a list of texts"
        raise InvalidRequest(field, f"must be {kinds}, got {shown(given)}")
    _check_surrogates(field, "".join(choices))
    return choices


def _check_surrogates(field: str, text: str) -> None:
    if not text.isascii() and _SURROGATE.search(text):
        raise InvalidRequest(field, "has an unpaired surrogate, which no text has")


def _terminal(hole: int | str | tuple[str, ...]) -> str:
    if isinstance(hole, int):
        return rf"/[^\n]{{1,{hole}}}/"
    if isinstance(hole, tuple):
        return " | ".join(map(lark_text, hole))
    return f"{lark_regex(hole)} & /(?s:.+)/"


def _fits(hole: int | str | tuple[str, ...], text: str) -> bool:
    if isinstance(hole, tuple):
        return text in hole
    if isinstance(hole, int):
        return "\n" not in text and len(text) <= hole
    try:
        return re.fullmatch(hole, text) is not None
    except re.error:
        return True  # a pattern that only the grammar's library reads


def lark_text(text: str) -> str:
    """A text in a rule of Lark."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # its lexer refuses DEL


def lark_regex(pattern: str) -> str:
    """A regular expression in a rule of Lark."""
    return f"/{_SLASH.sub(lambda found: found[1] or _ESCAPED, pattern)}/"
