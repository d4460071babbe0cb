"""The interface of the parsers of tool calls."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from aioinfer.text.rules import Rules

__all__ = ["Functions", "Parsed", "ToolCallDelta", "ToolCallParser", "new_id"]

#: name -> JSON schema of the arguments, which describes an object
Functions = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A part of a call. The first delta of a call has its id and its name, the others have arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Parsed:
    """Content and calls of a piece of output."""

    content: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)


def new_id() -> str:
    """An id of a call, unique across the turns of a conversation."""
    return f"call_{uuid.uuid4().hex[:24]}"


class ToolCallParser(Protocol):
    """Text in, content and calls out; the concatenation does not depend on how the text is split.

    Never raises, and every character of the text is either content or part of a call. Arguments are passed on
    as they arrive, so a call remains one even if its arguments are not valid JSON: as with OpenAI's API, the
    receiver validates them.

    Attributes:
        name: the setting's value.
        opening: the tag in front of calls; empty if the beginning of an answer tells whether it is a call.
        beginning: without an opening tag, a regular expression for how an answer with calls begins.
        separator: the text between calls that have an opening tag each; None if the calls of an answer have
            one together.
        tags: what has to be in the text for calls to be found, even if a vocabulary has special tokens for
            it.
    """

    name: ClassVar[str]
    opening: ClassVar[str]
    beginning: ClassVar[str]
    separator: ClassVar[str | None]
    tags: ClassVar[tuple[str, ...]]

    def __init__(self, functions: Functions | None = None) -> None:
        """``functions``: those that the model knows. The names of calls are not checked."""

    @staticmethod
    def in_template(template: str) -> bool:
        """Whether a chat template writes calls in this format."""

    def push(self, text: str) -> Parsed:
        """Parse the next piece of output."""

    def finish(self) -> Parsed:
        """End of the output: the held text."""

    @property
    def unfinished(self) -> bool:
        """The arguments of a call are incomplete: those of the newest one still, or of one that broke off."""

    @staticmethod
    def write(function: str, schema: Mapping[str, Any], rules: Rules) -> str:
        """The form of a call of ``function``, as a part of a rule: arguments obey their schema.

        Raises ValueError for a schema that cannot be written.
        """

    @staticmethod
    def group(call: str, most: int) -> str:
        """The form of the calls behind one opening tag: up to ``most`` if it can have several."""
