"""Simulated systems: the project's own code sees another operating system than the one that it runs on.

::

    SIMULATED_SYSTEM=darwin pytest tests/scheduling

Modules of the standard library are stood in for by proxies, for the importing code only: its ``os`` has no
``sched_getaffinity``, its ``sys.platform`` is "darwin", and ``/proc`` is not there. Python, pytest and all
libraries see what there is. Programs that tests start see the simulated system, too.

Not simulated: what a kernel does otherwise, event loops, file names, and libraries that are built for it.
"""

from __future__ import annotations

import builtins
import importlib.util
import io
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from tests.system.other_systems import SYSTEMS, System

__all__ = ["VARIABLE", "install", "simulate", "simulated"]

#: of the environment: the simulated system's ``sys.platform``
VARIABLE = "SIMULATED_SYSTEM"
#: where only Linux has files
_HIDDEN = re.compile(r"/(proc|sys)(/|$)")
_ROOT, _SITE = Path(__file__).parents[2], Path(__file__).parent / "site"
#: modules that ask the real system
_ANSWERING = (__name__, System.__module__)
_LONG_NAME = "aioinfer-simulated-"
_installed: str | None = None
_show: Callable[[ModuleType], None]


class Proxy(ModuleType):
    """A module of another system. What is set on it is set on the real one, if the other system has it.

    What is deleted has the value of before: pytest and ``mock`` undo a change so, which they take for one of
    the module's own ``__dict__``.
    """

    def __init__(self, real: ModuleType, missing: str, values: Mapping[str, Any]) -> None:
        super().__init__(real.__name__, real.__doc__)
        vars(self).update(_real=real, _missing=re.compile(missing or "(?!)"), _modules={}, _before={})
        vars(self).update(values)

    def __getattr__(self, name: str) -> Any:
        own = vars(self)
        if own["_missing"].fullmatch(name):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        found = getattr(own["_real"], name)
        return own["_modules"].get(found.__name__, found) if isinstance(found, ModuleType) else found

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self) or vars(self)["_missing"].fullmatch(name):
            vars(self)[name] = value
        else:
            real = vars(self)["_real"]
            vars(self)["_before"].setdefault(name, getattr(real, name))
            setattr(real, name, value)

    def __delattr__(self, name: str) -> None:
        if name in vars(self):
            del vars(self)[name]
        else:
            setattr(vars(self)["_real"], name, vars(self)["_before"][name])


# -- files -------------------------------------------------------------------------------------------------


def _is_hidden(path: object) -> bool:
    return isinstance(path, str | os.PathLike) and _HIDDEN.match(str(path)) is not None


def _without_hidden(call: Callable[..., Any]) -> Callable[..., Any]:
    def checked(path: Any = ".", *arguments: Any, **named: Any) -> Any:
        if _is_hidden(path):
            raise FileNotFoundError(2, os.strerror(2), path)
        return call(path, *arguments, **named)

    return checked


def _false_if_hidden(call: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda path: not _is_hidden(path) and call(path)


_FILES: dict[str, dict[str, Any]] = {
    "os": {name: _without_hidden(getattr(os, name)) for name in ("listdir", "lstat", "open", "stat")},
    "posixpath": {name: _false_if_hidden(getattr(os.path, name)) for name in ("exists", "isdir", "isfile")},
}


def _hide_files(own: Sequence[str]) -> Callable[..., Any]:
    """Hide files also where the standard library opens them for the project's code. The function ``open``."""
    real = io.open

    def opening(file: Any, *arguments: Any, **named: Any) -> Any:
        if _is_hidden(file) and _asked_by(own, sys._getframe(1)):
            raise FileNotFoundError(2, os.strerror(2), file)
        return real(file, *arguments, **named)

    io.open = opening  # which pathlib calls
    return opening


def _asked_by(own: Sequence[str], frame: FrameType | None) -> bool:
    """Whether the innermost frame that is not of the standard library is one of these packages."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        top = name.partition(".")[0]
        if name in _ANSWERING or top not in sys.stdlib_module_names:
            return top in own and name not in _ANSWERING
        frame = frame.f_back
    return False


# -- imports -----------------------------------------------------------------------------------------------


class _Importer(MetaPathFinder):
    """Loads modules of the project so that they see the other system's modules."""

    def __init__(self, own: Sequence[str], show: Callable[[ModuleType], None]) -> None:
        self._own = own

        class Loader(SourceFileLoader):
            def exec_module(self, module: ModuleType) -> None:
                show(module)
                super().exec_module(module)

        self._loader = Loader

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in self._own:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader) and spec.origin is not None:
            spec.loader = self._loader(fullname, spec.origin)
        return spec


