"""FastTokenizer: what this package reads of a fast tokenizer, which loads without transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

__all__ = ["FastTokenizer", "facts_of"]

#: tokens with a role
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


def facts_of(tokenizer: Any) -> dict[str, Any]:
    """What the files beside tokenizer.json say, of a tokenizer of transformers, as JSON has it."""
    return {
        "class": type(tokenizer).__name__,
        "chat_template": tokenizer.chat_template,
        "special_tokens_map": tokenizer.special_tokens_map,
        "eos_token_id": tokenizer.eos_token_id,
        "roles": {role: getattr(tokenizer, role, None) for role in _ROLES},
    }


class FastTokenizer:
    """A tokenizer of the library ``tokenizers``, with what files beside tokenizer.json say.

    Attributes:
        backend_tokenizer: the library's.
        chat_template: one template, or several by name; None without.
    """

    is_fast = True

    def __init__(self, backend_tokenizer: Any, facts: Mapping[str, Any]) -> None:
        """``facts``: from :func:`facts_of`."""
        self.backend_tokenizer, self.facts = backend_tokenizer, facts
        self.chat_template: str | dict[str, str] | None = facts["chat_template"]
        self.special_tokens_map: dict[str, Any] = facts["special_tokens_map"]
        self.eos_token_id: int | None = facts["eos_token_id"]

    @classmethod
    def of(cls, tokenizer: Any) -> Self:
        """That of a fast tokenizer of transformers, with which it shares the library's."""
        return cls(tokenizer.backend_tokenizer, facts_of(tokenizer))

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """Raises the exceptions of the Rust library."""
        from tokenizers import Tokenizer

        return cls(Tokenizer.from_str(record["tokenizer"]), record["facts"])

    @property
    def record(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        return {"tokenizer": self.backend_tokenizer.to_str(), "facts": self.facts}

    def __len__(self) -> int:
        size: int = self.backend_tokenizer.get_vocab_size(with_added_tokens=True)
        return size

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        found: dict[int, Any] = self.backend_tokenizer.get_added_tokens_decoder()
        return found

    def get_chat_template(self, *, tools: Any) -> str:
        """The template of chats with or without tools. Raises ValueError if there is none for them."""
        templates = self.chat_template
        if not isinstance(templates, dict):
            assert templates is not None, "it has none"
            return templates
        names = ["tool_use", "default"] if tools is not None else ["default"]
        found = next((templates[name] for name in names if name in templates), None)
        if found is None:
            raise ValueError(f"none of {', '.join(sorted(templates))} is the default")
        return found

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]:
        return [self.backend_tokenizer.id_to_token(each) for each in ids]
