"""The scheduler's state machine keeps the laws, with a model that has recurrent state, too."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from tests.machines import run_machine
from tests.scheduling.machine import SchedulerMachine
from tests.tiers import SECONDS, grid, rest


def test_the_scheduler_keeps_the_laws() -> None:
    run_machine(SchedulerMachine, 120, 40)


class Stateful(SchedulerMachine):
    """Many chunks and pages, so that there is much to take snapshots of, and few snapshots."""

    fixed: ClassVar[dict[str, Any]] = {"prefix_cache": True, "snapshots": 3, "page_size": 1}


@rest(SECONDS)
@pytest.mark.parametrize("snapshots", grid([1, 3], [0, 2, 16]))
def test_states_keep_the_laws(snapshots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(Stateful.fixed, "snapshots", snapshots)
    run_machine(Stateful, 120, 24)
