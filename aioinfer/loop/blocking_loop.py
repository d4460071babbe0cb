"""BlockingLoop: what the synchronous LLM runs: queues requests, launches steps, reads their results."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from aioinfer.config import EngineConfig
from aioinfer.errors import (
    Cancelled,
    EngineClosed,
    EngineError,
    InvalidRequest,
    Rejected,
    RequestError,
    StepFailed,
)
from aioinfer.execution.device import Device, Flight, StepOutOfMemory
from aioinfer.loop import factory
from aioinfer.loop.blocking import BlockingLoads, launched
from aioinfer.loop.core import Core
from aioinfer.loop.deadlines import Deadlines, Phase
from aioinfer.loop.options import Prepared, Prompt, RequestOptions
from aioinfer.observe.timeline import Timeline
from aioinfer.params import SamplingParams, inherited
from aioinfer.scheduling.request import Request
from aioinfer.scheduling.step import Step
from aioinfer.stream import StreamCell

if TYPE_CHECKING:
    from aioinfer.speculation.drafter import Drafter
    from aioinfer.text.tokenizer import Tokenizer

__all__ = ["BlockingLoop", "Entered"]


class Entered(NamedTuple):
    """A request that is not queued yet."""

    request: Request
    prepared: Prepared
    options: RequestOptions


class BlockingLoop:
    """What :class:`~aioinfer.LLM` runs on the calling thread: a device, a core, steps in flight."""

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        device: Callable[[EngineConfig], Device] = factory.make_device,
        tokenizer: Callable[[EngineConfig], Tokenizer | None] = factory.load_tokenizer,
        drafter: Drafter | None = None,
    ) -> None:
        """Load the model. Raises ConfigError, OutOfMemory. ``device`` and ``tokenizer`` replace the real
        ones in tests; ``drafter`` proposes tokens in place of ``config.speculation``."""
        self.config = config if config is not None else EngineConfig()
        located = factory.located(self.config) if device is factory.make_device else self.config
        self._device: Device | None = device(located)
        self._timeline = Timeline()
        self._device.lane = self._timeline.device
        loaded = tokenizer(located)
        info = factory.with_end_tokens(self._device.open(), loaded)
        self.default_params = factory.default_params(located, info)
        self.sentences = factory.sentences(located)
        decided = factory.decide(
            located,
            info.block_size,
            asynchronous=not self._device.synchronous,
            info=info,
        )
        self._overlap_steps = decided.overlap_steps or 0
        self._core = Core(decided, info, loaded, time.monotonic, drafter)
        self._flights: deque[tuple[Step, Flight]] = deque()
        #: requests that have not ended, by key
        self._open: dict[int, StreamCell] = {}
        #: keys of those that step() returns or raises: not those of generate() and stream()
        self._returned: set[int] = set()
        #: the latter that have ended and were not returned yet
        self._ended: dict[int, Request] = {}
        self._deadlines = Deadlines()
        self._loads = BlockingLoads(self._core.adapters, self._device, decided.model_name)
        self._loads.load_all(decided.adapter_paths)
        #: what ended in the latest step, for take_chunks()
        self._latest: dict[int, StreamCell] = {}
        #: of these, those whose chunks have not all been taken
        self._partly: dict[int, StreamCell] = {}
        #: state is being changed; if this is still set later, an exception has interrupted it
        self._changing = False
        #: requests whose streams were left: amid a step or on another thread, if the collector closes them
        self._left: deque[Request] = deque()

    def _options(
        self, waiting_timeout: float | None, running_timeout: float | None, **others: Any
    ) -> RequestOptions:
        config = self.config
        return RequestOptions(
            waiting_timeout=config.waiting_timeout if waiting_timeout is None else waiting_timeout,
            running_timeout=config.running_timeout if running_timeout is None else running_timeout,
            **others,
        )

    def _prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        options: RequestOptions,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Entered:
        """A request and its tokens, not queued yet. Raises InvalidRequest."""
        params = inherited(params, self.default_params)
        self._core.check(params, options.pooling)
        self._core.adapter(options)
        prepared = self._core.prepare(self._core.source(prompt, template_kwargs), params)
        return Entered(self._core.new_request(params, options), prepared, options)

    def _prepare_all(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams | None], options: RequestOptions
    ) -> list[Entered]:
        entered = []
        for index, (prompt, chosen) in enumerate(zip(prompts, params, strict=True)):
            try:
                entered.append(self._prepare(prompt, chosen, options))
            except InvalidRequest as error:
                if len(prompts) == 1 or error.field != "prompt":
                    raise
                raise InvalidRequest(f"prompts[{index}]", error.message, code=error.code) from error
        return entered

    def _submit(self, entered: Entered, *, returned: bool = False) -> StreamCell:
        """Queue a request. Raises Rejected, EngineClosed."""
        request, prepared, options = entered
        self._opened()
        self._mend()
        # Only what is queued keeps an adapter: a stream that is never read would keep it for ever.
        adapter = self._core.adapter(options)
        self._changing = True
        if adapter is not None:
            self._core.adapters.take(request, adapter)
        try:
            self._core.submit(request, prepared)
        except (RequestError, StepFailed):
            self._core.adapters.leave(request)
            self._changing = False  # refused before anything was changed
            raise
        cell = self._open[request.key] = StreamCell(request, options.running_timeout)
        self._await(request.key, "waiting", options.waiting_timeout)
        if returned:
            self._returned.add(request.key)
        self._changing = False
        return cell

    def _await(self, key: int, phase: Phase, seconds: float | None) -> None:
        self._deadlines.add(self._core.clock(), key, phase, seconds, self._open)

    def _submit_some(self, entered: deque[Entered]) -> None:
        """Queue as many as the queue takes. Raises Rejected if that is none and nothing is under way."""
        while entered:
            try:
                self._submit(entered[0])
            except Rejected:
                if not self._open:
                    raise
                return
            entered.popleft()

    def _advance(self, *, keep: bool = False) -> list[Request]:
        """Launch what may be launched and read one step; returns the requests that ended with it. ``keep``:
        the chunks of those that ended before can still be taken.

        Raises what the step raised, after ending its requests.
        """
        device = self._opened()
        self._mend()
        if not keep:
            self._latest = {}
        self._changing = True
        failed = self._take_ended(self._late(), returned=True)
        begun, steps = self._core.clock(), list[Step]()
        while len(self._flights) <= self._overlap_steps:
            step = self._core.plan(self._flights[-1][0] if self._flights else None)
            failed += self._take_ended(self._core.take_ended(), returned=True)
            if step is None:
                break
            for request in self._core.admitted:
                if request.key in self._open:
                    self._await(request.key, "running", self._open[request.key].running_timeout)
            self._flights.append((step, launched(device, step)))
            steps.append(step)
        idle = not self._flights and not failed
        ended, error = self._read() if self._flights else ([], None)
        ended += failed
        if len(steps) == 1:
            self._core.timed(steps[0], self._core.clock() - begun)
        self._changing = False
        if idle and self._open:
            raise EngineError("no step can be planned for the requests that are left")
        if error is not None:
            raise error
        return ended

    def _late(self) -> list[Request]:
        """End the requests whose deadlines have passed; returns them."""
        late = []
        for key, error in self._deadlines.passed(self._core.clock()):
            cell = self._open.get(key)
            if cell is not None and (cell.request.admitted_at is not None) == (error.phase == "running"):
                self._core.abort(cell.request, error)
                late.append(cell.request)
        return late

    def _read(self) -> tuple[list[Request], BaseException | None]:
        """Wait for the oldest flight and commit it; returns what ended, and what the step raised."""
        step, flight = self._flights[0]
        result, error = None, None
        # An exception that interrupts the waiting loses nothing.
        self._changing = False
        try:
            result = flight.wait()
        except Exception as raised:
            error = raised
        self._changing = True
        self._flights.popleft()
        if error is None:
            assert result is not None
            updated = self._core.resolve(step, result)
        else:
            updated = self._core.fail(step, error)
        lost = error is not None and not isinstance(error, StepOutOfMemory)
        ended = self._take_ended(updated, returned=not lost)
        return ended, error if lost else None

    def _take_ended(self, updated: Iterable[Request], *, returned: bool) -> list[Request]:
        """Those of the requests that have ended; if they are ``returned``, step() has results or errors."""
        ended = [request for request in updated if request.finished]
        for request in ended:
            self._core.adapters.leave(request)
            if returned and request.key in self._returned:
                self._ended[request.key] = request
            self._returned.discard(request.key)
            self._latest[request.key] = self._open.pop(request.key)
        return ended

    def _end(self, request: Request) -> None:
        """Abort a request if it is queued or runs."""
        self._changing = True
        if self._open.pop(request.key, None) is not None:
            self._core.abort(request)
            self._core.adapters.leave(request)
        self._returned.discard(request.key)
        self._changing = False

    def _withdraw(self, requests: Iterable[Request]) -> None:
        """End these requests and read what is in flight, so that nothing is left of them."""
        self._left.extend(requests)
        self._mend()

    def _drain(self) -> None:
        while self._flights:
            self._changing = True
            self._read()
            self._changing = False

    def _mend(self) -> None:
        """First of all in a call: start over if an exception has interrupted a change, and end the requests
        whose streams were left."""
        if self._changing:
            self._start_over()
        if not self._left:
            return
        while self._left:
            self._end(self._left[0])
            self._left.popleft()
        if not self._open:
            self._drain()

    def _start_over(self) -> None:
        """End all requests that have not ended, and forget what is half changed."""
        while self._flights:
            try:
                self._flights[0][1].wait()
            except Exception:
                pass  # nothing of it is used
            self._flights.popleft()
        for key, cell in self._open.items():
            if key not in self._ended:
                cell.request.refuse(Cancelled("an exception has interrupted a step"))
        self._open, self._latest, self._partly, self._returned = {}, {}, {}, set()
        self._core.start_over()
        self._changing = False

    def close(self) -> None:
        """Free the model's memory. Idempotent."""
        if self._device is not None:
            self._changing = True
            self._mend()  # ends all requests, and waits for what is in flight
            self._device.close()
            self._device = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _opened(self) -> Device:
        if self._device is None:
            raise EngineClosed("the LLM is closed")
        return self._device
