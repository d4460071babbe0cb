"""Bugs planted on purpose in the scheduling of blocks and in what keeps them on the device: all are found."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from aioinfer.diffusion.record import BlockRecords
from aioinfer.diffusion.state import BlockState
from aioinfer.execution.decoding import block_table
from aioinfer.execution.decoding.base import Transfer
from aioinfer.execution.decoding.block_table import BlockTable, Round
from aioinfer.execution.decoding.blocks import BlockDecoding, BlockPacker
from aioinfer.execution.packed import Layout, PackedStep
from aioinfer.scheduling import block_batch
from aioinfer.scheduling.block_batch import BlockBatch
from aioinfer.scheduling.block_cursor import BlockCursor
from aioinfer.scheduling.scheduler import Scheduler
from aioinfer.scheduling.sequence import Sequence
from aioinfer.scheduling.step import MultiStepBudget, Step
from tests.engine.block_worlds import make_block_world
from tests.engine.simulation import simulate
from tests.engine.test_block_events import ACTIONS, SETTINGS, course, moments, retract
from tests.tiers import PLANTED_BUG, nightly

Mutant = Callable[[pytest.MonkeyPatch], None]
MUTANTS: dict[str, Mutant] = {}


def mutant(plant: Mutant) -> Mutant:
    MUTANTS[plant.__name__] = plant
    return plant


# -- scheduling -------------------------------------------------------------------------------------


@mutant
def rounds_in_flight_survive_a_retraction(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockCursor, "survives_retraction", True)


@mutant
def flights_survive_a_retraction(patch: pytest.MonkeyPatch) -> None:
    rewind = BlockCursor.rewind

    def half(self: BlockCursor, computed: int) -> None:
        flights = self.flights.copy()
        rewind(self, computed)
        self.flights.extend(flights)

    patch.setattr(BlockCursor, "rewind", half)


@mutant
def what_a_row_in_flight_writes_is_shared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockCursor, "committed", property(lambda self: min(self._committed, self.block_start)))


@mutant
def a_block_that_has_just_changed_counts_as_committed(patch: pytest.MonkeyPatch) -> None:
    observe = BlockCursor.observe
    patch.setattr(BlockCursor, "observe", lambda self, state: observe(self, replace(state, changed=False)))


@mutant
def a_block_goes_on_from_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockCursor, "resume", property(lambda self: None))


@mutant
def a_block_goes_on_without_its_counters(patch: pytest.MonkeyPatch) -> None:
    def bare(self: BlockCursor) -> BlockState | None:
        return None if self.block is None else replace(self.block, private=(0,) * len(self.block.private))

    patch.setattr(BlockCursor, "resume", property(bare))


@mutant
def a_block_goes_on_at_its_first_round(patch: pytest.MonkeyPatch) -> None:
    def first(self: BlockCursor) -> BlockState | None:
        return None if self.block is None else replace(self.block, rounds=0)

    patch.setattr(BlockCursor, "resume", property(first))


@mutant
def a_third_row_is_launched(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(block_batch, "_MOST_FLIGHTS", 3)
    next_round = BlockCursor.next_round

    def third(self: BlockCursor, **options: Any) -> tuple[int, int] | None:
        if len(self.flights) > 1:
            return self.block_start, 1
        return next_round(self, **options)

    patch.setattr(BlockCursor, "next_round", third)


@mutant
def the_second_row_does_not_look_at_the_first(patch: pytest.MonkeyPatch) -> None:
    next_round = BlockCursor.next_round

    def blind(self: BlockCursor, **options: Any) -> tuple[int, int] | None:
        flights = self.flights.copy()
        self.flights.clear()
        try:
            return next_round(self, **options)
        finally:
            self.flights.extend(flights)

    patch.setattr(BlockCursor, "next_round", blind)


@mutant
def a_block_comes_without_a_commit(patch: pytest.MonkeyPatch) -> None:
    next_round = BlockCursor.next_round

    def hasty(self: BlockCursor, **options: Any) -> tuple[int, int] | None:
        chosen = next_round(self, **options)
        return (self.block_start, 1) if chosen == (self.block_start - self.block_size, 2) else chosen

    patch.setattr(BlockCursor, "next_round", hasty)


@mutant
def lock_step_lets_the_quick_go_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockBatch, "_held", property(lambda self: False))


@mutant
def lock_step_lets_others_in(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockBatch, "locked", property(lambda self: False))


@mutant
def rounds_in_place_while_somebody_waits(patch: pytest.MonkeyPatch) -> None:
    plan = Scheduler._step

    def any_budget(self: Scheduler, *arguments: Any) -> Step | None:
        step = plan(self, *arguments)
        if step is None or not all(row.blocks == 1 and not row.ids for row in step.rows):
            return step
        return replace(step, multi_step=MultiStepBudget(3))

    patch.setattr(Scheduler, "_step", any_budget)


@mutant
def a_second_block_has_no_pages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockBatch, "_has_pages", lambda self, request, positions: True)


@mutant
def steps_of_rows_of_two_blocks_are_too_long(patch: pytest.MonkeyPatch) -> None:
    launch = BlockBatch.launch
    patch.setattr(
        BlockBatch, "launch", lambda self, step_id, without, most: launch(self, step_id, without, 4 * most)
    )


@mutant
def tokens_that_may_change_are_taken(patch: pytest.MonkeyPatch) -> None:
    take_known = BlockCursor.take_known

    def eager(self: BlockCursor, request: Sequence) -> Any:
        self.monotone = True
        return take_known(self, request)

    patch.setattr(BlockCursor, "take_known", eager)


@mutant
def a_known_prefix_is_counted_twice(patch: pytest.MonkeyPatch) -> None:
    computed = BlockCursor.commit_prefill

    def further(self: BlockCursor, positions: int, *, last: bool) -> None:
        computed(self, positions + self.block_size, last=last)

    patch.setattr(BlockCursor, "commit_prefill", further)


# -- device -----------------------------------------------------------------------------------------


@mutant
def blocks_turn_before_they_are_done(patch: pytest.MonkeyPatch) -> None:
    take = BlockTable.take

    def early(
        self: BlockTable, slots: torch.Tensor, targets: torch.Tensor, *rest: Any, **options: Any
    ) -> Round:
        block, _ = self._records.block(self._table)
        block.done[slots] |= block.starts[slots] < targets
        return take(self, slots, targets, *rest, **options)

    patch.setattr(BlockTable, "take", early)


@mutant
def counters_go_on_into_the_next_block(patch: pytest.MonkeyPatch) -> None:
    take = BlockTable.take

    def keep(self: BlockTable, slots: torch.Tensor, *rest: Any, **options: Any) -> Round:
        before = self._records.block(self._table.index_select(0, slots))[1]
        found = take(self, slots, *rest, **options)
        self._records.block(found.records)[1].copy_(before)
        return found

    patch.setattr(BlockTable, "take", keep)


@mutant
def the_first_of_two_blocks_is_scored(patch: pytest.MonkeyPatch) -> None:
    gather = BlockDecoding.gather

    def first(self: BlockDecoding, packed: PackedStep, parts: Any, transfer: Transfer) -> Any:
        return parts["block_tokens"], gather(self, packed, parts, transfer)[1]

    patch.setattr(BlockDecoding, "gather", first)


@mutant
def a_block_is_committed_with_the_ids_of_the_next(patch: pytest.MonkeyPatch) -> None:
    take = BlockTable.take

    def later(self: BlockTable, *arguments: Any, **options: Any) -> Round:
        found = take(self, *arguments, **options)
        return replace(found, ids=found.records[:, : self._records.size])

    patch.setattr(BlockTable, "take", later)


@mutant
def parameters_of_a_former_tenant(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(block_table._Algorithm, "forget_rows", lambda self: None)


@mutant
def nobody_knows_that_a_row_may_turn(patch: pytest.MonkeyPatch) -> None:
    pack = BlockPacker.pack

    def still(self: BlockPacker, step: Step, layout: Layout) -> Any:
        sections, work = pack(self, step, layout)
        work.may_turn = False
        return sections, work

    patch.setattr(BlockPacker, "pack", still)


@mutant
def prompts_may_be_edited(patch: pytest.MonkeyPatch) -> None:
    encode = BlockRecords.encode
    patch.setattr(BlockRecords, "encode", lambda self, state, prompt_length: encode(self, state, 0))


@mutant
def rounds_in_place_read_the_same_ids(patch: pytest.MonkeyPatch) -> None:
    again = BlockDecoding.again

    def stale(self: BlockDecoding, packed: PackedStep, parts: Any, state: Round, rounds: int) -> bool:
        before = parts["input_ids"].clone()
        more = again(self, packed, parts, state, rounds)
        if more:
            parts["input_ids"].copy_(before)
        return more

    patch.setattr(BlockDecoding, "again", stale)


# -- the hunt ---------------------------------------------------------------------------------------

#: how whatever is wrong shows. (Assertions in tasks of a simulated loop come in a group.)
SYMPTOMS = (AssertionError, RuntimeError, ValueError, IndexError, KeyError, ExceptionGroup)


#: bugs that take text or more lives than a course has: seeds of worlds that come upon them
WORLDS = {"parameters_of_a_former_tenant": (0, 1, 2)}

#: and the settings to begin with, where others do not come upon them
FIRST = {
    "a_third_row_is_launched": 2,
    "lock_step_lets_the_quick_go_on": 3,
    "lock_step_lets_others_in": 3,
    "the_second_row_does_not_look_at_the_first": 3,
}


def hunt(name: str) -> Iterator[None]:
    for seed in WORLDS.get(name, ()):
        simulate(seed, 40, make=make_block_world)
        yield
    dice, first = random.Random(0), FIRST.get(name, 0)
    for _ in range(3):
        for settings in SETTINGS[first:] + SETTINGS[:first]:
            count = moments(settings)
            for action in (*ACTIONS[:: 1 + dice.randrange(3)], retract):
                yield course(settings, dice.randrange(count), action)


@nightly(PLANTED_BUG)
@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bugs_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    with pytest.raises(SYMPTOMS):
        for _ in hunt(name):
            pass
