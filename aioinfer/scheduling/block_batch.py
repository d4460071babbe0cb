"""BlockBatch: the requests that a diffusion model generates block by block.

A row is whole blocks: of the prompt, to denoise, to commit. Only what differs from tokens is here and in
:class:`~aioinfer.scheduling.block_cursor.BlockCursor`: what the next row of a request is, and what its round
has brought. Pages, slots, room in a step, the queue and retraction are the scheduler's.

In ``fdfo`` mode every request advances by itself: when its block is done it goes to the next one or leaves,
and makes room while others are still at theirs (first done, first out; PRs 27551 and 27877 of SGLang). In
``sync`` mode no request goes to the next block, and none is admitted, before all blocks of the batch are
done: the baseline.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

import numpy as np

from aioinfer.errors import ConstraintFailed
from aioinfer.outputs import Draft, TokenLogprob
from aioinfer.sampling.outcomes import BAD_GRAMMAR, BAD_LOGITS, NOT_FINITE
from aioinfer.scheduling.block_cursor import BlockCursor, RowInFlight
from aioinfer.scheduling.memory import Memory
from aioinfer.scheduling.sequence import Sequence, SequenceState
from aioinfer.scheduling.step import (
    NO_ROWS,
    Generating,
    MultiStepBudget,
    NewRequestData,
    Outcome,
    Row,
    Step,
    TableUpdate,
    new_request_data,
)

if TYPE_CHECKING:
    from aioinfer.config import EngineConfig
    from aioinfer.diffusion.state import BlockState
    from aioinfer.scheduling.queues import RequestQueues

__all__ = ["BlockBatch", "draft_of"]

#: rows of one request that may be in flight: what the second computes follows from the first, whatever the
#: first brings; of a third it could not be said which block it is for
_MOST_FLIGHTS = 2
#: weight of a round in the tokens per round of all requests
_NEWEST = 0.05


class BlockBatch:
    """Requests whose known blocks are computed, or in a row of the step that is being planned. See
    :class:`~aioinfer.scheduling.queues.RunningBatch`."""

    __slots__ = (
        "_config",
        "_fused",
        "_max_rounds",
        "_memory",
        "_turn",
        "grain",
        "last_step",
        "pace",
        "sequences",
        "unit",
    )

    def __init__(
        self, memory: Memory, config: EngineConfig, block_size: int, *, canvas: bool = False
    ) -> None:
        """``canvas``: blocks are canvases, whose commit is another pass than their rounds."""
        self._memory = memory
        self._config = config
        self._fused = config.fused_commit and not canvas
        self._max_rounds = config.max_rounds or 1
        #: positions of a block
        self.unit = block_size
        #: prompts are cut into multiples of so many positions
        self.grain = 1 if canvas else block_size
        self.sequences: list[Sequence] = []
        self.last_step = 0
        #: tokens that a round writes, running mean
        self.pace = 0.0
        self._turn = 0

    def __len__(self) -> int:
        return len(self.sequences)

    # -- membership -----------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        sequence.cursor.row = len(self.sequences)
        self.sequences.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        cursor = sequence.cursor
        mover = self.sequences.pop()
        if mover is not sequence:
            self.sequences[cursor.row] = mover
            mover.cursor.row = cursor.row
        cursor.row = -1

    def join(self, sequence: Sequence) -> None:
        # At once: a request whose prompt is cached may be the only one that wants a row of this step.
        self.add(sequence)

    def abandon(self, last_step: int) -> None:
        self.last_step = min(self.last_step, last_step)

    def planned(
        self, generating: Generating, prefilling: abc.Sequence[Row], queues: RequestQueues
    ) -> MultiStepBudget | None:
        queues.counters.rounds += len(generating) + sum(row.blocks > 0 for row in prefilling)
        # Rounds may follow each other on the device while they are all that there is to do.
        if self._max_rounds == 1 or queues.waiting or queues.prefilling:
            return None
        if any(cursor.drafts for cursor in self._cursors):
            return None
        single = generating.lengths is None or bool((generating.lengths == self.unit).all())
        alike = single and all(row.blocks == 1 and not row.ids for row in prefilling)
        return MultiStepBudget(self._max_rounds) if alike else None

    # -- pages ----------------------------------------------------------------------------------

    def out_of_pages(self) -> list[Sequence]:
        size = self._memory.pages.page_size
        short = [sequence for sequence in self.sequences if sequence.length > len(sequence.kv.pages) * size]
        return sorted(short, key=lambda sequence: sequence.key)

    def changed_pages(self, sequence: Sequence) -> None:
        """The request's next row tells the device."""

    def expected_tokens(self, clip: int) -> int:
        return sum(min(sequence.cursor.remaining, clip) for sequence in self.sequences)

    # -- plan -----------------------------------------------------------------------------------

    def may_plan(self, *, in_flight: bool) -> bool:
        return not in_flight or self._config.diffusion_mode != "sync"

    @property
    def locked(self) -> bool:
        return self._config.diffusion_mode == "sync" and any(cursor.mid_block for cursor in self._cursors)

    @property
    def _cursors(self) -> Iterable[BlockCursor]:
        return map(_cursor, self.sequences)

    @property
    def _held(self) -> bool:
        """In lock-step, and some block is not done or not committed."""
        if self._config.diffusion_mode != "sync":
            return False
        owed = not self._fused and any(cursor.uncommitted for cursor in self._cursors)
        return owed or self.locked

    def longest_chunk(self, sequence: Sequence) -> int | None:
        return None

    def launch(self, step_id: int, without: Collection[Sequence], most: int) -> Generating:
        sequences: list[Sequence] = []
        starts: list[int] = []
        lengths: list[int] = []
        hold = self._held
        # Rows of two blocks for all requests need no turns.
        enough = most >= 2 * len(self.sequences) * self.unit
        for sequence in self.sequences if enough else self._in_turn():
            cursor = _cursor(sequence)
            if (
                sequence in without
                or len(cursor.flights) >= _MOST_FLIGHTS
                or sequence.kv.last_step == step_id
            ):
                continue
            chosen = self._next_row(sequence, cursor, most, hold)
            if chosen is None:
                continue
            start, length = chosen
            cursor.flights.append(RowInFlight(start, start + length))
            sequences.append(sequence)
            starts.append(start)
            lengths.append(length)
            most -= length
            sequence.kv.last_step = self.last_step = step_id
        return self._columns(sequences, starts, lengths) if sequences else NO_ROWS

    def _columns(self, sequences: list[Sequence], starts: list[int], lengths: list[int]) -> Generating:
        tables: list[TableUpdate] = []
        new_requests: dict[int, NewRequestData] = {}
        for sequence in sequences:
            first, pages = sequence.kv.take_new_pages()
            if pages:
                tables.append((sequence.kv.slot, first, pages))
            new = new_request_data(sequence)
            if new is not None:
                new_requests[sequence.kv.slot] = new
        slots = [sequence.kv.slot for sequence in sequences]
        return Generating(
            sequences,
            np.asarray(slots, np.int64),
            np.asarray(starts, np.int64),
            np.asarray(lengths, np.int64),
            self.unit,
            tables,
            new_requests,
        )

    def _in_turn(self) -> list[Sequence]:
        """All requests, beginning with another one each time."""
        self._turn = (self._turn + 1) % len(self.sequences)
        return self.sequences[self._turn :] + self.sequences[: self._turn]

    def _next_row(
        self, sequence: Sequence, cursor: BlockCursor, most: int, hold: bool
    ) -> tuple[int, int] | None:
        """Start and length of a request's next row of at most ``most`` positions, if it is to have one."""
        size = self.unit
        chosen = cursor.next_round(fused=self._fused, hold=hold, pace=self.pace)
        if chosen is None:
            return None
        start, blocks = chosen
        if blocks > 1 and (most < 2 * size or not self._has_pages(sequence, start + 2 * size)):
            blocks = 1
        return (start, blocks * size) if blocks * size <= most else None

    def _has_pages(self, sequence: Sequence, positions: int) -> bool:
        """There are pages for a second block that no other request needs; takes them."""
        memory = self._memory
        while len(sequence.kv.pages) * memory.pages.page_size < positions:
            if memory.available <= len(self.sequences) or not memory.grow(sequence):
                return False
        return True

    # -- resolve --------------------------------------------------------------------------------

    def resolve(self, step: Step, outcome: Outcome, queues: RequestQueues) -> list[Sequence]:
        blocks, counters = outcome.blocks, queues.counters
        counters.forwards += outcome.rounds
        # Those that the device added by itself.
        counters.rounds += (outcome.rounds - 1) * len(blocks)
        updated: list[Sequence] = []
        for index, row in enumerate(step.rows):
            sequence = row.sequence
            cursor = _cursor(sequence)
            if sequence.finished:
                counters.late_tokens += row.blocks * self.unit
            elif step.id > max(sequence.recovery.void_until, sequence.recovery.junk_until):
                if row.blocks:
                    # Before the known blocks are shared: a row in flight holds back what it writes.
                    cursor.flights.popleft()
                if outcome.tokens[index] == BAD_LOGITS:
                    _fail(sequence, queues)
                    updated.append(sequence)
                    continue
                if row.ids:
                    _commit_known(sequence, cursor, row, queues)
                if row.blocks and blocks[index].failed:
                    _fail(sequence, queues, exhausted=outcome.tokens[index] == BAD_GRAMMAR)
                    updated.append(sequence)
                elif row.blocks and self._observe(sequence, cursor, blocks[index], queues):
                    updated.append(sequence)
        return updated

    def _observe(
        self, sequence: Sequence, cursor: BlockCursor, block: BlockState, queues: RequestQueues
    ) -> bool:
        """A round has resolved; True if there are tokens, an end, or a draft for the consumer."""
        output, asked = sequence.output, sequence.params.logprobs
        before, written = len(output.token_ids), cursor.observe(block)
        output.draft_version += cursor.drafts and not block.done
        if written is not None:
            self.pace += _NEWEST * (written - self.pace)
        for token, logprob, top in cursor.take_known():
            reason = sequence.append(token)
            if asked is not None:
                output.logprobs.append(TokenLogprob(token, logprob, top[:asked]))
            if reason is not None:
                queues.finish(sequence, reason)
                break
        output.block = cursor.under_way
        if cursor.requeues and not (cursor.flights or sequence.finished):
            queues.rewind(sequence, cursor.committed)
        return len(output.token_ids) > before or cursor.drafts

    def timed(self, step: Step, seconds: float) -> None:
        """Nothing follows from it."""

    def audit(self) -> None:
        """Assert that every request is described correctly."""
        for index, sequence in enumerate(self.sequences):
            assert sequence.cursor.row == index
            assert len(_cursor(sequence).flights) <= _MOST_FLIGHTS


