"""Grammar: the constraint on an output, before it is compiled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from aioinfer.errors import InvalidRequest, shown, why
from aioinfer.inputs import PLAIN, keep_plain, plain
from aioinfer.text.reasoning import REASONING_PARSERS

__all__ = ["Grammar", "Schema", "SchemaModel", "closed", "model_schema"]

#: keywords of JSON schemas that have others: by name, in a list, and one
_NAMED_SCHEMAS = ("$defs", "properties", "patternProperties")
_LISTED_SCHEMAS = ("anyOf", "oneOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties")
#: no server compiles more, whatever its settings
_MAX_GRAMMAR = 1 << 20


class SchemaModel(Protocol):
    """A class that has a JSON schema: pydantic's models."""

    def model_json_schema(self) -> Mapping[str, Any]:
        """The schema."""


#: a JSON schema, as an object or as what has one
Schema = Mapping[str, Any] | SchemaModel

_Kind = Literal["json_schema", "json_object", "regex", "choice", "lark", "answer", "template"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on an output.

    ``source`` is a JSON schema (``json_schema``), a regular expression for the whole output (``regex``), a
    JSON list of texts (``choice``), a grammar in llguidance's dialect of Lark or in GBNF (``lark``), a
    grammar built by :class:`~aioinfer.text.tool_grammar.AnswerGrammar` (``answer``), a text with holes made
    by :class:`~aioinfer.text.text_template.TextTemplate` (``template``), or empty (``json_object``: any JSON
    object). Syntax errors are found when it is compiled, on a worker thread.

    A schema may also be given as a mapping, a boolean or a class with ``model_json_schema``, and choices as a
    list; they are converted to text, so that later changes have no effect.

    ``reasoning``: the name of the format of the reasoning that an ``answer`` begins with. Its source has no
    rule ``start``: it depends on the prompt, see :meth:`behind`.

    Raises:
        InvalidRequest: unknown kind or format, or a source that cannot be converted or has more than 1 Mi
            characters.
    """

    kind: _Kind
    source: str | Schema | bool | list[str] | tuple[str, ...] = ""
    reasoning: str | None = None

    def __post_init__(self) -> None:
        keep_plain(self)
        kind: Any = self.kind
        if type(kind) is not str or kind not in get_args(_Kind):
            raise InvalidRequest("grammar", f"{shown(self.kind)} is not a kind of grammar")
        format_: Any = self.reasoning
        if format_ is not None and (type(format_) is not str or format_ not in REASONING_PARSERS):
            raise InvalidRequest("grammar", f"{shown(format_)} is no format of reasoning")
        source = _as_text(self.kind, self.source)
        if len(source) > _MAX_GRAMMAR:
            raise InvalidRequest("grammar", f"may have at most {_MAX_GRAMMAR} characters, got {len(source)}")
        object.__setattr__(self, "source", source)

    def behind(self, prompt_end: str) -> Grammar:
        """The grammar of an output after this end of a prompt, which can open or close the reasoning."""
        if self.reasoning is None:
            return self
        opened = REASONING_PARSERS[self.reasoning].opened_by(prompt_end)
        start = {True: "opened", False: "closed", None: "unopened"}[opened]
        return Grammar(self.kind, f"{self.text}\nstart: {start}")

    @property
    def text(self) -> str:
        """``source`` as text."""
        assert isinstance(self.source, str)
        return self.source


def _as_text(kind: str, source: Any) -> str:
    """Raises InvalidRequest."""
    if type(source) is str:
        return source
    if kind == "json_schema" and callable(getattr(source, "model_json_schema", None)):
        source = model_schema("grammar", source)
    if not isinstance(source, {"json_schema": (Mapping, bool), "choice": (list, tuple)}.get(kind, ())):
        raise InvalidRequest("grammar", f"is no {kind.replace('_', ' ')}, got {shown(source)}")
    try:
        return json.dumps(source, default=_plain, allow_nan=False)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidRequest("grammar", f"is not JSON: {why(error)}") from None


def model_schema(field: str, model: SchemaModel) -> Any:
    """The schema of a class, see :func:`closed`. Raises InvalidRequest of ``field``."""
    try:
        return closed(model.model_json_schema())
    except Exception as error:
        raise InvalidRequest(field, f"model_json_schema raised: {error!r}") from error


def closed(schema: Any) -> Any:
    """The schema of a class, in which objects with properties have no others. pydantic states that for
    ``extra="forbid"`` only, and allows others in words for ``extra="allow"``; by default it drops them, and a
    model that may write them does so without end."""
    if not isinstance(schema, Mapping):
        return schema
    found = dict(schema)
    for keyword in _NAMED_SCHEMAS:
        if isinstance(named := found.get(keyword), Mapping):
            found[keyword] = {name: closed(each) for name, each in named.items()}
    for keyword in _LISTED_SCHEMAS:
        if isinstance(listed := found.get(keyword), list):
            found[keyword] = [closed(each) for each in listed]
    for keyword in _SCHEMAS:
        if keyword in found:
            found[keyword] = closed(found[keyword])
    if "properties" in found:
        found.setdefault("additionalProperties", False)
    return found


def _plain(value: Any) -> Any:
    """Mappings that are no dicts, and scalars of numpy's."""
    if isinstance(value, Mapping):
        return dict(value)
    known = plain(value)
    if type(known) in PLAIN - {bytes}:
        return known
    raise TypeError(f"{type(value).__name__} is not JSON")
