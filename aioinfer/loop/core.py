"""Core: scheduler and text of an engine, without any waiting.

The asynchronous :class:`~aioinfer.Engine` and the synchronous :class:`~aioinfer.LLM` share it: validation,
the way of a request from its prompt to its text, and stop strings, which end requests in the scheduler.
"""

from __future__ import annotations

import functools
import logging
import random
from collections import abc
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from aioinfer.cache.namespace import Namespace
from aioinfer.cache.pages import PageAllocator
from aioinfer.cache.slots import SlotPool
from aioinfer.config import EngineConfig
from aioinfer.errors import ConfigError, Rejected, StepFailed, shown
from aioinfer.execution.device import DeviceInfo, StepOutOfMemory, StepResult
from aioinfer.loop.checks import Checks
from aioinfer.loop.generation import generation
from aioinfer.loop.logprobs import extend, record_logprobs
from aioinfer.loop.options import Prepared
from aioinfer.loop.preparing import Preparing
from aioinfer.loop.resumption import Resumption, check_adapter, replay, replay_block
from aioinfer.loop.texts import Texts, output_text
from aioinfer.params import SamplingParams
from aioinfer.request import Output, Request
from aioinfer.scheduling.adapters import AdapterRegistry, AdapterVersion
from aioinfer.scheduling.block_batch import draft_of
from aioinfer.scheduling.costs import Costs
from aioinfer.scheduling.features import FeatureCache
from aioinfer.scheduling.memory import Memory
from aioinfer.scheduling.policy import PolicyFailed
from aioinfer.scheduling.rates import TransferRates
from aioinfer.scheduling.scheduler import Scheduler
from aioinfer.scheduling.sequence import ParkedFor, Sequence, SequenceState
from aioinfer.scheduling.speculation import Speculation
from aioinfer.scheduling.step import Row, Step
from aioinfer.scheduling.step_time import StepTime
from aioinfer.speculation.drafter import NO_IDS, Drafter, DraftRequest
from aioinfer.speculation.drafting import Drafting, UsualRates
from aioinfer.speculation.lookup import LookupDrafter

if TYPE_CHECKING:
    from aioinfer.cells import StreamCell
    from aioinfer.resuming.record import StreamCheckpoint
    from aioinfer.text.tokenizer import Tokenizer

__all__ = ["Core"]

_log = logging.getLogger("aioinfer")


