"""Sessions: conversations whose KV is held between their turns, and prefixes that are warmed before they are
asked for.

A session is a value of token ids and messages, and a hold on what the prefix cache has of it. The hold saves
time and never changes a token: what was evicted, flushed or computed by other weights is computed again.
"""

from __future__ import annotations

import os
import uuid
from array import array
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, Unpack
from weakref import ref

from aioinfer.chat.answers import AnswerFormat, joined
from aioinfer.chat.functions import Tool
from aioinfer.chat.results import ChatRequest, message_of
from aioinfer.client.session_files import save
from aioinfer.errors import EngineClosed, InvalidRequest, shown
from aioinfer.images.limits import ImageLimits
from aioinfer.images.prompt import shown as shown_ids
from aioinfer.images.source import ImageSource, sourced
from aioinfer.inputs import freeze
from aioinfer.loop.given_images import image_limits, image_processor
from aioinfer.loop.holding import Prefix
from aioinfer.loop.options import Prompt, PromptForm, PromptSource
from aioinfer.params import SamplingParams
from aioinfer.request import RequestOptions
from aioinfer.text.tokenizer import Tokenizer, end_of

if TYPE_CHECKING:
    from aioinfer.cells import StreamCell
    from aioinfer.client.chats import ChatStream
    from aioinfer.client.requests import Requests
    from aioinfer.loop.holding import Kept, Seat
    from aioinfer.loop.service import Service
    from aioinfer.stream import Stream

__all__ = ["Answer", "HeldPrefix", "Session", "State"]

#: options that all turns of a session have alike, since they say which KV is theirs
_FIXED = ("adapter", "cache_salt")


class Answer:
    """The answer of one turn of a chat, as a message. Who reads its stream to the end says what it is, so
    that calls of tools have the ids that its reader saw; if nobody does, it is parsed when it is needed."""

    __slots__ = ("_cell", "_format", "_message", "_stream", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer | None, form: AnswerFormat | None) -> None:
        self._tokenizer = tokenizer
        self._format = form
        self._message: dict[str, Any] | None = None
        self._stream: ref[Stream] | None = None
        self._cell: StreamCell | None = None

    def of(self, stream: Stream) -> None:
        """The stream that brings it."""
        self._stream, self._cell = ref(stream), stream.cell

    def answered(self, message: dict[str, Any]) -> None:
        """Its reader has read it to the end."""
        self._message = message
        self._cell = None

    @property
    def unread(self) -> bool:
        """Its reader may still go on."""
        cell, stream = self._cell, self._stream
        return cell is not None and not cell.closed and stream is not None and stream() is not None

    @property
    def message(self) -> dict[str, Any]:
        """The message; the output has ended."""
        if self._message is None:
            assert self._cell is not None
            self.answered(self._parsed(self._cell))
        assert self._message is not None
        return self._message

    def _parsed(self, cell: StreamCell) -> dict[str, Any]:
        output = cell.output
        if self._format is None:
            return message_of(output.text, "", ())
        end = "" if self._tokenizer is None else end_of(output.shown_ids, self._tokenizer)
        reader = self._format.reader(end)
        for _ in reader.read(output.text, ended=True):
            pass
        reasoning, content, calls = reader.take()
        return message_of(content, reasoning, joined(calls))


class State(NamedTuple):
    """What a session has: a value, which forks share."""

    #: an array, four bytes each
    token_ids: Sequence[int] = ()
    messages: tuple[Mapping[str, Any], ...] = ()
    #: the last message of a chat
    answer: Answer | None = None

    def all_messages(self) -> tuple[Mapping[str, Any], ...]:
        return self.messages if self.answer is None else (*self.messages, self.answer.message)


