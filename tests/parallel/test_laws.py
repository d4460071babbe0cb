"""The laws of a dispatcher, over random lifetimes of its streams, while replicas are lost and come back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from aioinfer.parallel.dispatching import Dispatching
from aioinfer.parallel.local import LocalReplica
from aioinfer.parallel.record import Attempt, Record
from aioinfer.parallel.replica import Load, Rows
from tests.parallel.simulation import simulate
from tests.tiers import PLANTED_BUG, SECONDS, SIMULATION, grid, nightly, rest, scaled

LIFETIMES = scaled(60, 12)
BLOCKS = 3
#: per block; every policy comes up eleven times in each
WORLDS = 67


@rest(SECONDS)
@pytest.mark.parametrize("block", grid([0], range(1, BLOCKS), SIMULATION))
def test_random_lifetimes_keep_every_law(block: int) -> None:
    """3 blocks of 67 worlds of 60 lifetimes: 12,060 in all. The rest has 804."""
    counts: Counter[str] = Counter()
    for seed in range(block * WORLDS, (block + 1) * WORLDS):
        counts += simulate(seed, LIFETIMES).counts
    # The worlds are worth something only if all this did occur.
    for happening in (
        "finished", "left", "cancelled", "dropped", "never read", "timed out", "replicas lost", "restarts",
        "replicas rolled", "moved", "zombies", "late tokens", "streams lost", "worlds with a wire",
    ):  # fmt: skip
        assert counts[happening] > 0, (happening, counts)


@rest(SECONDS)
@pytest.mark.parametrize("seed", [3])
def test_the_same_seed_takes_the_same_course(seed: int) -> None:
    first, second, other = simulate(seed, 30), simulate(seed, 30), simulate(seed + 1, 30)
    assert first.outcomes == second.outcomes != other.outcomes


# -- bugs ----------------------------------------------------------------------------------------------


def late_rows_count(patch: pytest.MonkeyPatch) -> None:
    """What comes of an old attempt is taken."""
    moved = Dispatching.moved

    def wrong(self: Dispatching, rows: list[tuple[Attempt, Rows]]) -> None:
        for attempt, _ in rows:
            if attempt.record.attempt is not None:
                attempt.ended = False
        moved(self, rows)

    patch.setattr(Dispatching, "moved", wrong)


def twice(patch: pytest.MonkeyPatch) -> None:
    """What comes twice is appended twice."""

    def wrong(self: Attempt, rows: Rows) -> bool:
        self.record.output_ids += rows.ids
        self.record.token_times += rows.times
        if self.record.params.logprobs is not None:
            self.record.logprobs += rows.logprobs
        return self._bring_text(rows.at, rows.text)

    patch.setattr(Attempt, "bring", wrong)


def load_is_kept(patch: pytest.MonkeyPatch) -> None:
    """What was sent to a replica that is lost stays counted there."""
    remove = Load.remove

    def wrong(self: Load, attempt: Attempt) -> None:
        tokens = self.tokens
        remove(self, attempt)
        if attempt.record.losses:
            self.tokens = tokens

    patch.setattr(Load, "remove", wrong)


def not_aborted(patch: pytest.MonkeyPatch) -> None:
    """A replica goes on with what nobody reads."""
    patch.setattr(LocalReplica, "abort", lambda self, attempt: None)


def not_queued_again(patch: pytest.MonkeyPatch) -> None:
    """An interrupted stream is forgotten."""
    patch.setattr(Dispatching, "_again", lambda self, record: None)


def no_deadline(patch: pytest.MonkeyPatch) -> None:
    """What waits in the dispatcher waits for ever, once it has been sent."""
    again = Dispatching._again

    def wrong(self: Dispatching, record: Record) -> None:
        again(self, record)
        record.consumer.cancel_timer()  # type: ignore[attr-defined]
        record.admitted_at = None

    patch.setattr(Dispatching, "_again", wrong)


def never_loses(patch: pytest.MonkeyPatch) -> None:
    """A loss ends streams although others are left."""
    patch.setattr(Dispatching, "_lose", lambda self, attempt, cause: _ends(self, attempt, cause))


def _ends(dispatching: Dispatching, attempt: Attempt, cause: BaseException) -> None:
    record = attempt.record
    dispatching._leave(attempt, abort=True)
    dispatching.end(record, dispatching._lost_for_good(record, "lost", cause))


BUGS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "late rows count": late_rows_count,
    "rows count twice": twice,
    "load is kept": load_is_kept,
    "nothing is aborted": not_aborted,
    "nothing goes on": not_queued_again,
    "a loss ends streams": never_loses,
}


@nightly(PLANTED_BUG)
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    BUGS[bug](monkeypatch)
    with pytest.raises(BaseException) as found:  # noqa: PT011 - a Deadlock of the loop, or a group of what tasks raised
        for seed in range(60):
            simulate(seed, 40)
    assert not isinstance(found.value, KeyboardInterrupt)
