"""Steer: what an application bans while an output is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aioinfer import Steer
from aioinfer.errors import InvalidRequest


def banned(steer: Steer, *ids: int) -> list[int]:
    logits = np.zeros(10, np.float32)
    assert steer(np.array(ids, np.int64), logits) is None  # type: ignore[func-returns-value]
    return np.flatnonzero(np.isneginf(logits)).tolist()


def test_what_is_banned_cannot_be_completed_until_it_is_allowed() -> None:
    steer = Steer()
    assert banned(steer, 1, 2) == []
    steer.ban([3], [1, 2, 4], (2, 5), np.array([2, 2, 6]))
    assert banned(steer, 1, 2) == [3, 4, 5]
    assert banned(steer, 0, 2) == [3, 5]
    assert banned(steer, 2) == [3, 5]
    assert banned(steer, 2, 2) == [3, 5, 6]
    assert banned(steer) == [3]
    steer.allow([3], [2, 5], [7])
    assert banned(steer, 1, 2) == [4]
    steer.allow()
    assert banned(steer, 1, 2) == []


def test_tokens_that_the_model_does_not_have_are_nothing() -> None:
    steer = Steer()
    steer.ban([10], [1, 11], [9])
    assert banned(steer, 1) == [9]


@pytest.mark.parametrize("wrong", [[], 3, "a", [1.5], [-1], [True], [2**31], [[1]], [1] * 257])
def test_what_is_no_sequence_is_refused(wrong: Any) -> None:
    steer = Steer()
    for change in (steer.ban, steer.allow):
        with pytest.raises(InvalidRequest, match="sequences"):
            change([1], wrong)
    assert banned(steer) == []
    with pytest.raises(InvalidRequest, match="4096 at most"):
        steer.ban(*([each] for each in range(5000)))