def _checked(absent: frozenset[str], module: ModuleType, function: str) -> Callable[..., Any]:
    """The function of a module, found anew in each call: tests replace it."""

    def checked(name: str, *arguments: Any, **named: Any) -> Any:
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return getattr(module, function)(name, *arguments, **named)

    return checked


def _none_for(absent: frozenset[str]) -> Callable[..., Any]:
    return lambda name, *rest: (
        None if name.partition(".")[0] in absent else importlib.util.find_spec(name, *rest)
    )


def _proxies(system: System) -> dict[str, ModuleType]:
    importing = {
        "importlib": {"import_module": _checked(system.absent, importlib, "import_module")},
        "importlib.util": {"find_spec": _none_for(system.absent)},
    }
    found: dict[str, ModuleType] = {}
    for name in {*system.missing, *system.values, *_FILES, *importing} - system.absent:
        values = _FILES.get(name, {}) | importing.get(name, {}) | {**system.values.get(name, {})}
        found[name] = Proxy(importlib.import_module(name), system.missing.get(name, ""), values)
    for proxy in found.values():
        vars(proxy)["_modules"] = found
    return found


# -- putting it in place -----------------------------------------------------------------------------------


def simulated() -> str | None:
    """``sys.platform`` of the simulated system."""
    return _installed


def install(name: str) -> None:
    """Have the project's modules, and those of programs that are started, see this system."""
    global _installed, _show
    loaded = [each for each in sys.modules if each.partition(".")[0] == "aioinfer"]
    assert not loaded, f"{len(loaded)} modules have seen the real system: {loaded[:3]}"
    system = SYSTEMS[name]
    proxies, load = _proxies(system), _checked(system.absent, builtins, "__import__")

    def importing(*arguments: Any, **named: Any) -> Any:
        found = load(*arguments, **named)
        return proxies.get(found.__name__, found) if isinstance(found, ModuleType) else found

    names = {**vars(builtins), "__import__": importing, "open": _hide_files(system.own)}

    def show(module: ModuleType) -> None:
        if module.__name__.partition(".")[0] in system.own:
            vars(module)["__builtins__"] = names

    sys.meta_path.insert(0, _Importer(system.own, show))
    os.environ[VARIABLE] = name
    paths = str(_SITE), str(_ROOT), os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    _installed, _show = name, show


def simulate(name: str) -> None:
    """Install a system, and show it to tests, too. There is no compiler, as kernels would be those of the
    real system; and on macOS names of temporary directories are long."""
    from _pytest.assertion.rewrite import AssertionRewritingHook

    os.environ["AIOINFER_CXX"] = "no-compiler-on-a-simulated-system"
    if name == "darwin" and _LONG_NAME not in tempfile.gettempdir():
        place = Path(tempfile.gettempdir(), f"{_LONG_NAME}{os.getuid()}-".ljust(43, "x"))
        place.mkdir(exist_ok=True)
        os.environ["TMPDIR"] = tempfile.tempdir = str(place)
    if _installed is None:  # in a worker of pytest it is
        install(name)
    execute = AssertionRewritingHook.exec_module

    def exec_module(self: AssertionRewritingHook, module: ModuleType) -> None:
        _show(module)
        execute(self, module)

    AssertionRewritingHook.exec_module = exec_module  # type: ignore[method-assign]
