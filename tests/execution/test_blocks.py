"""Steps of blocks: whatever rows they come in, a request's blocks are those of the plain reference."""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aioinfer.diffusion.registry import usable_algorithms
from aioinfer.diffusion.state import BlockState
from aioinfer.execution.decoding.blocks import BlockPacker, block_records
from aioinfer.execution.device import Flight
from aioinfer.execution.packing import Packer
from aioinfer.params import DiffusionParams, SamplingParams
from aioinfer.scheduling.step import NO_ROWS, MultiStepBudget, NewRequestData, Row, Step
from tests.diffusion.cases import random_params
from tests.execution.block_driver import Driven, Driver, check, scripted
from tests.tiers import SECONDS, rest
from tests.toys.blocks import ScriptedDevice

VOCAB, MASK = 32, 31
EVERY = [*usable_algorithms((1, 2)), "low_confidence"]


class World:
    """Requests of all kinds and a device that has room for little more than them."""

    device_type = ScriptedDevice

    def __init__(
        self, seed: int, algorithms: list[str] = EVERY, *, drawn: bool = False, **options: Any
    ) -> None:
        self.rng = rng = random.Random(seed)
        self.size = size = rng.choice([4, 8])
        self.page_size = size * rng.choice([1, 2])
        self.pages = 12 * size // self.page_size
        self.places = list(range(len(algorithms) + 2))
        rng.shuffle(self.places)
        self.device = self.device_type(
            num_pages=len(self.places) * self.pages,
            page_size=self.page_size,
            num_slots=len(self.places),
            block_size=size,
            vocab_size=VOCAB,
            **{"mean_steps": 3.0, "edits": 2, "max_model_len": 12 * size, **options},
        )
        self.device.open()
        self.requests = [self._request(key, algorithm, drawn) for key, algorithm in enumerate(algorithms)]
        self.driver = Driver(self.launch, self.requests, size, self.page_size, seed)

    def launch(self, step: Step) -> Flight:
        return self.device.launch(self.device.prepare(step))

    def _request(self, key: int, algorithm: str, drawn: bool) -> Driven:
        """A prompt of a length around whole blocks, with a literal mask here and there."""
        rng, size = self.rng, self.size
        length = rng.choice([0, size, 2 * size]) + rng.choice([1, size - 1, size, size + 1])
        prompt = [rng.choice([MASK, *range(VOCAB)]) for _ in range(length)]
        sampling: dict[str, Any] = {"temperature": 0.0}
        if drawn and rng.random() < 0.6:
            sampling = {
                "temperature": rng.choice([0.5, 1.0]),
                "top_k": rng.choice([0, 3]),
                "top_p": rng.choice([1.0, 0.9]),
            }
        given = random_params(algorithm, np.random.default_rng(rng.randrange(1 << 30)))
        params = SamplingParams(**sampling, diffusion=DiffusionParams(algorithm=algorithm, **given))
        request = Driven(key, prompt, params, rng.randrange(1 << 40), 0, [])
        self.move(request)
        return request

    def move(self, request: Driven) -> None:
        """To a slot and pages that are free, but not fresh."""
        place = self.places.pop(self.rng.randrange(len(self.places)))
        if request.pages:
            self.places.append(request.slot - 1)
        request.slot = place + 1
        request.pages = [1 + place * self.pages + at for at in range(self.pages)]

    def check(self) -> None:
        for request in self.requests:
            check(request, scripted(self.device.script, self.size), self.size, MASK)


@rest(SECONDS)
@pytest.mark.parametrize("ahead", [0, 1])
def test_rows_of_any_kind_bring_the_blocks_of_the_reference(ahead: int) -> None:
    """Also those that are launched before the last was read: they find out by themselves."""
    kinds = set()
    for seed in range(4):
        world = World(seed + 10 * ahead, drawn=seed % 2 == 1)
        world.driver.run(3 + ahead, ahead=ahead)
        world.check()
        kinds |= world.driver.kinds
    if not ahead:
        ids_and_blocks = {kind[:2] for kind in kinds}
        assert ids_and_blocks == {(True, 0), (True, 1), (True, 2), (False, 1), (False, 2)}
        commits = {(True, 0, True), (True, 1, True), (False, 1, True), (False, 2, True)}
        assert {kind[:3] for kind in kinds if kind[2]} == commits


@rest(SECONDS)
def test_a_block_goes_on_elsewhere_as_if_nothing_had_happened() -> None:
    resumed: list[BlockState] = []
    for seed in range(20, 24):
        world = World(seed, [*EVERY, "joint_threshold"], drawn=seed % 2 == 1, mean_steps=4.0, edits=8)

        def move(request: Driven, world: World = world) -> None:
            if request.state is not None:
                resumed.append(request.state)
            world.move(request)

        world.driver.run(3, move=move)
        world.check()
    assert len(resumed) > 15
    assert any(any(state.private) for state in resumed), "counters go along"
    assert any(state.known[0] and state.written_in[0] < 0 for state in resumed), "and so do prompts"


@rest(SECONDS)
@pytest.mark.parametrize("most", [2, 5])
def test_rounds_in_place_are_rounds_like_any(most: int) -> None:
    counts = set()
    for seed in range(30, 35):
        world = World(seed, [EVERY[seed % 5], "static_steps"], mean_steps=6.0)
        world.driver.run(3, rounds=most)
        world.check()
        counts |= {rounds for request in world.requests for _, rounds in request.reported}
    assert max(counts) == most
    assert min(counts) == 1


