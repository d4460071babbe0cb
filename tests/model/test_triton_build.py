"""What Triton needs of a machine besides a device: a compiler and headers of Python."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aioinfer.model import triton_build
from aioinfer.model.triton_build import build_unsupported
from tests.tiers import COMPILES, nightly

triton = pytest.importorskip("triton", reason="triton is not installed")
#: imports a library that Triton links by a name with a version, as it does that of CUDA
_SOURCE = """
#include <Python.h>
extern int answer(void);
static PyObject *call(PyObject *self, PyObject *none) { return PyLong_FromLong(answer()); }
static PyMethodDef methods[] = {{"call", call, METH_NOARGS, ""}, {0}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "stub", "", -1, methods};
PyMODINIT_FUNC PyInit_stub(void) { return PyModule_Create(&module); }
"""


def _loads() -> None:
    """In place of a driver that can be loaded."""


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bool]]:
    """Which programs and packages there are: those that a test sets."""
    have = {"gcc": True}
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(triton_build.shutil, "which", lambda name: name if have.get(name) else None)
    monkeypatch.setattr(
        triton_build.importlib.util,
        "find_spec",
        lambda name: (
            (find_spec(name) if "ziglang" in have else None) if name == "ziglang" else find_spec(name)
        ),
    )
    monkeypatch.setattr(triton.knobs.build, "impl", None)
    monkeypatch.setattr(triton_build, "_load_driver", _loads)
    monkeypatch.delenv("CC", raising=False)
    build_unsupported.cache_clear()
    yield have
    build_unsupported.cache_clear()


NEEDED = "Triton needs a C compiler, and there is no {}"


@pytest.mark.parametrize(
    ("there", "named", "reason", "by_zig"),
    [
        (["gcc"], None, None, False),
        (["clang"], None, None, False),
        ([], None, NEEDED.format("gcc, clang, nor the package ziglang"), False),
        # What is named is what Triton takes, and nothing else.
        (["gcc"], "my-compiler", NEEDED.format("my-compiler"), False),
        (["my-compiler"], "my-compiler", None, False),
        (["ziglang"], None, None, True),
        (["gcc", "ziglang"], None, None, False),
    ],
)
def test_a_compiler_is_found_or_named(
    machine: dict[str, bool], monkeypatch: pytest.MonkeyPatch,
    there: list[str], named: str | None, reason: str | None, by_zig: bool,
) -> None:  # fmt: skip
    if "ziglang" in there:
        pytest.importorskip("ziglang", reason="the package ziglang is not installed")
    if named is not None:
        monkeypatch.setenv("CC", named)
    machine.clear()
    machine.update(dict.fromkeys(there, True))
    assert build_unsupported() == reason
    assert (triton.knobs.build.impl is not None) == by_zig
    machine.clear()
    assert build_unsupported() == reason, "it is found out once"


def test_a_build_that_was_chosen_stays(machine: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    own = object()
    machine.clear()
    monkeypatch.setattr(triton.knobs.build, "impl", own)
    assert build_unsupported() is None
    assert triton.knobs.build.impl is own


def test_missing_headers_and_drivers_that_do_not_load_are_named(
    machine: dict[str, bool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails() -> None:
        raise subprocess.CalledProcessError(1, ["gcc", "driver.c"])

    monkeypatch.setattr(triton_build, "_load_driver", fails)
    found = build_unsupported()
    assert found is not None
    assert found.startswith("Triton cannot load its driver: Command '['gcc', 'driver.c']' returned non-zero")
    monkeypatch.setattr(triton_build, "_headers", lambda: str(tmp_path))
    build_unsupported.cache_clear()
    header = tmp_path / "Python.h"
    assert build_unsupported() == f"Triton needs the headers of Python, and there is no {header}"


@nightly(COMPILES)
def test_zig_builds_a_module_that_python_imports(tmp_path: Path) -> None:
    pytest.importorskip("ziglang", reason="the package ziglang is not installed")
    (tmp_path / "answer.c").write_text("int answer(void) { return 42; }\n")
    library = tmp_path / "libanswer.so.1"
    command = [sys.executable, "-m", "ziglang", "cc", "-shared", "-fPIC", "-o", str(library)]
    subprocess.run([*command, f"-Wl,-rpath,{tmp_path}", str(tmp_path / "answer.c")], check=True)
    source = tmp_path / "stub.c"
    source.write_text(_SOURCE)
    build: Callable[..., Any] = triton_build._build_by_zig
    made = build("stub", str(source), str(tmp_path), [str(tmp_path)], [], ["libanswer.so.1"])
    asked = "import importlib.util as u; s = u.spec_from_file_location('stub', {!r}); "
    asked += "m = u.module_from_spec(s); s.loader.exec_module(m); print(m.call())"
    environment = {"LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", asked.format(made)], env=environment, capture_output=True, text=True
    )
    assert done.stdout == "42\n", done.stderr
    source.write_text("not C")
    with pytest.raises(RuntimeError, match=r"zig cc failed: .*error"):
        build("stub", str(source), str(tmp_path), [], [], [])
