"""The laws of the design, asserted around a scheduler at every step."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from aioinfer.engine import Engine
from aioinfer.loop.core import Core
from aioinfer.scheduling.adapters import AdapterRegistry, AdapterVersion
from aioinfer.scheduling.audit import audit, check
from aioinfer.scheduling.block_batch import BlockBatch
from aioinfer.scheduling.block_cursor import BlockCursor
from aioinfer.scheduling.queues import RequestQueues
from aioinfer.scheduling.recovery import failed_before
from aioinfer.scheduling.scheduler import Scheduler
from aioinfer.scheduling.sequence import Sequence
from aioinfer.scheduling.step import Outcome, Row, Step
from tests.engine.imaging import LONGEST


class LawChecker:
    """Sits on a scheduler and asserts conservation, fencing, seniority and single endings at every step."""

    #: tokens of the smallest step
    least = 1

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.resolved = 0
        self.launched = 0
        #: newest step that read or wrote a page or a slot, and that wrote a page
        self.page_touched: dict[int, int] = {}
        self.page_written: dict[int, int] = {}
        self.slot_touched: dict[int, int] = {}
        #: whose the newest touch was: key and how often it had been retracted
        self.page_tenant: dict[int, tuple[int, int]] = {}
        self.slot_tenant: dict[int, tuple[int, int]] = {}
        self.ended: set[int] = set()
        #: by request and life, the newest step with drafts of it
        self.verifying: dict[tuple[int, int], int] = {}
        #: a step failed: then, and only then, the eldest is retracted
        self.starting_over = False
        #: of the core; and by slot of an adapter, the newest step that read it
        self.adapters: AdapterRegistry | None = None
        self.adapter_read: dict[int, int] = {}
        #: the weights are replaced: then all are retracted, and only then
        self.updating = False
        self.updates = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)

    def plan(self) -> Step | None:
        step: Step | None = self.scheduler.plan()
        self.check()
        if step is None:
            return None
        assert step.id == self.launched + 1
        self.launched = step.id
        rows = step.rows
        assert sum(row.length for row in rows) == step.num_tokens <= self.scheduler.config.step_tokens
        images = self.scheduler.memory.features
        whole = images is not None and images.two_way
        assert step.num_tokens <= self.scheduler.cap.tokens or (whole and len(rows) == 1)
        assert len({row.slot for row in rows}) == len(rows) == step.num_rows, (
            "a slot has two rows in one step"
        )
        suspects = [row for row in rows if failed_before(row.sequence)]
        assert not suspects or len(rows) == 1, "a step could raise for others once more"
        self.check_limits(step)
        for row in rows:
            self.check_row(step, row)
        return step

    def check_limits(self, step: Step) -> None:
        config = self.scheduler.config
        chunks = [row.length for row in step.prefilling]
        images = self.scheduler.memory.features
        longest = LONGEST if images is not None and images.two_way else 0
        assert max(chunks, default=0) <= max(config.chunk_tokens, longest)
        most = config.max_prefill_tokens
        if most is not None and sum(chunks) > most:
            assert chunks[0] > most, "only the first chunk may be longer than the budget"
            assert sum(chunks[1:]) <= (most if config.admission == "pack" else 0)
        assert step.num_generating <= (config.max_decode_rows or step.num_generating)
        assert config.mixed or not (step.num_generating and chunks), "a mixed step, and mixing is off"

    def check_row(self, step: Step, row: Row) -> None:
        request, size = row.sequence, self.scheduler.memory.pages.page_size
        assert not request.finished, "a row of a request that has ended"
        assert not request.parked, "a row of a parked request"
        assert row.kv_length <= self.longest(request)
        first, stop = row.start // size, -(-row.kv_length // size)
        assert stop <= len(request.kv.pages), "a position without a page"
        assert first >= request.kv.cached_pages, "a row writes into the prefix cache"
        for page in request.kv.pages[: request.kv.cached_pages]:
            assert self.page_written.get(page, 0) <= self.resolved, f"cached page {page} is not resolved"
        if self.adapters is not None:
            self.check_adapter(step, row)
        tenant = (request.key, request.recovery.retractions)
        void = max(request.recovery.void_until, request.recovery.junk_until)
        assert self.verifying.get(tenant, 0) <= max(self.resolved, void), "a row behind drafts in flight"
        if row.drafts:
            assert not row.ids
            assert row.length == 1 + len(row.drafts)
            assert row.kv_length < request.max_length, "the last draft may be the last token, and is no input"
            self.verifying[tenant] = step.id
        for page in request.kv.pages[-(-row.start // size) : stop]:
            landed = self.page_touched.get(page, 0) <= self.resolved
            assert landed or self.page_tenant[page] == tenant, f"page {page} reused in flight"
        if row.new_request is not None:
            landed = self.slot_touched.get(row.slot, 0) <= self.resolved
            assert landed or self.slot_tenant[row.slot] == tenant, f"slot {row.slot} reused in flight"
        self.slot_touched[row.slot] = step.id
        self.slot_tenant[row.slot] = tenant
        self.page_tenant.update(dict.fromkeys(request.kv.pages[:stop], tenant))
        self.page_touched.update(dict.fromkeys(request.kv.pages[:stop], step.id))
        self.page_written.update(dict.fromkeys(request.kv.pages[first:stop], step.id))

    def check_adapter(self, step: Step, row: Row) -> None:
        request, version = row.sequence, row.sequence.adapter
        assert request.namespace.adapter == (0 if version is None else version.uid), "adapter"
        assert version is None or request.output in version.users, "an adapter was given back too early"
        if row.new_request is not None:
            assert row.new_request.adapter == (0 if version is None else version.slot), "adapter"
        if version is not None:
            self.adapter_read[version.slot] = step.id

    def longest(self, request: Sequence) -> int:
        """Positions that a request may ever have."""
        return request.max_length

    def replace_weights(self, version: int) -> None:
        assert self.resolved == self.launched, "a step is in flight while the weights are replaced"
        before = {request.key: list(request.output_ids) for request in self.queues.unfinished()}
        self.updating = True
        self.scheduler.replace_weights(version)
        self.updating = False
        self.updates += 1
        memory = self.scheduler.memory
        assert not self.queues.running
        # What workers fill is in no table, and what they copy is found no more.
        copied = memory.pages.cached if memory.transfers.departures else 0
        held = memory.pages.total - memory.pages.free - memory.transfers.pages - copied
        assert not held, "pages of earlier weights are still held"
        for request in self.queues.unfinished():
            assert request.output_ids == before[request.key], "a token was lost, or came from nowhere"
            assert request.namespace.weights == request.output.weight_version == version
        self.check()

    def resolve(self, step: Step, outcome: Outcome) -> list[Sequence]:
        self._land(step)
        updated: list[Sequence] = self.scheduler.resolve(step, outcome)
        self.check()
        return updated

    def fail(self, step: Step, error: BaseException) -> list[Sequence]:
        failed = self._start_over(self.scheduler.fail, step, error)
        self.check()
        return failed

    def run_out(self, step: Step, error: BaseException) -> list[Sequence]:
        failed = self._start_over(self.scheduler.run_out, step, error)
        least = max(self.least, step.num_tokens // 2)
        assert step.encoding or self.scheduler.cap.tokens <= least, "the next step asks for as much"
        self.check()
        return failed

    def _start_over(self, handle: Any, step: Step, error: BaseException) -> list[Sequence]:
        self._land(step)
        known = {request.key: request.known for request in step.sequences}
        self.starting_over = True
        failed: list[Sequence] = handle(step, error)
        self.starting_over = False
        for request in step.sequences:
            assert request.known == known[request.key], (
                "a token that was read is lost, or one that was not came"
            )
        return failed

    def _land(self, step: Step) -> None:
        assert step.id == self.resolved + 1, "steps resolve in order, each once"
        self.resolved = step.id

    def check(self) -> None:
        check(self.scheduler)
        if self.adapters is not None:
            self.adapters.check()
        if self.launched % 8 == 0:
            audit(self.scheduler)
            if self.adapters is not None:
                self.adapters.audit()
        memory = self.scheduler.memory
        if memory.pages.fenced or memory.slots.fenced:
            assert self.resolved < self.launched, "something is fenced, and no step is in flight"

    def totals(self) -> Counter[str]:
        """What happened, to see that everything did."""
        counters, memory = self.scheduler.queues.counters, self.scheduler.memory
        admitter = self.scheduler.admitter
        return Counter(
            updates=self.updates,
            retractions=counters.retractions,
            preemptions=counters.preemptions,
            parkings=counters.parkings,
            out_of_memory_retries=counters.out_of_memory_retries,
            late_tokens=counters.late_tokens,
            deferred_rows=counters.deferred_rows,
            forced_tokens=counters.forced_tokens,
            verified_rows=counters.verified_rows,
            accepted_tokens=counters.accepted_tokens,
            rejected_tokens=counters.drafted_tokens - counters.accepted_tokens,
            hit_tokens=memory.hit_tokens,
            snapshot_hits=memory.snapshot_hits,
            held_back=admitter.held,
            packed_rounds=admitter.packed_rounds,
            forced_rounds=admitter.forced_rounds,
            cut_steps=self.scheduler.times.cut_steps,
        )


class BlockLaws(LawChecker):
    """The same on a scheduler of blocks."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.least = self.size = scheduler.queues.batch.unit
        #: by request and life, the steps that hold a block of it and have not resolved
        self.flights: dict[tuple[int, int], deque[int]] = {}
        #: requests that were ended while some of their block was known, and some was not
        self.ended_in_mid_block = 0
        self.multi_steps = 0
        #: keys of those that were in the batch when the step was planned
        self.decoding: set[int] = set()
        #: by key, where the newest block that was read begins, and its rounds
        self.reached: dict[int, tuple[int, int]] = {}

    def plan(self) -> Step | None:
        self.decoding = {request.key for request in self.scheduler.queues.batch.sequences}
        return super().plan()

    def replace_weights(self, version: int) -> None:
        self.reached.clear()
        super().replace_weights(version)

    def longest(self, request: Sequence) -> int:
        return -(-request.max_length // self.size) * self.size

    def check_limits(self, step: Step) -> None:
        config = self.scheduler.config
        chunks = [row for row in step.rows if row.ids]
        rounds = [row for row in step.rows if not row.ids]
        lengths = [row.length for row in chunks]
        generating = step.generating
        assert not generating or (generating.lengths is not None and generating.unit == self.size)
        assert max(lengths, default=0) <= max(config.chunk_tokens, self.size)
        most = config.max_prefill_tokens
        if most is not None and sum(lengths) > most:
            assert lengths[0] > most, "only the first chunk may be longer than the budget"
            assert sum(lengths[1:]) <= (most if config.admission == "pack" else 0)
        if config.max_decode_rows is not None and config.mixed:
            blocks = sum(row.blocks for row in rounds if row.sequence.key in self.decoding)
            assert blocks <= config.max_decode_rows
        assert config.mixed or not (rounds and chunks), "a mixed step, and mixing is off"
        if config.diffusion_mode == "sync":
            assert self.launched == self.resolved + 1, "lock-step is one step after the other"
            decoding = [row for row in step.rows if row.sequence.key in self.decoding]
            if any(self.goes_on(row) for row in decoding):
                assert not chunks, "somebody is let in before all are done"
                assert not any(self.comes_to_the_next(row) for row in decoding), "not in step"
        if step.multi_step is not None:
            self.multi_steps += 1
            assert all(row.blocks == 1 for row in rounds)
            assert not chunks
            assert not self.scheduler.queues.waiting

    def goes_on(self, row: Row) -> bool:
        """A row is for a block of which some is known."""
        assert isinstance(row.sequence.cursor, BlockCursor)
        block = row.sequence.cursor.block
        return block is not None and not block.done

    def comes_to_the_next(self, row: Row) -> bool:
        """A row is for another block than the one that was last read."""
        assert isinstance(row.sequence.cursor, BlockCursor)
        block = row.sequence.cursor.block
        return block is not None and block.done and row.kv_length - self.size > block.start

    def check_row(self, step: Step, row: Row) -> None:
        super().check_row(step, row)
        request, size = row.sequence, self.size
        assert isinstance(request.cursor, BlockCursor)
        assert row.start % size == row.length % size == 0 < row.length
        assert row.length == len(row.ids or ()) + row.blocks * size
        if row.blocks:
            flights = self.flights.setdefault((request.key, request.recovery.retractions), deque())
            while flights and flights[0] <= self.resolved:
                flights.popleft()
            flights.append(step.id)
            assert len(flights) <= 2, "of a third row it cannot be said which block it is for"

    def resolve(self, step: Step, outcome: Outcome) -> list[Sequence]:
        self._land(step)
        known = {request.key: list(request.output_ids) for request in step.sequences}
        updated: list[Sequence] = self.scheduler.resolve(step, outcome)
        for request in step.sequences:
            before = known[request.key]
            assert request.output_ids[: len(before)] == before, "a token that was read has changed"
            assert isinstance(request.cursor, BlockCursor)
            assert len(request.cursor.step_map) == len(request.output_ids)
            if request.cursor.block is not None:
                reached = request.cursor.block.start, request.cursor.block.rounds
                assert reached >= self.reached.get(request.key, (0, 0)), "a block has begun again"
                self.reached[request.key] = reached
        self.check()
        return updated

    def totals(self) -> Counter[str]:
        counts = super().totals()
        never_there = ("deferred_rows", "forced_tokens", "snapshot_hits")
        for never in (*never_there, "verified_rows", "accepted_tokens", "rejected_tokens"):
            del counts[never]
        counts.update({"ended_in_mid_block": self.ended_in_mid_block, "multi_steps": self.multi_steps})
        return counts


def watch(engine: Engine) -> LawChecker:
    """Put a checker between the engine's core and its scheduler."""
    assert engine._core is not None
    return watch_core(engine._core)


def watch_core(core: Core) -> LawChecker:
    senior = core.scheduler
    checker = BlockLaws(senior) if isinstance(senior.queues.batch, BlockBatch) else LawChecker(senior)
    checker.adapters = core.adapters
    leaving = core.adapters.when_leaving

    def leave(version: AdapterVersion) -> None:
        assert checker.adapter_read.get(version.slot, 0) <= checker.resolved, "an adapter leaves in flight"
        leaving(version)

    core.adapters.when_leaving = leave

    class Watched(RequestQueues):
        __slots__ = ()

        def retract(self, request: Sequence) -> None:
            active = [each.key for each in self.running.values() if not each.parked]
            spared = request.parked or checker.starting_over or checker.updating or request.key != min(active)
            assert spared, "the eldest request was retracted"
            super().retract(request)

        def finish(self, request: Sequence, reason: Any, error: BaseException | None = None) -> bool:
            inside = in_mid_block(request)
            first = bool(super().finish(request, reason, error))
            assert not (first and request.key in checker.ended), "a request ended twice"
            checker.ended.add(request.key)
            if first and inside and reason == "abort" and isinstance(checker, BlockLaws):
                checker.ended_in_mid_block += 1
            return first

    senior.queues.__class__ = Watched
    core.scheduler = checker  # type: ignore[assignment]
    return checker


def in_mid_block(request: Sequence) -> bool:
    """Of the block that it is at, a round has written some tokens and others are still to come."""
    block = request.cursor.block if isinstance(request.cursor, BlockCursor) else None
    return block is not None and not block.done and max(block.written_in) >= 0
