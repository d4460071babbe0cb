"""Pooled: the requests of one call for many inputs, which computes embeddings or scores."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

from aioinfer.client.mapping import MapProgress, ResultMap
from aioinfer.config import EngineConfig
from aioinfer.embeddings.embedding import of_input
from aioinfer.errors import AioInferError, Rejected, StepFailed
from aioinfer.loop.options import Prompt, PromptSource
from aioinfer.outputs import Result

if TYPE_CHECKING:
    from aioinfer.stream import Stream

__all__ = ["PooledCall", "listing"]

_Finished = TypeVar("_Finished")
#: one call has this part of the queue at most, so that others find room
_SHARE = 4
#: ids that are checked between two turns of the loop, and so many that the rest of an input counts as
_PER_TURN, _EACH = 4096, 256
#: how often results of other weights than the newest are computed again
_AGAIN = 3

#: where the streams of this context's calls are put down
_listed: ContextVar[list[Stream] | None] = ContextVar("_listed", default=None)


@contextmanager
def listing(streams: list[Stream]) -> Iterator[None]:
    """Puts the streams of the calls that are made here into a list, for what has to be known of them however
    the calls end."""
    token = _listed.set(streams)
    try:
        yield
    finally:
        _listed.reset(token)


class PooledCall:
    """Computes the inputs of a call beside the requests of others. If one fails, the others are withdrawn."""

    def __init__(
        self,
        config: EngineConfig,
        source: Callable[[Prompt], PromptSource],
        submit: Callable[[PromptSource, int], Stream],
        name: Callable[[int], str],
        at_once: int,
    ) -> None:
        """``source``: an input, checked and copied; ``submit``: its request, in front of which so many of the
        call wait; ``name``: of an input by its index, in errors; ``at_once``: requests that are open at a
        time."""
        self._config = config
        self._make = source
        self._submit = submit
        self._name = name
        self._at_once = at_once
        #: requests that may not have begun yet, and how many tokens their prompts have at least
        self._waiting: list[tuple[Stream, int]] = []

    async def results(
        self, inputs: Sequence[Prompt], finish: Callable[[Result], _Finished], progress: MapProgress | None
    ) -> list[_Finished]:
        """The results, as ``finish`` returns them, in order. Raises as :meth:`aioinfer.Engine.embed`."""
        sources = await self._sources(inputs)
        return await self._computed(sources, range(len(sources)), finish, progress)

    async def of_one_version(
        self, inputs: Sequence[Prompt], progress: MapProgress | None, adapter: Callable[[], str]
    ) -> list[Result]:
        """Results that can be compared: all by the same weights and adapter, of which ``adapter`` tells what
        requests have at present. If these are replaced meanwhile, what came before is computed once more.
        Raises StepFailed if that goes on and on."""
        sources = await self._sources(inputs)
        numbers, found, used = [*range(len(sources))], dict[int, Result](), adapter()
        tries = 1 + _AGAIN
        while numbers and tries:
            computed = await self._computed(
                [sources[index] for index in numbers], numbers, lambda result: result, progress
            )
            progress = None  # all have been reported
            found.update(zip(numbers, computed, strict=True))
            newest = max(each.weight_version for each in found.values())
            old = [index for index, each in found.items() if each.weight_version != newest]
            before, used = used, adapter()
            if before != used:
                old = [*found]
            # Some replicas may keep older weights: the others have a part of what is left each time.
            tries -= len(old) >= len(numbers) or len(numbers) == len(sources)
            numbers = sorted(old)
        if numbers:
            raise StepFailed(
                "weights or adapter were replaced again and again while the inputs were computed"
            )
        return [found[index] for index in range(len(sources))]

    async def _sources(self, inputs: Sequence[Prompt]) -> list[PromptSource]:
        """All inputs: what can be seen of one without tokenizing is found before any is computed."""
        found: list[PromptSource] = []
        work = 0
        for index, each in enumerate(inputs):
            try:
                source = self._make(each)
            except AioInferError as error:
                raise of_input(error, self._name(index)) from error.__cause__
            found.append(source)
            work += _EACH + len(source.ids or ())
            if work >= _PER_TURN:
                work = 0
                await asyncio.sleep(0)
        return found

    async def _computed(
        self,
        sources: Sequence[PromptSource],
        numbers: Sequence[int],
        finish: Callable[[Result], _Finished],
        progress: MapProgress | None,
    ) -> list[_Finished]:
        """``numbers``: which inputs of the call the sources are."""
        found: list[_Finished] = []
        try:
            async with ResultMap(
                self._queue, sources, concurrency=self._at_once, progress=progress, on_error="raise"
            ) as results:
                async for result in results:
                    assert isinstance(result, Result)
                    found.append(finish(result))
        except AioInferError as error:
            raise of_input(error, self._name(numbers[len(found)])) from error.__cause__
        return found

    def _queue(self, source: Any, waiting: int) -> Stream:
        """Raises Rejected, uncounted, while the requests of the call that wait are its share of the queue."""
        self._waiting = [each for each in self._waiting if not (each[0].admitted or each[0].done)]
        tokens = source.least_tokens
        if waiting:
            most_tokens = self._config.max_queued_tokens // _SHARE
            if (
                waiting >= max(1, self._config.max_queued_requests // _SHARE)
                or tokens + sum(each for _, each in self._waiting) > most_tokens
            ):
                raise Rejected("others have their share of the queue")
        stream = self._submit(source, waiting)
        self._waiting.append((stream, tokens))
        listed = _listed.get()
        if listed is not None:
            listed.append(stream)
        return stream
