"""FastTokenizer: what this package reads of a fast tokenizer, which loads without transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from aioinfer.text.byte_level import TokenTexts, record_of, texts_from_record, token_texts
from aioinfer.text.length import longest_token

__all__ = ["FastTokenizer", "facts_of", "lean"]

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


def lean(tokenizer: Any) -> Any:
    """A fast tokenizer of transformers as a :class:`FastTokenizer`; anything else as it is."""
    fast = tokenizer is not None and tokenizer.is_fast and not isinstance(tokenizer, FastTokenizer)
    return FastTokenizer.of(tokenizer) if fast else tokenizer


class FastTokenizer:
    """A tokenizer of the library ``tokenizers``, with what files beside tokenizer.json say.

    Attributes:
        backend_tokenizer: the library's.
        chat_template: one template, or several by name; None without.
        longest_token: see :func:`~aioinfer.text.length.longest_token`.
        texts: see :func:`~aioinfer.text.byte_level.token_texts`.
    """

    is_fast = True

    def __init__(
        self,
        backend_tokenizer: Any,
        facts: Mapping[str, Any],
        longest_token: int | None,
        texts: Mapping[bool, TokenTexts] | None,
    ) -> None:
        """``facts``: from :func:`facts_of`."""
        self.backend_tokenizer, self.facts = backend_tokenizer, facts
        self.longest_token, self.texts = longest_token, texts
        self.chat_template: str | dict[str, str] | None = facts["chat_template"]
        self.special_tokens_map: dict[str, Any] = facts["special_tokens_map"]
        self.eos_token_id: int | None = facts["eos_token_id"]

    @classmethod
    def of(cls, tokenizer: Any) -> Self:
        """That of a fast tokenizer of transformers, with which it shares the library's."""
        fast = tokenizer.backend_tokenizer
        vocabulary = fast.get_vocab(with_added_tokens=False)
        texts = token_texts(fast, vocabulary)
        return cls(fast, facts_of(tokenizer), longest_token(fast, vocabulary), texts)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """Raises the exceptions of the Rust library."""
        from tokenizers import Tokenizer

        texts = None if record["texts"] is None else texts_from_record(record["texts"])
        return cls(Tokenizer.from_str(record["tokenizer"]), record["facts"], record["longest_token"], texts)

    @property
    def record(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        return {
            "tokenizer": self.backend_tokenizer.to_str(),
            "facts": self.facts,
            "longest_token": self.longest_token,
            "texts": None if self.texts is None else record_of(self.texts),
        }

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
