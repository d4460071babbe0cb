"""TokenBatch: the requests that generate token by token, as columns.

Most rows of most steps are decodes: one more token of a request whose prompt is computed. They are kept
in arrays, so that planning a step costs a few array operations and no object per token.

A decode may carry drafts, which it verifies: see :mod:`aioinfer.speculation`. How many tokens it brings is
known when it has resolved, so nothing follows it in flight; it may itself follow a decode in flight::

    decode    ─┤ relay ├─ decode ─┤ relay ├─ verify d1 d2 d3 ──── resolved: 1 to 4 tokens ──── decode, or
    verify
"""

from __future__ import annotations

from collections import abc
from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from aioinfer.errors import ConstraintFailed, ProcessorFailed
from aioinfer.sampling.outcomes import ASKED, BAD_LOGITS, BAD_PROCESSOR, DEFERRED, NOT_FINITE
from aioinfer.scheduling.counters import SchedulerCounters
from aioinfer.scheduling.cursor import TokenCursor
from aioinfer.scheduling.recovery import without_junk
from aioinfer.scheduling.sequence import Sequence, SequenceState
from aioinfer.scheduling.speculation import FEW
from aioinfer.scheduling.step import NO_ROWS, UNDRAWN, Generating, Outcome, Row, Step, TableUpdate

if TYPE_CHECKING:
    from aioinfer.scheduling.memory import Memory
    from aioinfer.scheduling.queues import RequestQueues
    from aioinfer.scheduling.speculation import Speculation

__all__ = ["TokenBatch"]

#: longest prefill chunk of a request whose prompt's tokens are scored: the logits of all of them take room
_MAX_SCORED = 64
#: looked up once, not once per token
_FINISHED = SequenceState.FINISHED


