"""The prompt and the options of a request, as the caller gives them.

Both are checked once, when the caller passes them in, as far as that needs no tokenizing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from aioinfer.errors import InvalidRequest, shown
from aioinfer.images.prompt import PromptImages
from aioinfer.images.prompt import shown as shown_ids
from aioinfer.inputs import freeze, plain
from aioinfer.loop.given_images import GivenImages
from aioinfer.params import SamplingParams
from aioinfer.pooling import Pooling
from aioinfer.prompt_ids import PromptIds
from aioinfer.request import SOON
from aioinfer.text.length import ASSUMED_LONGEST, exceeds_bytes

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from aioinfer.execution.device import DeviceInfo
    from aioinfer.images.source import ImageSource
    from aioinfer.loop.resumption import Resumption
    from aioinfer.steering.state import SteeringState
    from aioinfer.text.grammar import GrammarState
    from aioinfer.text.tokenizer import Tokenizer

__all__ = [
    "Images",
    "Prepared",
    "Prompt",
    "PromptForm",
    "PromptSource",
    "check_chat",
    "is_one",
    "pooling_params",
    "seconds_left",
    "too_long",
]

#: text, token ids (also an array of integers), chat messages (mappings with "role" and "content", of plain
#: data), or what ``Engine.prompt`` made of one of these
Prompt: TypeAlias = "str | Sequence[int] | Sequence[Mapping[str, Any]] | PromptSource"

#: those in a prompt of token ids that have words: as they were given, or as another engine's prompt has them
Images: TypeAlias = "Sequence[ImageSource] | PromptImages"

#: messages may have so many times the bytes of the longest prompt, and so many characters more, since
#: templates omit the reasoning of earlier answers, for example
_CHAT_FACTOR = 4
_CHAT_ROOM = 1 << 20
#: parameters of a tokenizer's methods
_NOT_VARIABLES = ("self", "messages")


#: parameters that also apply to a prompt that is pooled
_OF_PROMPTS = frozenset({"prompt_logprobs", "logprob_start_len"})


class Prepared(NamedTuple):
    """A tokenized prompt with what was compiled for its sampling parameters."""

    prompt_ids: Sequence[int]
    #: what masks the output, if anything does
    grammar: GrammarState | None
    #: the tokens of the caller's prediction, int32 [P]
    prediction: npt.NDArray[np.int32] | None = None
    #: the output that there is already
    resumption: Resumption | None = None
    #: what else decides how the output goes on
    steering: SteeringState | None = None
    #: the images in the prompt
    images: PromptImages | None = None


@dataclass(frozen=True, slots=True)
class PromptForm:
    """The way from a prompt to token ids. Raises InvalidRequest, by the name of the engine's argument."""

    #: those that the model expects around a text; None: as usual, around text and not around a rendered chat
    special_tokens: bool | None = None
    #: number of tokens of the prompt's end that are kept; negative: all but so many of the context
    truncate: int | None = None
    #: it is not to be computed, so it may have any number of tokens that a text of the longest prompt's
    #: length can have
    counted: bool = False
    #: of a truncated prompt the beginning is kept, with the special tokens around it; -1: what fits
    beginning: bool = False
    #: most tokens that it may have, because the model was made for no more; None: those of its context
    longest: int | None = None
    #: token ids that come before it
    after: Sequence[int] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.special_tokens, (bool, NoneType)):
            raise InvalidRequest(
                "add_special_tokens", f"must be true or false, got {shown(self.special_tokens)}"
            )
        truncate = 1 if self.truncate is None else self.truncate
        if type(truncate) is not int or not truncate or (self.beginning and truncate < -1):
            message = f"must be a positive number of tokens, or -1, got {shown(truncate)}"
            raise InvalidRequest("truncate_prompt_tokens", message)

    def most(self, context: int) -> int | None:
        """The number of tokens that are kept, if it is not all."""
        if self.truncate is None or self.truncate > 0:
            return self.truncate
        longest = context if self.longest is None else min(context, self.longest)
        return longest if self.beginning else max(1, context + self.truncate)


_AS_USUAL = PromptForm()


#: of inputs of which only a beginning may be kept
_TO_TRUNCATE = "; truncate_prompt_tokens keeps its beginning"


class Abandoned(Exception):
    """Nobody waits for the token ids of a prompt, and so its other images are not processed."""


