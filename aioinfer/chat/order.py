"""Order: which sequences of messages a chat template takes.

Most take any. Some raise an error for a later system message (Qwen 3.5), or for a message of the user
after another (Mistral, Gemma 3), and agents send such conversations on their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from aioinfer.errors import InvalidRequest
from aioinfer.text.tokenizer import Tokenizer

__all__ = ["UNREAD", "TemplateOrder"]

#: why a field is refused that the template would have to read
UNREAD = "is not read by the model's chat template"


@dataclass(frozen=True, slots=True)
class TemplateOrder:
    """Sequences that a chat template takes. ``late_system``: a system message after one of the user;
    ``successive``: a message of the user after another."""

    late_system: bool = True
    successive: bool = True

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        """Found out by trying. A template that does not take one message alone, because it needs variables
        for example, counts as one that takes all."""
        render = getattr(tokenizer, "render_chat", None)
        if render is None or not tokenizer.has_chat_template or not _takes(render, "user"):
            return cls()
        return cls(_takes(render, "user", "system"), _takes(render, "user", "user"))


def _takes(render: Callable[[Sequence[Mapping[str, Any]]], str], *roles: str) -> bool:
    """True if all messages are in the rendered text: some templates leave out what they do not expect."""
    messages = [{"role": role, "content": f"message {at}"} for at, role in enumerate(roles)]
    try:
        text = render(messages)
    except InvalidRequest:
        return False
    return all(message["content"] in text for message in messages)