def row(request: Driven, start: int, length: int, **options: Any) -> Row:
    """A row of one block unless it is told otherwise."""
    fields = {"ids": (), "new_pages": (), "first_new_page": 0, "new_request": None, "blocks": 1, **options}
    slot = fields.pop("slot", None) or request.slot
    return Row(getattr(request, "handle", request), slot, start, length, samples=False, **fields)


def first_row(request: Driven, size: int) -> Row:
    """A request takes its slot: its prompt and its first block."""
    admission = NewRequestData(request.params, request.seed, frozenset(), request.prompt, ())
    known = len(request.prompt) // size * size
    return row(
        *(request, 0, known + size),
        ids=request.prompt[:known],
        new_pages=request.pages,
        new_request=admission,
    )


def step(number: int, *rows: Row, multi_step: MultiStepBudget | None = None) -> Step:
    return Step(number, NO_ROWS, rows, sum(each.length for each in rows), multi_step)


def plain_world() -> World:
    """Two requests whose blocks take four rounds, and pages of one block."""
    world = next(
        each for each in (World(seed, EVERY[:2], mean_steps=4.0, variation=0.0) for seed in range(9))
        if each.page_size == each.size
    )  # fmt: skip
    for request in world.requests:
        request.params = SamplingParams(temperature=0.0, diffusion=DiffusionParams(threshold=0.9))
        request.prompt = list(range(world.size))
    return world


def test_rounds_in_place_end_when_somebody_wants_in_or_a_block_is_done() -> None:
    world = plain_world()
    size, (first, second) = world.size, world.requests
    world.launch(step(1, first_row(first, size)))
    world.launch(step(2, first_row(second, size)))
    rows = row(first, size, size), row(second, size, size)
    eager = MultiStepBudget(10)
    eager.interrupted = True
    assert world.launch(step(3, *rows, multi_step=eager)).wait().rounds == 1
    result = world.launch(step(4, *rows, multi_step=MultiStepBudget(10))).wait()
    assert result.rounds == 2, "the fourth round of four"
    assert [result.blocks[at].done for at in range(2)] == [True, True]


@rest(SECONDS)
def test_rows_of_a_request_that_is_gone_disturb_nobody() -> None:
    """The null slot, slots that nobody took and blocks that lie elsewhere than their rows."""
    world, other = World(3), World(3)
    strangers = [
        slot for slot in range(1, len(EVERY) + 3) if all(slot != each.slot for each in world.requests)
    ]
    handle = SimpleNamespace(key=-1)
    world.device._doomed.add(-1)

    def with_junk(original: Step) -> Flight:
        size = world.size
        junk = [
            Row(handle, slot, size * at, size * blocks, (), False, (), 0, None, blocks=blocks)  # type: ignore[arg-type]
            for at, (slot, blocks) in enumerate([(0, 1), (strangers[0], 1), (strangers[1], 2)])
        ]
        rows = (*original.prefilling, *junk)
        flight = world.launch(
            dataclasses.replace(original, prefilling=rows, num_tokens=original.num_tokens + 4 * size)
        )
        result = flight.wait()
        result.tokens = result.tokens[: len(original.prefilling)]
        result.blocks = {at: state for at, state in result.blocks.items() if at < len(original.prefilling)}
        return SimpleNamespace(wait=lambda: result)  # type: ignore[return-value]

    world.driver.launch = with_junk
    world.driver.run(3)
    other.driver.run(3)
    for mine, theirs in zip(world.requests, other.requests, strict=True):
        assert mine.reported == theirs.reported
    world.check()


@rest(SECONDS)
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_step_that_fails_leaves_junk_until_its_requests_start_over(ahead: int) -> None:
    failures = 0
    for seed in range(50, 54):
        world = World(seed)
        dice = random.Random(seed)

        def fault(_: Step, dice: random.Random = dice) -> None:
            if dice.random() < 0.15:
                raise Injected

        world.device.fault = world.device.late_fault = fault
        world.driver.fails_with = Injected
        world.driver.run(3, ahead=ahead)
        world.check()
        failures += world.driver.failures
    assert failures > 10


class Injected(RuntimeError):
    """What an injected fault raises."""


def test_a_new_tenant_has_the_pages_of_its_own_rows_alone() -> None:
    packer = Packer(BlockPacker(2, 4, MASK), 2, 8, 4)
    request = SimpleNamespace(key=1)
    admission = NewRequestData(SamplingParams(), 1, frozenset(), [1] * 4, ())

    def tables(*rows: tuple[int, list[int], NewRequestData | None]) -> list[int]:
        planned = [
            Row(request, slot, 0, 8, [1] * 8, False, pages, 0, taking)  # type: ignore[arg-type]
            for slot, pages, taking in rows
        ]
        return packer.pack(step(1, *planned)).sections["block_table"].tolist()

    assert tables((1, [5, 6], admission), (2, [7, 8], admission)) == [5, 6, 7, 8]
    assert tables((1, [9], admission), (2, [], None)) == [9, 0, 7, 8]


@pytest.mark.parametrize("prompt", range(1, 10))
def test_a_block_that_begins_again_has_all_known_tokens_in_it(prompt: int) -> None:
    """Behind a prompt that ends amid it, too: other weights take a block up, and what was delivered stays."""
    size = 8
    packer, records = BlockPacker(2, size, MASK), block_records(size, MASK)
    for length in range(prompt, prompt + 10):
        ids, start = [*range(1, length + 1)], length // size * size
        data = NewRequestData(SamplingParams(), 0, frozenset(), ids[:prompt], tuple(ids[prompt:]))
        packer.admit({1: data})
        expected = BlockState.unknown(start, ids[start:], size, MASK)
        assert packer._begun[0].tolist() == records.encode(expected, prompt).tolist()
