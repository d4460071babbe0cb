"""Two tiers: ``pytest`` runs what is wanted after each edit, ``pytest --battery`` runs every test.

A test or a parameter belongs to the battery by a marker that gives the reason. The scale of random
lifetimes and of Hypothesis belongs to the tier, too, and is set here and nowhere else.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

__all__ = [
    "COMPILES",
    "EXACT",
    "FURTHER",
    "INTERPRETER",
    "PLANTED_BUG",
    "PROGRAM",
    "RACES",
    "SIMULATION",
    "SLOW_MODEL",
    "battery",
    "grid",
    "loops",
    "points",
    "run_in_part",
    "runs_on",
    "scaled",
    "set_scale",
    "thinned",
]

#: ``@battery(reason)``: the test runs with ``--battery`` only
battery = pytest.mark.battery

# The usual reasons.
PLANTED_BUG = "a planted bug must be found: a test of the tests"
EXACT = "exact distributions, combination by combination"
INTERPRETER = "Triton's interpreter, a further point of a grid of sizes and types"
SLOW_MODEL = "a whole model in Triton's interpreter takes ten seconds and more"
SIMULATION = "a long simulation"
PROGRAM = "runs a program from its start"
COMPILES = "compiles for a minute or for another machine"
RACES = "thousands of programs on many threads"
FURTHER = "further values of the same parameter"

#: share of the random examples and lifetimes that ``pytest`` runs unless ``--scale`` says otherwise
QUICK_SCALE = 0.2
_scale = QUICK_SCALE
_PARAM = type(pytest.param())

#: Asyncio tests run on asyncio's loop and, with the battery, on uvloop. In the quick tier these run on both,
#: because they depend on the order in which a loop makes its calls; "tests/server/" runs on uvloop alone,
#: the loop of ``aioinfer serve``.
BOTH_LOOPS = ("tests/engine/test_streams.py", "tests/engine/test_lifecycle.py")
UVLOOP_ALONE = ("tests/server/",)
#: These take minutes and check what no loop changes: the arithmetic of models, what a request may say, what a
#: grammar allows, what other processes do. With the battery, too, they run on one loop.
ONE_LOOP = (
    "tests/bench/",
    "tests/model/",
    "tests/checkpoint/test_smollm2.py",
    "tests/engine/test_block_models.py",
    "tests/engine/test_bundled_model.py",
    "tests/engine/test_deterministic.py",
    "tests/engine/test_transparency.py",
    "tests/execution/",
    "tests/parallel/test_failover.py",
    "tests/parallel/test_processes.py",
    "tests/parallel/test_real_ray.py",
    "tests/server/test_near_valid.py",
    "tests/server/test_reasoning.py",
    "tests/server/test_tools.py",
)
LOOPS = ("asyncio", "uvloop")


def grid(quick: Iterable[Any], battery: Iterable[Any], reason: str = FURTHER) -> list[Any]:
    """Values of one parameter for ``parametrize``, or of a fixture: of every run, and of the battery.

    A value may be a ``pytest.param``, whose id and marks are kept.
    """
    return points((_param(value) for value in quick), (_param(value) for value in battery), reason)


def thinned(values: Iterable[Any], every: int, reason: str = FURTHER) -> list[Any]:
    """Values of one parameter, of which the first and every so many behind it are of every run."""
    kept = list(values)
    left_out = [value for at, value in enumerate(kept) if at % every]
    return grid(kept[::every], left_out, reason)


def points(quick: Iterable[Any], battery: Iterable[Any], reason: str = FURTHER) -> list[Any]:
    """The same for several parameters at once: a tuple, or a ``pytest.param``, of their values each."""
    mark = pytest.mark.battery(reason)
    marked = (value if isinstance(value, _PARAM) else pytest.param(*value) for value in battery)
    return [*quick, *(pytest.param(*each.values, marks=[*each.marks, mark], id=each.id) for each in marked)]


def scaled(full: int, least: int = 1) -> int:
    """``full`` with ``--battery``, a share of it but no less than ``least`` without."""
    return max(least, round(full * _scale))


def set_scale(scale: float, *, explore: bool = False) -> None:
    """Called by the conftest before any test module is imported.

    Hypothesis draws the same examples in every run, unless ``explore``, and judges no time: a busy machine is
    slow to draw them.
    """
    global _scale
    _scale = scale
    settings.register_profile(
        "aioinfer",
        max_examples=scaled(100, 20),
        deadline=None,
        derandomize=not explore,
        suppress_health_check=[HealthCheck.too_slow],
        print_blob=True,
    )
    settings.load_profile("aioinfer")


@functools.cache
def run_in_part(module: ModuleType) -> frozenset[str]:
    """Names of a test module's functions and classes of which the quick tier runs a share of the examples.

    They use ``scaled`` or ``given``, or something of the module that does, fixtures included.
    """
    found = {"given", "scaled"} & vars(module).keys()
    if not found:
        return frozenset()
    uses: dict[str, set[str]] = {}
    for statement in ast.parse(inspect.getsource(module)).body:
        nodes = [*ast.walk(statement)]
        names = [node for node in nodes if isinstance(node, ast.Name)]
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined = {statement.name}
        else:
            defined = {node.id for node in names if isinstance(node.ctx, ast.Store)}
        used = {node.id for node in names} | {node.arg for node in nodes if isinstance(node, ast.arg)}
        for name in defined:
            uses.setdefault(name, set()).update(used)
    while more := {name for name, used in uses.items() if name not in found and not used.isdisjoint(found)}:
        found |= more
    return frozenset(found)


def loops(nodeid: str) -> list[str]:
    """The loops on which any tier runs an asyncio test."""
    return [loop for loop in LOOPS if runs_on(nodeid, loop) or not nodeid.startswith(ONE_LOOP)]


def runs_on(nodeid: str, loop: str) -> bool:
    """Whether the quick tier runs an asyncio test on this loop ("asyncio" or "uvloop")."""
    if nodeid.startswith(BOTH_LOOPS):
        return True
    return (loop == "uvloop") == nodeid.startswith(UVLOOP_ALONE)


def _param(value: Any) -> Any:
    return value if isinstance(value, _PARAM) else pytest.param(value)
