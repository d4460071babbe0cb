"""LLM: the synchronous engine, for scripts and for study. Same scheduler, same steps, no event loop."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack, cast

from aioinfer.embedding import EmbeddingForm, EmbeddingOptions, of_input, source_form
from aioinfer.errors import (
    Cancelled,
    EngineFailed,
    InvalidRequest,
)
from aioinfer.loop.blocking import progress_bar
from aioinfer.loop.blocking_loop import BlockingLoop, Entered
from aioinfer.loop.options import Prompt, PromptForm, is_one
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
from aioinfer.outputs import AdapterInfo, Chunk, Result
from aioinfer.params import SamplingParams
from aioinfer.pooling import Pooling
from aioinfer.scoring import ScoreOptions, Scores, score_job

if TYPE_CHECKING:
    from aioinfer.text.tokenizer import Tokenizer

__all__ = ["LLM"]


class LLM(BlockingLoop):
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
        results = self._pooled(prompts, form.pooling, names, progress, form.form, adapter=adapter)
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
        names = [job.name(index) for index in range(len(job.prompts))]
        return job.finish(self._pooled(job.prompts, job.pooling, names, progress, job.form, adapter=adapter))

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
        entered: list[Entered] = []
        for name, prompt in zip(names, prompts, strict=True):
            try:
                source = self._core.source(prompt, None, source_form(prompt, form))
                entered.append(self._prepare(source, params, options))
            except InvalidRequest as error:
                raise of_input(error, name) from error.__cause__
        return self._finish_all(entered, progress)

    def _finish_all(self, prepared: Sequence[Entered], progress: bool | None) -> list[Result]:
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

    def _chunks(self, entered: Entered) -> Iterator[Chunk]:
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
