"""Tokenizer: the protocol that the engine uses, and its implementation for Hugging Face files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from aioinfer.checkpoint.files import Checkpoint, Directory
from aioinfer.errors import ConfigError, InvalidRequest
from aioinfer.images.prompt import shown
from aioinfer.text import template
from aioinfer.text.byte_level import ByteLevelDetokenizer, TokenTexts, part_of_character
from aioinfer.text.chat_template import ChatTemplate
from aioinfer.text.detokenizer import DecodeStreamDetokenizer, Detokenizer, OffsetDetokenizer
from aioinfer.text.fast_tokenizer import facts_of, lean
from aioinfer.text.messages import check_text, plain_messages

if TYPE_CHECKING:
    from aioinfer.images.limits import ImageLimits
    from aioinfer.images.processor import ImageProcessor

__all__ = ["NO_IMAGES", "HFTokenizer", "Tokenizer", "end_of"]

#: why no images are read, unless there is another reason
NO_IMAGES = "this model reads no images"

#: Parameters of ``apply_chat_template`` itself and of its call of the template, which callers cannot set.
_RESERVED = frozenset(
    {
        *(
            "self",
            "messages",
            "conversation",
            "conversations",
            "chat_template",
            "tokenize",
            "tokenizer_kwargs",
        ),
        *("sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        "return_assistant_tokens_mask",
    }
)
#: last tokens of a prompt: more than a tag of reasoning and the line breaks around it can have
_PROMPT_END = 32
#: a text before a token, so that it keeps its space
_BEFORE = "a"


class Tokenizer(Protocol):
    """Text to ids and back. Encoding happens on worker threads, detokenizing on the loop.

    Attributes:
        eos_token_ids: the ids that end an output.
        has_chat_template: ``encode_chat`` can be used.
        vocab_size: number of tokens, special and added ones included.
        added_tokens: text -> id of the tokens that encode a whole text (tags for example), special ones
            included.
        special_tokens: the texts among them that ``skip_special_tokens`` omits.
        longest_token: bytes of a text that one token stands for, at most; None if no bound is known.
        images: what the model's files make of images; None, or no such attribute, if they are not read. Then
            ``no_images`` says why.
        chat_templates: the texts of its chat templates.
        template_names: variables and keys of messages that the chat template reads; None if not known.
    """

    eos_token_ids: frozenset[int]
    has_chat_template: bool
    vocab_size: int
    added_tokens: Mapping[str, int]
    special_tokens: frozenset[str]
    longest_token: int | None
    chat_templates: tuple[str, ...]
    template_names: frozenset[str] | None

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt. Raises InvalidRequest."""

    def encode_part(self, text: str) -> list[int]:
        """Ids of a text within another, without special tokens around it. Raises InvalidRequest."""

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], /, **template_kwargs: Any) -> list[int]:
        """Ids of a conversation through the chat template, up to the answer. Raises InvalidRequest."""

    # ``render_chat`` is optional: the text of which ``encode_chat`` is the ``encode_part``. Where a tokenizer
    # has it, the length of that text is checked before it is tokenized.

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text in UTF-8, a leading space included, also if it is special; nothing for
        an id outside the vocabulary."""

    def detokenizer(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> Detokenizer:
        """For an output that continues ``prompt_ids``."""

    def for_grammars(self) -> Any:
        """The vocabulary for llguidance: the JSON of a tokenizers file, or a TokenizerWrapper.
        Raises InvalidRequest if the tokenizer has neither."""


def end_of(prompt_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """The last characters of a prompt, special tokens included, as its chat template ends it."""
    return tokenizer.decode(prompt_ids[-_PROMPT_END:], skip_special_tokens=False)


#: Tokens that end a turn of the chat template although the checkpoint's config does not list them: LLaDA2.
_TURN_ENDS = frozenset({"<|role_end|>"})


class HFTokenizer:
    """The tokenizer of a model directory, through transformers. Its methods may be called from any thread.

    Special tokens written out in a prompt or a message are encoded as special tokens, as in vLLM and
    transformers: applications that render templates themselves rely on it. An application that does not
    trust its texts must filter them first.
    """

    def __init__(self, tokenizer: Any) -> None:
        """``tokenizer`` is of transformers or a :class:`FastTokenizer`; this object owns it from now on."""
        tokenizer = lean(tokenizer)
        self._tokenizer = tokenizer
        self._fast: Any = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        if self._fast is not None:
            # Threads can share a fast tokenizer as long as it is not modified: truncation and padding are
            # disabled here, once, instead of by transformers in every call.
            self._fast.no_truncation()
            self._fast.no_padding()
        self.has_chat_template = bool(tokenizer.chat_template)
        templates = tokenizer.chat_template or {}
        self.chat_templates = (templates,) if isinstance(templates, str) else tuple(templates.values())
        for each in self.chat_templates:
            template.check(each)
        self.template_names: frozenset[str] | None = template.names_read(self.chat_templates)
        #: by whether a chat has tools, which may have a template of their own
        self._templates: dict[bool, ChatTemplate] = {}
        self.vocab_size = len(tokenizer)
        self.images: ImageProcessor | None = None
        self.no_images = NO_IMAGES
        added = tokenizer.added_tokens_decoder
        self.added_tokens: Mapping[str, int] = {token.content: at for at, token in added.items()}
        self.special_tokens = frozenset(token.content for token in added.values() if token.special)
        ends = {self.added_tokens[name] for name in self.special_tokens & _TURN_ENDS}
        eos = tokenizer.eos_token_id
        self.eos_token_ids = frozenset(ends if eos is None else {eos, *ends})
        self.longest_token: int | None = None
        #: by whether special tokens are left out; None if the decoder is not that of byte-level vocabularies
        self._texts: Mapping[bool, TokenTexts] | None = None
        if self._fast is not None:
            self.longest_token, self._texts = tokenizer.longest_token, tokenizer.texts

    @classmethod
    def load(cls, path: Path) -> Self:
        """Load from a local directory, without network, remote code or prompts. Raises ConfigError."""
        tokenizer = cls.of(Directory(path))
        if tokenizer is None:
            raise ConfigError(f"the tokenizer of {path.name} could not be loaded: it has none")
        return tokenizer

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, chat_template: str | None = None, read: Callable[[], Any] | None = None
    ) -> Self | None:
        """The tokenizer of a checkpoint; None if it has none. ``chat_template``, a template or its file,
        replaces the checkpoint's; ``read`` is called for the tokenizer in its place. Raises ConfigError."""
        try:
            found = (read or checkpoint.tokenizer)()
            if found is None:
                return None
            if chat_template is not None:
                found.chat_template = template.read_template(chat_template)
            return cls(found)
        except ConfigError:
            raise
        except Exception as error:
            # Broken files raise many types; the Rust library raises the bare Exception.
            name = checkpoint.path.name
            raise ConfigError(f"the tokenizer of {name} could not be loaded: {error}") from error

    def read_images(self, checkpoint: Checkpoint, limits: ImageLimits) -> None:
        """Read images from now on, if the files of the checkpoint say how; else ``no_images`` says why not.
        Blocks."""
        from aioinfer.images.processor import ImageProcessor

        try:
            self.images = ImageProcessor.of(checkpoint, self.added_tokens, limits)
        except ConfigError as error:
            self.no_images = f"{NO_IMAGES} here: {error}"

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, with the special tokens that the model expects around it (such as BOS).

        Raises InvalidRequest for an unpaired surrogate, which has no UTF-8 encoding.
        """
        check_text("prompt", text)
        return self._encode(text, add_special_tokens=True)

    def encode_part(self, text: str) -> list[int]:
        """Ids of a text within another. Raises InvalidRequest."""
        check_text("text", text)
        return self._encode(text, add_special_tokens=False)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], /, **template_kwargs: Any) -> list[int]:
        """Ids of a conversation: those of :meth:`render_chat`. Raises InvalidRequest."""
        return self._encode(self.render_chat(messages, **template_kwargs), add_special_tokens=False)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], /, **template_kwargs: Any) -> str:
        """The text of a conversation through the model's chat template.

        Args:
            messages: each with ``role`` and ``content``, which is text or a list of OpenAI's text parts
                and of parts of type "image". The template may read other keys.
            template_kwargs: variables of the template, besides ``tools``, ``documents``,
                ``add_generation_prompt`` (default true) and ``continue_final_message``.

        Raises:
            InvalidRequest: of field "messages" or its malformed part, also if the template is missing,
                refuses the messages, leaves out some of them or does not come to an end; of
                "chat_template_kwargs" for a reserved name.
        """
        reserved = None if self.images is None else self.images.reserved
        conversation = plain_messages(messages, reserved)
        if not self.has_chat_template:
            raise InvalidRequest("messages", "the model has no chat template: give a text prompt")
        for name in template_kwargs:
            if name in _RESERVED:
                raise InvalidRequest("chat_template_kwargs", f"{name!r} cannot be set")
        continued = bool(template_kwargs.get("continue_final_message"))
        if template_kwargs.setdefault("add_generation_prompt", not continued) and continued:
            message = "add_generation_prompt and continue_final_message cannot be combined"
            raise InvalidRequest("chat_template_kwargs", message)
        return self._template(template_kwargs.get("tools")).render(conversation, template_kwargs)

    def _template(self, tools: Any) -> ChatTemplate:
        given = tools is not None
        if given not in self._templates:
            try:
                source = self._tokenizer.get_chat_template(tools=tools)
            except ValueError as error:
                raise InvalidRequest("messages", f"there is no chat template for them: {error}") from error
            tokens = self._tokenizer.special_tokens_map
            self._templates[given] = ChatTemplate(source, tokens, self.template_names, given)
        return self._templates[given]

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """The tokens as the vocabulary writes them, such as "Ġthe"."""
        found: list[str] = self._tokenizer.convert_ids_to_tokens(list(ids))
        return found

    def described(self) -> dict[str, Any]:
        """Fields of ``tokenizer_config.json``: class, chat template, and the tokens with a role."""
        templates, known = self.chat_templates, self._tokenizer
        facts = known.facts if known.is_fast else facts_of(known)
        return {
            "tokenizer_class": facts["class"],
            "chat_template": templates[0] if templates else None,
            **facts["roles"],
        }

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``ids`` from the model's decoder, without transformers' clean-up of spaces.

        With special tokens, that of a single token is its text within a text: a decoder that omits the space
        before a text (Llama 2) would give "true" and " true" the same one.
        """
        given = list(self._shown([*ids]))
        if len(given) == 1 and not skip_special_tokens:
            return self.token_bytes(given[0]).decode(errors="replace")
        return self._decode(given, skip_special_tokens=skip_special_tokens)

    def _shown(self, ids: Sequence[int]) -> Sequence[int]:
        """The ids with the image token in place of words of images."""
        return ids if self.images is None else shown(ids, self.images.token_id)

    def _decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        options = {} if self._fast is not None else {"clean_up_tokenization_spaces": False}
        decode = (self._tokenizer if self._fast is None else self._fast).decode
        return str(decode(ids, skip_special_tokens=skip_special_tokens, **options))

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text in UTF-8; also the byte of a token such as ``<0xE2>``, and a part of a
        character in a byte-level vocabulary."""
        if self._texts is not None:
            return self._texts[False].bytes_of(token_id)
        before = self._encode(_BEFORE, add_special_tokens=False)
        detokenizer = self.detokenizer(before, skip_special_tokens=False)
        text = detokenizer.push(token_id) + detokenizer.finish()
        return part_of_character(self.token_strings([token_id])[0], text) or text.encode()

    def detokenizer(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> Detokenizer:
        """For an output that continues ``prompt_ids``; agrees with :meth:`decode`."""
        prompt_ids = self._shown(prompt_ids)
        if self._texts is not None:
            return ByteLevelDetokenizer(self._texts[skip_special_tokens], prompt_ids)
        if self._fast is not None:
            return DecodeStreamDetokenizer(self._fast, prompt_ids, skip_special_tokens=skip_special_tokens)
        return OffsetDetokenizer(
            lambda ids: self._decode(ids, skip_special_tokens=skip_special_tokens), prompt_ids
        )

    def for_grammars(self) -> str:
        """The JSON of the fast tokenizer."""
        if self._fast is None:
            raise InvalidRequest("grammar", "needs a model with a fast tokenizer")
        return str(self._fast.to_str())

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids: list[int]
        if self._fast is None:
            ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:
            # Of the library's encode methods, only the batch ones release the GIL.
            ids = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids
