"""The nine classic pitfalls of continuous batching, and its one rule: reserve before the model runs."""

from __future__ import annotations

from collections import abc
from typing import Any

import numpy as np
import pytest

from aioinfer.cache.pages import PageAllocator
from aioinfer.cache.slots import SlotPool
from aioinfer.config import EngineConfig
from aioinfer.execution.decoding.tokens import TokenPacker
from aioinfer.execution.packed import PackedStep
from aioinfer.execution.packing import Packer
from aioinfer.params import SamplingParams
from aioinfer.sampling.outcomes import NO_TOKEN
from aioinfer.scheduling.audit import audit
from aioinfer.scheduling.memory import Memory
from aioinfer.scheduling.scheduler import Scheduler
from aioinfer.scheduling.sequence import Sequence
from aioinfer.scheduling.step import Outcome, Step
from tests.sequences import new_sequence

PAGE = 4

#: a scheduler that goes in circles fails soon
pytestmark = pytest.mark.timeout(60)


class Bench:
    """A scheduler and a packer without a device: tokens are what the test says."""

    def __init__(
        self,
        *,
        pages: int = 32,
        running: int = 8,
        budget: int = 64,
        chunk: int = 64,
        prefix_cache: bool = False,
        **limits: Any,
    ) -> None:
        # Unless a test asks for it, nothing is kept back for tokens to come.
        ratio = {"new_token_ratio": 0.0, "min_new_token_ratio": 0.0}
        options = {"max_running_requests": running, "max_step_tokens": budget, "chunk_size": chunk}
        self.memory = Memory(PageAllocator(pages, PAGE), SlotPool(3 * running), prefix_cache=prefix_cache)
        self.scheduler = Scheduler(self.memory, EngineConfig(**{**ratio, **options, **limits}))
        self.packer = Packer(TokenPacker(3 * running), 3 * running, pages, PAGE)
        self._key = 0

    def request(self, prompt: int, max_tokens: int = 100, **params: Any) -> Sequence:
        self._key += 1
        request = new_sequence(
            self._key,
            [1000 * self._key + at for at in range(prompt)],
            SamplingParams(max_tokens=max_tokens, **params),
            seed=self._key,
            stop_ids=frozenset({7}),
            max_length=prompt + max_tokens,
        )
        self.scheduler.submit(request)
        return request

    def plan(self) -> tuple[Step, PackedStep]:
        step = self.scheduler.plan()
        assert step is not None
        return step, self.packer.pack(step)

    def resolve(self, step: Step, token: int = 42) -> list[Sequence]:
        tokens = [token if row.samples else NO_TOKEN for row in step.rows]
        return self.scheduler.resolve(step, Outcome(tokens))


def section(packed: PackedStep, name: str) -> list[int]:
    values: list[int] = packed.sections[name].tolist()
    return values


def block_tables(packed: PackedStep) -> list[list[int]]:
    """The pages that each row of a step may read, padded to the width of the longest."""
    table: list[list[int]] = np.asarray(section(packed, "block_table")).reshape(-1, packed.num_pages).tolist()
    return table


def test_2_a_launched_chunk_is_not_planned_again_before_it_resolves() -> None:
    bench = Bench(chunk=5)
    request = bench.request(prompt=12)
    spans = []
    for _ in range(3):
        step, _ = bench.plan()
        spans.append((step.rows[0].start, step.rows[0].length))
    assert spans == [(0, 4), (4, 4), (8, 4)], "chunks end at page boundaries"
    assert request.pending == 1


def test_4_unused_entries_of_the_block_table_belong_to_nobody() -> None:
    bench = Bench()
    bench.request(prompt=30)
    short = bench.request(prompt=3)
    _, packed = bench.plan()
    (_, table) = block_tables(packed)
    assert table == [*short.kv.pages, *[0] * (packed.num_pages - 1)], "padding points into an owned page"
    assert 0 not in bench.memory.pages.take(bench.memory.pages.free)


def test_4b_entries_of_a_slots_former_tenant_do_not_show() -> None:
    """A longer neighbour makes the table of the step as wide as the former tenant's was."""
    bench = Bench(running=2, budget=128)
    neighbour = bench.request(prompt=40)
    long = set()
    for _ in range(bench.memory.slots.total - 1):
        former = bench.request(prompt=30, max_tokens=1)
        step, _ = bench.plan()
        long |= {row.slot for row in step.rows if row.request is former}
        bench.resolve(step)
        assert former.finished
    short = bench.request(prompt=3)
    step, packed = bench.plan()
    rows = [row.request for row in step.rows]
    assert step.rows[rows.index(short)].slot in long
    tables = block_tables(packed)
    assert packed.num_pages == len(neighbour.kv.pages) > 30 // PAGE
    assert tables[rows.index(neighbour)] == neighbour.kv.pages
    assert tables[rows.index(short)] == [*short.kv.pages, *[0] * (packed.num_pages - 1)]