def _fail(sequence: Sequence, queues: RequestQueues, *, exhausted: bool = False) -> None:
    error: Exception
    grammar, constraints = sequence.grammar, sequence.params.constraints
    if grammar is not None and grammar.failed is not None:
        why = grammar.failed
        error = ValueError(why) if grammar.broken else ConstraintFailed(constraints, why)
    elif exhausted:
        error = ConstraintFailed(constraints, "no token is allowed")
    else:
        queues.memory.distrust(sequence)
        error = FloatingPointError(NOT_FINITE)
    queues.finish(sequence, "abort", error)


def _commit_known(sequence: Sequence, cursor: BlockCursor, row: Row, queues: RequestQueues) -> None:
    """The known blocks of a row are computed."""
    computed = max(cursor.committed, row.start + len(row.ids))
    cursor.commit_prefill(computed, last=computed >= cursor.block_start)
    if sequence.state is SequenceState.RUNNING:
        queues.share(sequence)


def draft_of(sequence: Sequence) -> Draft | None:
    """The newest draft of a sequence whose caller wants drafts."""
    found = _cursor(sequence).draft(sequence.stop_ids)
    if found is None:
        return None
    tokens, rounds, end = found
    shown = end + sequence.params.include_stop
    text = sequence.text.ahead(tokens[:shown])
    return Draft(len(sequence.output_ids), tuple(tokens), text, tuple(rounds))


def _cursor(sequence: Sequence) -> BlockCursor:
    cursor = sequence.cursor
    assert isinstance(cursor, BlockCursor)
    return cursor
