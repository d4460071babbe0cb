"""The nine classic pitfalls of continuous batching, a test each, and what the overlap adds.

Aborts, failures and retractions at any moment are for the scheduler's state machine.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from aioinfer.execution.decoding.tokens import TokenPacker
from aioinfer.execution.packed import PackedStep
from aioinfer.execution.packing import Packer
from aioinfer.sampling.batch import PenaltyReset
from aioinfer.sampling.sampler import Sampler
from aioinfer.scheduling.sequence import Sequence
from aioinfer.scheduling.step import Step
from tests.sampling.test_sampler import make_batch
from tests.scheduling.desk import STOP, Desk

PAGE = 4


class Bench(Desk):
    """A desk that packs its steps, as for a device."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"running": 8, "pages": 32, "prefix_cache": False, **options})
        slots, pages = self.memory.slots.total, self.memory.pages
        self.packer = Packer(TokenPacker(slots), slots, pages.total, pages.page_size)

    def packed(self) -> tuple[Step, PackedStep]:
        step = self.launch()
        return step, self.packer.pack(step)


def section(packed: PackedStep, name: str) -> list[int]:
    values: list[int] = packed.sections[name].tolist()
    return values


def block_tables(packed: PackedStep) -> list[list[int]]:
    """The pages that each row of a step may read, padded to the width of the longest."""
    table: list[list[int]] = np.asarray(section(packed, "block_table")).reshape(-1, packed.num_pages).tolist()
    return table


def test_1_a_row_moves_the_cursor_by_its_length() -> None:
    bench = Bench()
    request = bench.submit(6)
    for computed in (6, 7, 8):
        bench.packed()
        assert request.cursor.computed == computed


def test_2_a_launched_chunk_is_not_planned_again_before_it_resolves() -> None:
    bench = Bench(chunk_size=5)
    request = bench.submit(12)
    rows = [bench.launch().rows[0] for _ in range(3)]
    assert [(row.start, row.length) for row in rows] == [(0, 4), (4, 4), (8, 4)], "chunks end with pages"
    assert request.pending == 1


def test_3_a_prefill_computes_the_next_ids_of_the_prompt() -> None:
    bench = Bench(chunk_size=4)
    request = bench.submit(10)
    bench.bring(bench.launch())
    assert bench.launch().rows[0].ids == request.prompt_ids[4:8]


def test_4_unused_entries_of_the_block_table_belong_to_nobody() -> None:
    """Nor do entries of a slot's former tenant show, where a longer neighbour makes the table as wide."""
    bench = Bench(running=2, max_step_tokens=128, chunk_size=128)
    neighbour = bench.submit(40, 100)
    used = set()
    for _ in range(bench.memory.slots.total - 1):
        former = bench.submit(30, 1)
        step, _ = bench.packed()
        used |= {row.slot for row in step.rows if row.sequence is former}
        bench.bring(step)
        assert former.finished
    short = bench.submit(3)
    step, packed = bench.packed()
    rows = [row.sequence for row in step.rows]
    assert step.rows[rows.index(short)].slot in used
    tables = block_tables(packed)
    assert packed.num_pages == len(neighbour.kv.pages) > 30 // PAGE
    assert tables[rows.index(neighbour)] == neighbour.kv.pages
    assert tables[rows.index(short)] == [*short.kv.pages, *[0] * (packed.num_pages - 1)]
    assert 0 not in bench.memory.pages.take(bench.memory.pages.free), "padding points into an owned page"


@pytest.mark.parametrize("limits", [{}, {"max_decode_rows": 2}, {"max_decode_rows": 2, "mixed": False}])
def test_5_no_position_is_written_twice_while_steps_are_in_flight(limits: dict[str, Any]) -> None:
    """And none is left out, also where a step takes some of the decodes and the others wait their turn."""
    bench = Bench(**limits)
    requests = [bench.submit(prompt, 100) for prompt in (6, 1, 9)]
    positions: dict[int, list[int]] = {request.key: [] for request in requests}
    cells: list[int] = []
    flights = []
    for _ in range(15):
        step, packed = bench.packed()
        cells += section(packed, "slot_mapping")
        found = iter(section(packed, "positions"))
        for row in step.rows:
            positions[row.sequence.key] += [next(found) for _ in range(row.length)]
        flights.append(step)
        if len(flights) == 3:
            bench.bring(flights.pop(0))
    for written in positions.values():
        assert written == list(range(len(written)))
        assert len(written) > 9
    assert len(cells) == len(set(cells))


def test_6_penalty_histories_of_different_lengths_go_together() -> None:
    """The answer of each row needs all of its own output, by torch's operations and by kernels."""
    rows = [{"frequency_penalty": 1.0, "temperature": 0.0, "slot": slot} for slot in (1, 2, 3)]
    resets = [
        PenaltyReset(1, [5], []),
        PenaltyReset(2, list(range(50)), [0]),
        PenaltyReset(3, [0, 0], [0, 1, 0]),
    ]
    logits = torch.linspace(4.0, -27.5, 64).expand(3, -1)
    for backend in ("torch", "auto"):
        sampler = Sampler(4, 64, torch.device("cpu"), backend)
        assert sampler.sample(logits, make_batch(rows, penalty_resets=resets)).tolist() == [0, 1, 2]