class TokenBatch:
    """Rows in no particular order; a row that leaves is replaced by the last one. See
    :class:`~aioinfer.scheduling.queues.RunningBatch`."""

    __slots__ = (
        "_alone",
        "_columns",
        "_joining",
        "_memory",
        "_num_verifying",
        "_page_size",
        "_speculation",
        "_stale",
        "_stateful",
        "_turn",
        "capacity",
        "computed",
        "last_step",
        "limit",
        "sequences",
        "slots",
        "verifying",
    )

    unit = 1
    grain = 1
    locked = False

    def __init__(self, memory: Memory, size: int, speculation: Speculation | None = None) -> None:
        """``size``: requests at most. ``speculation``: None if no row has drafts."""
        self._memory = memory
        self._page_size = memory.pages.page_size
        self._speculation = speculation
        #: rows leave states that lack their drafts
        self._stateful = speculation is not None and memory.states is not None
        self._columns = np.zeros((5, size), np.int64)
        self.slots, self.computed, self.capacity, self.limit, self.verifying = self._columns
        #: rows of the batch whose drafts are being verified
        self._num_verifying = 0
        self.sequences: list[Sequence] = []
        #: requests whose next row waits for the result of the one before: their logits processors answer late
        self._alone: set[int] = set()
        #: requests whose page table the device does not know completely
        self._stale: dict[int, Sequence] = {}
        #: requests whose prefill ends in the step that is being planned
        self._joining: list[Sequence] = []
        self.last_step = 0
        self._turn = 0

    def __len__(self) -> int:
        return len(self.sequences)

    # -- membership -----------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        index, kv, cursor = len(self.sequences), sequence.kv, sequence.cursor
        assert isinstance(cursor, TokenCursor)
        if cursor.length >= sequence.max_length and not cursor.verifying:
            return  # its last token is in flight, for certain
        capacity, verifying = len(kv.pages) * self._page_size, cursor.verifying > 0
        self._columns[:, index] = (kv.slot, cursor.computed, capacity, sequence.max_length, verifying)
        self._num_verifying += verifying
        self.sequences.append(sequence)
        cursor.column, cursor.row = self.computed, index
        if _answers_late(sequence):
            self._alone.add(sequence.key)
        if kv.sent_pages < len(kv.pages):
            self._stale[sequence.key] = sequence

    def remove(self, sequence: Sequence) -> None:
        cursor = sequence.cursor
        assert isinstance(cursor, TokenCursor)
        index, last, computed = cursor.row, len(self.sequences) - 1, cursor.computed
        cursor.column, cursor.row = None, -1
        cursor.leave_batch(computed)
        self._num_verifying -= cursor.verifying > 0
        sequence.kv.last_step = max(sequence.kv.last_step, self.last_step)
        mover = self.sequences.pop()
        if index != last:
            self.sequences[index] = mover
            self._columns[:, index] = self._columns[:, last]
            mover.cursor.row = index
        self._stale.pop(sequence.key, None)
        self._alone.discard(sequence.key)

    def join(self, sequence: Sequence) -> None:
        # Not before the decodes of this step are chosen: the token to decode is sampled in it.
        self._joining.append(sequence)

    def abandon(self, last_step: int) -> None:
        self._joining.clear()
        self.last_step = min(self.last_step, last_step)

    def planned(self, generating: Generating, prefilling: abc.Sequence[Row], queues: RequestQueues) -> None:
        for sequence in self._joining:
            if not (sequence.finished or _answers_late(sequence)):
                self.add(sequence)
        self._joining.clear()

    # -- pages ----------------------------------------------------------------------------------

    def out_of_pages(self) -> list[Sequence]:
        count = len(self.sequences)
        # No request loses its pages for drafts of another one.
        full = self.computed[:count] >= self.capacity[:count]
        rows = np.flatnonzero(full & (self.verifying[:count] == 0) if self._num_verifying else full)
        return sorted((self.sequences[row] for row in rows.tolist()), key=_by_arrival)

    def changed_pages(self, sequence: Sequence) -> None:
        self.capacity[sequence.cursor.row] = len(sequence.kv.pages) * self._page_size
        self._stale[sequence.key] = sequence

    def expected_tokens(self, clip: int) -> int:
        count = len(self.sequences)
        return int(np.minimum(self.limit[:count] - self.computed[:count], clip).sum())

    # -- plan -----------------------------------------------------------------------------------

    def may_plan(self, *, in_flight: bool) -> bool:
        # After a step that verifies, only the requests without drafts could have a row. Where these are few,
        # all advance faster together.
        return self._num_verifying * FEW < max(1, len(self.sequences))

    def longest_chunk(self, sequence: Sequence) -> int | None:
        if sequence.params.prompt_logprobs is None:
            return None
        # Nothing is scored in front of the first position that is asked for.
        return max(_MAX_SCORED, sequence.request.first_scored - sequence.cursor.computed)

    def launch(self, step_id: int, without: Collection[Sequence], most: int) -> Generating:
        count = len(self.sequences) - self._num_verifying
        if count <= len(without) or most <= 0:
            return NO_ROWS
        self.last_step = step_id
        if not without and count <= most and not self._num_verifying:
            sequences = self.sequences.copy()
            slots, starts = self.slots[:count].copy(), self.computed[:count].copy()
            self.computed[:count] += 1
            limits = self.limit[:count]
        else:
            rows = self._choose(without, most)
            sequences = [self.sequences[row] for row in rows.tolist()]
            slots, starts, limits = self.slots[rows], self.computed[rows], self.limit[rows]
            self.computed[rows] += 1
        drafts: dict[int, abc.Sequence[int]] = {}
        if self._speculation is not None:
            drafts = self._speculation.drafts(sequences, starts.tolist(), most - len(sequences))
        if drafts:
            drafts = self._with_pages(sequences, starts, drafts)
        tables = self._tell_pages(sequences) if self._stale else []
        ending = [sequences[row] for row in np.flatnonzero(starts + 2 >= limits).tolist()]
        for sequence in ending:
            self.remove(sequence)
        decodes = Generating(sequences, slots, starts, tables=tables, ending=ending)
        if self._alone:
            decodes.alone = self._without_followers(sequences, drafts)
        replays = _replays(sequences) if self._stateful else {}
        if drafts or replays:
            decodes = self._verify(decodes, drafts, replays)
        if self._speculation is not None:
            decodes.draft_inputs = self._speculation.draft_inputs(decodes)
            decodes.draft_unit = self._speculation.draft_unit
        return decodes

    def _without_followers(
        self, sequences: abc.Sequence[Sequence], drafts: Collection[int]
    ) -> abc.Sequence[Sequence]:
        """Those that nothing is to follow leave the batch; ``drafts``: rows that verify some."""
        held = self._alone
        alone = [each for row, each in enumerate(sequences) if each.key in held and row not in drafts]
        for sequence in alone:
            self.remove(sequence)
        return alone

    def _with_pages(
        self,
        sequences: abc.Sequence[Sequence],
        starts: npt.NDArray[np.int64],
        drafts: dict[int, abc.Sequence[int]],
    ) -> dict[int, abc.Sequence[int]]:
        """The drafts that have pages, or get some that no other request needs."""
        found: dict[int, abc.Sequence[int]] = {}
        memory = self._memory
        for row, ids in drafts.items():
            sequence, start = sequences[row], int(starts[row])
            pages = sequence.kv.pages
            while len(pages) * self._page_size < start + 1 + len(ids):
                if memory.available <= len(self.sequences) or not memory.grow(sequence):
                    break
                self.changed_pages(sequence)
            fitting = ids[: len(pages) * self._page_size - start - 1]
            if len(fitting):
                found[row] = fitting
        return found

    def _verify(
        self, decodes: Generating, drafts: dict[int, abc.Sequence[int]], replays: dict[int, int]
    ) -> Generating:
        """The same rows, those with ``drafts`` last, and behind the others those with ``replays``."""
        sequences, count = decodes.sequences, len(decodes.sequences)
        others = [row for row in range(count) if row not in drafts]
        others.sort(key=replays.__contains__)
        order = np.asarray([*others, *drafts], np.int64)
        lengths = np.ones(count, np.int64)
        lengths[len(others) :] += np.asarray([len(ids) for ids in drafts.values()], np.int64)
        for row, ids in drafts.items():
            cursor = sequences[row].cursor
            assert isinstance(cursor, TokenCursor)
            self.computed[cursor.row] += len(ids)
            self.verifying[cursor.row] = 1
            cursor.verifying, cursor.drafted = self.last_step, len(ids)
            if (drafting := sequences[row].drafting) is not None:
                cursor.source = drafting.source
        self._num_verifying += len(drafts)
        return Generating(
            [sequences[row] for row in order.tolist()],
            decodes.slots[order],
            decodes.starts[order],
            lengths if drafts else None,
            tables=decodes.tables,
            ending=decodes.ending,
            alone=decodes.alone,
            drafts=list(drafts.values()),
            replays=np.asarray([replays.get(row, 0) for row in order.tolist()]) if replays else None,
        )

    def _choose(self, without: Collection[Sequence], most: int) -> npt.NDArray[np.int64]:
        """Rows in turn, so that all requests advance when not all fit into a step."""
        rows = np.arange(len(self.sequences))
        if without:
            rows = np.delete(rows, [sequence.cursor.row for sequence in without])
        if self._num_verifying:
            rows = rows[self.verifying[rows] == 0]
        if len(rows) <= most:
            return rows
        start = int(np.searchsorted(rows, self._turn % len(self.sequences)))
        chosen = np.take(rows, np.arange(start, start + most), mode="wrap")
        self._turn = int(chosen[-1]) + 1
        return chosen

    def _tell_pages(self, sequences: list[Sequence]) -> list[TableUpdate]:
        present = self._stale.keys() & {sequence.key for sequence in sequences}
        tables: list[TableUpdate] = []
        for sequence in [sequence for key, sequence in self._stale.items() if key in present]:
            kv = sequence.kv
            tables.append((kv.slot, kv.sent_pages, kv.pages[kv.sent_pages :]))
            kv.sent_pages = len(kv.pages)
            del self._stale[sequence.key]
        return tables

    # -- resolve --------------------------------------------------------------------------------

    def resolve(self, step: Step, outcome: Outcome, queues: RequestQueues) -> list[Sequence]:
        tokens, forced, counters = outcome.tokens, outcome.forced, queues.counters
        if step.id <= queues.junk_until:
            tokens = without_junk(step, tokens)
        updated: list[Sequence] = []
        generating = step.generating
        decodes = generating.sequences
        if generating.drafts:
            decodes = decodes[: generating.num_decodes]
        for index, (sequence, token) in enumerate(zip(decodes, tokens, strict=False)):
            if sequence.state is _FINISHED:
                counters.late_tokens += 1
            elif token < 0:
                updated += _unsampled(sequence, step, token, forced.get(index, ()), queues)
            else:
                updated.append(sequence)
                sequence.output_ids.append(token)
                if token in sequence.stop_ids:
                    sequence.output.stop_reason = token
                    queues.finish(sequence, "stop")
        for index in range(len(decodes), len(generating)):
            updated += self._resolve_verified(index, step, tokens[index], outcome, queues)
        for sequence in generating.ending:
            if sequence.known >= sequence.max_length:
                queues.finish(sequence, "length")
        for index, row in enumerate(step.prefilling, len(generating)):
            if row.sequence.finished:
                counters.late_tokens += row.samples
            else:
                updated += _resolve_chunk(step, row, tokens[index], forced.get(index, ()), queues)
                if self._speculation is not None and row.samples and row.slot == row.sequence.kv.slot:
                    self._speculation.prefilled(row.sequence, row.kv_length)
                if row.sequence.steering is not None:
                    self._go_on([row.sequence])
        if generating.alone:
            self._go_on(generating.alone)
        return updated

    def _go_on(self, alone: abc.Sequence[Sequence]) -> None:
        """The rows of these requests have resolved, which nothing has followed."""
        for sequence in alone:
            cursor = sequence.cursor
            waits = sequence.parked or cursor.in_batch or cursor.pending or not cursor.relay_ready
            if _answers_late(sequence) and sequence.state is SequenceState.RUNNING and not waits:
                self.add(sequence)

    def timed(self, step: Step, seconds: float) -> None:
        if self._speculation is not None:
            self._speculation.observe(step, seconds)

    def _resolve_verified(
        self, index: int, step: Step, token: int, outcome: Outcome, queues: RequestQueues
    ) -> abc.Sequence[Sequence]:
        """Commit the tokens of a row that verified drafts."""
        sequence, counters = step.generating.sequences[index], queues.counters
        drafts = step.generating.drafts[index - step.generating.num_decodes]
        run = outcome.runs.get(index, (token,)) if token >= 0 else (token,)
        if sequence.state is SequenceState.FINISHED:
            counters.late_tokens += len(run)
            return ()
        cursor = sequence.cursor
        assert isinstance(cursor, TokenCursor)
        if cursor.verifying == step.id:
            if cursor.in_batch:
                self.verifying[cursor.row] = 0
                self._num_verifying -= 1
            queues.shorten(sequence, len(drafts) + 1 - len(run))
            if self._stateful and step.generating.slots[index] == sequence.kv.slot:
                cursor.replays = len(run) - 1
        if token < 0:
            return _unsampled(sequence, step, token, outcome.forced.get(index, ()), queues)
        self._count(sequence, len(drafts), len(run) - 1, counters)
        if drafts[0] == UNDRAWN and sequence.drafting is not None:
            assert self._speculation is not None
            start = int(step.generating.starts[index])
            self._speculation.verified(sequence.drafting, start, len(drafts), len(run))
        for at, found in enumerate(run):
            if found < 0:
                _unsampled(sequence, step, found, outcome.forced.get(index, ()), queues)
            elif (reason := sequence.append(found)) is not None:
                counters.late_tokens += len(run) - 1 - at
                if sequence.drafting is not None:
                    sequence.drafting.cut(len(run) - 1 - at)
                    sequence.count_predictions()
                queues.finish(sequence, reason)
                break
        return (sequence,)

    def _count(self, sequence: Sequence, drafted: int, accepted: int, counters: SchedulerCounters) -> None:
        counters.verified_rows += 1
        counters.drafted_tokens += drafted
        counters.accepted_tokens += accepted
        cursor = sequence.cursor
        assert isinstance(cursor, TokenCursor)
        if sequence.drafting is not None:
            sequence.drafting.verified(cursor.source, drafted, accepted)
            sequence.count_predictions()

    def audit(self) -> None:
        """Assert that the columns say what the requests do. O(rows)."""
        assert not self._joining
        count = len(self.sequences)
        assert self._num_verifying == int(self.verifying[:count].sum())
        for index, sequence in enumerate(self.sequences):
            assert sequence.cursor.row == index
            row = [int(column[index]) for column in (self.slots, self.capacity, self.limit, self.verifying)]
            capacity = len(sequence.kv.pages) * self._page_size
            verifying = isinstance(sequence.cursor, TokenCursor) and sequence.cursor.verifying > 0
            assert row == [sequence.kv.slot, capacity, sequence.max_length, verifying], sequence


