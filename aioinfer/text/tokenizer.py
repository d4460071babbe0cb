"""Tokenizer: what the engine needs of one, and the one over Hugging Face files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

from aioinfer.errors import ConfigError, InvalidRequest
from aioinfer.text.detokenizer import DecodeStreamDetokenizer, Detokenizer, OffsetDetokenizer

__all__ = ["HFTokenizer", "Tokenizer"]

#: What ``apply_chat_template`` takes as arguments of its own, and is not for callers to set.
_RESERVED = frozenset(
    {
        "conversation",
        "chat_template",
        "tokenize",
        "tokenizer_kwargs",
        "sanitize_control_tokens",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
    }
)


class Tokenizer(Protocol):
    """Text to ids and back. Encoding happens on worker threads, detokenizing on the loop.

    Attributes:
        eos_token_ids: the ids that end an output.
        has_chat_template: ``encode_chat`` can be used.
        vocab_size: how many tokens there are, special and added ones included.
        added_tokens: ids of the tokens that stand for a text as a whole, such as tags; special ones included.
        special_tokens: the texts of those among them that ``skip_special_tokens`` leaves out.
    """

    eos_token_ids: frozenset[int]
    has_chat_template: bool
    vocab_size: int
    added_tokens: Mapping[str, int]
    special_tokens: frozenset[str]

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt. Raises InvalidRequest."""

    def encode_part(self, text: str) -> list[int]:
        """Ids of a text within another, without special tokens around it. Raises InvalidRequest."""

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **template_kwargs: Any) -> list[int]:
        """Ids of a conversation through the chat template, ready for the answer. Raises InvalidRequest."""

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str: ...

    def detokenizer(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> Detokenizer:
        """For an output that continues ``prompt_ids``."""

    def for_grammars(self) -> Any:
        """The vocabulary as llguidance takes it: the JSON of a tokenizers file, or a TokenizerWrapper.
        Raises InvalidRequest if there is no such thing."""


#: end a turn of the chat template, and no config of the checkpoint says so: LLaDA2
_TURN_ENDS = frozenset({"<|role_end|>"})


class HFTokenizer:
    """The tokenizer of a model directory, through transformers. Its methods may be called from any thread.

    Special tokens written out in a prompt or a message are special tokens, as in vLLM and transformers:
    who renders templates by hand relies on it, who wants to rule it out filters texts before they come
    here.
    """

    def __init__(self, tokenizer: Any) -> None:
        """``tokenizer`` is one of transformers'; it must not be used by anybody else from now on."""
        self._tokenizer = tokenizer
        self._fast: Any = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        if self._fast is not None:
            # Threads can share a fast tokenizer as long as nobody changes it, so what transformers would
            # switch off with every call is switched off here, once.
            self._fast.no_truncation()
            self._fast.no_padding()
        self.has_chat_template = bool(tokenizer.chat_template)
        self.vocab_size = len(tokenizer)
        added = tokenizer.added_tokens_decoder
        self.added_tokens: Mapping[str, int] = {token.content: at for at, token in added.items()}
        self.special_tokens = frozenset(token.content for token in added.values() if token.special)
        ends = {self.added_tokens[name] for name in self.special_tokens & _TURN_ENDS}
        eos = tokenizer.eos_token_id
        self.eos_token_ids = frozenset(ends if eos is None else {eos, *ends})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Load from a local directory; no network, no code from it, no question. Raises ConfigError."""
        from transformers import AutoTokenizer

        try:
            # Without an explicit no, transformers asks on the terminal whether to run the directory's code.
            config = _unknown_config(path)
            return cls(
                AutoTokenizer.from_pretrained(
                    path, config=config, local_files_only=True, trust_remote_code=False
                )
            )
        except Exception as error:
            # Broken files raise nearly anything, of Rust's making also the bare Exception.
            raise ConfigError(f"the tokenizer of {path.name} could not be loaded: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, with the special tokens that the model expects around it (such as BOS).

        Raises InvalidRequest for what is no text: half a surrogate pair has no bytes.
        """
        _check_text("prompt", text)
        return self._encode(text, add_special_tokens=True)

    def encode_part(self, text: str) -> list[int]:
        """Ids of a text within another. Raises InvalidRequest."""
        _check_text("text", text)
        return self._encode(text, add_special_tokens=False)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **template_kwargs: Any) -> list[int]:
        """Ids of a conversation through the model's chat template.

        Args:
            messages: each with ``role`` and ``content``, which is text or a list of OpenAI's text parts.
                Other keys are the template's to read.
            template_kwargs: variables of the template, besides ``tools``, ``documents``,
                ``add_generation_prompt`` (default true) and ``continue_final_message``.

        Raises:
            InvalidRequest: of field "messages" or the part of it that is malformed, also where the template
                refuses them or there is none; of "chat_template_kwargs" for one that is not for callers.
        """
        given: Any = messages
        if not isinstance(given, Sequence) or isinstance(given, (str, bytes)) or not given:
            raise InvalidRequest("messages", "must be a non-empty list")
        conversation = [_message(f"messages[{number}]", message) for number, message in enumerate(given)]
        if not self.has_chat_template:
            raise InvalidRequest("messages", "the model has no chat template: give a text prompt")
        for name in template_kwargs:
            if name in _RESERVED:
                raise InvalidRequest("chat_template_kwargs", f"{name!r} cannot be set")
        template_kwargs.setdefault(
            "add_generation_prompt", not template_kwargs.get("continue_final_message", False)
        )
        try:
            text: str = self._tokenizer.apply_chat_template(conversation, tokenize=False, **template_kwargs)
        except Exception as error:
            # A template is a program: on messages that it was not made for it may raise anything.
            raise InvalidRequest("messages", f"the chat template refused them: {error}") from error
        _check_text("messages", text)
        return self._encode(text, add_special_tokens=False)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``ids`` as the model's decoder has it, without transformers' clean-up of spaces."""
        text: str
        if self._fast is not None:
            text = self._fast.decode(list(ids), skip_special_tokens=skip_special_tokens)
        else:
            text = self._tokenizer.decode(
                list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        return text

    def detokenizer(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> Detokenizer:
        """For an output that continues ``prompt_ids``; agrees with :meth:`decode`."""
        if self._fast is not None:
            return DecodeStreamDetokenizer(self._fast, prompt_ids, skip_special_tokens=skip_special_tokens)
        return OffsetDetokenizer(
            lambda ids: self.decode(ids, skip_special_tokens=skip_special_tokens), prompt_ids
        )

    def for_grammars(self) -> str:
        """The JSON of the fast tokenizer."""
        if self._fast is None:
            raise InvalidRequest("grammar", "needs a model with a fast tokenizer")
        text: str = self._fast.to_str()
        return text

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids: list[int]
        if self._fast is not None:
            # Of the library's ways to encode, only those for batches let other threads run meanwhile.
            ids = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        else:
            ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids


def _unknown_config(path: Path) -> Any:
    """The config of a model type that transformers does not know; None for others, which it reads by itself.
    Of one that it does not know it would say so at length, and go on all the same."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    file = path / "config.json"
    stated = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    kind = stated.get("model_type")
    return None if kind is None or kind in CONFIG_MAPPING else PreTrainedConfig.from_dict(stated)


def _message(field: str, message: Any) -> dict[str, Any]:
    """A chat message with its content as plain text; OpenAI's text parts are joined."""
    if not isinstance(message, Mapping):
        raise InvalidRequest(field, f"must be an object, got {type(message).__name__}")
    role = message.get("role")
    if role is None:
        raise InvalidRequest(f"{field}.role", "is missing")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"{field}.role", f"must be non-empty text, got {role!r}")
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        content = "".join(_part(f"{field}.content[{number}]", part) for number, part in enumerate(content))
    if content is None and role == "assistant":
        # A message that only calls tools has none.
        content = ""
    if content is None:
        raise InvalidRequest(f"{field}.content", "is missing")
    if not isinstance(content, str):
        raise InvalidRequest(f"{field}.content", "must be text or a list of text parts")
    _check_text(f"{field}.content", content)
    return {**message, "role": role, "content": content}


def _part(field: str, part: Any) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise InvalidRequest(field, f"only parts of type 'text' are understood, got {str(kind)[:40]!r}")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{field}.text", "must be text")
    return text


def _check_text(field: str, text: Any) -> None:
    if not isinstance(text, str):
        raise InvalidRequest(field, f"must be text, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(field, "holds half a surrogate pair, which is not text") from None