class Core:
    """Owns all scheduling state. Only :meth:`prepare` may be called on another thread than the rest."""

    __slots__ = (
        "_arrivals",
        "_config",
        "_costs",
        "_drafter",
        "_generation",
        "_newest_step",
        "_next_key",
        "_seeds",
        "_usual_rates",
        "adapters",
        "admitted",
        "checks",
        "clock",
        "ended",
        "holding_back",
        "info",
        "preparing",
        "rates",
        "scheduler",
        "texts",
        "tokenizer",
    )

    def __init__(
        self,
        config: EngineConfig,
        info: DeviceInfo,
        tokenizer: Tokenizer | None,
        clock: Callable[[], float],
        drafter: Drafter | None = None,
        costs: Costs | None = None,
    ) -> None:
        """``drafter``: in place of the config's. ``costs``: what steps take, if that was calibrated."""
        self.info, self._costs = info, costs
        if drafter is not None and not callable(getattr(drafter, "propose", None)):
            raise ConfigError(f"drafter: has no method propose, got {shown(drafter)}")
        self._usual_rates = UsualRates()
        #: None: nothing is drafted
        self._drafter = drafter
        if drafter is None and config.speculation != "off" and info.block_size is None:
            self._drafter = LookupDrafter()
        self.tokenizer = tokenizer
        #: requests whose first row is in the step that was planned last
        self.admitted: list[Sequence] = []
        self._generation = generation(
            info.block_size, edits=info.edit_token_ids is not None, canvas=info.canvas
        )
        self.checks = Checks(config, info, tokenizer)
        self._config = config
        #: requests that ended because planning raised, until :meth:`take_ended`
        self.ended: list[Sequence] = []
        self._newest_step = 0
        reason = info.adapter_reason or "max_adapters is 0"
        self.adapters = AdapterRegistry(info.max_adapters, config.max_adapters, reason)
        #: requests that arrive wait for an update of the weights
        self.holding_back = False
        self.scheduler = self._new_scheduler()
        #: of reading pages, beside computing them
        self.rates = TransferRates(self.scheduler.times)
        #: seconds; of request metrics
        self.clock = clock
        self.texts = self._new_texts()
        self._seeds = random.Random(config.seed)
        self._next_key = 0
        self._arrivals = 0
        #: what requests need besides their prompts
        self.preparing = Preparing(config, info, tokenizer, drafts=self._drafter is not None)

    def _new_scheduler(self) -> Scheduler:
        config, info = self._config, self.info
        memory = Memory(
            PageAllocator(info.num_pages, info.page_size or config.positions_per_page),
            SlotPool(config.num_slots),
            prefix_cache=config.prefix_cache and not info.whole_prompts,
            snapshots=info.num_snapshots,
            snapshot_tokens=config.state_snapshot_tokens,
        )
        if info.images is not None:
            memory.features = FeatureCache(
                int(config.encoder_cache_gib * 2**30) // info.images.position_bytes,
                config.max_encoder_tokens,
                two_way=info.images.two_way,
            )
        times = StepTime(config.itl_target or 0.0, self._costs, refines=config.refine_costs)
        speculation = None
        if self._drafter is not None:
            speculation = Speculation(
                *(self._drafter, info.vocab_size, config.max_draft_tokens),
                adaptive=config.adaptive_drafts,
                overlap=bool(config.overlap_steps),
                catch_up=0 if info.draft_unit is None else config.chunk_tokens,
                head=bool(info.draft_head) and isinstance(self._drafter, LookupDrafter),
                head_most=info.draft_most,
                draft_unit=info.draft_unit or 1,
                draft_length=info.draft_length,
                draft_recurrent=info.draft_recurrent,
                times=times,
            )
        batch = self._generation.batch(memory, config, speculation)
        return Scheduler(memory, config, batch, whole_prompts=info.whole_prompts, times=times)

    @property
    def weight_version(self) -> int:
        """Version of the weights that compute the next step."""
        return self.scheduler.weight_version

    def replace_weights(self, version: int) -> list[Sequence]:
        """Other weights are about to be installed; no step is in flight, and no text is behind. Requests that
        run are retracted, and go on from their tokens. Returns those that ended because something raised."""
        self.scheduler.replace_weights(version)
        return self._faults()

    def hold_back(self) -> None:
        """Admit no request that has not begun, until :meth:`let_in`."""
        self.holding_back = True
        queues = self.scheduler.queues
        for sequence in [*queues.waiting]:
            if sequence.output.admitted_at is None:
                queues.park(sequence, ParkedFor.UPDATE)

    def let_in(self) -> None:
        """Undo :meth:`hold_back`."""
        self.holding_back = False
        queues = self.scheduler.queues
        for sequence in [*queues.shelved.values()]:
            try:
                queues.unpark(sequence, ParkedFor.UPDATE)
            except PolicyFailed as error:
                self.scheduler.faults.end((), error)
        self.ended += self._faults()

    @property
    def begun(self) -> list[Sequence]:
        """The requests that have begun and not ended."""
        return [each for each in self.scheduler.queues.unfinished() if each.output.admitted_at is not None]

    def _new_texts(self) -> Texts:
        return Texts(self.scheduler.queues, self.clock)

    # -- a request arrives ----------------------------------------------------------------------

    def adapter(self, request: Request, checkpoint: StreamCheckpoint | None = None) -> AdapterVersion | None:
        """The adapter that computes a request besides the model. Raises InvalidRequest: it is not loaded,
        or it is not what computed the output of the checkpoint."""
        if checkpoint is not None:
            check_adapter(checkpoint, {name: each.fingerprint for name, each in self.adapters.loaded.items()})
        return None if request.adapter is None else self.adapters.find(request.adapter)

    @property
    def queued(self) -> tuple[int, int]:
        """Requests that wait for their first step, and their tokens."""
        queues = self.scheduler.queues
        held_back = len(queues.shelved) if self.holding_back else 0
        return len(queues.waiting) + held_back, queues.queued_tokens

    @property
    def room(self) -> tuple[int, int]:
        """Free slots, and positions for which there are pages."""
        queues = self.scheduler.queues
        if self.holding_back:
            return 0, 0
        memory, slots = queues.memory, self._config.running_requests - len(queues.running)
        return max(0, slots), memory.available * memory.pages.page_size

    def complete(
        self,
        prompt_ids: abc.Sequence[int],
        params: SamplingParams,
        checkpoint: StreamCheckpoint | None = None,
    ) -> Prepared:
        """Work out what a request needs besides its prompt. May take long, then on any thread, if the
        parameters say so (``worked_out``) and with a checkpoint. Raises InvalidRequest, also if the extra for
        grammars is missing."""
        stop_ids = self.checks.stop_ids(params)
        prepared = self.preparing.complete(prompt_ids, params, stop_ids)
        if checkpoint is None:
            return prepared
        text = output_text(self.tokenizer, prompt_ids, params)
        grammar = prepared.grammar
        if grammar is not None and checkpoint.token_ids:
            grammar = replay(grammar, checkpoint.token_ids)
        if grammar is not None:
            replay_block(grammar, checkpoint, stop_ids)
        steering = prepared.steering
        if steering is not None:
            steering = steering.restarted(checkpoint.token_ids)
        resumption = Resumption.prepare(checkpoint, text, self.info)
        return prepared._replace(grammar=grammar, resumption=resumption, steering=steering)

    def submit(
        self,
        output: Output,
        prepared: Prepared,
        cell: StreamCell | None = None,
        adapter: AdapterVersion | None = None,
    ) -> Sequence:
        """Queue a request that was checked; ``cell``: of its consumer. Raises InvalidRequest, Rejected,
        and StepFailed if the queue's policy raises; nothing is changed then."""
        request, prompt_ids, resumption = output.request, prepared.prompt_ids, prepared.resumption
        params = request.params
        make_cursor = self._generation.cursor(params)
        self.checks.check_length(params, len(prompt_ids), request.pooling)
        max_length = self.info.longest(len(prompt_ids))
        if params.max_tokens is not None:
            max_length = min(max_length, len(prompt_ids) + params.max_tokens)
        self._next_key += 1
        self._arrivals += not request.queue_behind
        output.prompt_ids, queued = prompt_ids, None
        output.images = prepared.images
        if resumption is None:
            output.seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
            text = output_text(self.tokenizer, prompt_ids, params)
        else:
            text, queued = resumption.text, resumption.queued
            resumption.begin(output)
        sequence = Sequence(
            self._next_key,
            output,
            stop_ids=self.checks.stop_ids(params),
            max_length=max_length,
            place=(*(queued or (self._arrivals + request.queue_behind,)), self._next_key),
            namespace=Namespace(request.cache_salt or "", 0 if adapter is None else adapter.uid),
            adapter=adapter,
            text=text,
            grammar=prepared.grammar,
            steering=prepared.steering,
            cursor=make_cursor,
            prompt_key=None if resumption is None else resumption.prompt_key,
        )
        sequence.consumer = cell
        if params.diffusion is not None and params.diffusion.draft:
            output.make_draft = functools.partial(draft_of, sequence)
        if resumption is None:
            sequence.take_version(self.weight_version)
        else:
            resumption.place(sequence, cell, self.weight_version)
        self._draft(sequence, prepared.prediction)
        try:
            if not sequence.output_ids and queued is None:
                self._check_limits(sequence)
            self.scheduler.submit(sequence)
        except PolicyFailed as cause:
            output.accepted = False
            _log.error("%s could not be queued", sequence, exc_info=cause)
            raise StepFailed(f"the request could not be queued: {cause}") from cause
        if self.holding_back and output.admitted_at is None:
            self.scheduler.queues.park(sequence, ParkedFor.UPDATE)
        return sequence

    def _draft(self, sequence: Sequence, prediction: npt.NDArray[np.int32] | None) -> None:
        """Have tokens of a new request drafted, if they are. A model that drafts reads no images."""
        output = sequence.output
        reads = output.images is None or self.info.draft_unit is None
        if reads and self.preparing.speculates(sequence.params):
            prompt = np.frombuffer(sequence.token_key(0, len(sequence.prompt_ids)), np.int32)
            drafts = DraftRequest(prompt, NO_IDS if prediction is None else prediction, output.label or "")
            sequence.drafting = Drafting(drafts, self._usual_rates)

    def _check_limits(self, sequence: Sequence) -> None:
        """Raise Rejected for a new request that would miss its ``ttft_target`` or its deadline, as far as
        that is known; PolicyFailed."""
        request, scheduler = sequence.request, self.scheduler
        if request.ttft_target is None and request.deadline is None:
            return
        late = scheduler.forecast.late(scheduler.queues, sequence, self.clock())
        if late is None:
            return
        sequence.output.accepted = False
        what = f"in {late.seconds:.3g} s, {late.late:.3g} s after its"
        if late.limit == "ttft_target":
            message = f"its first token would come {what} target of {request.ttft_target:g} s"
        else:
            message = f"it would end {what} deadline of {request.deadline:g} s"
        raise Rejected(message, late.late, late.limit)

    def commit(self, sequence: Sequence) -> int:
        """Offer the resolved pages of a running request to others now, and not first when it ends; returns
        how many of its tokens the prefix cache has then.

        Only whole pages of tokens that are read: what steps in flight write, drafts for example, lies behind
        them. O(pages that are new)."""
        if sequence.state is SequenceState.RUNNING:
            self.scheduler.queues.share(sequence)
        return sequence.kv.cached_pages * self.scheduler.memory.pages.page_size

    # -- steps ----------------------------------------------------------------------------------

    def plan(self, behind: Step | None = None) -> Step | None:
        """The next step to launch, or None; ``behind`` is the newest step in flight."""
        prefill = 0 if behind is None else behind.prefill_tokens
        if prefill > self._config.max_overlapped_prefill and self.scheduler.queues.has_prefill:
            return None  # the step in flight takes long: requests that arrive meanwhile join the next one
        step = self._plan()
        if step is not None:
            self._newest_step = step.id
            now = self.clock()
            # A request that was retracted is announced again: not all of these are new.
            self.admitted = [
                sequence for sequence in step.new_requests if sequence.output.admitted_at is None
            ]
            for sequence in self.admitted:
                sequence.output.admitted_at = now
        return step

    def _plan(self) -> Step | None:
        """The scheduler's plan. What planning raises ends the requests that it concerns."""
        step = None
        try:
            step = self.scheduler.plan()
        except Exception as error:
            if not self.scheduler.abandon_plan(error, self._newest_step):
                raise
        if self.scheduler.faults:
            self.ended += self._faults()
        return step

    def _faults(self) -> list[Sequence]:
        """The requests that ended since the last call because something raised for them."""
        ended = []
        for sequence, cause in self.scheduler.faults.take():
            _log.error("planning failed for %s", sequence, exc_info=cause)
            self.texts.failed(sequence, cause)
            ended.append(sequence)
        return ended

    def take_ended(self) -> list[Sequence]:
        """The requests that ended since the last call because planning raised."""
        ended, self.ended = self.ended, []
        return ended

    def resolve(self, step: Step, result: StepResult, seconds: float | None = None) -> list[Sequence]:
        """Commit a step: tokens, text, stops. Returns the updated requests, finished ones included.

        After ``seconds`` of searching for stop patterns, the rest is left to :meth:`catch_up`. What the text
        or the logprobs of one request raise ends that request; after any other exception call
        :meth:`give_up`.
        """
        now = self.scheduler.times.now = self.clock()
        # If some are behind, catch_up() is due in this turn of the loop anyway.
        searching = seconds is None or not self.texts.behind
        failed = self._record_pooled(step, result) if result.pooled else ()
        advanced = self.scheduler.resolve(step, result)
        self.adapters.resolved(step.id)
        if failed:
            advanced = [*failed, *advanced]
        if result.logprobs or result.prompt_logprobs or result.forced:
            advanced += self._record_logprobs(step, result, advanced)
        self.texts.all_advanced(advanced, now)
        if not self.texts.behind:
            return advanced
        updated = dict.fromkeys([*advanced, *(self.texts.catch_up(seconds) if searching else ())])
        return [sequence for sequence in updated if not sequence.output.text_behind]

    def timed(self, step: Step, seconds: float) -> None:
        """A step has taken so long, from the end of the one before it: what drafts and prompts cost follows
        from that."""
        if step.encoding is not None:
            return
        self.scheduler.queues.batch.timed(step, seconds)
        self.scheduler.times.observe(step, seconds)

    def catch_up(self, seconds: float) -> list[Sequence]:
        """Search for stop patterns in the text of steps that are resolved; returns the updated requests."""
        return self.texts.catch_up(seconds)

    def give_up(self, step: Step, error: BaseException, *, launched: bool) -> list[Sequence]:
        """A step could not be packed, or its result not be committed: its requests end, all others go on.

        Returns the requests of the step, some of which may have ended before. :meth:`fail` has to follow in
        the order of the steps for one that was not ``launched``.
        """
        if launched:
            self.scheduler.memory.resolved(step.id)
            self.adapters.resolved(step.id)
        if step.encoding is not None and self.scheduler.memory.features is not None:
            self.scheduler.memory.features.failed(step, self.scheduler.queues.last_step)
        for sequence in step.concerned:
            # A request that has ended, but for its text, goes on getting that.
            if sequence.output.finished_at is None and not (
                sequence.finished and sequence.output.text_behind
            ):
                self.texts.end(sequence, error, distrust=True)
        return step.concerned

    def fail(self, step: Step, error: BaseException) -> list[Sequence]:
        """Handle a step that raised; returns the requests that it ended: all requests of the step, or, if it
        ran out of memory, those whose previous step did, too."""
        if isinstance(error, StepOutOfMemory):
            failed = self.scheduler.run_out(step, error)
        else:
            failed = self.scheduler.fail(step, error)
        self.adapters.resolved(step.id)
        for sequence in failed:
            self.texts.failed(sequence, error)
        return failed

    def abort(self, sequence: Sequence, error: BaseException | None = None) -> bool:
        """End a request, whatever its state; False if it had ended already."""
        return self.texts.abort(sequence, error)

    def _record_pooled(self, step: Step, result: StepResult) -> list[Sequence]:
        """Keep what rows have pooled, before the requests end that end with it. Returns those that failed."""
        failed: list[Sequence] = []
        count = step.num_generating
        for index, part in result.pooled.items():
            sequence = step.prefilling[index - count].sequence
            if sequence.finished or sequence.pooled is None or step.id <= sequence.recovery.void_until:
                continue
            try:
                sequence.pooled.add(part)
            except FloatingPointError as error:
                self.scheduler.memory.distrust(sequence)
                self.scheduler.finish(sequence, "abort", error)
                failed.append(sequence)
        return failed

    def _behind_failure(self, step: Step, row: Row) -> bool:
        """Whether a row may go on from where a step failed; one of an earlier life in doubt, too."""
        sequence = row.sequence
        left = row.slot != sequence.kv.slot and not sequence.finished
        return step.id <= sequence.recovery.junk_until or (
            left and step.id <= self.scheduler.queues.junk_until
        )

    def _record_logprobs(self, step: Step, result: StepResult, advanced: list[Sequence]) -> list[Sequence]:
        """Keep exactly one record per token. Returns requests that ended here and are not ``advanced``."""
        ended: list[Sequence] = []
        record_logprobs(step, result)
        for index, scored in result.prompt_logprobs.items():
            row = step.prefilling[index - step.num_generating]
            if row.scores is None or self._behind_failure(step, row):
                continue
            try:
                output, begin = row.sequence.output, row.sequence.request.first_scored
                extend(output.prompt_logprobs, row.scores[0] - begin, scored)
            except BaseException as error:
                self.texts.end(row.sequence, error)
                if row.sequence not in advanced:
                    ended.append(row.sequence)
        return ended
