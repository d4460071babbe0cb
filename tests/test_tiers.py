"""The tiers do what they say."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest, tiers


@pytest.fixture(autouse=True)
def _chosen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "_chosen", tiers.TIERS)


def test_further_points_are_marked_nightly_and_not_collected_without(monkeypatch: pytest.MonkeyPatch) -> None:
    marked = pytest.param(3, 4, id="three", marks=pytest.mark.gpu)
    plain, first, second = tiers.points([(0, 1)], [(1, 2), marked], "why")
    assert plain == (0, 1)
    assert (first.values, [(mark.name, mark.args) for mark in first.marks]) == (
        (1, 2),
        [("nightly", ("why",))],
    )
    assert (second.id, [mark.name for mark in second.marks]) == ("three", ["gpu", "nightly"])
    monkeypatch.setattr(tiers, "_chosen", ("quick", "rest"))
    assert [each.values for each in tiers.grid([1], [2, 3])] == [(1,)]
    assert [each.values for each in tiers.thinned(range(5), 3)] == [(0,), (3,)]


def test_each_test_is_in_one_of_six_shares() -> None:
    shares = [f"{part}/6" for part in range(1, 7)]
    for number in range(600):
        assert sum(tiers.in_share(f"tests/a/test_b.py::test_c[{number}]", share) for share in shares) == 1
    with pytest.raises(ValueError, match="no share"):
        tiers.in_share("tests/a", "7/6")


def test_what_has_changed_has_its_tests(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        user = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", *user, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    for _ in range(2):
        for name in (
            "aioinfer/cache/radix.py",
            "aioinfer/stream.py",
            "examples/deploy/Dockerfile",
            "tests/server/test_sse.py",
            "README.md",
        ):
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(path.read_text() + "1" if path.exists() else "")
        git("add", ".")
        git("commit", "-m", "Change it")
    assert tiers.touched(tmp_path, "HEAD^") == (
        "tests/cache/",
        "tests/deploy/",
        "tests/engine/",
        "tests/server/test_sse.py",
    )
    assert tiers.touched(tmp_path, "HEAD") == ()


def test_every_room_has_tests_and_every_name_in_the_tiers_exists() -> None:
    root = Path(__file__).parents[1]
    for room in (path.parent.name for path in (root / "aioinfer").glob("*/__init__.py")):
        assert [*root.glob(f"{tiers.TESTS_OF.get(room, f'tests/{room}/')}*.py")], room
    assert all((root / name).exists() for name in (*tiers.ONE_LOOP, *tiers.BOTH_LOOPS))


def test_nightly_runs_in_full_what_other_tiers_run_in_part(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        """
from hypothesis import given, strategies as st
from tests.tiers import scaled

COUNT = 2 * scaled(10)

def helper():
    return [*range(scaled(3))]

@given(st.integers())
def test_decorated(number): ...

def test_helper():
    helper()

class TestClass:
    def test_it(self):
        assert COUNT

def test_none(): ...
"""
    )
    spec = importlib.util.spec_from_file_location("module", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = {name for name in tiers.run_in_part(module) if name.lower().startswith("test")}
    assert found == {"test_decorated", "test_helper", "TestClass"}

    def tier(name: str, chosen: tuple[str, ...]) -> str:
        item: Any = SimpleNamespace(
            get_closest_marker=lambda _: None, module=module, nodeid=f"tests/a/test_x.py::{name}[a::b]"
        )
        return conftest._tier(item, chosen)

    assert tier("test_helper", ("nightly",)) == "nightly"
    assert tier("test_helper", ("quick",)) == tier("test_none", ("nightly",)) == "quick"
