"""LLM: the synchronous engine, for scripts and for study. Same scheduler, same steps, no event loop."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, Unpack, cast

from aioinfer.config import EngineConfig
from aioinfer.embedding import EmbeddingForm, EmbeddingOptions, of_input
from aioinfer.errors import (
    Cancelled,
    EngineClosed,
    EngineError,
    EngineFailed,
    InvalidRequest,
    Rejected,
    RequestError,
    StepFailed,
)
from aioinfer.execution.device import Device, Flight, StepOutOfMemory
from aioinfer.loop import factory
from aioinfer.loop.blocking import BlockingLoads, launched, progress_bar
from aioinfer.loop.core import Core
from aioinfer.loop.deadlines import Deadlines, Phase
from aioinfer.loop.options import Prepared, Prompt, PromptForm, RequestOptions, is_one
from aioinfer.loop.updating import (
    ABORTED,
    UpdateMode,
    WeightSource,
    check_mode,
    check_version,
    frozen,
    updatable,
)
from aioinfer.observe.stats import EngineStats
from aioinfer.observe.timeline import Timeline
from aioinfer.outputs import AdapterInfo, Chunk, Result
from aioinfer.params import SamplingParams, inherited
from aioinfer.pooling import Pooling
from aioinfer.scheduling.request import Request
from aioinfer.scheduling.step import Step
from aioinfer.scoring import ScoreOptions, Scores, score_job
from aioinfer.stream import StreamCell

if TYPE_CHECKING:
    from aioinfer.speculation.drafter import Drafter
    from aioinfer.text.tokenizer import Tokenizer

__all__ = ["LLM"]


class _Entered(NamedTuple):
    """A request that is not queued yet."""

    request: Request
    prepared: Prepared
    options: RequestOptions


class LLM:
    """A language model that is called, not awaited.

    ::

        with LLM(EngineConfig(model="/models/Qwen3-0.6B")) as llm:
            for result in llm.generate(["Hello", "Once upon a time"]):
                print(result.text)

    :meth:`add_request`, :meth:`step` and :meth:`has_unfinished` are the loop in its parts: each ``step``
    computes one forward pass of everything that can run and returns the requests that finished with it;
    :meth:`take_chunks` has what is new of the others. Everything happens on the calling thread.

    An exception that interrupts a step half-way, such as KeyboardInterrupt, ends every request that has not
    finished; the object can be used again. Deadlines count from queueing on and are checked between steps;
    their defaults are those of the config.
    """

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
            max_running=info.max_running_requests,
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

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._core.tokenizer

    # -- the loop in its parts ------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        routing_key: str | None = None,
        adapter: str | None = None,
        waiting_timeout: float | None = None,
        running_timeout: float | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> int:
        """Queue a prompt; returns the key of its result in :meth:`step`. Raises InvalidRequest, Rejected.

        The options are those of :meth:`aioinfer.Engine.generate`. All arguments are copied.
        """
        self._opened()
        others = {"priority": priority, "cache_salt": cache_salt, "routing_key": routing_key}
        options = self._options(waiting_timeout, running_timeout, adapter=adapter, **others)
        entered = self._prepare(prompt, params, options, chat_template_kwargs)
        self._submit(entered, returned=True)
        return entered.request.key

    def has_unfinished(self) -> bool:
        """A request has not been returned by :meth:`step` yet."""
        self._mend()
        return bool(self._open or self._ended or self._flights)

    def step(self) -> dict[int, Result]:
        """Compute one step and return the requests that finished with it, by key.

        As in the engine, ``overlap_steps`` steps are launched ahead of the one whose result is read. Raises
        what the step raised, after ending its requests. A step that ran out of memory is repeated as smaller
        ones; OutOfMemory is raised for a request that was in two of these without a token in between.
        TimedOut is raised for a request whose deadline has passed.
        """
        self._advance()
        for key, request in self._ended.items():
            if request.error is not None:
                # Other requests that finished in this step are returned by the next one.
                del self._ended[key]
                raise request.error
        finished = {key: request.result() for key, request in self._ended.items()}
        self._ended = {}
        return finished

    def take_chunks(self) -> dict[int, Chunk]:
        """What the requests have put out since the previous call, by key; also those that finished in the
        latest :meth:`step`. The chunks of one request are like those of a :class:`~aioinfer.Stream`: behind
        an update of the weights its last ones can take further calls, until one has ``finish_reason``."""
        self._mend()
        ended, self._latest, self._partly = {**self._partly, **self._latest}, {}, {}
        taken = {key: (cell, cell.take()) for key, cell in {**ended, **self._open}.items()}
        for key, (cell, chunk) in taken.items():
            if key in ended and chunk is not None and chunk.finish_reason is None:
                self._partly[key] = cell  # each version of the weights has a chunk of its own
        return {key: chunk for key, (_, chunk) in taken.items() if chunk is not None}

    def abort(self, key: int) -> bool:
        """End a request; :meth:`step` does not return it. False if it is not there or has ended."""
        self._mend()
        cell = self._open.get(key)
        if cell is not None:
            self._end(cell.request)
        return cell is not None

    def load_adapter(self, name: str, path: str | os.PathLike[str]) -> AdapterInfo:
        """Load a LoRA adapter for requests with its name. As :meth:`aioinfer.Engine.load_adapter`, but
        nothing goes on meanwhile, and Rejected is raised where that waits: call :meth:`step` first."""
        self._opened()
        self._mend()
        return self._loads.load(name, path)

    def unload_adapter(self, name: str) -> None:
        """As :meth:`aioinfer.Engine.unload_adapter`."""
        self._opened()
        self._mend()
        self._loads.unload(name)

    def adapters(self) -> list[AdapterInfo]:
        """The adapters that new requests can have."""
        return [version.info for version in self._core.adapters.loaded.values()]

    def stats(self) -> EngineStats:
        """A snapshot; O(1)."""
        return EngineStats.of(
            self._core.scheduler,
            output_tokens=self._core.texts.output_tokens,
            state="closed" if self._device is None else "running",
            paused=False,
            arriving=0,
            steps_in_flight=len(self._flights),
            failed_checks=0,
            stalled=0.0,
            timeline=self._timeline,
            adapters_loaded=len(self._core.adapters.loaded),
            adapters_draining=self._core.adapters.draining,
        )

    # -- weights --------------------------------------------------------------------------------

    def update_weights(
        self, source: WeightSource, *, mode: UpdateMode = "keep", version: int | None = None
    ) -> int:
        """Go on with other weights of the same model; returns their version. As
        :meth:`aioinfer.Engine.update_weights`; with mode "wait" the requests that have begun are computed to
        their ends here. If the weights cannot be written after they were checked, the LLM is closed.

        Raises ConfigError, which names the tensor, EngineFailed, and what a step raises.
        """
        device, core = self._opened(), self._core
        self._mend()
        check_mode(mode)
        chosen = check_version(version, core.weight_version)
        prepared = updatable(device).prepare_weights(frozen(source), lambda: None)
        if mode == "wait":
            try:
                core.hold_back()
                while core.begun:
                    self._advance(keep=True)
            finally:
                core.let_in()
        while self._flights:
            _, error = self._read()
            self._changing = False
            if error is not None:
                raise error
        self._changing = True
        if mode == "abort":
            begun = core.begun
            for request in begun:
                core.abort(request, Cancelled(ABORTED))
            self._take_ended(begun, returned=True)
        core.ended += core.replace_weights(chosen)
        self._changing = False
        try:
            updatable(device).install_weights(prepared)
        except BaseException as error:
            self.close()
            raise EngineFailed(f"the weights could not be replaced: {error}") from error
        return chosen

    @property
    def weight_version(self) -> int:
        """Of the weights that compute the next step."""
        return self._core.weight_version

    # -- whole answers --------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | None = None,
        waiting_timeout: float | None = None,
        running_timeout: float | None = None,
        progress: bool | None = None,
    ) -> list[Result]:
        """Generate for all prompts; results in their order.

        A single prompt (text, a list of token ids, a list of messages) is a list of one. ``params`` is one
        for all or one for each. ``adapter``: the LoRA adapter of all. The timeouts, in seconds, are those
        of each request: until its first step, and from there on. ``progress`` shows a bar; by default only
        on a terminal. A single message is refused: a chat is a list.

        Raises InvalidRequest before anything is computed, with ``field`` "prompts[3]" for the prompt at index
        3, if there are several; TimedOut, and what a step raises. Whatever it is, no request of this call is
        left.
        """
        self._opened()
        given: Any = prompts
        batch = [given] if is_one(given) else list(given)
        each = list(params) if isinstance(params, Sequence) else [params] * len(batch)
        if len(each) != len(batch):
            raise ValueError(f"{len(each)} params for {len(batch)} prompts")
        options = self._options(waiting_timeout, running_timeout, adapter=adapter)
        return self._finish_all(self._prepare_all(batch, each, options), progress)

    def embed(
        self,
        inputs: Prompt | Sequence[Prompt],
        *,
        adapter: str | None = None,
        progress: bool | None = None,
        **asked: Unpack[EmbeddingOptions],
    ) -> Any:
        """As :meth:`aioinfer.Engine.embed`; ``progress`` as of :meth:`generate`."""
        self._opened()
        form = EmbeddingForm.of(self._core.info, self.sentences, **asked)
        one, several = is_one(inputs), cast("Sequence[Prompt]", inputs)
        given: Any = [inputs] if one else list(several)
        names = ["inputs" if one else f"inputs[{index}]" for index in range(len(given))]
        prompts = [form.prompt(each) for each in given]
        results = self._pooled(prompts, form.pooling, names, progress, adapter=adapter)
        found = [form.finish(each) for each in results]
        return found[0] if one else found

    def score(
        self,
        query: str | Sequence[str],
        documents: Sequence[str],
        *,
        adapter: str | None = None,
        progress: bool | None = None,
        **asked: Unpack[ScoreOptions],
    ) -> Scores:
        """As :meth:`aioinfer.Engine.score`; ``progress`` as of :meth:`generate`."""
        self._opened()
        job = score_job(self._core.info, self.tokenizer, self.sentences, query, documents, **asked)
        form = None if job.special_tokens is None else PromptForm(job.special_tokens)
        names = [job.name(index) for index in range(len(job.prompts))]
        return job.finish(self._pooled(job.prompts, job.pooling, names, progress, form, adapter=adapter))

    def _pooled(
        self,
        prompts: Sequence[Prompt],
        pooling: Pooling,
        names: Sequence[str],
        progress: bool | None,
        form: PromptForm | None = None,
        *,
        adapter: str | None = None,
    ) -> list[Result]:
        params = SamplingParams(max_tokens=0)
        options = self._options(None, None, pooling=pooling, adapter=adapter)
        entered: list[_Entered] = []
        for name, prompt in zip(names, prompts, strict=True):
            try:
                entered.append(self._prepare(self._core.source(prompt, None, form), params, options))
            except InvalidRequest as error:
                raise of_input(error, name) from error.__cause__
        return self._finish_all(entered, progress)

    def _finish_all(self, prepared: Sequence[_Entered], progress: bool | None) -> list[Result]:
        """Queue these and compute until they have ended; none is left if anything raises."""
        entered = deque(prepared)
        requests = [each.request for each in entered]
        left = len(requests)
        try:
            with progress_bar(left, sys.stderr.isatty() if progress is None else progress) as bar:
                own = set(requests)
                while left:
                    self._submit_some(entered)
                    ended = [request for request in self._advance() if request in own]
                    for request in ended:
                        if request.error is not None:
                            raise request.error
                    left -= len(ended)
                    bar.update(len(ended))
            return [request.result() for request in requests]
        except BaseException:
            self._withdraw(requests)
            raise

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        waiting_timeout: float | None = None,
        running_timeout: float | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[Chunk]:
        """The chunks of one answer, as they come; other requests advance with it.

        The arguments are checked and copied at once. The request is queued when the first chunk is wanted,
        and aborted when the iterator is closed or dropped, on any thread; the next call then ends it. Raises
        InvalidRequest; the iterator also Rejected, TimedOut and what a step raises.
        """
        self._opened()
        options = self._options(waiting_timeout, running_timeout, adapter=adapter)
        return self._chunks(self._prepare(prompt, params, options, chat_template_kwargs))

    def _chunks(self, entered: _Entered) -> Iterator[Chunk]:
        request = entered.request
        try:
            cell = self._submit(entered)
            while True:
                chunk = cell.take()
                if chunk is not None:
                    yield chunk
                    if chunk.finish_reason is not None:
                        return
                elif request.error is not None:
                    raise request.error
                elif request.finished:
                    return  # aborted
                else:
                    self._advance()
        finally:
            self._left.append(request)

    # -- inside ---------------------------------------------------------------------------------

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
    ) -> _Entered:
        """A request and its tokens, not queued yet. Raises InvalidRequest."""
        params = inherited(params, self.default_params)
        self._core.check(params, options.pooling)
        self._core.adapter(options)
        prepared = self._core.prepare(self._core.source(prompt, template_kwargs), params)
        return _Entered(self._core.new_request(params, options), prepared, options)

    def _prepare_all(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams | None], options: RequestOptions
    ) -> list[_Entered]:
        entered = []
        for index, (prompt, chosen) in enumerate(zip(prompts, params, strict=True)):
            try:
                entered.append(self._prepare(prompt, chosen, options))
            except InvalidRequest as error:
                if len(prompts) == 1 or error.field != "prompt":
                    raise
                raise InvalidRequest(f"prompts[{index}]", error.message, code=error.code) from error
        return entered

    def _submit(self, entered: _Entered, *, returned: bool = False) -> StreamCell:
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

    def _submit_some(self, entered: deque[_Entered]) -> None:
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
