"""Requests: the part of an engine that takes requests. Its life is in :mod:`aioinfer.engine`."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Unpack

from aioinfer.chat.answers import ChatFormat
from aioinfer.chat.asking import ChatRequest, chat_request
from aioinfer.chat.functions import Tool
from aioinfer.checkpoint.sentences import Sentences
from aioinfer.client.chats import ChatStream
from aioinfer.client.filling import Filling, FillStream, Hole, Template
from aioinfer.config import EngineConfig, ServerConfig
from aioinfer.errors import AioInferError, InvalidRequest, RequestError, renamed, shown
from aioinfer.loop.given_images import image_limits
from aioinfer.loop.options import (
    Images,
    Prompt,
    PromptForm,
    PromptSource,
    check_chat,
    pooling_params,
    seconds_left,
)
from aioinfer.outputs import AdapterInfo
from aioinfer.params import SamplingParams, Schema, inherited
from aioinfer.pooling import Pooling
from aioinfer.request import JobOptions, Request, RequestOptions
from aioinfer.resuming.record import StreamCheckpoint, options_of
from aioinfer.stream import Stream

if TYPE_CHECKING:
    from aioinfer.loop.service import Service
    from aioinfer.text.tokenizer import Tokenizer

__all__ = ["Requests", "refuse_names"]

#: options with a default in the config
_CONFIGURED = ("waiting_timeout", "running_timeout", "ttft_target", "max_lag")
_OPTIONS = frozenset(each.name for each in fields(Request))
#: choices of one prompt, as in the HTTP API
_MOST_CHOICES = 128


def refuse_names(taker: str, unknown: Iterable[str], kind: str = "argument") -> None:
    """Raise TypeError if there are keywords that a class or a call has not, with the class that has them."""
    homes = (SamplingParams, EngineConfig, ServerConfig)
    for name in unknown:
        having = [each.__name__ for each in homes if name in each.__dataclass_fields__]
        found = f": it is one of {having[0]}({name}=...)" if having else ""
        raise TypeError(f"{taker} has no {kind} {name!r}{found}")


class Requests(ABC):
    """Calls that make requests: one output, a chat, choices; :mod:`aioinfer.client.batches` has many."""

    config: EngineConfig
    #: what the model recommends: for outputs, and for embeddings
    default_params: SamplingParams
    sentences: Sentences

    @property
    @abstractmethod
    def chat_format(self) -> ChatFormat:
        """The formats of tool calls and reasoning of the model, and what its chat template reads."""

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Nothing more comes from it until it is started again."""

    @abstractmethod
    def _serving(self) -> Service[Any]:
        """The service that takes the requests. Raises EngineClosed, EngineFailed, WrongLoop."""

    @property
    @abstractmethod
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, if it has one. Raises EngineClosed before the start."""

    # -- adapters -------------------------------------------------------------------------------

    @abstractmethod
    async def load_adapter(self, name: str, path: str | os.PathLike[str]) -> AdapterInfo:
        """Load a LoRA adapter from a directory as PEFT writes it; requests have it by its name.

        It is read on a worker thread and installed between two steps: requests go on meanwhile. If the name
        is there already, new requests get the new adapter; those that were accepted before keep the old one,
        whose memory comes back when the last of them has ended. A load that fails, or is cancelled, changes
        nothing. It waits if all slots hold adapters that are not found any more and have requests still.

        Raises:
            ConfigError: the directory is no adapter of this model, or ``max_adapters`` are loaded, or this
                engine has no adapters.
            InvalidRequest: the name is empty, too long or the model's, or the path is none.
            EngineClosed, EngineFailed, WrongLoop: the engine cannot serve it here and now.
        """

    @abstractmethod
    async def unload_adapter(self, name: str) -> None:
        """Have no new request find an adapter; those that have it go on. Its memory comes back when the last
        of them has ended. Raises InvalidRequest: it is not loaded; EngineClosed, EngineFailed, WrongLoop."""

    @abstractmethod
    def adapters(self) -> list[AdapterInfo]:
        """The adapters that new requests can have, in the order of their loads. Raises EngineClosed before
        the start."""

    # -- requests -------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Stream:
        """Queue a generation and return its :class:`~aioinfer.Stream` at once.

        All arguments are copied: changing them afterwards has no effect.

        Args:
            prompt: text, a list of token ids, a list of chat messages for the chat template, or what
                :meth:`prompt` returned. Token ids may also be an array of integers.
            params: where a field that the model's ``generation_config.json`` recommends is not set, and for
                None, the model's value (:attr:`default_params`) is used.
            chat_template_kwargs: variables of the chat template, e.g. ``{"enable_thinking": False}``.
            waiting_timeout: seconds until its first step; default from the config.
            running_timeout: seconds from its first step on; default from the config.
            deadline: seconds from now in which it should end, or what ``asyncio.timeout`` returned. It is
                refused if it would end later by what steps and outputs took so far, and goes the sooner the
                less time it has to spare with the policy ``slack``. It ends no request: the timeouts do.
            ttft_target: seconds from now in which its first token should come; default from the config. It is
                refused if that would come later by what is before it in the queue.
            itl_target: seconds that steps which it shares with prompts of others should take at most; the
                smallest of the config's and of those of the requests that generate counts.
            budget: output tokens that it shares with other requests. When these are used up, all that share
                them end with the finish reason "length".
            priority: larger goes first, with the policy ``priority``.
            cache_salt: prefixes are shared only between requests with the same salt.
            routing_key: what the policy ``routing-key`` groups by.
            queue_behind: number of later arrivals that may overtake this one. With 0, 1, 2 ... for the parts
                of one job, a large job does not keep others waiting: others get their turn between.
            max_lag: when the consumer has left more than this many tokens unread, nothing more is
                computed until it reads (tokens in flight still arrive); default from the config.
            request_id: a name of at most 256 characters, which stream, result, errors and logs have; it need
                not be unique. By default one is made.
            adapter: name of a LoRA adapter that was loaded: :meth:`load_adapter`. The request keeps what the
                name stands for now, whatever is loaded or unloaded meanwhile.
            pooling: what is wanted of the prompt's hidden states, which ``Result.pooled`` then has. Nothing
                is generated, so ``params`` can only have ``prompt_logprobs``; :meth:`embed` is what most
                applications want.

        Raises:
            InvalidRequest: an argument is bad, or the prompt certainly too long (``code`` is then
                "context_length_exceeded"). Errors that only tokenizing can find are raised by the stream.
            Rejected: the queue is full, or it would miss its ``ttft_target`` or its ``deadline``.
            EngineClosed, EngineFailed, WrongLoop: the engine cannot serve it here and now.
        """
        serving = self._serving()
        if options.get("pooling") is not None:
            params = pooling_params(inherited(params, SamplingParams()))
        request = self._request(inherited(params, self.default_params), options)
        try:
            return self._queue(serving, serving.source(prompt, chat_template_kwargs), request)
        except AioInferError as error:
            error.request_id = request.request_id
            raise

    def restore(self, checkpoint: StreamCheckpoint, **options: Unpack[RequestOptions]) -> Stream:
        """Queue a request that goes on where a checkpoint was taken, in this engine or another one.

        The stream delivers what its consumer had not read, then what follows; its result has the whole
        output. Where all engines have the same arithmetic and are deterministic, that is the output of a
        request that was never interrupted, to the bit (``Result.identical``); else the tokens after the
        checkpoint can differ from those that would have come. Penalties, grammars, stops, logprobs and usage
        go on in both cases.

        ``options``: those of :meth:`generate`; by default priority, salt, routing key, adapter and
        ``request_id`` are those of the checkpoint.

        Raises as :meth:`generate`; InvalidRequest with the field ``checkpoint`` if it is of another model,
        or of an adapter that is not loaded by its name from the same files, or does not make sense. What
        only its text shows is raised by the stream.
        """
        serving = self._serving()
        if not isinstance(checkpoint, StreamCheckpoint):
            raise InvalidRequest("checkpoint", f"must be a StreamCheckpoint, got {shown(checkpoint)}")
        request = self._request(checkpoint.params, {**options_of(checkpoint), **options})
        try:
            source = serving.source(list(checkpoint.prompt_token_ids), images=checkpoint.images)
            return self._queue(serving, source, request, checkpoint)
        except AioInferError as error:
            error.request_id = request.request_id
            raise

    def _request(self, params: SamplingParams, options: RequestOptions) -> Request:
        """A request with the config's defaults for what is not given. Raises InvalidRequest."""
        given: dict[str, Any] = {**options}
        for name in _CONFIGURED:
            if given.get(name) is None:
                given[name] = getattr(self.config, name)
        given["deadline"] = seconds_left(given.get("deadline"))
        refuse_names("a request", given.keys() - _OPTIONS, "option")
        return Request(params=params, **given)

    def queue(
        self,
        prompt_ids: Sequence[int],
        request: Request,
        checkpoint: StreamCheckpoint | None = None,
        images: Images = (),
    ) -> Stream:
        """Queue a request that another engine has made: nothing is taken from the model or the config.
        ``images``: those whose words are among the ids."""
        serving = self._serving()
        source = serving.source(prompt_ids, images=images)
        return self._queue(serving, source, request, checkpoint)

    def _queue(
        self,
        serving: Service[Any],
        prompt: PromptSource,
        request: Request,
        checkpoint: StreamCheckpoint | None = None,
    ) -> Stream:
        """The way of every request; engines in tests add to it."""
        return serving.generate(prompt, request, checkpoint)

    def check_room(self, prompt: PromptSource) -> None:
        """Raise Rejected, which is not counted, if the queue certainly has no room for a prompt."""
        self._serving().check_room(prompt.least_tokens)

    @property
    def when_room(self) -> Callable[[Callable[[], None], int | None], int]:
        """:meth:`aioinfer.loop.service.Service.when_room`, also when the engine is closed by then."""
        return self._serving().when_room

    async def check_whole(
        self, prompt: PromptSource, params: SamplingParams, pooling: Pooling | None
    ) -> None:
        """Tokenize a prompt, and raise InvalidRequest for what an engine would refuse then."""
        serving = self._serving()
        serving.checks.check(params, pooling)
        serving.checks.check_length(params, len(await serving.encode(prompt)), pooling)

    def fill(
        self,
        prompt: Prompt,
        template: Template,
        params: SamplingParams | None = None,
        *,
        holes: Mapping[str, Hole] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> FillStream:
        """Queue a request that fills in a template, and return its :class:`~aioinfer.FillStream` at once.

        Args:
            template: a text with named holes, ``"{name} lives in {city}."``, of any model (``{{`` and ``}}``
                are braces; needs the extra ``aioinfer[structured]``); or, of a diffusion model, token ids
                with None for each token of a hole. A hole of a text is not empty, has no line break, and ends
                where the text behind it begins.
            params: without what would constrain or end the output otherwise.
            holes: of a text, by name, what a hole may be: a number of characters at most (80, if nothing is
                said), a regular expression for it, or a list of texts of which it is one.
            options: those of :meth:`generate`.

        Raises as :meth:`generate`, for the template by the field ``template`` or ``holes``.
        """
        filling = Filling.of(template, inherited(params, self.default_params), holes)
        source = self.prompt(prompt, chat_template_kwargs=chat_template_kwargs)
        return filling.open(lambda params: self.generate(source, params, **options))

    def abort(self, request_id: str) -> int:
        """End the open requests with this name (``Stream.request_id``) and return their number; their streams
        raise :class:`~aioinfer.Cancelled`. Raises EngineClosed, EngineFailed, WrongLoop."""
        return self._serving().abort(request_id)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Tool] | None = None,
        tool_choice: str | Tool | None = None,
        parallel_tool_calls: bool | None = None,
        response_format: Schema | type[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> ChatStream:
        """Queue the next answer of a chat and return its :class:`~aioinfer.ChatStream` at once.

        As :meth:`generate`, with the answer split into reasoning, content and calls of tools. All arguments
        are checked as the HTTP API checks them, and copied.

        Args:
            messages: in OpenAI's form; :attr:`ChatResult.message` and :meth:`ToolCall.reply` are some.
            tools: functions that the model may call: objects in OpenAI's form, Python functions whose
                parameters have annotations, or pydantic models. They are never called here.
            tool_choice: "auto" (the default), "none", "required", or the tool that must be called, as an
                object in OpenAI's form or as it is in ``tools``.
            parallel_tool_calls: False for one call at most.
            response_format: of the content: OpenAI's object, a JSON schema, a pydantic model, a dataclass or
                a ``TypedDict``. The result's ``parsed`` is then what the content stands for.
            chat_template_kwargs: variables that the chat template reads.
            options: those of :meth:`generate`.

        Raises as :meth:`generate`, with these names, also for tools that the model's formats cannot express.
        """
        try:
            asked, prompt = self.asked_chat(
                messages,
                params,
                tools=tools,
                tool_choice=tool_choice,
                parallel_tool_calls=parallel_tool_calls,
                response_format=response_format,
                chat_template_kwargs=chat_template_kwargs,
            )
        except RequestError as error:
            error.request_id = options.get("request_id")
            raise
        return self.open_chat(asked, prompt, **options)

    def asked_chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None, **asked: Any
    ) -> tuple[ChatRequest, PromptSource]:
        """The first half of :meth:`chat`: check and copy its arguments but ``options``, all by name."""
        self._serving()
        asked["limits"] = image_limits(self.tokenizer)
        checked = chat_request(self.chat_format, messages, inherited(params, self.default_params), **asked)
        try:
            return checked, self.prompt(checked.messages, chat_template_kwargs=checked.template_kwargs)
        except RequestError as error:
            raise renamed(error, checked.names) from error.__cause__

    def open_chat(
        self,
        asked: ChatRequest,
        prompt: PromptSource,
        answered: Callable[[dict[str, Any]], object] | None = None,
        **options: Unpack[RequestOptions],
    ) -> ChatStream:
        """The second half of :meth:`chat`: queue a chat that was checked. ``answered`` is called with the
        answer as a message when it was read to its end."""
        try:
            check_chat(asked.params, options.get("pooling"))
            stream = self.generate(prompt, asked.params, **options)
        except RequestError as error:
            raise renamed(error, asked.names) from error.__cause__
        return ChatStream(stream, prompt, asked, self.tokenizer, answered)

    def choices(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        n: int,
        queue_behind: int = 0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[JobOptions],
    ) -> list[Stream]:
        """``n`` streams of one prompt (1 to 128), which is tokenized once; as ``n`` of the HTTP API.

        The first is what :meth:`generate` gives; with a ``seed``, the others have the seeds that follow it.
        Each can be read, awaited and left by itself: ``await asyncio.gather(*engine.choices(prompt, n=4))``.
        Either all are queued or none. Raises as :meth:`generate`.
        """
        if type(n) is not int or not 1 <= n <= _MOST_CHOICES:
            raise InvalidRequest("n", f"must be 1 to {_MOST_CHOICES}, got {shown(n)}")
        source = self.prompt(prompt, chat_template_kwargs=chat_template_kwargs)
        params = inherited(params, self.default_params)
        streams: list[Stream] = []
        try:
            for number in range(n):
                # Other requests get their turns between them.
                choice = params.for_choice(number)
                streams.append(self.generate(source, choice, queue_behind=queue_behind + number, **options))
        except BaseException:
            for stream in streams:
                stream.close()
            raise
        return streams

    def prompt(
        self,
        prompt: Prompt,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_special_tokens: bool | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> PromptSource:
        """A prompt for several calls of :meth:`generate`: it is copied and checked here and tokenized once.

        ::

            prompt = engine.prompt("Once upon a time")
            results = await asyncio.gather(*(engine.generate(prompt) for _ in range(8)))

        It can be used until the engine is closed. Raises as :meth:`generate`, except Rejected.

        ``add_special_tokens``: whether the special tokens that the model expects around a text are added; by
        default they are, except to chats, whose template has them. Token ids are taken as they are.
        ``truncate_prompt_tokens``: how many tokens of the prompt's end are kept; -100: so many that there is
        room for 100 more in the context.
        """
        form: PromptForm | None = PromptForm(add_special_tokens, truncate_prompt_tokens)
        if form == PromptForm():
            form = None
        return self._serving().source(prompt, chat_template_kwargs, form)

    async def tokenize(
        self,
        prompt: Prompt,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_special_tokens: bool | None = None,
    ) -> list[int]:
        """The token ids of a prompt, made on a worker thread; arguments as of :meth:`prompt`.

        There may be more of them than the context length; a text that certainly has is refused. Raises as
        :meth:`prompt`.
        """
        serving = self._serving()
        form = None
        if not isinstance(prompt, PromptSource):
            form = PromptForm(add_special_tokens, counted=True)
        return list(await serving.encode(serving.source(prompt, chat_template_kwargs, form)))

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids, made on a worker thread. Raises as :meth:`prompt`, by the field "tokens"."""
        return await self._serving().decode(token_ids, skip_special_tokens=skip_special_tokens)