def test_7_padding_is_not_the_end() -> None:
    """0, which pads buffers here, is a token like any other: only ids that a request stops on end it."""
    desk = Desk(prefix_cache=False)
    request = desk.submit(3)
    for count in (1, 2, 3):
        desk.bring(desk.launch(), 0)
        assert not request.finished
        assert request.output_ids == [0] * count
    desk.bring(desk.launch(), STOP)
    assert request.output.finish_reason == "stop"


def test_8_every_sequence_of_a_step_is_sampled_at_its_own_last_row() -> None:
    """A chunk that is not the last one of its prompt samples nothing."""
    bench = Bench(chunk_size=5)
    for prompt in (5, 1, 3):
        bench.submit(prompt)
    prefill, packed = bench.packed()
    assert packed.q_lens == [5, 1, 3]
    assert section(packed, "cu_q") == [0, 5, 6, 9]
    assert section(packed, "logits_rows") == [4, 5, 8]
    decodes, packed = bench.packed()
    assert packed.q_lens == [1, 1, 1]
    assert section(packed, "cu_q") == [0, 1, 2, 3]
    assert section(packed, "logits_rows") == [0, 1, 2]
    slots = {row.sequence.key: row.slot for row in prefill.rows}
    assert section(packed, "sample_slots") == [slots[row.sequence.key] for row in decodes.rows]
    bench.submit(7)
    for chunk, logits_rows in ((4, [0, 1, 2]), (3, [0, 1, 2, 5])):
        _, packed = bench.packed()
        assert packed.q_lens == [1, 1, 1, chunk]
        assert section(packed, "logits_rows") == logits_rows


def test_9_a_reservation_counts_the_new_positions_too() -> None:
    bench = Bench()
    request = bench.submit(PAGE + 1)
    bench.launch()
    assert len(request.kv.pages) == 2
    exact = bench.submit(PAGE)
    bench.launch()
    assert len(exact.kv.pages) == 1
    bench.launch()
    assert len(exact.kv.pages) == 2, "the token after a full page needs the next page"


# -- and what the overlap adds -------------------------------------------------------------------------


def test_a_late_token_for_a_request_that_ended_is_dropped_and_counted() -> None:
    desk = Desk(prefix_cache=False)
    request = desk.submit(3)
    first, second = desk.launch(), desk.launch()
    desk.bring(first, STOP)
    assert request.output.finish_reason == "stop"
    assert desk.memory.pages.fenced == 1, "the second step still writes into the page"
    assert desk.bring(second) == []
    assert request.output_ids == [STOP]
    assert desk.scheduler.queues.counters.late_tokens == 1
    assert desk.memory.pages.free == desk.memory.pages.total


def test_retraction_waits_for_fenced_pages_instead_of_emptying_the_engine() -> None:
    desk = Desk(pages=5, prefix_cache=False)
    request, ending = desk.submit(2 * PAGE, 100), desk.submit(PAGE, 100)
    flights = [desk.launch(), desk.launch()]
    assert desk.memory.pages.free == 0
    desk.scheduler.finish(ending, "abort")
    assert desk.memory.pages.fenced == 2, "the second step still reads them"
    while (step := desk.scheduler.plan()) is not None:
        flights.append(step)
        assert len(flights) < 20, "it never runs out of pages"
    assert request.cursor.computed == 3 * PAGE, "it ran until it needed a page"
    assert request.recovery.retractions == 0
    for flight in flights:
        desk.bring(flight)
    assert desk.scheduler.plan() is not None
    assert len(request.kv.pages) == 4


def test_a_page_that_was_copied_for_a_fork_is_not_read_from_a_store() -> None:
    """Both would fill it, and what arrives be counted behind it."""

    class Finder:
        def __init__(self) -> None:
            self.asked: list[Sequence] = []

        def find(self, sequence: Sequence) -> None:
            self.asked.append(sequence)

        def committed(self, sequence: Sequence, start: int, stop: int) -> None:
            pass

        def distrusted(self, sequence: Sequence, start: int, stop: int) -> None:
            pass

    desk, finder = Desk(share_prefix_tokens=0), Finder()
    desk.memory.finder = finder
    copied: list[tuple[int, int]] = []
    desk.memory.copy_page = lambda source, copy: copied.append((source, copy))
    parent = desk.submit(20, max_tokens=20)
    desk.round()
    desk.memory.flush()
    fork = desk.submit(parent.prompt_ids)
    fork.forked = parent, 12
    other = desk.submit(9)
    desk.round()
    assert len(copied) == 1
    assert fork.cursor.computed == 20
    assert finder.asked == [parent, other]
