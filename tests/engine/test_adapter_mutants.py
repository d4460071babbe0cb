"""Planted bugs of adapters: the laws find each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aioinfer.cache.namespace import Namespace
from aioinfer.loop import core
from aioinfer.loop.adapters import AdapterLoads
from aioinfer.loop.core import Core
from aioinfer.request import Output
from aioinfer.scheduling import scheduler
from aioinfer.scheduling.adapters import AdapterRegistry, AdapterVersion
from aioinfer.scheduling.sequence import Sequence
from tests.engine import laws
from tests.engine.simulation import simulate
from tests.engine.test_adapters import fence_course, reload_course
from tests.parallel.toys import virtual
from tests.tiers import PLANTED_BUG, nightly
from tests.toys.adapters import write_toy_adapter

Patch = pytest.MonkeyPatch


def the_name_is_the_namespace(patch: Patch) -> None:
    """The complaint of others: the pages of what a name stood for before are hit."""
    original = Core.submit

    def submit(self: Core, output: Output, *rest: Any) -> Sequence:
        name = output.request.adapter
        with pytest.MonkeyPatch.context() as inner:
            number = 0 if name is None else 1 + ord(name[0])
            inner.setattr(core, "Namespace", lambda salt, adapter: Namespace(salt, number))
            return original(self, output, *rest)

    patch.setattr(Core, "submit", submit)
    _see_streams_alone(patch)


def adapters_have_no_namespace(patch: Patch) -> None:
    patch.setattr(core, "Namespace", lambda salt, adapter: Namespace(salt))
    _see_streams_alone(patch)


def slots_come_back_before_the_fence(patch: Patch) -> None:
    original = AdapterRegistry._leave_if_idle

    def leave(self: AdapterRegistry, version: AdapterVersion) -> None:
        version.fence = 0
        original(self, version)

    patch.setattr(AdapterRegistry, "_leave_if_idle", leave)


def slots_come_back_with_the_name(patch: Patch) -> None:
    """Rows in flight and requests that wait lose what they were accepted with."""
    original = AdapterRegistry._leave_if_idle

    def leave(self: AdapterRegistry, version: AdapterVersion) -> None:
        version.users.clear()
        original(self, version)

    patch.setattr(AdapterRegistry, "_leave_if_idle", leave)
    _see_streams_alone(patch)


def adapters_are_lost_with_the_slot(patch: Patch) -> None:
    """A request that was retracted is announced again, without."""
    original = scheduler.new_request_data

    def data(request: Sequence) -> Any:
        found = original(request)
        again = found is not None and request.recovery.retractions
        return replace(found, adapter=0) if found is not None and again else found

    patch.setattr(scheduler, "new_request_data", data)
    _see_streams_alone(patch)


def requests_get_what_the_name_stands_for_when_they_are_queued(patch: Patch) -> None:
    original = Core.submit

    def submit(self: Core, output: Output, prepared: Any, cell: Any, adapter: AdapterVersion | None) -> Any:
        if adapter is not None and adapter.name in self.adapters.loaded:
            newest = self.adapters.loaded[adapter.name]
            self.adapters.leave(adapter, output, 0)
            newest.users.add(output)
            adapter = newest
        return original(self, output, prepared, cell, adapter)

    patch.setattr(Core, "submit", submit)


def requests_that_were_never_queued_keep_theirs(patch: Patch) -> None:
    original = AdapterRegistry.leave

    def leave(self: AdapterRegistry, version: AdapterVersion, output: Output, last_step: int) -> None:
        if output.accepted:
            original(self, version, output, last_step)

    patch.setattr(AdapterRegistry, "leave", leave)


def cancelled_loads_keep_their_slot(patch: Patch) -> None:
    original = AdapterLoads._start

    def start(self: AdapterLoads, emptying: Any) -> None:
        if "give_back" in repr(emptying.cr_frame.f_locals["freed"]):
            emptying.close()
        else:
            original(self, emptying)

    patch.setattr(AdapterLoads, "_start", start)


def a_name_is_found_before_its_adapter_is_there(patch: Patch) -> None:
    async def install(self: AdapterLoads, name: str, path: str, prepared: Any) -> Any:
        slot = await self._slot()
        facts: dict[str, Any] = {"rank": 1, "num_bytes": 1, "fingerprint": prepared.fingerprint}
        version = self._registry.publish(name, path, slot, **facts)
        await self._unless_closed(self._loop.run_in_executor(None, int))
        await self._launcher.call(lambda device: device.install_adapter(slot, prepared))
        return version

    patch.setattr(AdapterLoads, "_install", install)


def _see_streams_alone(patch: Patch) -> None:
    """The laws of rows and of the registry say nothing of adapters: tokens and the device have to."""
    original = laws.LawChecker.check_row

    def check_row(self: Any, step: Any, row: Any) -> None:
        try:
            original(self, step, row)
        except AssertionError as error:
            if "adapter" not in str(error):
                raise

    patch.setattr(laws.LawChecker, "check_row", check_row)
    patch.setattr(AdapterRegistry, "audit", lambda self: None)


@nightly(PLANTED_BUG)
@pytest.mark.parametrize(
    "bug",
    [
        adapters_have_no_namespace,
        slots_come_back_with_the_name,
        adapters_are_lost_with_the_slot,
        requests_get_what_the_name_stands_for_when_they_are_queued,
        requests_that_were_never_queued_keep_theirs,
        cancelled_loads_keep_their_slot,
        a_name_is_found_before_its_adapter_is_there,
    ],
)
def test_planted_bugs_are_found_in_random_worlds(bug: Callable[[Patch], None], monkeypatch: Patch) -> None:
    bug(monkeypatch)
    with pytest.raises((Exception, pytest.fail.Exception)):
        for seed in range(300):
            simulate(seed, 80)


@pytest.mark.parametrize("bug", [the_name_is_the_namespace, adapters_have_no_namespace])
def test_a_reload_finds_bugs_of_namespaces(
    bug: Callable[[Patch], None], monkeypatch: Patch, tmp_path: Path
) -> None:
    bug(monkeypatch)
    with pytest.raises((Exception, pytest.fail.Exception)):
        virtual(reload_course)(tmp_path)


def test_an_unload_in_flight_finds_slots_that_come_back_too_early(monkeypatch: Patch, tmp_path: Path) -> None:
    """On a device that computes while Python goes on, its rows would read what is not there."""
    slots_come_back_before_the_fence(monkeypatch)
    with pytest.raises(AssertionError):
        virtual(fence_course)(write_toy_adapter(tmp_path / "a", "a"))
