"""Order: what the conversations of protocols were fitted to before the tokenizer did that for all of them."""

from __future__ import annotations

from typing import Any, Self

__all__ = ["TemplateOrder"]


class TemplateOrder:
    """The sequences of messages that a chat template takes: all: the tokenizer fits them."""

    @classmethod
    def of(cls, tokenizer: Any) -> Self:
        return cls()
