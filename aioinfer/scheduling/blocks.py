"""Blocks: the scheduler of diffusion models. A row is whole blocks: of the prompt, to denoise, to commit.

Only what differs from :class:`~aioinfer.scheduling.scheduler.Scheduler` is here: what the next row of a
request is, and what its round has brought. Who gets pages, a slot and room in a step, who waits and who
loses them is the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from aioinfer.diffusion.state import BlockState
from aioinfer.scheduling.admission import Limits, StepBudget
from aioinfer.scheduling.block_request import BlockRequest
from aioinfer.scheduling.decode_batch import NO_DECODES
from aioinfer.scheduling.memory import Memory
from aioinfer.scheduling.policy import Policy
from aioinfer.scheduling.recovery import StepCap
from aioinfer.scheduling.request import Request, RequestState
from aioinfer.scheduling.scheduler import Scheduler
from aioinfer.scheduling.step import MultiStepBudget, Outcome, Row, Step, new_request_data

__all__ = ["BlockScheduler"]

#: rows of one request that may be in flight: what the second computes follows from the first, whatever the
#: first brings; of a third it could not be said which block it is for
_MOST_FLIGHTS = 2
#: how much a round counts in the tokens per round of all
_NEWEST = 0.05


class BlockBatch:
    """The requests whose known blocks are computed, or in a row of the step that is being planned."""

    __slots__ = ("_memory", "_turn", "computed", "last_step", "limits", "pace", "requests")

    def __init__(self, memory: Memory, limits: Limits) -> None:
        self._memory = memory
        self.limits = limits
        self.requests: list[BlockRequest] = []
        self.last_step = 0
        #: tokens that a round writes, in the mean of late
        self.pace = 0.0
        self._turn = 0
        #: asked for by nobody: how far a request is, it knows itself
        self.computed: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, request: Request) -> None:
        assert isinstance(request, BlockRequest)
        request.batch, request.batch_index = self, len(self.requests)
        self.requests.append(request)

    def remove(self, request: Request) -> None:
        mover = self.requests.pop()
        if mover is not request:
            self.requests[request.batch_index] = mover
            mover.batch_index = request.batch_index
        request.batch, request.batch_index = None, -1

    def out_of_pages(self) -> list[Request]:
        size = self._memory.pages.page_size
        short = [request for request in self.requests if request.length > len(request.pages) * size]
        return sorted(short, key=lambda request: request.key)

    def changed_pages(self, request: Request) -> None:
        """The next row tells the device."""

    def expected_tokens(self, clip: int) -> int:
        return sum(min(request.max_length - request.known, clip) for request in self.requests)

    def audit(self) -> None:
        for index, request in enumerate(self.requests):
            assert request.batch is self
            assert request.batch_index == index
            assert len(request.flights) <= _MOST_FLIGHTS

    def launch(self, step_id: int, without: Collection[Request], most: int) -> list[Row]:
        """The next round of everybody but ``without`` who does not wait for one in flight, ``most`` tokens
        in all."""
        rows: list[Row] = []
        hold = self._held
        for request in self.requests if most >= self._full else self._in_turn():
            if request in without or len(request.flights) >= _MOST_FLIGHTS or request.last_step == step_id:
                continue
            row = self._row(request, most, hold)
            if row is None:
                continue
            rows.append(row)
            most -= row.length
            request.last_step = self.last_step = step_id
        return rows

    @property
    def _full(self) -> int:
        """Tokens that rows of two blocks for everybody would have."""
        return 2 * len(self.requests) * (self.requests[0].block_size if self.requests else 0)

    @property
    def locked(self) -> bool:
        """In lock-step, and some block is not done."""
        return self.limits.diffusion_mode == "sync" and any(request.mid_block for request in self.requests)

    @property
    def _held(self) -> bool:
        """In lock-step, and some block is not done or not committed."""
        if self.limits.diffusion_mode != "sync":
            return False
        owed = not self.limits.fused_commit and any(request.uncommitted for request in self.requests)
        return owed or self.locked

    def _in_turn(self) -> list[BlockRequest]:
        """Everybody, beginning with another one each time."""
        self._turn = (self._turn + 1) % len(self.requests)
        return self.requests[self._turn :] + self.requests[: self._turn]

    def _row(self, request: BlockRequest, most: int, hold: bool) -> Row | None:
        size = request.block_size
        chosen = request.next_round(fused=self.limits.fused_commit, hold=hold, pace=self.pace)
        if chosen is None:
            return None
        start, blocks = chosen
        if blocks > 1 and (most < 2 * size or not self._has_pages(request, start + 2 * size)):
            blocks = 1
        return block_row(request, start, blocks) if blocks * size <= most else None

    def _has_pages(self, request: BlockRequest, positions: int) -> bool:
        """There are pages for a second block; those of others are not asked for."""
        memory = self._memory
        while len(request.pages) * memory.pages.page_size < positions:
            if memory.available <= len(self.requests) or not memory.grow(request):
                return False
        return True


def block_row(request: BlockRequest, start: int, blocks: int, known: int = 0) -> Row:
    """A row from ``start`` on: ``known`` positions whose tokens are final, and blocks behind."""
    row = Row(
        request=request,
        slot=request.slot,
        start=start,
        length=known + blocks * request.block_size,
        ids=request.known_ids(start, start + known),
        samples=blocks > 0,
        new_pages=request.pages[request.sent_pages :],
        first_new_page=request.sent_pages,
        admission=new_request_data(request),
        blocks=blocks,
    )
    request.sent_pages = len(request.pages)
    if blocks:
        request.flights.append(row)
    return row


class BlockScheduler(Scheduler):
    """Continuous batching of blocks. See the module, and :class:`BlockRequest` for a request's own course.

    In ``fdfo`` mode every request goes on by itself: whose block is done comes to the next one, leaves, and
    makes room while others are still at theirs (first done, first out; PRs 27551 and 27877 of SGLang). In
    ``sync`` mode nobody comes to the next block, and nobody is let in, before all blocks of the batch are
    done: the baseline.
    """

    __slots__ = ("_block_size",)

    batch: BlockBatch

    def __init__(
        self, memory: Memory, limits: Limits, policy: Policy | None = None, *, block_size: int
    ) -> None:
        super().__init__(memory, limits, policy)
        self._block_size = block_size
        self.cap = StepCap(limits.max_step_tokens, least=block_size)

    @staticmethod
    def _make_batch(memory: Memory, limits: Limits) -> BlockBatch:
        return BlockBatch(memory, limits)

    # -- plan -----------------------------------------------------------------------------------

    def plan(self) -> Step | None:
        """The next step, or None if nothing can be computed before a launched step resolves."""
        limits = self.limits
        if limits.diffusion_mode == "sync" and self.last_step > self.memory.pages.last_resolved:
            return None
        budget = StepBudget(limits, self.memory.pages.page_size, self.cap.tokens, self._block_size)
        self._short = False
        self._preempt()
        starved = self._grow()
        rounds: list[Row] = []
        prefills: list[Row] = []
        if self.batch.locked:
            return self._step(self._rounds(budget, starved), [], budget)
        if limits.step_priority == "decode" and (limits.mixed or self._prefilled_last):
            rounds = self._rounds(budget, starved)
        if limits.mixed or not rounds:
            prefills = self._prefill(budget)
        # Who was let in just now may have no prompt to compute, and be the only one who wants a row.
        if not rounds and (limits.mixed or not prefills):
            rounds = self._rounds(budget, starved)
        return self._step(rounds, prefills, budget)

    def _step(self, rounds: list[Row], prefills: list[Row], budget: StepBudget) -> Step | None:
        if not (rounds or prefills):
            return None
        self.last_step += 1
        self._prefilled_last = bool(prefills)
        num_tokens = self.cap.tokens - budget.tokens
        rows = (*rounds, *prefills)
        step = Step(self.last_step, NO_DECODES, rows, num_tokens, self._horizon(rows))
        counters = self.counters
        counters.steps += 1
        counters.rounds += sum(row.blocks > 0 for row in rows)
        counters.prefill_tokens += step.prefill_tokens
        counters.decode_tokens += num_tokens - step.prefill_tokens
        self.ratio.decay()
        return step

    def _horizon(self, rows: tuple[Row, ...]) -> MultiStepBudget | None:
        """Rounds may follow each other where they are, while they are all that there is to do."""
        if self.limits.max_rounds == 1 or self.waiting or self.prefilling:
            return None
        alike = all(row.blocks == 1 and not row.ids for row in rows)
        if any(request.drafts for request in self.batch.requests):
            return None  # somebody wants to see every round
        return MultiStepBudget(self.limits.max_rounds) if alike else None

    def _rounds(self, budget: StepBudget, starved: Collection[Request]) -> list[Row]:
        most = budget.tokens
        if self.limits.max_decode_rows is not None:
            most = min(most, self.limits.max_decode_rows * self._block_size)
        rows = self.batch.launch(self.last_step + 1, starved, most)
        budget.spend_decodes(sum(row.length for row in rows))
        return rows

    def _chunk(self, request: Request, budget: StepBudget, most: int | None = None) -> list[Row]:
        """The next known blocks of an admitted request, and its first round if there is room for it, too."""
        assert isinstance(request, BlockRequest)
        start, known = request.computed, request.block_start
        stop = request.length if self.limits.mixed else known
        length = budget.chunk(start, stop - start, most) if start < stop else 0
        rows: list[Row] = []
        if length > 0:
            budget.spend_prefill(length)
            request.last_step = self.last_step + 1
            blocks = int(start + length > known)
            rows = [block_row(request, start, blocks, length - blocks * self._block_size)]
        request.advance(min(start + length, known), len(request.output_ids))
        if start + length == stop:
            request.relay_ready = True
            del self.prefilling[request.key]
            self.batch.add(request)
        return rows

    def _may_generate(self, request: Request) -> int:
        return max(0, min(request.max_length - request.known, self.limits.clip_new_tokens))

    # -- resolve --------------------------------------------------------------------------------

    def land(self, step: Step, outcome: Outcome) -> list[Request]:
        return self.resolve_blocks(step, outcome.blocks, outcome.rounds)

    def resolve_blocks(
        self, step: Step, blocks: Mapping[int, BlockState], forwards: int = 1
    ) -> list[Request]:
        """Commit what a step's rounds brought, by row; returns the requests that moved, in row order.

        ``forwards``: how many it took.
        """
        self.memory.resolved(step.id)
        self.counters.forwards += forwards
        # Those that the device added by itself.
        self.counters.rounds += (forwards - 1) * len(blocks)
        self.cap.fitted()
        moved: list[Request] = []
        for index, row in enumerate(step.prefills):
            request = row.request
            assert isinstance(request, BlockRequest)
            if request.finished:
                self.counters.late_tokens += row.blocks * self._block_size
            elif step.id > max(request.void_until, request.junk_until):
                if row.blocks:
                    # Before the known blocks are shared: a row in flight holds back what it writes.
                    request.flights.popleft()
                if row.ids:
                    self._commit_known(request, row)
                if row.blocks and self._observe(request, blocks[index]):
                    moved.append(request)
        return moved

    def _commit_known(self, request: BlockRequest, row: Row) -> None:
        """The known blocks of a row are computed."""
        assert row.ids is not None
        computed = max(request.committed, row.start + len(row.ids))
        request.commit_prefill(computed, last=computed >= request.block_start)
        if request.state is RequestState.RUNNING:
            self._share(request)

    def _observe(self, request: BlockRequest, block: BlockState) -> bool:
        """A round has resolved; True if there are tokens, an end, or a draft for somebody."""
        if block.failed:
            self.memory.distrust(request)
            self.finish(request, "abort", FloatingPointError("the model gave no finite logits"))
            return True
        before, written = len(request.output_ids), request.observe(block)
        if written is not None:
            self.batch.pace += _NEWEST * (written - self.batch.pace)
        reason = request.take_known()
        if reason is not None:
            self.finish(request, reason)
        return len(request.output_ids) > before or request.drafts

    def _retract(self, request: Request) -> None:
        super()._retract(request)
        # What is in flight is not waited for: the rounds are computed again from the last that was read.
        request.void_until = self.last_step