def _replays(sequences: abc.Sequence[Sequence]) -> dict[int, int]:
    """By row, the drafts that were right which its state takes in now."""
    found: dict[int, int] = {}
    for row, sequence in enumerate(sequences):
        cursor = sequence.cursor
        assert isinstance(cursor, TokenCursor)
        if cursor.replays:
            found[row], cursor.replays = cursor.replays, 0
    return found


def _answers_late(sequence: Sequence) -> bool:
    """A row of it may well sample nothing at first, and one that follows it at once would be void."""
    return sequence.steering is not None and sequence.steering.late


def _resolve_chunk(
    step: Step, row: Row, token: int, forced: abc.Sequence[int], queues: RequestQueues
) -> abc.Sequence[Sequence]:
    """Commit a prefill chunk, and the token after it if it was the last one."""
    sequence = row.sequence
    if row.ends and step.id <= sequence.recovery.void_until:
        return ()  # it has begun again since
    if token == BAD_LOGITS:
        return _unsampled(sequence, step, token, forced, queues)
    updated: abc.Sequence[Sequence] = (sequence,) if row.samples or row.ends else ()
    if row.samples and token >= 0:
        sequence.output_ids.append(token)
    # A request that was retracted meanwhile has lost this slot, and cannot have it again yet.
    stayed = row.slot == sequence.kv.slot
    if stayed:
        sequence.cursor.commit_prefill(row.kv_length, last=row.samples)
    if row.samples and token < 0:
        updated = _unsampled(sequence, step, token, forced, queues)
    elif row.samples and token in sequence.stop_ids:
        sequence.output.stop_reason = token
        queues.finish(sequence, "stop")
    elif row.ends or (row.samples and sequence.known >= sequence.max_length):
        queues.finish(sequence, "length")
    # The request may have been retracted just now.
    if stayed and sequence.state is SequenceState.RUNNING:
        queues.share(sequence)
    return updated


