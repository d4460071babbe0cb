"""Shared by all tests: tiers, parallel workers, event loops, and what is skipped where it cannot run."""

from __future__ import annotations

import asyncio
import atexit
import gc
import itertools
import os
import random
import signal
import sys
import tempfile
import zlib
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from tests import tiers
from tests.system.simulated import VARIABLE, simulate, simulated

# One thread per torch process, subprocesses included: on a busy machine a second one makes each step
# wait for the slower of the two, many times over. Set before anything imports torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Before anything of the project is imported, that of other conftest.py included.
if VARIABLE in os.environ:
    simulate(os.environ[VARIABLE])

# The directories of macOS are longer than the path of a socket may be.
if len(tempfile.gettempdir()) > 40:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/tmp")

_GPU = any(Path("/dev").glob("nvidia[0-9]*"))
# Without a GPU, Triton kernels run in its interpreter. Triton makes its own functions for one or the other
# when it is imported, which transformers does too, so a process must know before that.
if not _GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")


#: modules when objects were frozen last, and how many more make collections slow: frameworks have thousands
_frozen_modules, _MANY_MODULES = 0, 300

#: further workers bring little, and each imports torch
_MOST_WORKERS = 8


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("aioinfer", "tiers of tests (tests/tiers.py)")
    group.addoption("--quick", action="store_true", help="run the quick tests: the default")
    group.addoption("--rest", action="store_true", help="run what else a change needs")
    group.addoption(
        "--nightly",
        action="store_true",
        help="run the nightly tests, and in full those that else run in part",
    )
    group.addoption("--share", metavar="K/N", help="run one of N disjoint parts of the nightly tests")
    group.addoption(
        "--touched",
        metavar="REVISION",
        help="and all of those for what has changed since REVISION",
    )
    group.addoption(
        "--scale",
        type=float,
        help=f"share of random examples (default: 1 with --nightly or named tests, else {tiers.QUICK_SCALE})",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Parallel workers, unless ``-n`` says otherwise, tests are named one by one or output is shown.

    A default in ``addopts`` would make ``-p no:xdist`` an error. With a GPU, real or emulated, there is one
    process: tests size pools by the free memory of the device.
    """
    option = config.option
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # a worker comes by here, too, and must not start workers of its own
    if getattr(option, "numprocesses", 0) is not None or option.dist != "no" or option.tx:
        return
    watched = option.usepdb or option.trace or option.capture == "no" or option.collectonly
    if not (watched or _GPU or "gpu" in option.markexpr or _named(config)):
        option.numprocesses, option.dist = "auto", "worksteal"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Processors that this process may use: cores that share one physical core count, too."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(allowed or 1, _MOST_WORKERS)


def pytest_configure(config: pytest.Config) -> None:
    # A shell without job control starts what it does not wait for with this signal ignored, for good.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    chosen = tiers.TIERS if _named(config) else _chosen(config)
    explore = config.getoption("--hypothesis-seed", None) is not None
    tiers.choose(chosen, config.getoption("--scale"), explore=explore)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Before workers start: each of them would compile the native kernels."""
    if getattr(session.config.option, "numprocesses", None) and simulated() is None:
        from aioinfer.native.build import BuildFailed, build
        from aioinfer.native.processor import MODELLED

        with suppress(BuildFailed):  # the tests that need them say why
            build()
            if _chosen(session.config) != ("quick",):
                build(tiles=MODELLED)


def pytest_report_header(config: pytest.Config) -> str:
    chosen = _chosen(config)
    left = [f"--{tier}" for tier in tiers.TIERS if tier not in chosen]
    return f"tiers: {', '.join(chosen)}" + (f" (others: pytest {' '.join(left)})" if left else "")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    factories = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    return {name: factories[name] for name in tiers.loops(item.nodeid)}


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name bytes by their length: compressed ones may hold the time, and processes must agree on names."""
    return f"{len(val)}-bytes" if isinstance(val, bytes) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Only tests of the chosen tiers run, and those that are named on the command line; the long ones first,
    or a worker has one of them left when the others have nothing."""
    for item in items:
        spec: Any = getattr(item, "callspec", None)
        factory = spec and spec.params.get("_asyncio_loop_factory")
        loop = "uvloop" if factory is uvloop.new_event_loop else "asyncio"
        if factory and not tiers.runs_on(item.nodeid, loop):
            item.add_marker(tiers.nightly("the same test on the other event loop"))
        for mark in (*item.iter_markers("rest"), *item.iter_markers("nightly")):
            if not mark.args:
                raise pytest.UsageError(f"{item.nodeid}: the marker {mark.name} needs a reason")
    named, chosen = _named(config), _chosen(config)
    share, revision = config.getoption("--share"), config.getoption("--touched")
    touched = tiers.touched(config.rootpath, revision) if revision else ()
    left = []
    for item in items:
        tier = _tier(item, chosen)
        if named and item.nodeid.startswith(named):
            continue
        out = tier == "nightly" and share and not tiers.in_share(item.nodeid, share)
        if tier not in chosen or (out and not item.nodeid.startswith(touched)):
            left.append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        out = set(left)
        items[:] = [item for item in items if item not in out]
    items.sort(key=lambda item: not _takes_long(item, chosen))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Freeze what stays for good: torch, transformers and ten thousand tests.

    A collection takes half a second with them. Tests collect hundreds of times, and engines when they start.
    """
    _freeze()
    # When the interpreter exits, modules of C++ count what is left, as leaks.
    atexit.register(gc.unfreeze)


def _freeze() -> None:
    global _frozen_modules
    gc.collect()
    gc.freeze()
    _frozen_modules = len(sys.modules)


def _chosen(config: pytest.Config) -> tuple[str, ...]:
    """All tiers with ``-m gpu``, whose tests are few and need a machine that is rare."""
    if "gpu" in config.option.markexpr:
        return tiers.TIERS
    return tuple(tier for tier in tiers.TIERS if config.getoption(f"--{tier}")) or tiers.TIERS[:1]


def _tier(item: pytest.Item, chosen: Collection[str]) -> str:
    """The tier of a test. If nightly is chosen, it has those of which others run a share of the examples."""
    module = getattr(item, "module", None)
    in_part = module is not None and _top_name(item) in tiers.run_in_part(module)
    if item.get_closest_marker("nightly") is not None or ("nightly" in chosen and in_part):
        return "nightly"
    return "rest" if item.get_closest_marker("rest") is not None else "quick"


def _takes_long(item: pytest.Item, chosen: Collection[str]) -> bool:
    marks = (*item.iter_markers("rest"), *item.iter_markers("nightly"))
    in_full = _tier(item, chosen) == "nightly" and item.get_closest_marker("nightly") is None
    return in_full or any(mark.args[0] in tiers.LONG for mark in marks)


def _top_name(item: pytest.Item) -> str:
    """The function or class of the module that a test is, or is in."""
    return item.nodeid.split("::")[1].partition("[")[0]


def _named(config: pytest.Config) -> tuple[str, ...]:
    """Tests named one by one on the command line, which run whatever their tier."""
    return tuple(argument for argument in config.args if "::" in argument)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """The one place where something that is not there skips tests: a GPU, kernels, Linux."""
    if item.get_closest_marker("linux") is not None and (simulated() or sys.platform) != "linux":
        pytest.skip("checks what Linux alone has")
    spec = getattr(item, "callspec", None)
    values = spec.params.values() if spec is not None and simulated() else ()
    # a value itself, or one of the settings that a value has
    each = (one for value in values for one in (value.values() if isinstance(value, dict) else [value]))
    chosen = any(isinstance(one, str) and one == "native" for one in each)
    if chosen or item.get_closest_marker("native") is not None:
        from tests.compiled import require_native

        require_native()
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device; its twin on the CPU has run, where it can have one")
    if len(sys.modules) > _frozen_modules + _MANY_MODULES:
        _freeze()
    _draw_seeds(item.nodeid)
    _seed_generators(item.nodeid)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """No garbage is collected while a failure is reported.

    What the test has left may raise in its finalizer, and pytest formats that. Within ``ast.parse``, by which
    it finds the lines of the failure, Python 3.11 fails at a further ``ast.parse``: an internal error, which
    ends the run.
    """
    off = call.excinfo is not None and gc.isenabled()
    if off:
        gc.disable()
    try:
        return (yield)
    finally:
        if off:
            gc.enable()


def _draw_seeds(name: str) -> None:
    """Engines of a test whose config has no seed draw the same ones in every run: its outcome is no dice."""
    from aioinfer.loop import core
    from aioinfer.parallel import dispatching

    made = itertools.count()

    def dice(seed: int | None = None) -> random.Random:
        return random.Random(f"{name} {next(made)}" if seed is None else seed)

    for module in (core, dispatching):
        assert hasattr(module, "random"), f"{module.__name__} draws no seeds any more: find what does"
        module.random = SimpleNamespace(Random=dice)  # type: ignore[attr-defined]


def _seed_generators(name: str) -> None:
    """What a test draws from the generators of its process depends on nothing but its name."""
    random.seed(name)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(zlib.crc32(name.encode()))
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(zlib.crc32(name.encode()))


@pytest.fixture(autouse=True, scope="session")
def cpu_step_time() -> Iterator[float]:
    """The default of ``itl_target`` on a CPU, which no engine of this process has: with it, a slow
    machine decides which requests meet in a batch. Tests of the target give one of their own."""
    from aioinfer.loop import factory

    with pytest.MonkeyPatch.context() as patch:
        shipped = factory._CPU_STEP
        patch.setattr(factory, "_CPU_STEP", 0.0)
        yield shipped


@pytest.fixture
def thawed() -> Iterator[None]:
    """Nothing is frozen, as in a program that has just started; and what other tests have left is gone."""
    gc.collect()
    gc.unfreeze()
    yield
    gc.collect(1)  # what is frozen as garbage stays
    gc.freeze()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """``checkpoint(family) -> (directory, transformers model in float32)``, made once."""
    import torch

    from tests.model.checkpoints import make_checkpoint

    made: dict[str, tuple[Path, Any]] = {}

    def get(name: str) -> tuple[Path, Any]:
        if name not in made:
            path = tmp_path_factory.mktemp(name)
            made[name] = (path, make_checkpoint(name, path))
        return made[name]

    torch.set_num_threads(1)
    return get