@pytest.mark.parametrize("limits", [{}, {"max_decode_rows": 2}, {"max_decode_rows": 2, "mixed": False}])
def test_5_no_position_is_written_twice_while_steps_are_in_flight(limits: dict[str, Any]) -> None:
    """And none is left out, also where a step takes some of the decodes and the others wait their turn."""
    bench = Bench(**limits)
    requests = [bench.request(prompt=prompt) for prompt in (6, 1, 9)]
    positions: dict[int, list[int]] = {request.key: [] for request in requests}
    cells: list[int] = []
    flights = []
    for _ in range(15):
        step, packed = bench.plan()
        cells += section(packed, "slot_mapping")
        found = iter(section(packed, "positions"))
        for row in step.rows:
            positions[row.request.key] += [next(found) for _ in range(row.length)]
        flights.append(step)
        if len(flights) == 3:
            bench.resolve(flights.pop(0))
    for written in positions.values():
        assert written == list(range(len(written)))
        assert len(written) > 9
    assert len(cells) == len(set(cells))


def test_6_penalty_histories_of_different_lengths_go_together() -> None:
    """The answer of each row needs all of its own output, by torch's operations and by kernels."""
    import torch

    from aioinfer.sampling.batch import PenaltyReset
    from aioinfer.sampling.sampler import Sampler
    from tests.sampling.test_sampler import make_batch

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
    """Only ids that the request stops on end it. 0, which pads buffers here, is a token like any other: as
    the first, which a prefill samples, and as a later one."""
    bench = Bench()
    request = bench.request(prompt=3)
    for count in (1, 2, 3):
        step, _ = bench.plan()
        assert bench.resolve(step, token=0) == [request]
        assert not request.finished
        assert request.output_ids == [0] * count
    step, _ = bench.plan()
    bench.resolve(step, token=7)
    assert request.output.finish_reason == "stop"


def test_8_every_sequence_of_a_step_is_sampled_at_its_own_last_row() -> None:
    bench = Bench()
    for prompt in (5, 1, 3):
        bench.request(prompt=prompt)
    _, packed = bench.plan()
    assert packed.q_lens == [5, 1, 3]
    assert section(packed, "cu_q") == [0, 5, 6, 9]
    assert section(packed, "logits_rows") == [4, 5, 8]


def test_8b_in_a_step_of_decodes_every_row_is_its_own_last() -> None:
    """And beside a prompt, where a chunk that is not the last one of its prompt samples nothing."""
    bench = Bench(chunk=5)
    for prompt in (2, 1, 3):
        bench.request(prompt=prompt)
    prefill, _ = bench.plan()
    decodes, packed = bench.plan()
    assert packed.q_lens == [1, 1, 1]
    assert section(packed, "cu_q") == [0, 1, 2, 3]
    assert section(packed, "logits_rows") == [0, 1, 2]
    slots = {row.request.key: row.slot for row in prefill.rows}
    assert section(packed, "sample_slots") == [slots[row.request.key] for row in decodes.rows]
    assert sorted(section(packed, "sample_slots")) == sorted(slots.values())
    bench.request(prompt=7)
    _, packed = bench.plan()
    assert packed.q_lens == [1, 1, 1, 4]
    assert section(packed, "logits_rows") == [0, 1, 2]
    _, packed = bench.plan()
    assert packed.q_lens == [1, 1, 1, 3]
    assert section(packed, "logits_rows") == [0, 1, 2, 5]


def test_9_a_reservation_counts_the_new_positions_too() -> None:
    bench = Bench()
    request = bench.request(prompt=PAGE + 1)
    bench.plan()
    assert len(request.kv.pages) == 2
    exact = bench.request(prompt=PAGE)
    bench.plan()
    assert len(exact.kv.pages) == 1
    bench.plan()
    assert len(exact.kv.pages) == 2, "the token after a full page needs the next page"


def test_everything_is_reserved_before_a_step_exists() -> None:
    """A request that does not fit leaves no trace: no slot, no page, no row."""
    bench = Bench(pages=4)
    fits = bench.request(prompt=2 * PAGE)
    too_much = bench.request(prompt=2 * PAGE + 1)
    before = bench.memory.slots.free
    step, _ = bench.plan()
    assert [row.request for row in step.rows] == [fits]
    assert too_much.kv.pages == []
    assert too_much.kv.slot == 0
    assert bench.memory.slots.free == before - 1
    assert bench.memory.pages.free == 2
    for row in step.rows:
        assert row.kv_length <= len(row.request.kv.pages) * PAGE


