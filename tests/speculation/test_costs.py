"""How many drafts a step verifies: as many as pay."""

from __future__ import annotations

from collections import abc
from typing import Any, cast

import numpy as np
import pytest

from aioinfer.params import SamplingParams
from aioinfer.scheduling.sequence import Sequence
from aioinfer.scheduling.size_costs import SizeCosts
from aioinfer.scheduling.speculation import Speculation
from aioinfer.scheduling.step import NO_ROWS, Generating, Step
from aioinfer.speculation.drafter import DraftRequest
from aioinfer.speculation.drafting import Drafting, DraftSource, UsualRates
from tests.sequences import new_sequence


class Always:
    """Proposes as many tokens as are wanted."""

    def __init__(self) -> None:
        self.asked = 0

    def propose(self, request: DraftRequest, most: int) -> abc.Sequence[int]:
        self.asked += 1
        return [5] * most


def requests(count: int) -> list[Sequence]:
    made = []
    for key in range(1, count + 1):
        request = new_sequence(key, [1, 2, 3], SamplingParams(), max_length=1000)
        request.drafting = Drafting(DraftRequest(np.asarray([1, 2, 3], np.int32)))
        made.append(request)
    return made


def observed(speculation: Speculation, seconds: dict[int, float], *, drafts: bool) -> None:
    """Steps have taken so long for long."""
    for positions, took in list(seconds.items()) * 50:
        once(speculation, positions, took, drafts=drafts)


def once(speculation: Speculation, positions: int, took: float, *, drafts: bool) -> None:
    nobody: Any = None
    generating = Generating([nobody], np.zeros(1, np.int64), np.zeros(1, np.int64))
    if drafts:
        generating.drafts = [[1]]
    speculation.observe(Step(1, generating, (), positions), took)


def chosen(speculation: Speculation, batch: list[Sequence], room: int = 1000) -> list[int]:
    found = speculation.drafts(batch, [request.known - 1 for request in batch], room)
    return [len(found.get(row, ())) for row in range(len(batch))]


def rate(request: Sequence, right: float) -> None:
    """The request's drafts have been right that often for long."""
    assert request.drafting is not None
    request.drafting._rates[DraftSource.TEXT] = right


def after(
    plain: dict[int, float],
    verifying: dict[int, float],
    *,
    right: float | None = None,
    count: int = 1,
    most: int = 15,
    drafter: Always | None = None,
    **options: bool,
) -> tuple[Speculation, list[Sequence]]:
    """A batch, after steps without drafts and with them have taken so long for long."""
    speculation, batch = Speculation(drafter or Always(), 64, most, **options), requests(count)
    observed(speculation, plain, drafts=False)
    observed(speculation, verifying, drafts=True)
    for request in batch:
        if right is not None:
            rate(request, right)
    return speculation, batch


def test_the_wait_after_a_step_with_drafts_is_a_cost_of_the_drafts() -> None:
    """What follows is planned when they have been read; plain steps overlap."""
    speculation, batch = after({1: 1.0}, {}, right=0.4)
    for _ in range(50):
        once(speculation, 2, 1.1, drafts=True)
        once(speculation, 1, 1.5, drafts=False)
    assert chosen(speculation, batch) == [0]
    observed(speculation, {2: 1.1}, drafts=True)
    assert chosen(speculation, batch) != [0]


@pytest.mark.parametrize("prompt", [False, True])
def test_steps_with_drafts_or_a_prompt_take_their_time_for_themselves(prompt: bool) -> None:
    """Only a plain one waited to be planned after drafts, and only plain ones say what plain ones take."""
    speculation, nobody = Speculation(Always(), 64, 15), cast(Any, None)
    observed(speculation, {1: 1.0, 3: 1.0}, drafts=False)
    for _ in range(50):
        once(speculation, 3, 1.5, drafts=True)
        if prompt:
            speculation.observe(Step(1, NO_ROWS, (nobody,), 500), 100.0)
    assert speculation._verifies.of(3) == pytest.approx(1.5)
    assert speculation._decodes.of(3) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("verifying", "right", "drafts"), [({1: 1.0, 16: 1.6}, 0.98, 15), ({2: 1.05, 16: 1.6}, 0.01, 0)]
)
def test_drafts_are_many_where_they_are_right_and_none_where_they_are_wrong(
    verifying: dict[int, float], right: float, drafts: int
) -> None:
    speculation, batch = after({1: 1.0}, verifying, right=right)
    assert chosen(speculation, batch) == [drafts]


