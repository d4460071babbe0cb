"""Grammar: the constraint on an output, before it is compiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from aioinfer.errors import InvalidRequest

__all__ = ["Grammar"]

_MAX_GRAMMAR = 1 << 16


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on an output.

    ``source`` is a JSON schema (``json_schema``, as text), a regular expression for the whole output
    (``regex``), a JSON list of texts (``choice``), a grammar in llguidance's dialect of Lark or in GBNF
    (``lark``), a grammar built by :class:`~aioinfer.text.tool_grammar.AnswerGrammar` (``answer``), or empty
    (``json_object``: any JSON object). Syntax errors are found when it is compiled, on a worker thread.

    Raises:
        InvalidRequest: unknown kind, or a source that is not text or has more than 65,536 characters.
    """

    kind: Literal["json_schema", "json_object", "regex", "choice", "lark", "answer"]
    source: str = ""

    def __post_init__(self) -> None:
        if self.kind not in ("json_schema", "json_object", "regex", "choice", "lark", "answer"):
            raise InvalidRequest("grammar", f"{self.kind!r} is not a kind of grammar")
        if not isinstance(self.source, str):
            raise InvalidRequest("grammar", "must be given as text")
        if len(self.source) > _MAX_GRAMMAR:
            raise InvalidRequest(
                "grammar", f"may have at most {_MAX_GRAMMAR} characters, got {len(self.source)}"
            )