class PromptSource:
    """A prompt that was checked and copied: what the caller gave is not read again.

    Its token ids are computed once, for any number of requests. One source must not be encoded on two
    threads at the same time.
    """

    __slots__ = (
        "_form",
        "_given",
        "_ids",
        "_info",
        "_most",
        "_prompt",
        "_template_kwargs",
        "_tokenizer",
        "abandoned",
        "chat",
        "images",
        "size",
    )

    def __init__(
        self,
        prompt: Prompt,
        tokenizer: Tokenizer | None,
        info: DeviceInfo,
        template_kwargs: Mapping[str, Any] | None = None,
        form: PromptForm = _AS_USUAL,
        images: Images = (),
    ) -> None:
        """``images``: those whose words are among token ids. Raises InvalidRequest for what can be seen
        without tokenizing, the length included."""
        self._tokenizer = tokenizer
        self._info = info
        self._form = form
        #: tokens that are kept
        self._most = form.most(info.max_model_len)
        self._ids: list[int] | None = None
        self._prompt: Any = None
        self._template_kwargs: Any = {}
        #: characters, roughly, that have to be tokenized
        self.size = 0
        #: it was given as messages
        self.chat = False
        #: the images in it, once its token ids are known; None: it has none
        self.images: PromptImages | None = None
        self._given: GivenImages | None = None
        #: nobody waits for its token ids: images that have not begun are not processed
        self.abandoned = False
        given: Any = prompt if type(prompt) is PromptIds else plain(prompt)
        if type(given) is str:
            self._take_text(given, template_kwargs)
            return
        if not isinstance(given, (list, tuple)) and not hasattr(given, "tolist"):
            raise InvalidRequest("prompt", f"must be text, token ids or messages, got {type(given).__name__}")
        if form.truncate is None:
            self._check_count(_length(given), "entries")
        # From here on the copy is read: another thread may change the original at any time.
        items = given if type(given) is PromptIds else _elements(given)
        if not items:
            raise InvalidRequest("prompt", "is empty")
        if isinstance(items[0], Mapping):
            self._take_chat(items, template_kwargs)
            return
        self._refuse_template(template_kwargs)
        if isinstance(images, PromptImages):
            self._ids, self.images = items, images
        elif images:
            self._take_images(GivenImages.again(images, self._tokenizer, info))
            self._prompt = items
        else:
            self._ids = self._checked(items)

    def _take_text(self, text: str, template_kwargs: Mapping[str, Any] | None) -> None:
        self._refuse_template(template_kwargs)
        if not text:
            raise InvalidRequest("prompt", "is empty")
        self._require_tokenizer()
        self._check_text(text)
        self._prompt = text
        self.size = len(text)

    def _take_chat(self, messages: list[Any], template_kwargs: Mapping[str, Any] | None) -> None:
        self._require_tokenizer()
        self.chat = True
        self._check_count(len(messages), "messages")
        messages, images = GivenImages.of(messages, self._tokenizer, self._info)
        self.size = sum(map(_content_length, messages))
        # A template can omit parts of messages: their lengths alone show only what is far too long.
        if self._most is None and self.size > _CHAT_FACTOR * self._most_bytes + _CHAT_ROOM:
            raise self._too_long(f"the messages have {self.size} characters")
        self._prompt = freeze("messages", messages)
        if images is not None:
            self._take_images(images)
        if template_kwargs is None:
            return
        given: Any = template_kwargs
        if not isinstance(given, Mapping):
            kind = type(given).__name__
            raise InvalidRequest("chat_template_kwargs", f"must be a mapping, got {kind}")
        kwargs = freeze("chat_template_kwargs", given)
        for name in kwargs:
            if type(name) is not str or name in _NOT_VARIABLES:
                raise InvalidRequest("chat_template_kwargs", f"{shown(name)} cannot be set")
        self._template_kwargs = kwargs

    def _take_images(self, images: GivenImages) -> None:
        if self._form.truncate is not None:
            raise InvalidRequest("truncate_prompt_tokens", "cannot be combined with images")
        self._given = images
        self.size += images.size

    def _require_tokenizer(self) -> None:
        if self._tokenizer is None:
            raise InvalidRequest("prompt", "the model has no tokenizer: give token ids")

    def _refuse_template(self, template_kwargs: Mapping[str, Any] | None) -> None:
        if template_kwargs is not None:
            raise InvalidRequest("chat_template_kwargs", "only chat messages go through a template")

    # -- tokens ---------------------------------------------------------------------------------

    @property
    def messages(self) -> tuple[Any, Mapping[str, Any]] | None:
        """The messages and the variables of the template, until they are tokens. None: there are none."""
        return (self._prompt, self._template_kwargs) if self.chat and self._prompt is not None else None

    @property
    def ids(self) -> Sequence[int] | None:
        """The token ids, once they are known. Not to be changed."""
        return self._ids

    def shown(self) -> Sequence[int]:
        """As :meth:`encode`, with the model's image token in place of words of images."""
        ids = self.encode()
        return ids if self.images is None else shown_ids(ids, self.images.token_id)

    @property
    def least_tokens(self) -> int:
        """The prompt has at least this many tokens, as far as that is known."""
        if self._ids is not None:
            return len(self._ids)
        if isinstance(self._prompt, str):
            least = -(-len(self._prompt) // self._token_bytes)
        else:
            least = len(self._prompt)  # messages
        least += len(self._form.after)
        return least if self._most is None else min(least, self._most)

    def encode(self) -> Sequence[int]:
        """Token ids of the prompt. Blocks if they are not known yet. Raises InvalidRequest."""
        tokenizer = self._tokenizer
        if self._ids is None and tokenizer is not None:
            special = self._form.special_tokens
            text = self._prompt
            if self._given is not None and not self.chat:
                self.images = self._given.restored(text, self._checked)
                self._ids, self._prompt = list(text), None
                return self._ids
            if not isinstance(text, str):
                ids = self._encode_chat(tokenizer)
            else:
                text = self._cut(tokenizer, text)
                ids = tokenizer.encode_part(text) if special is False else tokenizer.encode(text)
            if not ids:
                raise InvalidRequest("prompt", "is empty")
            if self._form.beginning and isinstance(text, str) and special is not False:
                ids = self._beginning(tokenizer, text, ids)
            self._ids = self._checked(ids) if self._given is None else ids
            self._prompt = None
        assert self._ids is not None
        return self._ids

    def _cut(self, tokenizer: Tokenizer, text: str) -> str:
        """The part of a long text that has all tokens that are kept; the whole text where it is not known.

        What is far away does not matter to tokens, unless they are aligned to it, as digits in groups are.
        Then parts that begin a character apart have other tokens.
        """
        most, beginning = self._most, self._form.beginning
        if most is None or len(text) <= 2 * most * self._token_bytes:
            return text
        sizes = [most * self._token_bytes + more for more in (0, 1)]
        parts = [text[:size] if beginning else text[-size:] for size in sizes]
        one, other = (tokenizer.encode_part(part) for part in parts)
        kept = slice(most) if beginning else slice(-most, None)
        same = len(one) > most < len(other) and one[kept] == other[kept]
        return parts[0] if same else text

    def _beginning(self, tokenizer: Tokenizer, text: str, ids: list[int]) -> list[int]:
        """Tokens of a text's beginning, with room for the special ones around them."""
        most = self._most
        if most is None or len(ids) <= most:
            return ids
        part = tokenizer.encode_part(text)
        around = len(ids) - len(part)
        first = next((at for at in range(around + 1) if ids[at : at + len(part)] == part), None)
        if first is None or around >= most:
            return ids  # the tokenizer does not only put tokens around, or there is no room for these
        return [*ids[:first], *part[: most - around], *ids[first + len(part) :]]

    def _encode_chat(self, tokenizer: Tokenizer) -> list[int]:
        messages, kwargs = self._prompt, self._template_kwargs
        render = getattr(tokenizer, "render_chat", None)
        if render is None:
            if self._form.special_tokens:
                raise InvalidRequest("add_special_tokens", "is not supported by this tokenizer's chats")
            return tokenizer.encode_chat(messages, **kwargs)
        text = self._cut(tokenizer, render(messages, **kwargs))
        self._check_text(text)
        encode = tokenizer.encode if self._form.special_tokens else tokenizer.encode_part
        if self._given is None:
            return encode(text)
        ids, self.images = self._given.encoded(text, encode, self._checked, self._begin_image)
        return ids

    def _begin_image(self, positions: int) -> None:
        """Before each image; ``positions``: of those before it. Raises Abandoned, InvalidRequest."""
        if self.abandoned:
            raise Abandoned
        if not self._form.counted:
            self._check_count(positions, "positions of images, and more")

    def _checked(self, ids: list[int]) -> list[int]:
        """The ids that are the prompt."""
        if self._form.after:
            ids = [*self._form.after, *ids]
        most, longest = self._most, self._form.longest
        if most is not None:
            ids = ids[:most] if self._form.beginning else ids[-most:]
        if not self._form.counted:
            self._check_count(len(ids), "tokens")
        if longest is not None and len(ids) > longest:
            message = f"has {len(ids)} tokens, and this model was made for {longest} at most (max_seq_length)"
            message += _TO_TRUNCATE
            raise InvalidRequest("prompt", message, code="context_length_exceeded")
        return PromptIds.checked(ids, self._info.vocab_size)

    @classmethod
    def of(
        cls,
        prompt: Prompt,
        tokenizer: Tokenizer | None,
        info: DeviceInfo,
        template_kwargs: Mapping[str, Any] | None = None,
        form: PromptForm | None = None,
        images: Images = (),
    ) -> PromptSource:
        """A prompt, checked and copied; one that was made for this model already is returned unchanged.
        Raises InvalidRequest."""
        if not isinstance(prompt, PromptSource):
            return cls(prompt, tokenizer, info, template_kwargs, form or PromptForm(), images)
        if not prompt.is_for(info):
            raise InvalidRequest("prompt", "was made by another engine, or before this one was started again")
        if template_kwargs is not None:
            raise InvalidRequest("chat_template_kwargs", "belong to the call that made the prompt")
        if form is not None:
            raise InvalidRequest("prompt", "has its form from the call that made it")
        return prompt

    def is_for(self, info: DeviceInfo) -> bool:
        """It was made for this model, as it was loaded."""
        return self._info is info

    # -- length ---------------------------------------------------------------------------------

    @property
    def _token_bytes(self) -> int:
        """Bytes of text per token, at most."""
        longest = None if self._tokenizer is None else self._tokenizer.longest_token
        return longest or ASSUMED_LONGEST

    @property
    def _most_bytes(self) -> int:
        """A text with more bytes has too many tokens."""
        return self._token_bytes * self._info.max_model_len

    def _check_text(self, text: str) -> None:
        if self._most is None and exceeds_bytes(text, self._most_bytes):
            raise self._too_long(f"the prompt has {len(text)} characters")

    def _check_count(self, count: int, what: str) -> None:
        # Whether there has to be room for a token after it, its request says.
        if count > self._info.max_model_len:
            raise self._too_long(f"the prompt has {count} {what}")

    def _too_long(self, found: str) -> InvalidRequest:
        return too_long(self._info, found, "" if self._form.longest is None else _TO_TRUNCATE)


def too_long(info: DeviceInfo, found: str, hint: str = "") -> InvalidRequest:
    """The error of a prompt that leaves no room for what is to follow; ``found``: what it has."""
    limit, reason = info.max_model_len, info.length_reason
    why = f" ({reason})" if reason else ""
    return InvalidRequest(
        "prompt",
        f"This model's maximum context length is {limit} tokens{why}, prompt and output together. "
        f"However, {found}{hint}.",
        code="context_length_exceeded",
    )


def _length(given: Any) -> int:
    try:
        return len(given)
    except TypeError:
        raise InvalidRequest("prompt", "must be a sequence, got a single value") from None


def _elements(given: Any) -> list[Any]:
    if isinstance(given, (list, tuple)):
        return list(given)
    elements = given.tolist()
    return elements if isinstance(elements, list) else [elements]


def _content_length(message: Any) -> int:
    """Characters of a message's content; its form is checked later."""
    content = plain(message.get("content")) if _is_mapping(message) else None
    if type(content) is str:
        return len(content)
    parts = content if isinstance(content, (list, tuple)) else ()
    texts = (plain(part.get("text") if _is_mapping(part) else part) for part in parts)
    return sum(len(text) for text in texts if type(text) is str)


def _is_mapping(value: Any) -> bool:
    # The check against an abstract class takes ten times as long.
    return type(value) is dict or isinstance(value, Mapping)


def is_one(prompts: Any) -> bool:
    """Whether prompts are a single one, and not a batch of them."""
    if isinstance(prompts, (str, PromptSource, Mapping)):
        return True  # a mapping is none, and refused as one
    if hasattr(prompts, "tolist"):
        return getattr(prompts, "ndim", 1) <= 1  # an array of ids; the rows of a matrix are prompts
    if not isinstance(prompts, (list, tuple)) or not prompts:
        return False
    first = prompts[0]
    several = isinstance(first, PromptSource) or (
        hasattr(first, "__len__") and not isinstance(first, Mapping)
    )
    return not several


def pooling_params(params: SamplingParams) -> SamplingParams:
    """Parameters of a request that only pools its prompt. Raises InvalidRequest for a parameter that would
    have no effect."""
    defaults = SamplingParams()
    for name in SamplingParams.__dataclass_fields__:
        value = getattr(params, name)
        if name in _OF_PROMPTS or value == getattr(defaults, name) or (name == "max_tokens" and value == 0):
            continue
        raise InvalidRequest(name, "has no effect with pooling, which generates nothing")
    return params.changed(max_tokens=0)


def check_chat(params: SamplingParams, pooling: Pooling | None) -> None:
    """Raise InvalidRequest for a chat without an answer."""
    if pooling is not None:
        raise InvalidRequest("pooling", "a chat generates an answer: use embed() or generate()")
    if params.max_tokens == 0:
        raise InvalidRequest("max_tokens", "must be a positive number: a chat generates an answer")


def seconds_left(deadline: float | asyncio.Timeout | None) -> float | None:
    """A deadline as seconds from now; of what ``asyncio.timeout`` returned, until it cancels its block."""
    if not isinstance(deadline, asyncio.Timeout):
        return deadline
    when = deadline.when()
    return None if when is None else max(SOON, when - asyncio.get_running_loop().time())
