"""The fenced pool against a naive model."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aioinfer.cache.fenced import FencedPool
from tests.machines import run_machine
from tests.tiers import SECONDS, rest


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = FencedPool(12)
        self.launched = self.resolved = 0
        self.owned: list[tuple[list[int], int]] = []
        #: naive: for every item, the newest launched step that could touch it
        self.touched = dict.fromkeys(range(1, 13), 0)

    @rule(count=st.integers(0, 5))
    def take(self, count: int) -> None:
        free = self.pool.free
        if count > free:
            with pytest.raises(IndexError):
                self.pool.take(count)
            assert self.pool.free == free, "a refused take changed something"
            return
        items = self.pool.take(count)
        assert len(set(items)) == count
        for item in items:
            assert all(item not in others for others, _ in self.owned), "handed out twice"
            assert self.touched[item] <= self.resolved, "handed out while in flight"
        self.owned.append((items, 0))

    @precondition(lambda self: self.launched - self.resolved < 3)
    @rule(data=st.data())
    def launch(self, data: st.DataObject) -> None:
        self.launched += 1
        for at, (items, _) in enumerate(self.owned):
            if data.draw(st.booleans()):
                self.owned[at] = (items, self.launched)
                self.touched.update(dict.fromkeys(items, self.launched))

    @precondition(lambda self: self.resolved < self.launched)
    @rule()
    def resolve(self) -> None:
        self.resolved += 1
        self.pool.resolved(self.resolved)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        items, last_step = self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1)))
        self.pool.give(items, last_step)

    @invariant()
    def conserved(self) -> None:
        self.pool.check()
        self.pool.audit(item for items, _ in self.owned for item in items)
        if self.resolved == self.launched:
            assert self.pool.fenced == 0


@rest(SECONDS)
def test_the_pool_behaves_like_the_naive_model() -> None:
    run_machine(PoolMachine, 120, 60)
