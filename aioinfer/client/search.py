"""Search: calls that compute several outputs of one prompt and rank them, on streams that fork."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from math import inf, isnan
from typing import TYPE_CHECKING, Any, Unpack

from aioinfer.cells import when_ended
from aioinfer.client.batches import Batches
from aioinfer.errors import InvalidRequest, shown
from aioinfer.loop.options import Prompt
from aioinfer.outputs import Result, TokenLogprob
from aioinfer.params import SamplingParams
from aioinfer.request import JobOptions
from aioinfer.stream import Stream

if TYPE_CHECKING:
    from aioinfer.client.beams import Beam, Beams, EarlyStopping, Row
    from aioinfer.steering.processors import Ids, Logits

__all__ = ["ScoredResult", "Searches"]

_MOST_BEAMS = 128
#: powers of a length by it are numbers in float32
_MOST_PENALTY = 5.0
#: parameters of beams; of these, the second line has no effect where nothing is sampled
_OF_BEAMS = {
    *("max_tokens", "stop_token_ids", "ignore_eos", "logit_bias", "logits_processors", "logprobs"),
    *("temperature", "top_p", "top_k", "min_p", "top_n_sigma", "seed", "speculate", "prediction"),
    *("skip_special_tokens", "include_stop", "stop_format"),
}


@dataclass(frozen=True, slots=True)
class ScoredResult:
    """One of the outputs of a search. A larger score is better."""

    result: Result
    score: float


class Searches(Batches):
    """Calls that search for the best outputs of a prompt."""

    async def best_of(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        n: int,
        score: Callable[[Result], float | Awaitable[float]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[JobOptions],
    ) -> list[ScoredResult]:
        """``n`` outputs of one prompt, which is computed once, best first: those of :meth:`choices`.

        ``score``: a function or a coroutine that is called with each result when it is there; by default, the
        mean of its logprobs. A score of NaN is the lowest. Raises as :meth:`generate`, and what ``score``
        raises: the other outputs end then, and also when the call is cancelled.
        """
        params = params or SamplingParams()
        if score is None:
            params, score = replace(params, logprobs=params.logprobs or 0), _mean_logprob
        streams = self.choices(prompt, params, n=n, chat_template_kwargs=chat_template_kwargs, **options)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(_scored(stream, score)) for stream in streams]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        finally:
            for stream in streams:
                stream.close()
        found = [task.result() for task in tasks]
        return sorted(found, key=lambda each: -inf if isnan(each.score) else each.score, reverse=True)

    async def beam(
        self,
        prompt: Prompt,
        width: int,
        params: SamplingParams | None = None,
        *,
        n: int | None = None,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[JobOptions],
    ) -> list[ScoredResult]:
        """The best ``n`` (default: all) of the ``width`` hypotheses that a beam search finds, best first; a
        score is the sum of the logprobs divided by ``length ** length_penalty``. See
        :mod:`aioinfer.client.beams`.

        Args:
            params: what ends an output and how its text is made, ``logit_bias``, ``logits_processors`` and
                ``logprobs=0``. Temperature, filters, seed, and what the model recommends have no effect:
                nothing is sampled. Anything else is refused.
            early_stopping: the search ends when ``width`` hypotheses have ended and, unless this is True, the
                best beam is worse than all of these by the score that it has now, or, with "never", by the
                score that it would have at ``max_tokens``.
            options: those of :meth:`generate`, for each beam.

        Raises as :meth:`generate`. All beams end with the call, also when it is cancelled.
        """
        source = self.prompt(prompt, chat_template_kwargs=chat_template_kwargs)
        found = await self.beam_streams(source, width, params, n, length_penalty, early_stopping, **options)
        return [ScoredResult(await stream, score) for stream, score in found]

    async def beam_streams(
        self,
        prompt: Prompt,
        width: int,
        params: SamplingParams | None = None,
        n: int | None = None,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        *,
        lost: list[Stream] | None = None,
        **options: Unpack[JobOptions],
    ) -> list[tuple[Stream, float]]:
        """What :meth:`beam` finds, as streams that have ended and their scores. ``lost``: gets the beams of a
        search that does not come to its end."""
        from aioinfer.client.beams import Beams  # with numpy, which takes longer to import than all else

        serving = self._serving()
        most = min(_MOST_BEAMS, serving.info.vocab_size)
        for name, value, bound in (("width", width, most), ("n", 1 if n is None else n, width)):
            if type(value) is not int or not 1 <= value <= bound:
                raise InvalidRequest(name, f"must be 1 to {bound}, got {shown(value)}")
        params = _checked(params or SamplingParams(), length_penalty, early_stopping)
        if options.get("budget") is not None:
            raise InvalidRequest("budget", "beams go on together: max_tokens bounds them")
        source, longest = serving.source(prompt), serving.info.max_model_len
        length = len(await serving.encode(source))
        limit = min(longest - length, params.max_tokens or longest)
        beams = Beams(width, serving.checks.stop_ids(params), limit, length_penalty, early_stopping)
        search = _Search(beams, params, length)
        try:
            first = search.add(beams.running[0], partial(self.generate, source, **options))
            while not beams.done:
                await search.step()
            return await search.results(n, first.usage.cached_tokens)
        except BaseException:
            if lost is not None:
                lost += search.streams()
            raise
        finally:
            search.close()


class _Hook:
    """A logits processor that hands the most likely tokens of a position to a search, which decides."""

    def __init__(self, most_likely: Callable[[Logits], Row], position: int) -> None:
        self._most_likely, self._position = most_likely, position
        self._loop = asyncio.get_running_loop()
        #: None: the stream has ended
        self.row: asyncio.Future[Row | None] = self._loop.create_future()
        self._token: asyncio.Future[int] = self._loop.create_future()

    async def __call__(self, ids: Ids, logits: Logits) -> list[int]:
        if len(ids) != self._position:
            raise ValueError("another logits processor forces tokens: beams cannot follow")
        if not self.row.done():
            self.row.set_result(self._most_likely(logits))
        return [await self._token]

    def ended(self) -> None:
        if not self.row.done():
            self.row.set_result(None)

    def decide(self, token: int) -> None:
        """The stream goes on with a token."""
        self._token.set_result(token)
        self.row, self._token = self._loop.create_future(), self._loop.create_future()
        self._position += 1


class _Search:
    """The streams of the beams: each waits at every position for the search."""

    def __init__(self, beams: Beams, params: SamplingParams, length: int) -> None:
        """``length``: tokens of the prompt."""
        self._beams, self._params, self._length = beams, params, length
        self._streams: dict[Beam, tuple[Stream, _Hook]] = {}

    def add(self, beam: Beam, make: Callable[..., Stream]) -> Stream:
        """Begin the stream of a beam."""
        hook = _Hook(self._beams.most_likely, self._length + beam.length)
        steered = (*self._params.logits_processors, hook)
        stream = make(params=self._params.changed(logits_processors=steered, logprobs=None))
        when_ended(stream.cell, hook.ended)
        self._streams[beam] = stream, hook
        return stream

    async def step(self) -> None:
        """All beams become a token longer: one that wins several times forks, one that loses ends."""
        beams = self._beams
        beams.step([await self._row(*self._streams[beam]) for beam in beams.running])
        if beams.done:
            return
        heirs: dict[Beam, list[Beam]] = {}
        for beam in beams.running:
            assert beam.parent is not None
            heirs.setdefault(beam.parent, []).append(beam)
        for parent, children in heirs.items():
            self._streams[parent][1].decide(children[0].token_id)
        # First these streams go on. What is closed or forked wakes the engine: all are in its next step then.
        await asyncio.sleep(0)
        for loser in [each for each in self._streams if each not in heirs]:
            self._streams.pop(loser)[0].close()
        for parent, (first, *others) in heirs.items():
            stream, hook = self._streams.pop(parent)
            self._streams[first] = stream, hook
            for beam in others:
                self.add(beam, partial(stream.fork_beside, parent.length, [beam.token_id]))

    async def _row(self, stream: Stream, hook: _Hook) -> Row:
        row = await hook.row
        if row is None:
            await stream  # raises why it has ended
            raise RuntimeError("a beam has ended unasked")
        return row

    async def results(self, n: int | None, cached: int) -> list[tuple[Stream, float]]:
        """The best hypotheses: streams that are made of their tokens, the last of which ends them.
        ``cached``: tokens of the prompt that were not computed."""
        source, _ = next(iter(self._streams.values()))
        found: list[tuple[Stream, float]] = []
        try:
            for score, beam in self._beams.finished[:n]:
                *then, last = [each.token_id for each in beam.path()]
                params = self._params.changed(logits_processors=(partial(_forced, last),))
                found.append((source.fork_beside(0, then, params), score))
            for (stream, _), (_, beam) in zip(found, self._beams.finished, strict=False):
                await stream
                output = stream.cell.output
                output.cached_tokens = cached
                if self._params.logprobs is not None:
                    output.logprobs[:] = [TokenLogprob(each.token_id, each.logprob) for each in beam.path()]
        except BaseException:
            for stream, _ in found:
                stream.close()
            raise
        return found

    def streams(self) -> list[Stream]:
        """Those of the beams that are searched."""
        return [stream for stream, _ in self._streams.values()]

    def close(self) -> None:
        for stream in self.streams():
            stream.close()


def _forced(token: int, ids: Ids, logits: Logits) -> list[int]:
    return [token]


def _checked(params: SamplingParams, penalty: float, early: EarlyStopping) -> SamplingParams:
    """The parameters of beams, with no value left to the model. Raises InvalidRequest."""
    if type(penalty) not in (int, float) or not -_MOST_PENALTY <= penalty <= _MOST_PENALTY:
        bounds = f"{-_MOST_PENALTY} to {_MOST_PENALTY}"
        raise InvalidRequest("length_penalty", f"must be {bounds}, got {shown(penalty)}")
    if not (type(early) is bool or early == "never"):
        raise InvalidRequest("early_stopping", f'must be True, False or "never", got {shown(early)}')
    for field in fields(params):
        if field.name not in _OF_BEAMS and getattr(params, field.name) != field.default:
            raise InvalidRequest(field.name, "is not supported with beams")
    if params.max_tokens == 0:
        raise InvalidRequest("max_tokens", "must be a positive number: beams generate an output")
    if params.logprobs:
        raise InvalidRequest("logprobs", "must be 0: beams have those of their own tokens only")
    given = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    return params.changed(**given, stop_format=None)


async def _scored(stream: Stream, score: Callable[[Result], float | Awaitable[float]]) -> ScoredResult:
    result = await stream
    value = score(result)
    return ScoredResult(result, await value if inspect.isawaitable(value) else value)


def _mean_logprob(result: Result) -> float:
    logprobs = [each.logprob for each in result.logprobs or ()]
    return sum(logprobs) / max(1, len(logprobs))
