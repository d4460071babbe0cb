"""The prompt and the options of a request, as the caller gives them.

Both are checked once, when the caller passes them in, as far as that needs no tokenizing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from aioinfer.errors import InvalidRequest, shown

if TYPE_CHECKING:
    from aioinfer.text.grammar import GrammarState
    from aioinfer.text.tokenizer import Tokenizer

__all__ = ["Prepared", "Prompt", "PromptSource", "RequestOptions"]

#: text, token ids, or chat messages (mappings with "role" and "content")
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]

#: characters of a label that a caller gives
_MAX_LABEL = 256


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Options of one request. Raises InvalidRequest, by the name of the field."""

    #: larger goes first, with the policy ``priority``; 32 bits
    priority: int = 0
    #: prefixes are shared only between requests with the same salt
    cache_salt: str = ""
    #: what the policy ``routing-key`` groups by
    routing_key: str | None = None
    #: seconds until the first step, and from there on; None for no limit
    waiting_timeout: float | None = None
    running_timeout: float | None = None
    #: unread output tokens beyond which the request is parked; None for no limit
    max_lag: int | None = None

    def __post_init__(self) -> None:
        _check_timeout("waiting_timeout", self.waiting_timeout)
        _check_timeout("running_timeout", self.running_timeout)
        if self.max_lag is not None and (type(self.max_lag) is not int or self.max_lag < 1):
            raise InvalidRequest("max_lag", f"must be a positive number of tokens, got {shown(self.max_lag)}")
        if type(self.priority) is not int or not -(2**31) <= self.priority < 2**31:
            raise InvalidRequest("priority", f"must be an integer of 32 bits, got {shown(self.priority)}")
        _check_label("cache_salt", self.cache_salt)
        _check_label("routing_key", self.routing_key)


class Prepared(NamedTuple):
    """What tokenizing and compiling make of a prompt and its sampling parameters."""

    prompt_ids: Sequence[int]
    #: what masks the output, if anything does
    grammar: GrammarState | None


class PromptSource:
    """A prompt as the caller gave it, and how to make token ids of it."""

    __slots__ = ("_chat", "_prompt", "_template_kwargs", "_tokenizer")

    def __init__(
        self, prompt: Prompt, tokenizer: Tokenizer | None, template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Raises InvalidRequest for what can be seen without tokenizing."""
        if not isinstance(prompt, (str, list, tuple)):
            raise InvalidRequest(
                "prompt", f"must be text, token ids or messages, got {type(prompt).__name__}"
            )
        if not prompt:
            raise InvalidRequest("prompt", "is empty")
        self._prompt: Any = prompt
        self._tokenizer = tokenizer
        self._chat = not isinstance(prompt, str) and isinstance(prompt[0], Mapping)
        if template_kwargs is not None and not self._chat:
            raise InvalidRequest("chat_template_kwargs", "only chat messages go through a template")
        self._template_kwargs = dict(template_kwargs or {})
        if self.is_ids:
            self._prompt = prompt[:]  # the caller may change its list
        elif tokenizer is None:
            raise InvalidRequest("prompt", "the model has no tokenizer: give token ids")

    @property
    def is_ids(self) -> bool:
        """The prompt is token ids already."""
        return not (self._chat or isinstance(self._prompt, str))

    def encode(self) -> Sequence[int]:
        """Token ids of the prompt. Blocks if it is text or messages. Raises InvalidRequest."""
        ids: Sequence[int] = self._prompt
        if self._tokenizer is None or self.is_ids:
            return ids
        if self._chat:
            return self._tokenizer.encode_chat(self._prompt, **self._template_kwargs)
        return self._tokenizer.encode(self._prompt)


def _check_timeout(field: str, value: float | None) -> None:
    if value is not None and (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not math.isfinite(value)
        or value <= 0
    ):
        raise InvalidRequest(field, f"must be a positive number of seconds, got {shown(value)}")


def _check_label(field: str, value: str | None) -> None:
    if value is not None and (not isinstance(value, str) or len(value) > _MAX_LABEL):
        raise InvalidRequest(field, f"must be a string of at most {_MAX_LABEL} characters")