class Session:
    """A conversation whose KV is held between its turns. ``engine.session()`` makes it.

    ::

        async with engine.session() as session:
            print((await session.chat("Why is the sky blue?")).content)
            print((await session.chat("And at sunset?")).content)

    A turn continues where the last one ended, and computes its new tokens only. One turn is under way at a
    time; one that is cancelled, fails or is closed before its end leaves the session as it was. A session is
    either a chat or a text: :meth:`chat`, or :meth:`generate`, whose tokens continue the last ones exactly.

    Its KV is evicted after all that nobody holds, and when it was not used for ``ttl`` seconds it is held no
    longer. The next turn then computes what is missing: its tokens are the same. A closed session, one that
    was dropped, and those of a closed engine are at an end; what they contain can be read still.
    """

    def __init__(
        self,
        engine: Requests,
        service: Service[Any],
        seat: Seat,
        options: Mapping[str, Any],
        usual: Mapping[str, Any],
        ttl: float | None,
        state: State | None = None,
    ) -> None:
        """``options``: of all turns; ``usual``: arguments of chats, for turns that have none."""
        self._seat = seat
        self._service = service
        self._engine = engine
        self._options = options
        self._usual = usual
        #: seconds without use until its KV is held no longer
        self.ttl = ttl
        self._state = State() if state is None else state
        #: the turn under way
        self._turn: StreamCell | None = None
        #: names it in listings and messages
        self.id = f"sess_{uuid.uuid4().hex[:24]}"

    # -- what it has ----------------------------------------------------------------------------

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompts and outputs of all turns that have ended, stop tokens included. Of a chat: the prompt of
        the last turn, as the template made it, and its output."""
        processor = image_processor(self._service.tokenizer)
        ids = self._state.token_ids
        return tuple(ids if processor is None else shown_ids(ids, processor.token_id))

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages of a chat, answers included: copies."""
        copies: list[dict[str, Any]] = freeze(
            "messages", list(self._state.all_messages()), lists=True, kept=(ImageSource,)
        )
        return copies

    @property
    def num_tokens(self) -> int:
        """Length of ``token_ids``."""
        return len(self._state.token_ids)

    @property
    def held_tokens(self) -> int:
        """Of these, from the first on, those whose KV is held at this moment: whole pages, and not the last
        token, which was never computed."""
        kept = self._seat.kept
        return 0 if kept is None else min(kept.held_tokens, self.num_tokens)

    @property
    def state(self) -> State:
        """What it has, for :meth:`rewind`."""
        return self._state

    @property
    def options(self) -> Mapping[str, Any]:
        """Options of all its turns, those of a loaded one included. Not to be changed."""
        return self._options

    @property
    def in_turn(self) -> bool:
        """A turn is under way."""
        return self._turn is not None

    @property
    def closed(self) -> bool:
        """It takes no more turns."""
        return self._seat.left

    # -- turns ----------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt | None = None,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Stream:
        """Append text or token ids to what is there and generate from that. As
        :meth:`aioinfer.Engine.generate`, whose special tokens are only added to the first text.

        ``prompt``: None: go on without. ``options``: in place of the session's; adapter and salt are fixed.

        Raises as :meth:`aioinfer.Engine.generate`; InvalidRequest with the field ``session``: a turn is under
        way, or it is a chat; EngineClosed: the session is closed.
        """
        state = self._ready()
        if state.messages:
            raise InvalidRequest("session", "is a chat, which is continued with chat()")
        stream = self._engine.generate(self._after(state, prompt), params, **self._merged(options))
        self._begin(stream, (), None)
        return stream

    def chat(
        self,
        messages: str | Mapping[str, Any] | Sequence[Mapping[str, Any]] = (),
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Tool] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tool_choice: str | Tool | None = None,
        parallel_tool_calls: bool | None = None,
        response_format: Any = None,
        **options: Unpack[RequestOptions],
    ) -> ChatStream:
        """Append messages, a text for one of the user, and the answer to them. As
        :meth:`aioinfer.Engine.chat`; tools and variables are those of the session unless they are given.

        The template renders the whole conversation. KV is used again as far as its tokens are those of
        before: a template that leaves earlier reasoning out, for example, makes them differ there.

        Raises as :meth:`generate`; also if the last answer was neither read to its end nor left, so that it
        is not known which ids its calls of tools have.
        """
        state = self._ready_chat()
        given = _messages(messages, image_limits(self._service.tokenizer))
        usual = dict(self._usual)
        if tools is not None:
            usual["tools"] = tools
        if chat_template_kwargs is not None:
            usual["chat_template_kwargs"] = chat_template_kwargs
        asked, prompt = self._engine.asked_chat(
            [*state.all_messages(), *given],
            params,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            response_format=response_format,
            **usual,
        )
        answer = Answer(self._engine.tokenizer, asked.answer)
        chat = self._engine.open_chat(asked, prompt, answered=answer.answered, **self._merged(options))
        self._begin(chat.stream, given, answer)
        return chat

    def turn(
        self,
        asked: ChatRequest,
        prompt: PromptSource,
        given: Sequence[Mapping[str, Any]],
        **options: Unpack[RequestOptions],
    ) -> tuple[Stream, Answer]:
        """The second half of :meth:`chat` for readers with an answer of their own: queue a chat of all
        messages that was checked, of which ``given`` are the new ones. Its reader calls
        :meth:`Answer.answered` at the end. Raises as :meth:`chat`."""
        self._ready_chat()
        stream = self._engine.generate(prompt, asked.params, **self._merged(options))
        answer = Answer(self._engine.tokenizer, asked.answer)
        self._begin(stream, given, answer)
        return stream, answer

    def _ready(self) -> State:
        """The state that a turn continues. Raises InvalidRequest, EngineClosed, EngineFailed, WrongLoop."""
        self._check_open()
        if self._turn is not None:
            raise InvalidRequest("session", "has a turn under way: read it to its end, or close it, first")
        answer = self._state.answer
        if answer is not None and answer.unread:
            raise InvalidRequest("session", "has an answer that is not read to its end: await it or close it")
        return self._state

    def _ready_chat(self) -> State:
        """The same of a chat."""
        state = self._ready()
        if state.token_ids and not state.messages:
            raise InvalidRequest("session", "is no chat, and is continued with generate()")
        return state

    def _check_open(self) -> None:
        self._service.check_serving()
        if self._seat.left:
            raise EngineClosed("the session was closed")

    def _merged(self, options: RequestOptions) -> Any:
        for name in _FIXED:
            if name in options:
                raise InvalidRequest(name, "is the session's, and the same for all its turns")
        return {**self._options, **options}

    def _after(self, state: State, prompt: Prompt | None) -> PromptSource:
        """The whole prompt of a turn."""
        if not state.token_ids:
            return self._service.source([] if prompt is None else prompt)
        if any(token < 0 for token in state.token_ids):
            raise InvalidRequest("session", "has images, and is continued with chat()")
        if prompt is None:
            return self._service.source(list(state.token_ids))
        if isinstance(prompt, PromptSource):
            raise InvalidRequest("prompt", "of a later turn must be text or token ids")
        source = self._service.source(prompt, None, PromptForm(special_tokens=False, after=state.token_ids))
        if source.chat:
            raise InvalidRequest("prompt", "has messages: a session takes those with chat()")
        return source

    def _begin(self, stream: Stream, given: Sequence[Mapping[str, Any]], answer: Answer | None) -> None:
        """A turn was queued, in this turn of the loop."""
        cell, state = stream.cell, self._state
        if answer is not None:
            answer.of(stream)
        messages = (*state.all_messages(), *given) if given or answer is not None else ()
        self._turn, cell.concluded = cell, True
        if self._seat.kept is not None:
            self._seat.kept.touch()
        cell.ending = lambda: self._ended(cell, messages, answer)

    def _ended(
        self, cell: StreamCell, messages: tuple[Mapping[str, Any], ...], answer: Answer | None
    ) -> None:
        """The turn has ended, and nothing was computed since."""
        self._turn = None
        output = cell.output
        if output.error is None and output.finish_reason != "abort" and not self._seat.left:
            self._state = State(array("i", [*output.prompt_ids, *output.token_ids]), messages, answer)
            self._seat.hold(self._service.keep(cell, self.ttl))
        elif self._seat.kept is not None:
            self._seat.kept.touch()

    def rewind(self, state: State) -> None:
        """Be as it was before the last turn, which has ended and whose reader has left. Its KV stays held."""
        self._state = state

    def restored(self, kept: Kept | None) -> None:
        """Its KV is there and held."""
        self._seat.hold(kept)

    # -- forks and ends -------------------------------------------------------------------------

    def fork(self) -> Session:
        """Another session with the same past, as it was before the turn under way. It has its own turns,
        time and hold; no ids, messages or KV are copied. Raises Rejected, EngineClosed, WrongLoop."""
        self._check_open()
        seat, kept = self._service.seats.take(), self._seat.kept
        seat.hold(None if kept is None else kept.again())
        shared = self._options, self._usual, self.ttl, self._state
        return Session(self._engine, self._service, seat, *shared)

    async def move(self, replica: str) -> int:
        """Have its KV in another replica of its dispatcher, which then computes its turns, as far as the
        policy looks at prefixes; returns how many of its tokens are held there. What cannot be copied is
        computed there.

        Raises InvalidRequest with the field ``replica``: there is no such one that takes requests, or this is
        one engine; with ``session``: a turn is under way; EngineClosed, EngineFailed, WrongLoop.
        """
        state, options = self._ready(), self._options
        if any(token < 0 for token in state.token_ids):
            raise InvalidRequest("session", "has images: its KV cannot be moved")
        prefix = Prefix(list(state.token_ids), options.get("cache_salt", ""), options.get("adapter"))
        kept = await self._service.move(prefix, replica, self.ttl)
        if self._state is state and not self._seat.left:
            self._seat.hold(kept)
            return self.held_tokens
        if kept is not None:  # it has had a turn meanwhile, or was closed
            kept.release()
        return 0

    async def save(self, path: str | os.PathLike[str]) -> int:
        """Write it to a file, in place of one that is there, for :meth:`aioinfer.Engine.load_session`:
        tokens, messages and options, as they were before the turn under way, and of its KV what is cached at
        this moment. Returns of how many tokens that is; none on a GPU, and after an update of the weights.

        Tools are not saved. Who can read the file can read the conversation and its salt. When something
        fails, the file is as it was before; so it is when this is cancelled, unless that comes at the very
        end. Either way nothing is done to it any more.

        Raises InvalidRequest with the field ``path``: it cannot be written; EngineClosed, EngineFailed,
        WrongLoop.
        """
        self._check_open()
        adapter = self._options.get("adapter")
        loaded = {each.name: each.fingerprint for each in self._engine.adapters()}
        fingerprint = "" if adapter is None else loaded.get(adapter, "")
        state = self._state
        messages = state.all_messages()
        return await save(self._service, path, state.token_ids, messages, self._options, fingerprint)

    def close(self) -> None:
        """Hold its KV no longer, and take no more turns; one under way goes on as any request. Idempotent.
        Raises WrongLoop."""
        self._service.check_loop()
        self._seat.leave()

    async def __aenter__(self) -> Self:
        self._check_open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # On any thread and at any point, amid a step of the engine, too.
        if not self._seat.left:
            try:
                self._service.loop.call_soon_threadsafe(self._seat.leave)
            except RuntimeError:
                pass  # the loop is closed

    def __repr__(self) -> str:
        state = "closed" if self.closed else "in a turn" if self.in_turn else "open"
        return f"<Session {self.id} {state} tokens={self.num_tokens} held={self.held_tokens}>"


