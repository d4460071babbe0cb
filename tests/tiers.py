"""Three tiers: quick (``pytest``, after each edit), rest (``--rest``, what else a change needs) and nightly.

A test or a parameter belongs to the rest or to nightly by a marker that gives the reason; all others are
quick. Quick and rest run a share of the random lifetimes and of Hypothesis's examples, and ``--nightly`` runs
those tests once more, in full. ``--share 2/24`` runs a 24th of nightly, and with ``--touched REVISION``
also all of nightly that belongs to what has changed since then.
"""

from __future__ import annotations

import ast
import functools
import inspect
import subprocess
import zlib
from collections.abc import Collection, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

__all__ = [
    "COMPILES", "EMULATED", "EXACT", "FURTHER", "INTERPRETER", "LONG", "PROGRAM", "RACES", "SECONDS",
    "SIMULATION", "SLOW_MODEL", "TIERS", "choose", "grid", "in_share", "loops", "nightly", "points", "rest",
    "run_in_part", "runs_on", "scaled", "thinned", "touched",
]  # fmt: skip

TIERS = ("quick", "rest", "nightly")
#: ``@rest(reason)``: what else a change needs; ``@nightly(reason)``: 24 runs of ``.ci/run`` have it once
rest = pytest.mark.rest
nightly = pytest.mark.nightly

# The usual reasons, of the rest ...
SECONDS = "takes longer than a tenth of a second, and there are thousands of tests"
PROGRAM = "runs a program from its start"
# ... and of nightly.
EXACT = "exact distributions, combination by combination"
INTERPRETER = "Triton's interpreter: takes seconds, or is a further point of a grid of sizes and types"
SLOW_MODEL = "a whole model in Triton's interpreter takes ten seconds and more"
EMULATED = "on the emulated device, takes seconds"
SIMULATION = "a long simulation"
COMPILES = "compiles for a minute or for another machine"
RACES = "thousands of programs on many threads"
FURTHER = "further values of the same parameter"
#: reasons of those that may take longer than all others of a worker's
LONG = frozenset({PROGRAM, SLOW_MODEL, EMULATED, SIMULATION, COMPILES, RACES})

#: share of the random examples and lifetimes that ``pytest`` runs unless ``--scale`` says otherwise
QUICK_SCALE = 0.125
_scale = QUICK_SCALE
_chosen: Collection[str] = TIERS
_PARAM = type(pytest.param())

#: Asyncio tests run on asyncio's loop and, nightly, on uvloop. In the quick tier these run on both, because
#: they depend on the order in which a loop makes its calls; "tests/server/" runs on uvloop alone, the loop of
#: ``aioinfer serve``.
BOTH_LOOPS = ("tests/engine/test_streams.py", "tests/engine/test_lifecycle.py")
UVLOOP_ALONE = ("tests/server/",)
#: These take minutes and check what no loop changes: the arithmetic of models, what a request may say, what a
#: grammar allows, what other processes do. Nightly, too, they run on one loop.
ONE_LOOP = (
    "tests/bench/",
    "tests/model/",
    "tests/checkpoint/test_smollm2.py",
    "tests/engine/test_block_battery.py",
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

#: where the tests of a room are that has no folder of its name
TESTS_OF = {
    "bundled": "tests/engine/",
    "chat": "tests/server/",
    "client": "tests/engine/",
    "config": "tests/test_",
    "embeddings": "tests/engine/",
    "loop": "tests/engine/",
    "resuming": "tests/engine/",
    "testing": "tests/engine/",
    "tiers": "tests/pages/",
}


def grid(quick: Iterable[Any], nightly: Iterable[Any], reason: str = FURTHER) -> list[Any]:
    """Values of one parameter for ``parametrize``, or of a fixture: of every run, and of nightly.

    A value may be a ``pytest.param``, whose id and marks are kept.
    """
    return points((_param(value) for value in quick), (_param(value) for value in nightly), reason)


def thinned(values: Iterable[Any], every: int, reason: str = FURTHER) -> list[Any]:
    """Values of one parameter, of which the first and every so many behind it are of every run."""
    kept = list(values)
    left_out = [value for at, value in enumerate(kept) if at % every]
    return grid(kept[::every], left_out, reason)


def points(quick: Iterable[Any], nightly: Iterable[Any], reason: str = FURTHER) -> list[Any]:
    """The same for several parameters at once: a tuple, or a ``pytest.param``, of their values each.

    Without nightly the further ones are not even collected, which would take longer than the tests that run.
    """
    if "nightly" not in _chosen:
        return [*quick]
    mark = pytest.mark.nightly(reason)
    marked = (value if isinstance(value, _PARAM) else pytest.param(*value) for value in nightly)
    return [*quick, *(pytest.param(*each.values, marks=[*each.marks, mark], id=each.id) for each in marked)]


def scaled(full: int, least: int = 1) -> int:
    """``full`` with ``--nightly``, a share of it but no less than ``least`` without."""
    return max(least, round(full * _scale))


def choose(tiers: Collection[str], scale: float | None = None, *, explore: bool = False) -> None:
    """What is collected, and how many examples run; called before any test module is imported.

    ``scale`` is 1 with nightly unless it is given. Hypothesis draws the same examples in every run, unless
    ``explore``, and judges no time: a busy machine is slow to draw them.
    """
    global _chosen, _scale
    _chosen = tiers
    _scale = scale if scale is not None else 1.0 if "nightly" in tiers else QUICK_SCALE
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
    """The loops on which the chosen tiers run an asyncio test."""
    further = "nightly" in _chosen and not nodeid.startswith(ONE_LOOP)
    return [loop for loop in LOOPS if runs_on(nodeid, loop) or further]


def runs_on(nodeid: str, loop: str) -> bool:
    """Whether the quick tier runs an asyncio test on this loop ("asyncio" or "uvloop")."""
    if nodeid.startswith(BOTH_LOOPS):
        return True
    return (loop == "uvloop") == nodeid.startswith(UVLOOP_ALONE)


def in_share(nodeid: str, share: str) -> bool:
    """Whether a test is in the share "K/N" of all tests: one of N disjoint parts. Raises ValueError."""
    part, _, parts = share.partition("/")
    if not 1 <= int(part) <= int(parts):
        raise ValueError(f"{share!r} is no share: 2/12 is the second of twelve")
    return zlib.crc32(nodeid.encode()) % int(parts) == int(part) - 1


def touched(root: Path, revision: str) -> tuple[str, ...]:
    """Beginnings of the node ids of tests that belong to what has changed since a revision.

    The tests of a room of the library are in the folder of its name, or where ``TESTS_OF`` says; those of the
    modules beside the rooms in "tests/engine/". A test file that has changed is run, too. Raises
    CalledProcessError if git knows no such revision.
    """
    command = ["git", "diff", "--name-only", revision, "HEAD"]
    found = set()
    for name in subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.split():
        folder, *rest = Path(name).parts
        if folder == "tests" and Path(name).name.startswith("test_"):
            found.add(name)
        elif folder == "aioinfer" and len(rest) > 1:
            found.add(TESTS_OF.get(rest[0], f"tests/{rest[0]}/"))
        elif folder == "aioinfer" and name.endswith(".py"):
            found.add("tests/engine/")
        elif name.startswith("examples/deploy/"):
            found.add("tests/deploy/")
    return tuple(sorted(found))


def _param(value: Any) -> Any:
    return value if isinstance(value, _PARAM) else pytest.param(value)
