"""Tokenizer: what the engine needs of one, and the one over Hugging Face files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

from aioinfer.errors import ConfigError, InvalidRequest
from aioinfer.text.detokenizer import DecodeStreamDetokenizer, Detokenizer, OffsetDetokenizer

__all__ = ["HFTokenizer", "Tokenizer"]


class Tokenizer(Protocol):
    """Text to ids and back. Encoding happens on worker threads, detokenizing on the loop."""

    eos_token_ids: frozenset[int]
    has_chat_template: bool

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt. Raises InvalidRequest."""

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **template_kwargs: Any) -> list[int]:
        """Ids of a conversation through the chat template, ready for the answer. Raises InvalidRequest."""

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str: ...

    def detokenizer(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> Detokenizer:
        """For an output that continues ``prompt_ids``."""


class HFTokenizer:
    """The tokenizer of a model directory, through transformers.

    Special tokens written out in a prompt are special tokens, as in vLLM and transformers: who renders
    templates by hand relies on it, who wants to rule it out filters prompts before they come here.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._fast = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        eos = tokenizer.eos_token_id
        self.eos_token_ids: frozenset[int] = frozenset() if eos is None else frozenset({eos})
        self.has_chat_template = bool(tokenizer.chat_template)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Load from a local directory; no remote code, no network. Raises ConfigError."""
        from transformers import AutoTokenizer

        try:
            return cls(AutoTokenizer.from_pretrained(path, local_files_only=True))
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"the tokenizer of {path.name} could not be loaded: {error}") from error

    def encode(self, text: str) -> list[int]:
        _check_unicode("prompt", text)
        ids: list[int] = self._tokenizer.encode(text)
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **template_kwargs: Any) -> list[int]:
        import jinja2

        conversation = [_message(number, message) for number, message in enumerate(messages)]
        if not self.has_chat_template:
            raise InvalidRequest("messages", "the model has no chat template: give a text prompt")
        try:
            text: str = self._tokenizer.apply_chat_template(
                conversation, add_generation_prompt=True, tokenize=False, **template_kwargs
            )
        except (jinja2.TemplateError, ValueError, TypeError) as error:
            raise InvalidRequest("messages", f"the chat template refused them: {error}") from error
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> Detokenizer:
        if self._fast is not None:
            return DecodeStreamDetokenizer(self._fast, prompt_ids, skip_special_tokens=skip_special_tokens)
        return OffsetDetokenizer(
            lambda ids: self.decode(ids, skip_special_tokens=skip_special_tokens), prompt_ids
        )


def _message(number: int, message: Any) -> dict[str, Any]:
    """A chat message with its content as plain text; OpenAI's text parts are joined."""
    field = f"messages[{number}]"
    if not isinstance(message, Mapping):
        raise InvalidRequest(field, f"must be an object, got {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"{field}.role", "is missing")
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        content = "".join(_part(f"{field}.content", part) for part in content)
    if content is None and role == "assistant":
        content = ""
    if not isinstance(content, str):
        raise InvalidRequest(f"{field}.content", "must be text or a list of text parts")
    _check_unicode(f"{field}.content", content)
    return {**message, "role": role, "content": content}


def _part(field: str, part: Any) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise InvalidRequest(field, "only text parts are understood")
    text: str = part["text"]
    return text


def _check_unicode(field: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(field, "holds half a surrogate pair, which is not text") from None
