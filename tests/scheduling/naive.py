"""A device that computes the scheduler's steps by the book, cell by cell, and what is known of requests."""

from __future__ import annotations

from collections import abc
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

from aioinfer.sampling.outcomes import BAD_LOGITS, NO_TOKEN
from aioinfer.scheduling.sequence import Sequence
from aioinfer.scheduling.step import Row, Step

#: what a cell holds that nobody may read
JUNK = ("junk",)


@dataclass
class Life:
    """What the model knows of one request."""

    request: Sequence
    #: everything the device sampled, and what of it was delivered
    sampled: list[int] = field(default_factory=list)
    delivered: list[int] = field(default_factory=list)
    reason: str | None = None
    #: tokens it had when a step of it last ran out of memory
    ran_out_at: int | None = None
    #: tokens it had when a step of it last raised
    failed_at: int | None = None
    #: its tenancy of a slot: who touches a page is (key, tenancy)
    tenancy: int = 0

    @property
    def suspect(self) -> bool:
        """A step of it raised, and nothing came of it since."""
        return self.failed_at == len(self.delivered)

    def cell(self, stop: int) -> tuple[Any, ...]:
        """What the cell of position ``stop - 1`` holds: all tokens up to there, and for whom."""
        return (self.request.namespace, *self.request.prompt_ids, *self.sampled)[: stop + 1]


@dataclass
class Flight:
    step: Step
    tokens: list[int]
    rows: list[Row]
    #: who touches a page, and who wrote a cell
    touched: dict[int, set[tuple[int, int]]]
    written: dict[int, int]
    #: in which tenancy each request is here
    tenancies: dict[int, int] = field(default_factory=dict)
    #: requests that start over: what this brings for them is junk
    void: set[int] = field(default_factory=set)
    #: by cell of recurrent state: whose row wrote it here; and all cells that were read or written
    states_written: dict[int, int] = field(default_factory=dict)
    states_touched: dict[int, set[tuple[int, int]]] = field(default_factory=dict)


class NaiveDevice:
    """Computes rows by the book, and looks at every cell before it reads it."""

    def __init__(
        self, num_pages: int, page_size: int, num_slots: int, num_snapshots: int | None = None
    ) -> None:
        self.page_size = page_size
        self.cells: list[tuple[Any, ...]] = [JUNK] * ((num_pages + 1) * page_size)
        self.writer = [0] * len(self.cells)
        self.tables: list[list[int]] = [[] for _ in range(num_slots + 1)]
        self.tenants = [0] * (num_slots + 1)
        self.relay = [BAD_LOGITS] * (num_slots + 1)
        #: what each cell of recurrent state stands for, and the newest step that wrote it
        self.states: list[tuple[Any, ...]] | None = None
        if num_snapshots is not None:
            self.states = [JUNK] * (num_slots + num_snapshots + 1)
        self.state_writer = [0] * (0 if self.states is None else len(self.states))

    def launch(
        self, step: Step, lives: dict[int, Life], flights: list[Flight], luck: abc.Sequence[int]
    ) -> Flight:
        rows = step.rows
        flight = Flight(step, [], rows, {}, {})
        for row in rows:
            self._tell(row, lives[row.sequence.key], flights)
        for row in rows:
            flight.tenancies[row.sequence.key] = lives[row.sequence.key].tenancy
            self._write(row, lives[row.sequence.key], flight, flights)
        for at, row in enumerate(rows):
            token = NO_TOKEN
            if row.samples:
                life = lives[row.sequence.key]
                assert row.output_index == len(life.sampled), "a token is sampled twice, or was lost"
                token = luck[at % len(luck)]
                life.sampled.append(token)
                self.relay[row.slot] = token
            flight.tokens.append(token)
        return flight

    def spoil(self, flight: Flight, keys: Container[int]) -> None:
        """What a flight wrote for these requests is junk."""
        for cell, key in flight.written.items():
            if key in keys and self.writer[cell] == flight.step.id:
                self.cells[cell] = JUNK
        for cell, key in flight.states_written.items():
            if key in keys and self.state_writer[cell] == flight.step.id:
                assert self.states is not None
                self.states[cell] = JUNK

    def _tell(self, row: Row, life: Life, flights: list[Flight]) -> None:
        table = self.tables[row.slot]
        if row.new_request is not None:
            busy = [each.step.id for each in flights if any(r.slot == row.slot for r in each.rows)]
            assert not busy, f"slot {row.slot} is handed out while steps {busy} use it"
            assert [*row.new_request.output_ids] == life.sampled, "announced with other tokens than it has"
            table.clear()
            self.tenants[row.slot] = row.sequence.key
            self.relay[row.slot] = BAD_LOGITS
            life.tenancy += 1
        assert self.tenants[row.slot] == row.sequence.key, "the slot has another tenant"
        assert row.first_new_page <= len(table) or not row.new_pages, "a gap in the page table"
        table[row.first_new_page : row.first_new_page + len(row.new_pages)] = row.new_pages

    def _write(self, row: Row, life: Life, flight: Flight, flights: list[Flight]) -> None:
        table, size = self.tables[row.slot], self.page_size
        assert row.length >= 1
        assert row.kv_length <= len(table) * size, "a position without a page"
        cells = [table[at // size] * size + at % size for at in range(row.kv_length)]
        who = (row.sequence.key, life.tenancy)
        for page in {cell // size for cell in cells[row.start :]}:
            others = {each for past in flights for each in past.touched.get(page, ())} - {who}
            assert not others, f"page {page} is written while {others} use it"
        for cell in cells:
            flight.touched.setdefault(cell // size, set()).add(who)
        for at, cell in enumerate(cells[: row.start]):
            assert self.cells[cell] == life.cell(at + 1), f"{row.sequence} reads what is not its own"
        if self.states is not None:
            self._move_state(self.states, row, life, flight, flights)
        ids = [self.relay[row.slot]] if not row.ids else list(row.ids)
        own = [*row.sequence.prompt_ids, *life.sampled][row.start : row.kv_length]
        assert ids == own, "the row computes other tokens than the request has"
        for at in range(row.start, row.kv_length):
            self.cells[cells[at]] = life.cell(at + 1)
            self.writer[cells[at]] = flight.step.id
            flight.written[cells[at]] = row.sequence.key

    def _move_state(
        self, states: list[tuple[Any, ...]], row: Row, life: Life, flight: Flight, flights: list[Flight]
    ) -> None:
        read, write, who = row.state_read, row.state_write, (row.sequence.key, life.tenancy)
        assert (read == 0) == (row.start == 0), "the empty state is that of no token"
        assert write, "the null cell is written"
        for past in flights:
            assert not past.states_touched.get(write, set()) - {who}, f"cell {write} is reused in flight"
        others = flight.states_touched.get(write, set()) | {
            (key, life.tenancy) for cell, key in flight.states_written.items() if cell == read
        }
        assert not others, "two rows of a step share a cell that one of them writes"
        if read:
            assert states[read] == life.cell(row.start), f"{row.sequence} starts from another state"
        for cell in {read, write} - {0}:
            flight.states_touched.setdefault(cell, set()).add(who)
        states[write] = life.cell(row.kv_length)
        self.state_writer[write] = flight.step.id
        flight.states_written[write] = row.sequence.key