def _messages(given: Any, limits: ImageLimits) -> list[dict[str, Any]]:
    """Messages of a turn, copied."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if isinstance(given, Mapping):
        given = [given]
    if not isinstance(given, Sequence):
        raise InvalidRequest("messages", f"must be text or messages, got {shown(given)}")
    messages: list[dict[str, Any]] = freeze(
        "messages", sourced(given, limits), lists=True, kept=(ImageSource,)
    )
    return messages


class HeldPrefix:
    """A prefix whose KV is held: ``await engine.warm(...)`` makes it. It is held until it is released, until
    it was not used for its time, or until the engine is closed; dropping this object changes nothing."""

    __slots__ = ("_kept", "_service", "num_tokens")

    def __init__(self, service: Service[Any], kept: Kept | None, num_tokens: int) -> None:
        self._service = service
        self._kept = kept
        #: of the prefix
        self.num_tokens = num_tokens

    @property
    def held_tokens(self) -> int:
        """Of these, from the first on, those whose KV is held at this moment: whole pages."""
        return 0 if self._kept is None else self._kept.held_tokens

    def release(self) -> None:
        """Hold it no longer: it stays cached as any other. Idempotent. Raises WrongLoop."""
        self._service.check_loop()
        if self._kept is not None:
            self._kept.release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
