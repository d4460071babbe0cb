"""The tiers do what they say."""

from __future__ import annotations

import gc
import importlib.util
import random
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest, tiers


@pytest.fixture(autouse=True)
def _chosen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "_chosen", tiers.TIERS)
    monkeypatch.setattr(tiers, "_scale", tiers._scale)


def test_what_is_nightly_is_marked_and_keeps_id_and_marks() -> None:
    plain, first = tiers.grid([(0, 1)], [(1, 2)], "why")
    assert (plain.values, plain.marks) == (((0, 1),), ())
    assert first.values == ((1, 2),)
    assert [(mark.name, mark.args) for mark in first.marks] == [("nightly", ("why",))]
    marked = pytest.param(3, 4, id="three", marks=pytest.mark.gpu)
    plain, first, second = tiers.points([(0, 1)], [(1, 2), marked], "why")
    assert plain == (0, 1)
    assert first.values == (1, 2)
    assert (second.values, second.id) == ((3, 4), "three")
    assert [mark.name for mark in second.marks] == ["gpu", "nightly"]


@pytest.mark.parametrize("chosen", [("quick",), ("rest",), ("quick", "rest")])
def test_what_is_nightly_is_not_collected_without(
    chosen: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "_chosen", chosen)
    assert [each.values for each in tiers.grid([1], [2, 3])] == [(1,)]
    assert tiers.points([(0, 1)], [(1, 2)]) == [(0, 1)]
    assert [each.values for each in tiers.thinned(range(5), 3)] == [(0,), (3,)]
    assert tiers.loops("tests/engine/test_pacing.py::test_x") == ["asyncio"]


def test_the_scale_leaves_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    for scale, found in ((1.0, (100, 30, 3)), (0.2, (20, 20, 1)), (0.001, (1, 20, 1))):
        monkeypatch.setattr(tiers, "_scale", scale)
        assert (tiers.scaled(100), tiers.scaled(30, 20), tiers.scaled(3)) == found


def test_nightly_asyncio_tests_run_on_both_loops_but_for_those_of_models() -> None:
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


def test_each_test_is_in_one_of_six_shares() -> None:
    shares = [f"{part}/6" for part in range(1, 7)]
    names = [f"tests/a/test_b.py::test_c[{number}]" for number in range(600)]
    found = [[share for share in shares if tiers.in_share(name, share)] for name in names]
    assert all(len(each) == 1 for each in found)
    assert all(found.count([share]) > 60 for share in shares)
    for wrong in ("7/6", "0/6", "2", "a/b", ""):
        with pytest.raises(ValueError):  # noqa: PT011
            tiers.in_share("tests/a", wrong)


def test_what_has_changed_has_its_tests(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        names = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", *names, *arguments], cwd=tmp_path, check=True, capture_output=True)

    def commit(*names: str) -> None:
        for name in names:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(path.read_text() + "1" if path.exists() else "")
        git("add", ".")
        git("commit", "-m", "Change it")

    git("init")
    commit("aioinfer/cache/radix.py", "README.md", "aioinfer/loop/turns.py", "tests/tiers.py")
    commit("README.md", "tests/tiers.py")
    assert tiers.touched(tmp_path, "HEAD^") == ()
    commit("aioinfer/loop/turns.py", "aioinfer/cache/radix.py", "tests/server/test_sse.py")
    assert tiers.touched(tmp_path, "HEAD^") == ("tests/cache/", "tests/engine/", "tests/server/test_sse.py")
    commit("aioinfer/mapping.py")
    assert tiers.touched(tmp_path, "HEAD^") == ("tests/engine/",)
    with pytest.raises(subprocess.CalledProcessError):
        tiers.touched(tmp_path, "no-such-revision")


def test_every_room_of_the_library_has_its_tests() -> None:
    root = Path(__file__).parents[1]
    rooms = [path.parent.name for path in (root / "aioinfer").glob("*/__init__.py")]
    for room in rooms:
        prefix = tiers.TESTS_OF.get(room, f"tests/{room}/")
        assert [*root.glob(f"{prefix}*.py")], room


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


def test_nightly_has_what_other_tiers_leave_out_or_run_in_part() -> None:
    from tests.scheduling import test_packing, test_state_machine_states
    from tests.text import test_stop

    def tier(module: Any, name: str, *marks: Any, chosen: tuple[str, ...] = ("rest", "nightly")) -> str:
        found = {mark.name: mark for mark in marks}
        item: Any = SimpleNamespace(
            get_closest_marker=found.get, module=module, nodeid=f"tests/room/test_x.py::{name}[a::b]"
        )
        return conftest._tier(item, chosen)

    plain = "test_where_slots_are_short_packing_keeps_the_policys_order"
    nightly, rest = tiers.nightly("why").mark, tiers.rest("why").mark
    assert tier(test_packing, plain) == "quick"
    assert tier(test_packing, plain, rest) == "rest"
    assert tier(test_packing, plain, rest, nightly) == tier(test_packing, plain, nightly) == "nightly"
    # Examples are drawn, a share of a constant, of a function in the module, of settings.
    for module, name in (
        (test_stop, "test_the_match_does_not_depend_on_the_chunks"),
        (test_state_machine_states, "test_the_scheduler_keeps_the_laws"),
    ):
        assert tier(module, name) == tier(module, name, rest) == "nightly"
        assert tier(module, name, chosen=("quick",)) == "quick"
        assert tier(module, name, rest, chosen=("rest",)) == "rest"


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
