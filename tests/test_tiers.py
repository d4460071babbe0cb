"""The tiers do what they say."""

from __future__ import annotations

import gc
import importlib.util
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest, tiers


def test_what_is_left_to_the_battery_is_marked_and_keeps_id_and_marks() -> None:
    plain, first = tiers.grid([(0, 1)], [(1, 2)], "why")
    assert (plain.values, plain.marks) == (((0, 1),), ())
    assert first.values == ((1, 2),)
    assert [(mark.name, mark.args) for mark in first.marks] == [("battery", ("why",))]
    marked = pytest.param(3, 4, id="three", marks=pytest.mark.gpu)
    plain, first, second = tiers.points([(0, 1)], [(1, 2), marked], "why")
    assert plain == (0, 1)
    assert first.values == (1, 2)
    assert (second.values, second.id) == ((3, 4), "three")
    assert [mark.name for mark in second.marks] == ["gpu", "battery"]


def test_the_scale_leaves_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    for scale, found in ((1.0, (100, 30, 3)), (0.2, (20, 20, 1)), (0.001, (1, 20, 1))):
        monkeypatch.setattr(tiers, "_scale", scale)
        assert (tiers.scaled(100), tiers.scaled(30, 20), tiers.scaled(3)) == found


def test_the_battery_runs_asyncio_tests_on_both_loops_but_for_those_of_models() -> None:
    assert tiers.loops("tests/engine/test_pacing.py::test_x") == ["asyncio", "uvloop"]
    assert tiers.loops("tests/server/test_sse.py::test_x") == ["asyncio", "uvloop"]
    assert tiers.loops("tests/model/test_oracle.py::test_x") == ["asyncio"]
    assert tiers.loops("tests/server/test_tools.py::test_x") == ["uvloop"]
    files = Path(__file__).parents[1]
    assert all((files / name).exists() for name in (*tiers.ONE_LOOP, *tiers.BOTH_LOOPS))


def test_quick_asyncio_tests_run_on_one_loop_but_for_streams_and_lifecycle() -> None:
    def loops(nodeid: str) -> list[str]:
        return [loop for loop in ("asyncio", "uvloop") if tiers.runs_on(nodeid, loop)]

    assert loops("tests/engine/test_streams.py::test_x") == ["asyncio", "uvloop"]
    assert loops("tests/server/test_sse.py::test_x") == ["uvloop"]
    assert loops("tests/engine/test_pacing.py::test_x") == ["asyncio"]


@pytest.mark.parametrize(
    ("changes", "workers"),
    [
        ({}, "auto"),
        ({"numprocesses": 0}, 0),
        ({"numprocesses": 3}, 3),
        ({"capture": "no"}, None),
        ({"markexpr": "gpu"}, None),
        ({"usepdb": True}, None),
        ({"args": ["tests/test_tiers.py::test_x"]}, None),
        ({"PYTEST_XDIST_WORKER": "gw0"}, None),
    ],
    ids=str,
)
def test_workers_start_by_themselves_and_start_none(
    changes: dict[str, Any], workers: int | str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a worker the hook is called, too: one that started workers would never end."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setattr(conftest, "_GPU", False)
    changes = dict(changes)
    if "PYTEST_XDIST_WORKER" in changes:
        monkeypatch.setenv("PYTEST_XDIST_WORKER", changes.pop("PYTEST_XDIST_WORKER"))
    config: Any = SimpleNamespace(args=changes.pop("args", ["tests"]))
    defaults = {"numprocesses": None, "dist": "no", "tx": [], "capture": "fd", "markexpr": ""}
    flags = {"usepdb": False, "trace": False, "collectonly": False}
    config.option = SimpleNamespace(**{**defaults, **flags, **changes})
    conftest.pytest_cmdline_main(config)
    assert config.option.numprocesses == workers
    assert config.option.dist == ("worksteal" if workers == "auto" else "no")


def test_what_a_test_draws_follows_from_its_name() -> None:
    import numpy as np
    import torch

    def drawn(name: str) -> tuple[float, float, float]:
        conftest._seed_generators(name)
        return random.random(), float(np.random.random()), float(torch.rand(1))

    first = drawn("a")
    assert drawn("a") == first
    assert not {*first} & {*drawn("b")}


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_while_a_failure_is_reported(enabled: bool) -> None:
    def while_reported(call: Any) -> bool:
        reporting = conftest.pytest_runtest_makereport(call)
        next(reporting)
        found = gc.isenabled()
        with pytest.raises(StopIteration, match="the report"):
            reporting.send("the report")
        return found

    failed = pytest.CallInfo.from_call(lambda: 1 // 0, "call")  # type: ignore[arg-type,return-value]
    passed = pytest.CallInfo.from_call(lambda: None, "call")
    found = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        assert not while_reported(failed)
        assert while_reported(passed) == gc.isenabled() == enabled
    finally:
        (gc.enable if found else gc.disable)()


def test_the_rest_has_what_the_quick_tier_leaves_out_or_runs_in_part() -> None:
    from tests.scheduling import test_packing, test_state_machine_states
    from tests.text import test_stop

    def more(module: Any, name: str, mark: Any = None) -> bool:
        item: Any = SimpleNamespace(
            get_closest_marker=lambda name: mark, module=module, nodeid=f"tests/room/test_x.py::{name}[a::b]"
        )
        return conftest._has_more(item)

    assert more(
        test_packing, "test_where_slots_are_short_packing_keeps_the_policys_order", tiers.battery("why")
    )
    assert not more(test_packing, "test_where_slots_are_short_packing_keeps_the_policys_order")
    # Examples are drawn, a share of a constant, of a function in the module, of settings.
    assert more(test_stop, "test_the_match_does_not_depend_on_the_chunks")
    assert more(test_state_machine_states, "test_the_scheduler_keeps_the_laws")


def test_what_runs_in_part_is_found_through_constants_functions_and_fixtures(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        """
import pytest
from hypothesis import given, strategies as st
from tests.tiers import scaled

COUNT = 2 * scaled(10)
numbers = given(st.integers())

@pytest.fixture
def made():
    return COUNT

def helper():
    return [*range(scaled(3))]

def plain(): ...

@numbers
def test_decorated(number): ...

def test_fixture(made): ...

def test_helper():
    helper()

async def test_inside():
    @given(st.integers())
    def inner(number): ...

class TestClass:
    def test_it(self):
        assert COUNT

def test_none(plain):
    made_here = plain
"""
    )
    spec = importlib.util.spec_from_file_location("module", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = {name for name in tiers.run_in_part(module) if name.lower().startswith("test")}
    assert found == {"test_decorated", "test_fixture", "test_helper", "test_inside", "TestClass"}
