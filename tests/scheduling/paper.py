"""PaperDevice: what a device does with rows of blocks, in the plainest way, checking all it reads.

A "model" is a hash: the tokens of a block follow from all tokens before it, and so does in how many rounds
they are written, and in which order. KV cells hold the position and the hash of everything up to the end of
their block, so whoever reads a cell of somebody else, of another block, or of a block that was not committed
is found out.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from aioinfer.diffusion.state import BlockState
from aioinfer.scheduling.step import Row, Step

MASK_ID = 999
STOP = 7
_BITS = (1 << 61) - 1


def mix(state: int, *values: int) -> int:
    for value in values:
        state = (state ^ value) * 0x9E3779B97F4A7C15 & _BITS
        state ^= state >> 29
    return state


class TaintError(AssertionError):
    """A row reads what is not its own, or is not there."""


@dataclass(frozen=True)
class Script:
    """How blocks come to be."""

    size: int
    #: rounds of a block at most
    most_rounds: int = 4
    #: one of so many tokens is a stop
    stops: int = 40
    #: tokens that are written are changed once more when the block is full
    edits: bool = False

    def tokens(self, context: int, given: list[int]) -> list[int]:
        """What the block behind ``context`` ends as."""
        found = list(given)
        for at in range(len(given), self.size):
            drawn = mix(context, at, 3)
            found.append(STOP if drawn % self.stops == 0 else 100 + drawn % 500)
        return found

    def rounds(self, context: int, unknown: int) -> int:
        """Rounds until every token is written."""
        return min(unknown, 1 + mix(context, 11) % self.most_rounds)

    def round(self, context: int, block: BlockState, given: int) -> BlockState:
        """The block after one more round."""
        if block.done:
            return replace(block, changed=False)
        first = list(block.ids[:given])
        final = self.tokens(context, first)
        order = sorted(range(given, self.size), key=lambda at: mix(context, at, 5))
        needed = self.rounds(context, len(order))
        ids, known, written_in = list(block.ids), list(block.known), list(block.written_in)
        logprobs = list(block.logprobs)
        full = all(known)
        # A share each round; with edits, first something else, and one round more that changes nothing.
        write = [] if full else order[len(order) * block.rounds // needed :][: -(-len(order) // needed)]
        write = [at for at in write if not known[at]]
        for at in write:
            ids[at] = final[at] + 1000 if self.edits and at % 3 == 0 else final[at]
            known[at], written_in[at], logprobs[at] = True, block.rounds, -float(mix(context, at) % 100)
        changed = bool(write)
        if full:
            assert self.edits, "a full block is denoised again"
            changed = ids != final
            ids = list(final)
        done = (not changed) if self.edits else all(known)
        private = (sum(block.private) + block.rounds,)
        return BlockState(
            block.start, ids, known, written_in, logprobs, block.rounds + 1, done, changed, False, private
        )

    def generate(self, prompt: list[int], max_tokens: int) -> tuple[list[int], list[int]]:
        """The output of a request, and the round in which each token was written."""
        ids, steps = list(prompt), list[int]()
        while True:
            start = len(ids) // self.size * self.size
            context = chain(ids[:start], self.size)[-1]
            block = fresh(start, ids[start:], self.size)
            while not block.done:
                block = self.round(context, block, len(ids) - start)
            for at in range(len(ids) - start, self.size):
                ids.append(block.ids[at])
                steps.append(block.written_in[at])
                if block.ids[at] == STOP or len(ids) - len(prompt) == max_tokens:
                    return ids[len(prompt) :], steps


def fresh(start: int, given: list[int], size: int) -> BlockState:
    rest = size - len(given)
    known = [True] * len(given) + [False] * rest
    return BlockState(
        start, [*given, *[MASK_ID] * rest], known, [-1] * size, [0.0] * size, 0, not rest, False, False
    )


def chain(ids: list[int], size: int) -> list[int]:
    """The hash of everything up to the end of each block, with that of nothing before them."""
    hashes = [1]
    for at in range(0, len(ids) - len(ids) % size, size):
        hashes.append(mix(hashes[-1], *ids[at : at + size]))
    return hashes


@dataclass
class _Slot:
    table: list[int] = field(default_factory=list)
    #: final tokens before the block, which must be in the cells
    final: list[int] = field(default_factory=list)
    given: int = 0
    block: BlockState | None = None
    key: int = 0


class PaperDevice:
    """Steps are prepared when they are launched and computed when they resolve."""

    def __init__(self, script: Script, *, num_pages: int, page_size: int, num_slots: int) -> None:
        self.script = script
        self._page_size = page_size
        self._cells: list[tuple[int, int]] = [(-1, 0)] * ((num_pages + 1) * page_size)
        self._slots = [_Slot() for _ in range(num_slots + 1)]
        self._tables: list[list[int]] = [[] for _ in range(num_slots + 1)]
        #: requests whose rows are junk until they are admitted again: a step of theirs failed
        self._doomed: set[int] = set()
        #: times a second block was computed, and times it was void
        self.seconds = self.void_seconds = 0

    def prepare(self, step: Step) -> list[tuple[Row, list[int]]]:
        prepared = []
        seen = set()
        for row in step.rows:
            assert row.request.key not in seen, "two rows of one request"
            seen.add(row.request.key)
            table = self._tables[row.slot]
            if row.new_request is not None:
                table.clear()
            if row.new_pages:
                assert row.first_new_page <= len(table)
                table[row.first_new_page : row.first_new_page + len(row.new_pages)] = row.new_pages
            prepared.append((row, table.copy()))
        assert step.num_tokens == sum(row.length for row in step.rows)
        return prepared

    def spoil(self, prepared: list[tuple[Row, list[int]]]) -> None:
        """The step failed."""
        for row, table in prepared:
            self._doomed.add(row.request.key)
            self._write(row, table, row.start, [0] * (row.length // self.script.size))

    def compute(self, prepared: list[tuple[Row, list[int]]]) -> dict[int, BlockState]:
        return {
            index: block
            for index, (row, table) in enumerate(prepared)
            if (block := self._row(row, table)) is not None
        }

    def _row(self, row: Row, table: list[int]) -> BlockState | None:
        slot, size = self._slots[row.slot], self.script.size
        if row.new_request is not None:
            self._admit(row, slot)
        if row.request.key in self._doomed:
            self._write(row, table, row.start, [0] * (row.length // size))
            return fresh(row.start, [], size) if row.blocks else None
        if row.start % size or row.length % size or not row.length:
            raise TaintError(f"{row}: not whole blocks")
        if slot.key != row.request.key:
            raise TaintError(f"{row}: the slot is another's")
        if row.ids:
            if len(slot.final) != row.start:
                raise TaintError(f"{row}: {len(slot.final)} positions come before")
            slot.final += row.ids
        block = slot.block
        assert block is not None
        if row.blocks == 1 and block.done and block.start < row.kv_length - size:
            slot.final += block.ids
            slot.block, slot.given = fresh(row.kv_length - size, [], size), 0
        self._check_before(row, table, slot)
        hashes = chain(slot.final, size)
        self._write(row, table, row.start, hashes[row.start // size + 1 :])
        return self._round(row, table, slot) if row.blocks else None

    def _admit(self, row: Row, slot: _Slot) -> None:
        admission = row.new_request
        assert admission is not None
        self._doomed.discard(row.request.key)
        ids = [*admission.prompt_ids, *admission.output_ids]
        start = len(ids) // self.script.size * self.script.size
        slot.key, slot.final = row.request.key, ids[: row.start]
        given = list(admission.prompt_ids[start:])
        slot.given = len(given)
        slot.block = fresh(start, given, self.script.size)
        if admission.resume is not None:
            if admission.resume.start != start:
                raise TaintError(f"{row}: goes on at {admission.resume.start}, not at {start}")
            slot.block = admission.resume

    def _round(self, row: Row, table: list[int], slot: _Slot) -> BlockState:
        size = self.script.size
        last = row.kv_length - size
        block = slot.block
        assert block is not None
        context = chain(slot.final, size)[-1]
        turns = block.done and block.start < last
        if row.blocks == 2:
            self.seconds += 1
            self.void_seconds += not turns
            if block.start != row.start + len(row.ids or ()):
                raise TaintError(f"{row}: the block of the slot begins at {block.start}")
            # A second block behind one that is not final leaves cells that nobody may read.
            self._write(row, table, block.start, [mix(context, *block.ids) if turns else 0, 0])
        if turns:
            slot.final += block.ids
            context = chain(slot.final, size)[-1]
            block, slot.given = fresh(last, [], size), 0
        if block.start != (last if turns or row.blocks == 1 else row.start + len(row.ids or ())):
            raise TaintError(f"{row}: the block of the slot begins at {block.start}")
        was_done = block.done
        slot.block = self.script.round(context, block, slot.given)
        if not turns or row.blocks == 1:
            # Over final tokens, before this round or unchanged by it, the forward was a commit.
            final = was_done or (slot.block.done and not slot.block.changed)
            self._write(row, table, block.start, [mix(context, *block.ids) if final else 0])
        return slot.block

    def _check_before(self, row: Row, table: list[int], slot: _Slot) -> None:
        """Every cell before the row's first block that is not final holds what it should."""
        size = self.script.size
        hashes = chain(slot.final, size)
        stop = row.start
        if len(slot.final) < stop:
            raise TaintError(f"{row}: {len(slot.final)} positions come before")
        for at in range(stop):
            cell = self._cells[table[at // self._page_size] * self._page_size + at % self._page_size]
            if cell != (at, hashes[at // size + 1]):
                raise TaintError(f"{row}: reads {cell} at position {at}")

    def _write(self, row: Row, table: list[int], start: int, hashes: list[int]) -> None:
        size = self.script.size
        if row.kv_length > len(table) * self._page_size:
            raise TaintError(f"{row}: no page for position {row.kv_length - 1}")
        for index, value in enumerate(hashes):
            for at in range(start + index * size, start + (index + 1) * size):
                self._cells[table[at // self._page_size] * self._page_size + at % self._page_size] = (
                    at,
                    value,
                )
