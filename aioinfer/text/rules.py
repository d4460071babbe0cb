"""Rules of a grammar in llguidance's dialect of Lark, and the spelling of what they consist of.

Tags are single tokens in some vocabularies and plain text in others. llguidance does not match an added token
by its text, so a grammar names it by its id: ``<[id]>``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import regex

from aioinfer.errors import InvalidRequest
from aioinfer.text.guidance import json_options

__all__ = ["Rules"]

#: More than any grammar may have. A definition is written again for every value that refers to it.
_MOST_WRITTEN = 1 << 22
_TOKENS = re.compile(r"(<\|[^<>]*\|>|｜\w+｜)")
#: characters of any grammar: known before the rest of a larger one is built
_MOST = 1 << 20


class Rules:
    """Collects the rules of one grammar. What the methods return belongs into the form of a rule.

    ``TEXT`` is any text. The names of terminals, which are matched as one regular expression, are upper case.
    """

    def __init__(self, tokens: Mapping[str, int]) -> None:
        """``tokens``: text -> id of the vocabulary's added tokens."""
        self._tokens = tokens
        self._lines = ["%llguidance {}", "TEXT: /(.|\\n)*/"]
        self._size = 0
        #: those without a name of their own, by their form
        self._names: dict[str, str] = {}
        self._unused = 0
        #: characters of JSON schemas
        self._written = 0

    def lark(self) -> str:
        """All of them."""
        return "\n".join(self._lines)

    def add(self, name: str, form: str) -> str:
        """A rule of this name; returns the name. Raises InvalidRequest for too many or too large rules."""
        self._size += len(name) + len(form) + 3
        if self._size > _MOST:
            raise InvalidRequest("grammar", f"may have at most {_MOST} characters")
        self._lines.append(f"{name}: {form}")
        return name

    def unused(self, prefix: str) -> str:
        """A name for a rule that may refer to itself."""
        self._unused += 1
        return f"{prefix}_{self._unused}"

    def shared(self, prefix: str, form: str) -> str:
        """A rule of this form, one for all that need it; returns its name."""
        if form not in self._names:
            self._names[form] = self.add(self.unused(prefix), form)
        return self._names[form]

    def until(self, name: str, tag: str, text: str = "TEXT") -> str:
        """A rule for any text, or that of a terminal, up to and including a tag."""
        form = self.tag(tag)
        before, token, after = form.partition(" <[")
        if token and not form.startswith("<["):
            # What precedes a token within the tag is a part of the text, as far as the lexer can tell.
            return self.add(name, f"{self.shared('BEFORE', f'{text} {before}')}{token}{after}")
        return self.add(name if form.startswith("<[") else f"{name}[lazy]", f"{text} {form}")

    def without(self, name: str, tags: Iterable[str]) -> str:
        """A terminal for any text without these tags."""
        found = "|".join(regex.escape(tag) for tag in tags)
        return self.add(name, f"TEXT & ~/(.|\\n)*({found})(.|\\n)*/") if found else "TEXT"

    def is_token(self, tag: str) -> bool:
        """The vocabulary has a token for the tag."""
        return tag in self._tokens

    def tag(self, tag: str) -> str:
        """A tag, as the vocabulary has it: one token, or several in ``<|...|>`` or bars with text between."""
        parts = [tag] if self.is_token(tag) else [part for part in _TOKENS.split(tag) if part]
        if not any(map(self.is_token, parts)):
            return json.dumps(tag)
        return " ".join(
            f"<[{self._tokens[each]}]>" if self.is_token(each) else json.dumps(each) for each in parts
        )

    def text(self, text: str) -> str:
        """This text."""
        return json.dumps(text)

    def json(self, schema: Mapping[str, Any] | bool) -> str:
        """An instance of a JSON schema. Raises ValueError for one that cannot be written."""
        try:
            text = json.dumps(schema)
            self._written += len(text)
            if not isinstance(schema, bool):
                text = json.dumps({**schema, "x-guidance": json_options(text)})
        except RecursionError:
            raise ValueError("is nested too deeply") from None
        if self._written > _MOST_WRITTEN:
            raise ValueError("has too many references to large definitions")
        return f"%json {text}"
