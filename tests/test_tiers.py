"""The tiers do what they say."""

from __future__ import annotations

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


def test_the_rest_has_what_the_quick_tier_leaves_out_or_runs_in_part() -> None:
    def item(mark: Any, **names: Any) -> Any:
        return SimpleNamespace(get_closest_marker=lambda name: mark, module=SimpleNamespace(**names))

    assert not conftest._has_more(item(None, pytest=pytest))
    assert conftest._has_more(item(tiers.battery("why")))
    assert conftest._has_more(item(None, scaled=tiers.scaled))
    assert conftest._has_more(item(None, given=None))
