"""Tokens: texts and chats as token ids, and back, with vLLM's paths and objects."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NotRequired

from aiohttp import web
from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from aioinfer.chat.bodies import NO, Object, Refused, field, later
from aioinfer.chat.door import conversation
from aioinfer.chat.fields import Message
from aioinfer.client.engine_like import EngineLike
from aioinfer.config import ServerConfig
from aioinfer.engine import Prompt
from aioinfer.errors import EngineClosed, InvalidRequest, renamed
from aioinfer.server.generation import Generation
from aioinfer.server.http.pieces import json_response
from aioinfer.server.openai.fields import ChatTemplateFields, Model, TokenId
from aioinfer.server.openai.protocol import Served, chat_messages, read, variables_of
from aioinfer.server.openapi.endpoints import Endpoint, Route

__all__ = ["Tokens"]


class TokenizeBody(
    ChatTemplateFields,
    refused={"chat_template": NO, "mm_processor_kwargs": Refused(({},)), "media_io_kwargs": Refused(({},))},
):
    """A body of ``/tokenize``."""

    model_config = ConfigDict(
        json_schema_extra={"anyOf": [{"required": ["prompt"]}, {"required": ["messages"]}]}
    )

    model: Model = field("name of the served model (the default), or of an adapter")
    prompt: Annotated[str, Field(min_length=1)] | None = field("a text; or `messages`")
    messages: Annotated[Any, later(Annotated[list[Message], Field(min_length=1)])] = field(
        "a conversation; or `prompt`"
    )
    add_special_tokens: bool | None = field(
        "the special tokens that the model expects around a text; by default they are added to a `prompt` "
        "and not to `messages`, whose template has them"
    )
    return_token_strs: bool = field("the tokens as the vocabulary writes them, too", False)


class DetokenizeBody(Object):
    """A body of ``/detokenize``."""

    model: Model = field("name of the served model (the default), or of an adapter")
    tokens: Annotated[list[Any], later(list[TokenId], required=True)] = field("token ids", ...)


class Tokenized(TypedDict):
    """The tokens of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(TypedDict):
    """The text of tokens, special ones included."""

    prompt: str


class TokenizerInfo(TypedDict):
    """The tokenizer. With a tokenizer of Hugging Face, the rest is as in `tokenizer_config.json`."""

    tokenizer_class: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: list[int]
    special_tokens: list[str]
    chat_template: str | None
    bos_token: NotRequired[str | None]
    eos_token: NotRequired[str | None]
    unk_token: NotRequired[str | None]
    pad_token: NotRequired[str | None]


_TOKENIZE = Endpoint(
    "POST",
    "/tokenize",
    "The token ids of a text or a chat",
    body=TokenizeBody,
    example={"prompt": "Once upon a time"},
    answer=Tokenized,
    place="here",
    tag="tokens",
)
_DETOKENIZE = Endpoint(
    "POST",
    "/detokenize",
    "The text of token ids",
    body=DetokenizeBody,
    example={"tokens": [1, 2, 3]},
    answer=Detokenized,
    place="here",
    tag="tokens",
)
_INFO = Endpoint("GET", "/tokenizer_info", "The tokenizer", answer=TokenizerInfo, place="here", tag="tokens")


@dataclass(frozen=True, slots=True)
class _Asked:
    """A body of ``/tokenize``."""

    prompt: Prompt
    kwargs: Mapping[str, Any] | None
    special_tokens: bool | None
    strings: bool
    #: argument of the engine -> field of the body
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Tokens:
    """The handlers, of one engine."""

    def __init__(self, engine: EngineLike, config: ServerConfig, generation: Generation) -> None:
        self._engine = engine
        self._config = config
        self._generation = generation

    def routes(self) -> list[Route]:
        return [_TOKENIZE.route(self.tokenize), _DETOKENIZE.route(self.detokenize), _INFO.route(self.info)]

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        with self._generation.tokenizing(request):
            return await self._tokenize(request)

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        asked, _ = await self._generation.parsed(request, _parse_tokenize)
        tokenizing = self._engine.tokenize(
            asked.prompt, chat_template_kwargs=asked.kwargs, add_special_tokens=asked.special_tokens
        )
        try:
            async with self._generation.watched(request):
                ids = await tokenizing
        except InvalidRequest as refused:
            raise renamed(refused, asked.names) from None
        strings = None
        if asked.strings:
            strings = await asyncio.get_running_loop().run_in_executor(None, self._strings, ids)
        found: Tokenized = {
            "count": len(ids),
            "max_model_len": self._engine.info.max_model_len,
            "tokens": ids,
            "token_strs": strings,
        }
        return await json_response(request, found, self._config.send_timeout)

    async def detokenize(self, request: web.Request) -> web.StreamResponse:
        with self._generation.tokenizing(request):
            ids, _ = await self._generation.parsed(request, _parse_detokenize)
            async with self._generation.watched(request):
                text = await self._engine.detokenize(ids, skip_special_tokens=False)
            return await json_response(request, {"prompt": text}, self._config.send_timeout)

    async def info(self, request: web.Request) -> web.StreamResponse:
        if not self._engine.ready:
            raise EngineClosed("the engine is not serving")
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise InvalidRequest("model", "has no tokenizer")
        templates = tokenizer.chat_templates
        described = getattr(tokenizer, "described", None)
        found: dict[str, Any] = {
            "tokenizer_class": type(tokenizer).__name__,
            "vocab_size": tokenizer.vocab_size,
            "max_model_len": self._engine.info.max_model_len,
            "eos_token_ids": sorted(tokenizer.eos_token_ids),
            "special_tokens": sorted(tokenizer.special_tokens),
            "chat_template": templates[0] if templates else None,
            **({} if described is None else described()),
        }
        return await json_response(request, found, self._config.send_timeout)

    def _strings(self, ids: Sequence[int]) -> list[str]:
        """As the vocabulary writes the tokens; as text if the tokenizer does not tell."""
        tokenizer = self._engine.tokenizer
        assert tokenizer is not None
        written = getattr(tokenizer, "token_strings", None)
        if written is not None:
            found: list[str] = written(ids)
            return found
        return [tokenizer.decode([each], skip_special_tokens=False) for each in ids]


def _parse_tokenize(raw: bytes, served: Served) -> _Asked:
    body = read(TokenizeBody, raw, served)
    special, strings = body.add_special_tokens, body.return_token_strs
    if body.prompt is None:
        messages, kwargs, _ = conversation(
            served.chat,
            chat_messages(body.messages, served),
            variables_of(body, served.chat),
            body.tools,
            body.tool_choice,
            body.parallel_tool_calls,
        )
        names = {"prompt": "messages", **served.images.names}
        return _Asked(messages, kwargs or None, special, strings, names)
    for name in ("messages", *ChatTemplateFields.model_fields):
        if getattr(body, name) is not None:
            raise InvalidRequest(name, "cannot be combined with prompt")
    return _Asked(body.prompt, None, special, strings)


def _parse_detokenize(raw: bytes, served: Served) -> list[int]:
    tokens = read(DetokenizeBody, raw, served).tokens
    if not isinstance(tokens, list):
        raise InvalidRequest("tokens", "must be a list of token ids")
    return tokens
