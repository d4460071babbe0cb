"""ChatStream: what ``engine.chat()`` returns. Iterate it, await it, or enter it, as a Stream.

It reads a stream, and parses what that gives as the HTTP API does: reasoning, content, calls of tools.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, Self, cast

from aioinfer.awaited import Awaited
from aioinfer.cells import StreamCell
from aioinfer.chat.answers import AnswerReader, joined
from aioinfer.chat.asking import ChatRequest
from aioinfer.chat.results import ChatDelta, ChatFinishReason, ChatResult, ToolCall, message_of
from aioinfer.errors import Cancelled, RequestError, renamed
from aioinfer.loop.options import PromptSource
from aioinfer.outputs import Chunk, FinishReason, Result, TokenLogprob, Usage
from aioinfer.resuming.record import StreamCheckpoint
from aioinfer.stream import Stream
from aioinfer.text.tokenizer import Tokenizer, end_of
from aioinfer.text.tool_calls import ToolCallDelta

__all__ = ["ChatStream"]

#: steps of a reader between two turns of the loop; each parses some thousand characters
_STEPS = 4


class ChatStream(Awaited[ChatResult]):
    """One answer of a chat in progress.

    * ``async for delta in chat`` yields :class:`~aioinfer.ChatDelta`; the last one carries ``finish_reason``.
    * ``await chat`` waits for the end and returns the :class:`~aioinfer.ChatResult`, also after some deltas;
      so does a task made of it.
    * ``async with chat`` closes it on the way out.

    It ends its request as a :class:`~aioinfer.Stream` does: closed, cancelled or dropped. Errors of the
    request are raised where it is read, with the names of the arguments of ``engine.chat``.
    """

    __slots__ = (
        "_answered",
        "_asked",
        "_calls",
        "_content",
        "_ended",
        "_left",
        "_logprobs",
        "_read",
        "_reader",
        "_reading",
        "_reasoning",
        "_result",
        "_source",
        "_stream",
        "_tokenizer",
    )

    def __init__(
        self,
        stream: Stream,
        source: PromptSource,
        asked: ChatRequest,
        tokenizer: Tokenizer | None,
        answered: Callable[[dict[str, Any]], object] | None = None,
    ) -> None:
        """``answered`` is called with the answer as a message, when all of it was parsed."""
        super().__init__()
        self._answered = answered
        self._stream = stream
        stream.cell.parsed = stream.cell.concluded = True
        self._source = source
        self._asked = asked
        self._tokenizer = tokenizer
        self._reader: AnswerReader | None = None
        #: a task parses text
        self._reading = False
        #: characters of the stream's text that the reader has
        self._read = 0
        #: left amid the parsing of a text, of which some is lost
        self._left = False
        #: the reader knows that there is no more
        self._ended = False
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCallDelta] = []
        #: of tokens whose delta is to come
        self._logprobs: list[TokenLogprob] = []
        self._result: ChatResult | None = None

    @property
    def stream(self) -> Stream:
        """The stream that it reads."""
        return self._stream

    @property
    def admitted(self) -> bool:
        """The request has had a row in a step."""
        return self._stream.admitted

    @property
    def done(self) -> bool:
        """The request has ended, with or without an error; nothing more is computed for it."""
        return self._stream.done

    @property
    def usage(self) -> Usage:
        """The token counts so far; of the prompt, 0 before it is tokenized."""
        return self._stream.usage

    @property
    def request_id(self) -> str:
        """The caller's name for the request, or one that was made for it."""
        return self._stream.request_id

    @property
    def cell(self) -> StreamCell:
        """As :attr:`aioinfer.Stream.cell`."""
        return self._stream.cell

    def checkpoint(self) -> StreamCheckpoint:
        """As :meth:`aioinfer.Stream.checkpoint`: the text is restored, with its reasoning and calls as
        the model wrote them."""
        return self._stream.checkpoint()

    async def accepted(self) -> None:
        """Wait until the prompt is tokenized, checked and queued. Raises InvalidRequest, Rejected."""
        try:
            await self._stream.accepted()
        except RequestError as error:
            raise renamed(error, self._asked.names) from error.__cause__

    # -- async for ------------------------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ChatDelta:
        while True:
            self._check_free()
            try:
                chunk = await self._stream.__anext__()
            except RequestError as error:
                raise renamed(error, self._asked.names) from error.__cause__
            delta = await self._delta(chunk)
            if delta is not None:
                return delta

    async def _delta(self, chunk: Chunk) -> ChatDelta | None:
        """The new part of a chunk; None if all of it is held back."""
        ended = chunk.finish_reason is not None
        delta = ChatDelta(draft=chunk.draft, usage=chunk.usage)
        if self._asked.answer is None:
            delta.content = chunk.text
            self._content.append(chunk.text)
            self._read += len(chunk.text)
            self._ended = ended
        else:
            await self._parse(chunk.text, ended=ended)
            delta.reasoning, delta.content, delta.tool_calls = self._take()
        if chunk.finish_reason is not None:
            delta.finish_reason = self._finish_reason(chunk.finish_reason)
            self._tell()
            if chunk.usage is not None:
                delta.usage = await self._counted(chunk.usage)
        self._logprobs += chunk.logprobs or ()
        if not (ended or delta.content or delta.reasoning or delta.tool_calls or delta.draft):
            return None
        if chunk.logprobs is not None:
            delta.logprobs, self._logprobs = self._logprobs, []
        return delta

    # -- await ----------------------------------------------------------------------------------

    async def _wait_result(self) -> ChatResult:
        self._check_free()
        try:
            result = await self._stream
        except RequestError as error:
            raise renamed(error, self._asked.names) from error.__cause__
        self._check_free()
        if self._result is None:
            self._result = await self._finish(result)
        return self._result

    async def _finish(self, result: Result) -> ChatResult:
        if not self._ended:
            rest = result.text[self._read :]
            if self._asked.answer is None:
                self._content.append(rest)
                self._ended = True
            else:
                await self._parse(rest, ended=True)
                self._take()
        self._tell()
        content = "".join(self._content)
        parsers = self._asked.parse_arguments
        calls = [
            ToolCall(call.id or "", call.name or "", call.arguments, parsers.get(call.name or "", json.loads))
            for call in joined(self._calls)
        ]
        return ChatResult(
            content=content or (None if calls else ""),
            reasoning="".join(self._reasoning) or None,
            tool_calls=calls,
            finish_reason=self._finish_reason(result.finish_reason),
            usage=await self._counted(result.usage),
            result=result,
            _parse=self._asked.parse,
        )

    # -- parsing --------------------------------------------------------------------------------

    async def _parse(self, text: str, *, ended: bool) -> None:
        """Give the reader more text. Other tasks get their turns after every few thousand characters."""
        reader = self._reader = self._reader or self._new_reader()
        self._reading = True
        try:
            for step, _ in enumerate(reader.read(text, ended=ended), 1):
                if step % _STEPS == 0:
                    await asyncio.sleep(0)
        except GeneratorExit:
            # Closed by the collector, for example: at any point, amid a step, too.
            self._left = True
            self._stream.leave()
            raise
        except BaseException:
            self._left = True
            self.close()
            raise
        finally:
            self._reading = False
        self._read += len(text)
        self._ended = ended

    def _new_reader(self) -> AnswerReader:
        answer = self._asked.answer
        assert answer is not None
        # The prompt's ids are known by now.
        end = "" if self._tokenizer is None else end_of(self._source.shown(), self._tokenizer)
        return answer.reader(end)

    def _take(self) -> tuple[str, str, list[ToolCallDelta]]:
        """Parts that the reader has made of the text since the last time; kept for the result, too."""
        assert self._reader is not None
        reasoning, content, calls = self._reader.take()
        self._reasoning.append(reasoning)
        self._content.append(content)
        self._calls += calls
        return reasoning, content, calls

    def _tell(self) -> None:
        """All of it was parsed."""
        answered, self._answered = self._answered, None
        if answered is not None:
            answered(message_of("".join(self._content), "".join(self._reasoning), joined(self._calls)))

    async def _counted(self, usage: Usage) -> Usage:
        return usage if self._reader is None else await self._reader.counted(usage, self._tokenizer)

    def _finish_reason(self, reason: FinishReason) -> ChatFinishReason:
        if self._reader is None:
            return reason
        return cast("ChatFinishReason", self._reader.finish_reason(reason))

    def _check_free(self) -> None:
        if self._left:
            raise Cancelled("the chat was left while it was being read")
        if self._reading:
            raise RuntimeError("another task is reading this chat")

    # -- leaving --------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        return self

    def close(self) -> None:
        """The same from synchronous code."""
        self._stream.close()

    def leave(self) -> None:
        """The same one turn of the loop later, from any thread and at any point."""
        self._stream.leave()
