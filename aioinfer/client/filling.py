"""Filling: templates as parameters of a request, and what its output has in their holes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeAlias

from aioinfer.awaited import Awaited
from aioinfer.cells import StreamCell
from aioinfer.errors import InvalidRequest, RequestError, renamed
from aioinfer.outputs import Chunk, FinishReason, Result, Usage
from aioinfer.params import SamplingParams
from aioinfer.stream import Stream
from aioinfer.text.text_template import Hole, TextTemplate

__all__ = ["FillStream", "Filled", "Filling", "Hole", "Template"]

#: a text with holes, ``"{name} lives in {city}."``, or token ids with None for each token of a hole
Template: TypeAlias = "str | Sequence[int | None]"
_NAMES = {"grammar": "template"}
#: what would end an output before its template does
_ENDS = ("stop", "stop_regex", "stop_token_ids", "min_tokens")


@dataclass(frozen=True, slots=True)
class Filled:
    """A template that was filled in."""

    result: Result
    #: "stop" where the template is complete
    finish_reason: FinishReason
    #: of a text, what each hole has, by its name; of token ids, the ids of each run of None. An output that
    #: ended early has those that it has come to
    holes: dict[str, str] | list[list[int]]

    @property
    def text(self) -> str:
        """The whole text, that of the template included."""
        return self.result.text

    @property
    def token_ids(self) -> list[int]:
        """The token ids, those of the template included."""
        return self.result.token_ids

    @property
    def usage(self) -> Usage:
        """The token counts; those of the template are output."""
        return self.result.usage


@dataclass(frozen=True, slots=True)
class Filling:
    """A template, and the parameters of a request that fills it in."""

    template: TextTemplate | Sequence[int | None]
    params: SamplingParams

    @classmethod
    def of(cls, template: Any, params: SamplingParams, holes: Mapping[str, Hole] | None = None) -> Self:
        """``params``: of the request, but for the template. Raises InvalidRequest."""
        for field in ("grammar", "template", *_ENDS):
            if getattr(params, field):
                raise InvalidRequest(
                    field, "cannot be combined with a template, which says how the output goes"
                )
        if isinstance(template, str):
            text = TextTemplate.of(template, holes)
            return cls(text, replace(params, grammar=text.grammar()))
        if holes is not None:
            raise InvalidRequest(
                "holes", "are of a template that is text: in token ids, each None is a token"
            )
        pinned = replace(params, template=template)
        if pinned.template is None:
            raise InvalidRequest("template", "must be text, or a list of token ids and None")
        count = len(pinned.template)
        if params.max_tokens not in (None, count):
            raise InvalidRequest("max_tokens", f"is {params.max_tokens}, and the template has {count} tokens")
        return cls(pinned.template, pinned.changed(max_tokens=count, min_tokens=count))

    def open(self, generate: Callable[[SamplingParams], Stream]) -> FillStream:
        """Queue the request. Raises as :meth:`aioinfer.Engine.generate`."""
        try:
            return FillStream(generate(self.params), self)
        except RequestError as error:
            raise renamed(error, _NAMES) from error.__cause__

    def filled(self, result: Result) -> Filled:
        """The result of the request, with its holes."""
        if isinstance(self.template, TextTemplate):
            return Filled(result, result.finish_reason, self.template.split(result.text))
        found: list[list[int]] = []
        before: int | None = 0
        for pin, token in zip(self.template, result.token_ids, strict=False):
            if pin is None:
                found += [[]] if before is not None else []
                found[-1].append(token)
            before = pin
        whole = len(result.token_ids) == len(self.template)
        return Filled(result, "stop" if whole else result.finish_reason, found)


class FillStream(Awaited[Filled]):
    """A template that is being filled in: ``await`` it for the :class:`Filled`, or iterate it for the chunks
    of its text, as a :class:`~aioinfer.Stream`. It ends its request as that does."""

    __slots__ = ("_filling", "_stream")

    def __init__(self, stream: Stream, filling: Filling) -> None:
        super().__init__()
        self._stream = stream
        self._filling = filling

    @property
    def stream(self) -> Stream:
        """The stream that it reads."""
        return self._stream

    @property
    def cell(self) -> StreamCell:
        """As :attr:`aioinfer.Stream.cell`."""
        return self._stream.cell

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        try:
            return await self._stream.__anext__()
        except RequestError as error:
            raise renamed(error, _NAMES) from error.__cause__

    async def _wait_result(self) -> Filled:
        try:
            return self._filling.filled(await self._stream)
        except RequestError as error:
            raise renamed(error, _NAMES) from error.__cause__

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        return self

    def close(self) -> None:
        """The same from synchronous code."""
        self._stream.close()

    def leave(self) -> None:
        """The same one turn of the loop later, from any thread and at any point."""
        self._stream.leave()