def test_a_full_batch_verifies_for_requests_that_are_often_right_only() -> None:
    """32 rows, where one more costs half of what a token is worth."""
    speculation, batch = after({32: 1.0}, {32: 1.0, 64: 1.5, 128: 2.5}, right=0.2, count=32)
    rate(batch[7], 0.95)
    counts = chosen(speculation, batch)
    assert counts[7] > 5
    assert sum(counts) == counts[7]


def test_steps_go_up_to_a_size_that_costs_no_more() -> None:
    """Kernels compute rows in blocks: the fifth row costs much, those up to the eighth nothing."""
    times = {size: 1.0 if size <= 4 else 1.8 if size <= 8 else 4.0 for size in range(1, 17)}
    speculation, batch = after({1: 1.0}, times, right=0.9)
    assert chosen(speculation, batch) == [3]
    rate(batch[0], 0.999)
    assert chosen(speculation, batch) == [7]


def test_nothing_is_drafted_before_a_step_without_drafts_is_known() -> None:
    drafter = Always()
    speculation = Speculation(drafter, 64, 15)
    assert chosen(speculation, requests(3)) == [0, 0, 0]
    assert not drafter.asked
    assert sum(chosen(Speculation(drafter, 64, 15, adaptive=False), requests(3))) == 45


def test_in_many_short_rows_few_are_asked_in_a_step_and_all_in_turn() -> None:
    """Asking takes 10 us, and may take a fiftieth of a step of 6 ms. Three quarters of those that are asked
    had drafts in the step before."""
    asked: list[int] = []

    class Noting(Always):
        def propose(self, request: DraftRequest, most: int) -> abc.Sequence[int]:
            asked.append(id(request))
            return super().propose(request, most)

    times = {101: 0.006, 200: 0.006}
    speculation, batch = after(
        {100: 0.006}, times, right=0.99, count=100, most=1, drafter=Noting(), overlap=False
    )
    seen: set[int] = set()
    before: set[int] = set()
    for turn in range(30):
        asked.clear()
        assert 9 <= sum(chosen(speculation, batch)) == len(asked) <= 13
        assert len(before & set(asked)) >= 9 or not turn
        before = set(asked)
        seen |= before
    assert len(seen) == len(batch)


def test_where_drafts_of_many_short_rows_do_not_pay_few_steps_ask() -> None:
    drafter = Always()
    speculation, batch = after({100: 0.006}, {101: 0.1, 200: 0.1}, count=100, drafter=drafter)
    asking = 0
    for _ in range(320):
        before = drafter.asked
        assert not sum(chosen(speculation, batch))
        asking += drafter.asked > before
    assert 10 <= asking <= 25
    observed(speculation, {101: 0.006, 200: 0.006}, drafts=True)
    for request in batch:
        rate(request, 0.99)
    found = [sum(chosen(speculation, batch)) for _ in range(32)]
    assert sum(map(bool, found)) > 16


def test_a_row_that_overlap_takes_out_of_the_next_step_must_bring_more_than_that() -> None:
    """A tenth of the rows misses the next step; all of them are waited for."""
    for overlap, right, drafted in ((True, 0.4, 0), (False, 0.4, 2), (True, 0.9, 2)):
        speculation, batch = after({20: 1.0}, {21: 1.0, 26: 1.0}, right=0, count=20, most=3, overlap=overlap)
        for request in batch[:2]:
            rate(request, right)
        assert sum(map(bool, chosen(speculation, batch))) == drafted, (overlap, right)


def test_there_are_no_more_drafts_than_room() -> None:
    speculation, batch = after({3: 1.0}, {}, right=0.99, count=3)
    assert sum(chosen(speculation, batch, room=7)) == 7
    assert chosen(speculation, batch, room=0) == [0, 0, 0]
    fixed = Speculation(Always(), 64, 4, adaptive=False)
    assert chosen(fixed, batch, room=6) == [4, 2, 0]
    assert chosen(fixed, batch) == [4, 4, 4]


def test_requests_that_are_never_right_are_hardly_asked() -> None:
    drafter = Always()
    speculation, batch = after({32: 1.0}, {33: 1.02}, right=0.1, count=32, drafter=drafter)
    for _ in range(64):
        chosen(speculation, batch)
    assert drafter.asked <= 32 * 64 / 8


