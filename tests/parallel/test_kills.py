"""The kill test on a small scale: ``python -m tests.parallel.kills`` has the large one."""

from __future__ import annotations

import asyncio

import pytest

from tests.model.harness import require
from tests.parallel.kills import run
from tests.tiers import PROGRAM, nightly


@nightly(PROGRAM)
@pytest.mark.parametrize(
    ("model", "streams", "rolling", "prefill"),
    [
        ("tiny-chat", 20, False, False),
        ("tiny-diffusion", 15, False, False),
        ("tiny-chat", 60, True, False),
        ("tiny-chat", 20, False, True),
    ],
)
def test_no_answer_shows_that_replicas_were_killed(
    model: str, streams: int, rolling: bool, prefill: bool
) -> None:
    require("native")
    every = 0.1 if rolling else 1.0
    found = asyncio.run(
        run(model, streams, clients=12, every=every, rolling=rolling, prefill=prefill, seed=0)
    )
    assert bool(found["handovers"]) is prefill
    assert found["failed"] == found["differing"] == found["diverged"] == 0, found
    assert found["streams"] >= streams
    assert found["kills"] or found["rolled"]
