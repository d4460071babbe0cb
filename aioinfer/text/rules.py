"""Rules of a grammar in llguidance's dialect of Lark, and the spelling of what they consist of.

Tags are single tokens in some vocabularies and plain text in others. llguidance does not match an added token
by its text, so a grammar names it by its id: ``<[id]>``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from aioinfer.text.guidance import ADDED_TO_SCHEMAS

__all__ = ["Rules"]


class Rules:
    """Collects the rules of one grammar. What the methods return belongs into the form of a rule.

    ``TEXT`` is any text. The names of terminals, which are matched as one regular expression, are upper case.
    """

    def __init__(self, tokens: Mapping[str, int]) -> None:
        """``tokens``: text -> id of the vocabulary's added tokens."""
        self._tokens = tokens
        self._lines = ["%llguidance {}", "TEXT: /(.|\\n)*/"]
        #: those without a name of their own, by their form
        self._names: dict[str, str] = {}

    def lark(self) -> str:
        """All of them."""
        return "\n".join(self._lines)

    def add(self, name: str, form: str) -> str:
        """A rule of this name; returns the name."""
        self._lines.append(f"{name}: {form}")
        return name

    def shared(self, prefix: str, form: str) -> str:
        """A rule of this form, one for all that need it; returns its name."""
        if form not in self._names:
            self._names[form] = self.add(f"{prefix}_{len(self._names)}", form)
        return self._names[form]

    def until(self, name: str, tag: str) -> str:
        """A rule for any text up to and including a tag."""
        return self.add(name if tag in self._tokens else f"{name}[lazy]", f"TEXT {self.tag(tag)}")

    def tag(self, tag: str) -> str:
        """A tag, as the vocabulary has it."""
        return f"<[{self._tokens[tag]}]>" if tag in self._tokens else json.dumps(tag)

    def text(self, text: str) -> str:
        """This text."""
        return json.dumps(text)

    def json(self, schema: Mapping[str, Any] | bool) -> str:
        """An instance of a JSON schema. Raises ValueError for one that cannot be written."""
        given = schema if isinstance(schema, bool) else {**schema, **ADDED_TO_SCHEMAS}
        try:
            return f"%json {json.dumps(given)}"
        except RecursionError:
            raise ValueError("is nested too deeply") from None