def test_a_rate_follows_what_turns_out_right() -> None:
    drafting = requests(1)[0].drafting
    assert drafting is not None
    for _ in range(50):
        drafting.verified(DraftSource.TEXT, 4, 4)
    assert drafting.rate > 0.95
    for _ in range(50):
        drafting.verified(DraftSource.TEXT, 4, 0)
    assert drafting.rate < 0.05
    assert (drafting.accepted, drafting.rejected) == (200, 200)
    for _ in range(500):
        drafting.unused()
    usual = drafting._usual.of(DraftSource.TEXT)
    assert DraftSource.TEXT.value / 3 <= usual < DraftSource.TEXT.value + 0.4
    assert drafting.rate == pytest.approx(usual, abs=0.01)


def test_a_new_request_expects_what_was_usual_of_others() -> None:
    usual = UsualRates()
    nothing = DraftRequest(np.asarray([1], np.int32))
    assert Drafting(nothing, usual).rate == DraftSource.TEXT.value
    for right, least, most in ((0, 0.19, 0.21), (4, 0.95, 1.0)):
        for _ in range(1000):
            Drafting(nothing, usual).verified(DraftSource.TEXT, 4, right)
        assert least < Drafting(nothing, usual).rate < most
    assert usual.of(DraftSource.PREDICTION) == DraftSource.PREDICTION.value
    # Engines share nothing.
    assert Drafting(nothing).rate == DraftSource.TEXT.value


def test_a_cost_that_was_measured_wrongly_is_measured_again() -> None:
    """While the first steps with drafts ran, the machine did something else, too."""
    speculation, batch = after({1: 1.0}, {2: 9.0, 16: 9.0}, right=0.9)
    assert chosen(speculation, batch) == [0]
    tried = 0
    for turn in range(3000):
        if count := chosen(speculation, batch)[0]:
            tried = tried or turn
            assert batch[0].drafting is not None
            batch[0].drafting.verified(DraftSource.TEXT, count, count)
            once(speculation, 1 + count, 1.3, drafts=True)
        else:
            once(speculation, 1, 1.0, drafts=False)
    assert 0 < tried < 2500
    assert chosen(speculation, batch)[0] > 4


def test_plain_steps_are_measured_again_where_all_steps_have_drafts() -> None:
    """The first ones, in which memory is first touched and code loaded, took three times as long."""
    speculation, batch = Speculation(Always(), 64, 15), requests(1)
    rate(batch[0], 0.2)
    for took in (3.0, 3.0):
        once(speculation, 1, took, drafts=False)
    turns, plain = 2000, 0
    for _ in range(turns):
        if count := chosen(speculation, batch)[0]:
            once(speculation, 1 + count, 1.5, drafts=True)
        else:
            once(speculation, 1, 1.0, drafts=False)
            plain += 1
    assert plain > 0.8 * turns


def test_of_the_first_two_steps_of_a_size_the_shorter_counts() -> None:
    costs = SizeCosts()
    costs.observe(8, 3.0)
    costs.observe(8, 1.0)
    assert costs.of(8) == 1.0
    costs.observe(8, 2.0)
    assert 1.0 < costs.of(8) < 1.5


def test_drafts_that_cost_too_much_are_rarely_tried() -> None:
    speculation, batch = after({1: 1.0}, dict.fromkeys(range(2, 17), 3.0))
    tried = 0
    for _ in range(10_000):
        rate(batch[0], 0.6)
        if count := chosen(speculation, batch)[0]:
            tried += 1
            once(speculation, 1 + count, 3.0, drafts=True)
    assert tried <= 100


# -- costs ---------------------------------------------------------------------------------------------


def test_sizes_between_known_ones_are_interpolated() -> None:
    costs = SizeCosts()
    assert not costs
    assert costs.of(2) > costs.of(1) > 0
    for _ in range(50):
        costs.observe(1, 1.0)
        costs.observe(5, 3.0)
    assert costs.of(3) == pytest.approx(2.0, rel=1e-3)
    assert costs.of(1) == 1.0
    assert costs.of(9) > 3.0


def test_a_step_that_was_disturbed_changes_little() -> None:
    costs = SizeCosts()
    for _ in range(10):
        costs.observe(4, 1.0)
    costs.observe(4, 500.0)
    assert costs.of(4) < 1.3
