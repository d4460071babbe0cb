"""Core: scheduler and text of an engine, without any waiting.

The asynchronous :class:`~aioinfer.Engine` and the synchronous :class:`~aioinfer.LLM` share it: validation,
the way of a request from its prompt to its text, and stop strings, which end requests in the scheduler.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from aioinfer.cache.pages import PageAllocator
from aioinfer.cache.slots import SlotPool
from aioinfer.config import EngineConfig
from aioinfer.errors import EngineError, InvalidRequest, OutOfMemory, Rejected, StepFailed
from aioinfer.execution.device import DeviceInfo, StepOutOfMemory, StepResult
from aioinfer.loop import factory
from aioinfer.loop.generation import generation
from aioinfer.loop.options import Prepared, PromptSource, RequestOptions
from aioinfer.params import SamplingParams
from aioinfer.scheduling.admission import Limits
from aioinfer.scheduling.faults import end_with
from aioinfer.scheduling.memory import Memory
from aioinfer.scheduling.policy import policy_class
from aioinfer.scheduling.request import Request, RequestState
from aioinfer.scheduling.scheduler import Scheduler
from aioinfer.scheduling.step import Step
from aioinfer.text.output import OutputText

if TYPE_CHECKING:
    from aioinfer.outputs import TokenLogprob
    from aioinfer.text.grammar import Compiler, GrammarBackend, GrammarState, Matcher
    from aioinfer.text.tokenizer import Tokenizer

__all__ = ["Core"]

_log = logging.getLogger("aioinfer")

_NO_OPTIONS = RequestOptions()


class Core:
    """Owns all scheduling state. Only :meth:`prepare` may be called on another thread than the rest."""

    __slots__ = (
        "_clock",
        "_compiler",
        "_compiler_lock",
        "_config",
        "_generation",
        "_newest_step",
        "_next_key",
        "_seeds",
        "admitted",
        "ended",
        "info",
        "output_tokens",
        "raised",
        "scheduler",
        "tokenizer",
    )

    def __init__(
        self,
        config: EngineConfig,
        info: DeviceInfo,
        tokenizer: Tokenizer | None,
        clock: Callable[[], float],
    ) -> None:
        self.info = info
        self.tokenizer = tokenizer
        #: of all requests since the start
        self.output_tokens = 0
        #: requests whose first row is in the step that was planned last
        self.admitted: list[Request] = []
        #: requests that ended because planning raised, until :meth:`take_ended`
        self.ended: list[Request] = []
        #: what ended a request last, if the state of all others was not checked since
        self.raised: BaseException | None = None
        memory = Memory(
            PageAllocator(info.num_pages, info.page_size or config.page_size),
            SlotPool(config.num_slots),
            prefix_cache=config.prefix_cache,
        )
        policy = policy_class(config.policy)(memory, config.seed or 0)
        settings = {item.name: getattr(config, item.name) for item in dataclasses.fields(Limits)}
        limits = Limits(**{**settings, "max_rounds": config.max_rounds or 1})
        self._generation = generation(info.block_size)
        self.scheduler = Scheduler(memory, limits, policy, self._generation.batch(memory, limits))
        self._config = config
        self._clock = clock
        self._seeds = random.Random(config.seed)
        self._newest_step = 0
        self._next_key = 0
        self._compiler: Compiler | None = None
        self._compiler_lock = threading.Lock()

    # -- a request arrives ----------------------------------------------------------------------

    def new_request(self, params: SamplingParams, options: RequestOptions = _NO_OPTIONS) -> Request:
        """A request that arrives now. It is PREPARING until :meth:`submit`."""
        return Request.preparing(
            params,
            arrival=self._clock(),
            priority=options.priority,
            namespace=options.cache_salt or "",
            routing_key=options.routing_key,
        )

    def check_queue(self, arriving: int = 0, tokens: int = 0) -> None:
        """Raise Rejected if the queue is full. ``arriving`` requests are PREPARING and count as queued;
        ``tokens`` are those of the next prompt."""
        waiting = len(self.scheduler.queues.waiting) + arriving
        if waiting >= self._config.max_queued_requests:
            raise Rejected(f"{waiting} requests are waiting already (max_queued_requests)")
        queued = self.scheduler.queues.queued_tokens
        if queued and queued + tokens > self._config.max_queued_tokens:
            raise Rejected(f"{queued} prompt tokens are waiting already (max_queued_tokens)")

    def prepare(self, prompt: PromptSource, params: SamplingParams) -> Prepared:
        """Tokenize a prompt, and compile the grammar that masks its output. May take long: on any thread.

        Raises InvalidRequest; ConfigError if the extra for grammars is missing.
        """
        ids = prompt.encode()
        return Prepared(ids, self._compile(params, ids))

    def _compile(self, params: SamplingParams, prompt_ids: Sequence[int]) -> GrammarState | None:
        if not params.masked:
            return None
        self._generation.check(params)  # raises for a request that would be refused after compiling
        from aioinfer.text.grammar import GrammarState

        # Forced tokens are not sampled, so they have no logprobs. They also void the steps in flight, so
        # there must be more of them than those steps would have sampled.
        least_forced = (
            (self._config.overlap_steps or 0) + 2
            if self._config.fast_forward and params.logprobs is None
            else 0
        )
        rest = len(prompt_ids), self.info.vocab_size, least_forced
        backend, matcher = self._matcher(params)
        try:
            return GrammarState.start(backend, matcher, *rest)
        except InvalidRequest:
            if params.grammar is None:
                raise
            # Copies of a matcher share llguidance's budget, and earlier outputs may have used it up.
            self._grammar_compiler().forget(params.grammar)
            backend, matcher = self._matcher(params)
            return GrammarState.start(backend, matcher, *rest)

    def _matcher(self, params: SamplingParams) -> tuple[GrammarBackend, Matcher]:
        """A matcher of the grammar and the bad words of a new output. Raises InvalidRequest, ConfigError."""
        from aioinfer.text.bad_words import BadWordsBackend, BadWordsMatcher, spell  # rarely needed

        backend: GrammarBackend | None = None
        matcher: Matcher | None = None
        if params.grammar is not None:
            compiler = self._grammar_compiler()
            backend, matcher = compiler.backend, compiler.matcher(params.grammar)
        if params.bad_words:
            words = spell(params.bad_words, self.tokenizer)
            matcher = BadWordsMatcher(words, backend, matcher)
            backend = BadWordsBackend()
        assert backend is not None
        assert matcher is not None
        return backend, matcher

    def _grammar_compiler(self) -> Compiler:
        with self._compiler_lock:
            if self._compiler is None:
                self._compiler = factory.grammar_compiler(self.tokenizer, self.info)
            return self._compiler

    def submit(self, request: Request, prepared: Prepared) -> None:
        """Check a request that is PREPARING, and queue it. Raises InvalidRequest, Rejected."""
        prompt_ids, params = prepared.prompt_ids, request.params
        self._check(prompt_ids, params)
        cursor = self._generation.cursor(params)
        max_length = self.info.max_model_len
        if params.max_tokens is not None:
            max_length = min(max_length, len(prompt_ids) + params.max_tokens)
        stop_ids = frozenset(params.stop_token_ids)
        # Only an end token can follow a complete grammar.
        if not params.ignore_eos or params.grammar is not None:
            stop_ids |= self.info.eos_token_ids
        self._next_key += 1
        request.set_prompt(
            self._next_key,
            prompt_ids,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            stop_ids=stop_ids,
            max_length=max_length,
            text=self._output_text(prompt_ids, params),
            grammar=prepared.grammar,
            cursor=cursor,
        )
        self.check_queue(tokens=request.length)
        request.state = RequestState.WAITING
        self.scheduler.submit(request)

    def _check(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Raise InvalidRequest for what this model cannot serve."""
        info = self.info
        _check_ids("prompt", prompt_ids, info.vocab_size)
        _check_ids("stop_token_ids", params.stop_token_ids, info.vocab_size)
        _check_ids("allowed_token_ids", params.allowed_token_ids or (), info.vocab_size)
        _check_ids("logit_bias", list(params.logit_bias or ()), info.vocab_size)
        spelled = [token for word in params.bad_words if not isinstance(word, str) for token in word]
        _check_ids("bad_words", spelled, info.vocab_size)
        if len(prompt_ids) >= info.max_model_len:
            why = f" ({info.length_reason})" if info.length_reason else ""
            raise InvalidRequest(
                "prompt",
                f"has {len(prompt_ids)} tokens; the engine takes {info.max_model_len} "
                f"tokens of prompt and output together{why}",
            )
        if self.tokenizer is None and (params.stop or params.stop_regex):
            field = "stop" if params.stop else "stop_regex"
            raise InvalidRequest(field, "the engine has no tokenizer, so there is no text to match")
        if params.grammar is not None and params.min_tokens:
            raise InvalidRequest("min_tokens", "cannot be combined with a grammar, which says when to end")
        self._generation.check(params)

    def _output_text(self, prompt_ids: Sequence[int], params: SamplingParams) -> OutputText:
        if self.tokenizer is None:
            return OutputText(None)
        detokenizer = self.tokenizer.detokenizer(prompt_ids, skip_special_tokens=params.skip_special_tokens)
        return OutputText(detokenizer, params.stop, params.include_stop, params.stop_regex)

    # -- steps ----------------------------------------------------------------------------------

    def plan(self, behind: Step | None = None) -> Step | None:
        """The next step to launch, or None; ``behind`` is the newest step in flight."""
        prefill = 0 if behind is None else behind.prefill_tokens
        if prefill > self._config.max_overlapped_prefill and self.scheduler.queues.has_prefill:
            return None  # the step in flight takes long: requests that arrive meanwhile join the next one
        step = self._plan()
        if step is not None:
            self._newest_step = step.id
            now = self._clock()
            # A request that was retracted is announced again: not all of these are new.
            self.admitted = [request for request in step.new_requests if request.admitted_at is None]
            for request in self.admitted:
                request.admitted_at = now
        return step

    def _plan(self) -> Step | None:
        """The scheduler's plan. What planning raises ends the requests that it concerns."""
        faults, step = self.scheduler.faults, None
        try:
            step = self.scheduler.plan()
        except Exception as error:
            if not self.scheduler.abandon_plan(error, self._newest_step):
                raise
        if faults:
            for request, cause in faults.take():
                _log.error("planning failed for %s", request, exc_info=cause)
                request.error = _step_failed(cause)
                self._close_text(request, self._clock())
                self.ended.append(request)
        return step

    def take_ended(self) -> list[Request]:
        """The requests that ended since the last call because planning raised."""
        ended, self.ended = self.ended, []
        return ended

    def resolve(self, step: Step, result: StepResult) -> list[Request]:
        """Commit a step: tokens, text, stops. Returns the updated requests, finished ones included.

        What the text or the logprobs of one request raise ends that request. After any other exception call
        :meth:`give_up`.
        """
        now = self._clock()
        advanced = self.scheduler.resolve(step, result)
        if result.logprobs or result.prompt_logprobs:
            advanced += self._record_logprobs(step, result, advanced)
        for request in advanced:
            before = len(request.token_times)
            if request.error is None:
                try:
                    self._append_text(request, now)
                except BaseException as error:
                    # A detokenizer that raises on this output must not stop the other requests.
                    self._end_request(request, error)
            self.output_tokens += len(request.token_times) - before
            if request.error is not None:
                request.error = _step_failed(request.error)
            if request.finished:
                self._close_text(request, now)
        return advanced

    def give_up(self, step: Step, error: BaseException, *, launched: bool) -> list[Request]:
        """A step could not be packed, or its result not be committed: its requests end, all others go on.

        Returns the requests of the step, some of which may have ended before. :meth:`fail` has to follow in
        the order of the steps for one that was not ``launched``.
        """
        if launched:
            self.scheduler.memory.resolved(step.id)
        for request in step.requests:
            if request.finished_at is None:
                self._end_request(request, error, distrust=True)
                request.error = _step_failed(error)
                self._close_text(request, self._clock())
        return step.requests

    def _end_request(self, request: Request, error: BaseException, *, distrust: bool = False) -> None:
        """End a request with what one of its own parts raised; tokens without a time are forgotten."""
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise error
        self.raised = error
        end_with(self.scheduler.queues, request, error, distrust=distrust)
        request.finish_reason, request.error = "abort", error
        request.trim(len(request.token_times))

    def fail(self, step: Step, error: BaseException) -> list[Request]:
        """Handle a step that raised; returns the requests that it ended: all requests of the step, or, if it
        ran out of memory, those whose previous step did, too."""
        if isinstance(error, StepOutOfMemory):
            failed = self.scheduler.run_out(step, error)
        else:
            failed = self.scheduler.fail(step, error)
        for request in failed:
            request.error = _step_failed(error)
            self._close_text(request, self._clock())
        return failed

    def abort(self, request: Request, error: BaseException | None = None) -> bool:
        """End a request, whatever its state; False if it had ended already."""
        if request.state is RequestState.PREPARING:
            request.refuse(error)
            return True
        if not self.scheduler.finish(request, "abort", error):
            return False
        self._close_text(request, self._clock())
        return True

    def _append_text(self, request: Request, now: float) -> None:
        """Detokenize the newest tokens: one, or several if the grammar forced them or a block got done."""
        ids = request.output_ids
        for at in range(len(request.token_times), len(ids)):
            request.token_times.append(now)
            if at == len(ids) - 1 and request.finish_reason == "stop" and not request.params.include_stop:
                return
            stop = request.text.push(ids[at])
            if stop is not None:
                # Also where the token that completes the stop string is the last one that was allowed.
                self.scheduler.finish(request, "stop")
                request.finish_reason = "stop"
                request.stop_reason = stop
                request.trim(at + 1)
                return

    def _close_text(self, request: Request, now: float) -> None:
        request.finished_at = now
        if request.finish_reason != "abort":
            # Text held back as the possible begin of a stop string is final now; not after an abort.
            try:
                request.text.finish()
            except BaseException as error:
                self._end_request(request, error)
                request.error = _step_failed(error)

    def _record_logprobs(self, step: Step, result: StepResult, advanced: list[Request]) -> list[Request]:
        """Keep exactly one record per token. Returns requests that ended here and are not ``advanced``."""
        ended: list[Request] = []
        decodes = step.generating.requests
        for index, logprob in result.logprobs.items():
            request = (
                decodes[index] if index < len(decodes) else step.prefilling[index - len(decodes)].request
            )
            if len(request.logprobs) < len(request.output_ids):
                request.logprobs.append(logprob)
        for index, logprobs in result.prompt_logprobs.items():
            row = step.prefilling[index - len(decodes)]
            if row.scores is None or step.id <= row.request.recovery.junk_until:
                continue
            try:
                _extend(row.request.prompt_logprobs, row.scores[0], logprobs)
            except BaseException as error:
                self._end_request(row.request, error)
                if row.request not in advanced:
                    ended.append(row.request)
        return ended


def _extend(known: list[TokenLogprob], first: int, logprobs: Sequence[TokenLogprob]) -> None:
    """Append records of the prompt's tokens from the ``first`` on."""
    # A step from before a retraction may have recorded some of them already.
    there = len(known) - first
    if there >= 0:
        known += logprobs[there:]


def _step_failed(cause: BaseException) -> EngineError:
    """A new exception for each request, since several tasks may raise theirs."""
    error: EngineError = StepFailed(f"the step of this request failed: {cause}")
    if isinstance(cause, StepOutOfMemory):
        error = OutOfMemory(f"two steps in turn that held this request ran out of memory: {cause}")
    error.__cause__ = cause
    return error


def _check_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    if field == "prompt" and not len(ids):
        raise InvalidRequest(field, "is empty")
    for token in ids:
        if type(token) is not int:
            raise InvalidRequest(field, f"must be integer token ids, got {token!r}")
    if len(ids) and (min(ids) < 0 or max(ids) >= vocab_size):
        bad = next(token for token in ids if not 0 <= token < vocab_size)
        raise InvalidRequest(field, f"{bad} is not a token id; the model has {vocab_size}")
