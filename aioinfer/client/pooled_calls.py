"""Pooled: the requests of one call for many inputs, which computes embeddings or scores."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

from aioinfer.client.mapping import MapProgress, OnError, ResultMap
from aioinfer.config import EngineConfig
from aioinfer.embeddings.embedding import of_input
from aioinfer.errors import AioInferError, Rejected, StepFailed
from aioinfer.loop.options import Prompt, PromptSource
from aioinfer.outputs import Result

if TYPE_CHECKING:
    from aioinfer.stream import Stream

__all__ = ["PooledCall", "listing"]

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
    the calls end. These calls do not wait for room before their first request: others may go elsewhere."""
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
        when_room: Callable[[Callable[[], None], int | None], int],
    ) -> None:
        """``source``: an input, checked and copied; ``submit``: its request, in front of which so many of the
        call wait; ``name``: of an input by its index, in errors; ``at_once``: requests that are open at a
        time; ``when_room``: as of :class:`ResultMap`."""
        self._config = config
        self._make = source
        self._submit = submit
        self._name = name
        self._at_once = at_once
        self._when_room = when_room
        #: requests that may not have begun yet, and how many tokens their prompts have at least
        self._waiting: list[tuple[Stream, int]] = []

    async def results(
        self,
        inputs: Sequence[Any],
        prompt: Callable[[Any], Prompt],
        finish: Callable[[Result], Any],
        progress: MapProgress | None,
        found: list[Any],
        on_error: OnError,
    ) -> None:
        """Put the results, as ``finish`` returns them, in order into ``found``, which has None before.
        ``prompt``: that of an input. Raises as :meth:`aioinfer.Engine.embed`."""
        found += [None] * len(inputs)
        sources = await self._sources(inputs, prompt, on_error)

        def put(index: int, result: Result | AioInferError) -> None:
            found[index] = result if isinstance(result, AioInferError) else finish(result)

        await self._computed(sources, range(len(sources)), put, progress, on_error)

    async def of_one_version(
        self,
        inputs: Sequence[Prompt],
        progress: MapProgress | None,
        adapter: Callable[[], str],
        *,
        on_error: OnError = "raise",
    ) -> list[Any]:
        """Results that can be compared: all by the same weights and adapter, of which ``adapter`` tells what
        requests have at present. If these are replaced meanwhile, what came before is computed once more.
        Raises StepFailed if that goes on and on."""
        sources = await self._sources(inputs, lambda prompt: prompt, on_error)
        numbers, found, used = [*range(len(sources))], dict[int, Result | AioInferError](), adapter()
        tries = 1 + _AGAIN
        while numbers and tries:
            await self._computed(sources, numbers, found.__setitem__, progress, on_error)
            progress = None  # all have been reported
            versions = {at: each.weight_version for at, each in found.items() if isinstance(each, Result)}
            newest = max(versions.values(), default=0)
            old = [index for index, version in versions.items() if version != newest]
            before, used = used, adapter()
            if before != used:
                old = [*versions]
            # Some replicas may keep older weights: the others have a part of what is left each time.
            tries -= len(old) >= len(numbers) or len(numbers) == len(sources)
            numbers = sorted(old)
        if numbers:
            raise StepFailed(
                "weights or adapter were replaced again and again while the inputs were computed"
            )
        return [found[index] for index in range(len(sources))]

    async def _sources(
        self, inputs: Sequence[Any], prompt: Callable[[Any], Prompt], on_error: OnError
    ) -> list[PromptSource | AioInferError]:
        """All inputs: what can be seen of one without tokenizing is found before any is computed."""
        found: list[PromptSource | AioInferError] = []
        work = 0
        for index, each in enumerate(inputs):
            try:
                source = self._make(prompt(each))
            except AioInferError as error:
                named = of_input(error, self._name(index))
                if on_error == "raise":
                    raise named from error.__cause__
                found.append(named)
                continue
            found.append(source)
            work += _EACH + len(source.ids or ())
            if work >= _PER_TURN:
                work = 0
                await asyncio.sleep(0)
        return found

    async def _computed(
        self,
        sources: Sequence[PromptSource | AioInferError],
        numbers: Sequence[int],
        put: Callable[[int, Result | AioInferError], object],
        progress: MapProgress | None,
        on_error: OnError,
    ) -> None:
        """Compute those of the inputs with these ``numbers``; ``put`` has each as it is done."""
        rows: ResultMap[Any] = ResultMap(
            self._open,
            [sources[index] for index in numbers],
            concurrency=self._at_once,
            room=self._when_room,
            progress=progress,
            on_error=on_error,
            patient=_listed.get() is None,
        )
        count = 0
        try:
            async with rows:
                async for result in rows:
                    put(numbers[count], self._named(result, numbers[count]))
                    count += 1
        except AioInferError as error:
            raise self._named(error, numbers[count]) from error.__cause__
        finally:
            for index, result in (await rows.undelivered()).items():
                put(numbers[index], self._named(result, numbers[index]))

    def _named(self, result: Any, index: int) -> Any:
        """An error by the name of its input; anything else unchanged."""
        if not isinstance(result, AioInferError):
            return result
        return of_input(result, self._name(index))

    def _open(self, source: PromptSource | AioInferError) -> Callable[[int], Stream]:
        if isinstance(source, AioInferError):
            raise source
        return partial(self._queue, source)

    def _queue(self, source: PromptSource, waiting: int) -> Stream:
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