def _unsampled(
    sequence: Sequence, step: Step, token: int, forced: abc.Sequence[int], queues: RequestQueues
) -> abc.Sequence[Sequence]:
    """A row sampled no token: its request ends, or continues from tokens that the host knows."""
    if token > DEFERRED or token == BAD_PROCESSOR:
        error: Exception
        if token == BAD_LOGITS:
            queues.memory.distrust(sequence)
            error = FloatingPointError(NOT_FINITE)
            if sequence.steering is not None and (fields := sequence.params.constraints):
                error = ConstraintFailed((*fields, "logits_processors"), f"allow no token, or {NOT_FINITE}")
        elif token == BAD_PROCESSOR:
            assert sequence.steering is not None
            error = ProcessorFailed.because(sequence.steering.failed)
        else:
            assert sequence.grammar is not None
            why = sequence.grammar.failed or "no token is allowed"
            if sequence.grammar.broken:
                error = ValueError(why)
            else:
                error = ConstraintFailed(sequence.params.constraints, why)
        queues.finish(sequence, "abort", error)
        return (sequence,)
    if step.id <= sequence.recovery.void_until:
        return ()
    queues.counters.deferred_rows += 1
    if token == ASKED:
        queues.ask(sequence)
        return ()
    computed = sequence.known
    # Up to the token that ends the output, if one does.
    ended = next((reason for token in forced if (reason := sequence.append(token)) is not None), None)
    queues.counters.forced_tokens += sequence.known - computed
    queues.rewind(sequence, min(computed, sequence.known - 1))
    if ended is not None:
        queues.finish(sequence, ended)
    return (sequence,) if forced else ()


def _by_arrival(sequence: Sequence) -> int:
    return sequence.key
