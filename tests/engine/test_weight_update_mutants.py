"""Planted bugs of weight updates: the laws find each of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from aioinfer.cache.namespace import Namespace
from aioinfer.loop.driver import Driver
from aioinfer.scheduling.memory import Memory
from aioinfer.scheduling.queues import RequestQueues
from aioinfer.scheduling.sequence import Sequence
from tests.engine.simulation import simulate
from tests.tiers import PLANTED_BUG, nightly

Mutant = Callable[[pytest.MonkeyPatch], None]


def the_cache_is_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Memory, "flush", lambda self: 0)


def the_namespace_is_kept_and_the_cache(patch: pytest.MonkeyPatch) -> None:
    the_cache_is_kept(patch)
    switch = Sequence.take_version

    def kept(self: Sequence, version: int) -> None:
        switch(self, version)
        self.namespace = Namespace(self.namespace.salt)

    patch.setattr(Sequence, "take_version", kept)


def those_that_wait_keep_their_namespace(patch: pytest.MonkeyPatch) -> None:
    switch = RequestQueues.switch

    def kept(self: RequestQueues, version: int) -> None:
        before = {request: request.namespace for request in self.waiting}
        switch(self, version)
        for request, namespace in before.items():
            request.namespace = namespace

    patch.setattr(RequestQueues, "switch", kept)


def steps_go_on_meanwhile(patch: pytest.MonkeyPatch) -> None:
    async def hold(self: Driver) -> None:
        self._holds += 1

    patch.setattr(Driver, "hold", hold)


MUTANTS: list[Mutant] = [
    the_cache_is_kept,
    the_namespace_is_kept_and_the_cache,
    those_that_wait_keep_their_namespace,
    steps_go_on_meanwhile,
]


@nightly(PLANTED_BUG)
@pytest.mark.parametrize("plant", MUTANTS, ids=lambda plant: plant.__name__)
def test_planted_bugs_are_found(monkeypatch: pytest.MonkeyPatch, plant: Mutant) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, BaseExceptionGroup)):
        for seed in range(60):
            simulate(seed, 40)