# -- and what the overlap adds -------------------------------------------------------------------------


def test_a_request_is_never_scheduled_past_its_known_end() -> None:
    bench = Bench()
    request = bench.request(prompt=3, max_tokens=2)
    first, _ = bench.plan()
    second, _ = bench.plan()
    assert bench.scheduler.plan() is None
    bench.resolve(first)
    assert bench.scheduler.plan() is None
    bench.resolve(second)
    assert request.output.finish_reason == "length"
    assert len(request.output_ids) == 2


def test_a_late_token_for_a_request_that_ended_is_dropped_and_counted() -> None:
    bench = Bench()
    request = bench.request(prompt=3)
    first, _ = bench.plan()
    second, _ = bench.plan()
    bench.resolve(first, token=7)
    assert request.output.finish_reason == "stop"
    assert bench.memory.pages.fenced == 1, "the second step still writes into the page"
    assert bench.resolve(second) == []
    assert request.output_ids == [7]
    assert bench.scheduler.queues.counters.late_tokens == 1
    assert bench.memory.pages.free == bench.memory.pages.total


def test_retraction_waits_for_fenced_pages_instead_of_emptying_the_engine() -> None:
    bench = Bench(pages=5)
    request, ending = bench.request(prompt=2 * PAGE), bench.request(prompt=PAGE)
    flights = [bench.plan()[0], bench.plan()[0]]
    assert bench.memory.pages.free == 0
    bench.scheduler.finish(ending, "abort")
    assert bench.memory.pages.fenced == 2, "the second step still reads them"
    while (step := bench.scheduler.plan()) is not None:
        flights.append(step)
        assert len(flights) < 20, "it never runs out of pages"
    assert request.cursor.computed == 3 * PAGE, "it ran until it needed a page"
    assert request.recovery.retractions == 0
    for flight in flights:
        bench.resolve(flight)
    assert bench.scheduler.plan() is not None
    assert len(request.kv.pages) == 4


def test_a_retracted_request_keeps_its_tokens_and_prefills_them() -> None:
    bench = Bench(pages=4)
    old, young = bench.request(prompt=PAGE + 1), bench.request(prompt=PAGE - 1)
    seen: list[abc.Sequence[int]] = []
    for token in range(100, 120):
        step, _ = bench.plan()
        seen += [row.ids for row in step.rows if row.request is young and row.ids]
        bench.resolve(step, token)
        if young.recovery.retractions:
            break
    assert old.recovery.retractions == 0
    assert young.kv.pages == []
    kept = list(young.output_ids)
    assert kept
    bench.scheduler.finish(old, "abort")
    step, _ = bench.plan()
    assert step.rows[0].request is young
    assert step.rows[0].ids == [*young.prompt_ids, *kept]
    assert step.rows[0].output_index == len(kept)


def test_a_step_that_fails_ends_its_own_requests_only() -> None:
    bench = Bench(running=2)
    inside = bench.request(prompt=3)
    step, _ = bench.plan()
    outside = bench.request(prompt=3)
    later, _ = bench.plan()
    error = RuntimeError("boom")
    assert bench.scheduler.fail(step, error) == [inside]
    assert inside.output.error is error
    bench.resolve(later)
    assert not outside.finished
    assert outside.output_ids == [42]
    audit(bench.scheduler)


@pytest.mark.parametrize("state", ["waiting", "prefill", "decode", "in flight"])
def test_an_abort_gives_everything_back_from_any_state(state: str) -> None:
    bench = Bench(chunk=4)
    request = bench.request(prompt=10)
    flights: list[Step] = []
    if state != "waiting":
        flights.append(bench.plan()[0])
    if state in ("decode", "in flight"):
        flights += [bench.plan()[0], bench.plan()[0]]
    if state == "decode":
        while flights:
            bench.resolve(flights.pop(0))
        flights.append(bench.plan()[0])
    assert bench.scheduler.finish(request, "abort")
    assert not bench.scheduler.finish(request, "abort"), "a request ends once"
    for flight in flights:
        bench.resolve(flight)
    assert bench.memory.pages.free == bench.memory.pages.total
    assert bench.memory.slots.free == bench.memory.slots.total
    assert not bench.scheduler.queues.has_unfinished
    audit(bench.scheduler)
