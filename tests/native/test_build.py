"""How kernels are compiled, and what an engine does where they cannot be.

Most tests use scripts as compilers: all other tests here depend on a real one.
"""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from aioinfer.config import EngineConfig
from aioinfer.errors import ConfigError
from aioinfer.execution.torch_device import TorchDevice
from aioinfer.llm import LLM
from aioinfer.model.backend import Backend
from aioinfer.model.kernels import choose_attention, choose_layers
from aioinfer.native import bindings
from aioinfer.native import build as building
from aioinfer.native.arguments import WeightsArguments
from aioinfer.native.build import UNITS, BuildFailed, build, cache_directory, find_compiler
from aioinfer.params import SamplingParams
from tests.model.harness import require
from tests.native.compilers import WORKS, Compiler, alive, calls, left
from tests.tiers import SECONDS, rest

CPU = torch.device("cpu")
_ROOT = Path(__file__).parents[2]


def test_what_was_compiled_is_found_again(compiler: Compiler) -> None:
    script, told = compiler(WORKS), list[tuple[int, int]]()
    path = build(lambda *done: told.append(done))
    assert path.read_text() == "made\n"
    assert told == sorted(told)
    assert set(told) == {(done, UNITS) for done in range(UNITS + 1)}
    assert calls(script) == UNITS + 1
    told.clear()
    assert build(lambda *done: told.append(done)) == path
    assert (calls(script), told) == (UNITS + 1, [])
    assert left() == [".so"]


def test_a_compiler_may_be_called_by_another_program(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = compiler(WORKS)
    monkeypatch.setenv("AIOINFER_CXX", f"env -u NOTHING '{script}'")
    assert build().read_text() == "made\n"
    assert calls(script) == UNITS + 1


@rest(SECONDS)
def test_where_the_system_has_no_compiler_that_of_the_extra_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AIOINFER_CXX", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    command = find_compiler()
    assert command == [sys.executable, "-m", "ziglang", "c++"]
    assert "clang" in subprocess.run([*command, "--version"], capture_output=True, text=True).stdout


@rest(SECONDS)
def test_flags_compilers_processors_and_sources_have_libraries_of_their_own(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler(WORKS)
    found = [build()]
    monkeypatch.setenv("AIOINFER_CXXFLAGS", "-march=x86-64-v3 -DX")
    found.append(build())
    assert "-march=x86-64-v3 -DX" in (tmp_path / "calls").read_text()
    compiler(WORKS.replace("fake 1", "fake 2"))
    found.append(build())
    monkeypatch.setattr(building, "instruction_sets", lambda: "flags: none")
    assert build() == found[-1], "flags that name a processor are for all machines"
    monkeypatch.setenv("AIOINFER_CXXFLAGS", "-march=x86-64-v3 -mtune=native")
    found.append(build())
    source = tmp_path / "source"
    shutil.copytree(building.SOURCE, source)
    monkeypatch.setattr(building, "SOURCE", source)
    assert build() == found[-1]
    (source / "simd.hpp").write_text((source / "simd.hpp").read_text() + "\n")
    found.append(build())
    assert len(set(found)) == 5
    assert left() == [".so"] * 5


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            "\n[ $1 = --version ] || { echo 'note: so\nx.hpp:1: error: no luck' >&2; exit 1; }",
            "error: no luck",
        ),
        ("\n[ $1 = --version ] || { echo 'out of space' >&2; exit 1; }", "the compiler failed: out of space"),
        ("\nexit 1", "does not run"),
        ("\n[ $1 = --version ] || exec sleep 100", "did not end within"),
        # It says that all went well and writes nothing.
        ("\nexit 0", "cannot be written"),
    ],
)
def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, script: str, said: str
) -> None:
    compiler(script)
    if "sleep" in script:
        monkeypatch.setattr(building, "_PATIENCE", 0.2)
    with pytest.raises(BuildFailed, match=said):
        build()
    assert not cache_directory().exists() or left() == []


def test_compilers_end_with_the_process_that_started_them(compiler: Compiler, tmp_path: Path) -> None:
    """Also where it ends while a thread waits for them, as a launch thread does. That thread must not go on
    with torch, whose operations abort a process that is about to end."""
    workers = tmp_path / "workers"
    compiler(f'\n[ "$1" = --version ] && exit\necho $$ >> "{workers}"; exec sleep 100')
    code = f"""if True:
        import atexit, pathlib, threading
        from aioinfer.native.build import UNITS, build

        def launch():
            try:
                build()
            except Exception:
                workers.with_name("went on").touch()

        thread = threading.Thread(target=launch, daemon=True)
        workers = pathlib.Path({str(workers)!r})
        atexit.register(thread.join)
        thread.start()
        while not workers.exists() or len(workers.read_text().split()) < UNITS:
            pass
    """
    env = {**os.environ, "PYTHONPATH": str(_ROOT)}
    subprocess.run([sys.executable, "-c", code], env=env, timeout=240, check=True, capture_output=True)
    for worker in workers.read_text().split():
        while alive(int(worker)):
            pass
    assert left() == []
    assert not workers.with_name("went on").exists()


KILLS = {
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "left": "os._exit(3)",
    "replaced": 'os.execv("/bin/true", ["true"])',
}


@pytest.mark.parametrize("end", KILLS)
def test_compilers_end_with_a_process_that_cannot_end_them(
    compiler: Compiler, tmp_path: Path, end: str
) -> None:
    """By the kernel, for example, which is out of memory. So do the processes that they have started."""
    workers = tmp_path / "workers"
    compiler(f'\n[ "$1" = --version ] && exit\nsleep 100 & echo $$ $! >> "{workers}"; wait')
    code = f"""if True:
        import os, pathlib, signal
        from aioinfer.native.build import UNITS, build

        workers = pathlib.Path({str(workers)!r})

        def progress(done, total):
            if workers.exists() and len(workers.read_text().split()) == 2 * UNITS:
                {KILLS[end]}

        build(progress)
    """
    env = {**os.environ, "PYTHONPATH": str(_ROOT)}
    subprocess.run([sys.executable, "-c", code], env=env, timeout=240, capture_output=True)
    pids = workers.read_text().split()
    assert len(pids) == 2 * UNITS
    for pid in pids:
        while alive(int(pid)):
            pass


def test_compilers_write_to_the_cache_only(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else may be writable. ``zig`` and ``ccache`` keep files of their own in the user's cache."""
    monkeypatch.setenv("TMPDIR", "/nowhere")
    work = WORKS.replace("\necho", '\necho "$TMPDIR" "$XDG_CACHE_HOME" >> "$(dirname "$0")/places"\necho', 1)
    compiler(work)
    build()
    [(temporary, cache)] = {tuple(line.split()) for line in (tmp_path / "places").read_text().splitlines()}
    assert cache == str(cache_directory())
    assert temporary.startswith(f"{cache}/compiling-")


@pytest.mark.usefixtures("unshipped")
def test_no_compiler_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("AIOINFER_CACHE", str(tmp_path))
    monkeypatch.setenv("AIOINFER_CXX", "no-such-compiler")
    with pytest.raises(BuildFailed, match="there is no compiler no-such-compiler"):
        build()
    monkeypatch.delenv("AIOINFER_CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BuildFailed, match=r"no C\+\+ compiler .* pip install 'aioinfer\[compiler\]'"):
        build()


def test_the_users_cache_is_the_place_where_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIOINFER_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/cache")
    assert cache_directory() == Path("/some/cache/aioinfer")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/some/home")
    assert cache_directory() == Path("/some/home/.cache/aioinfer")


@pytest.mark.usefixtures("unshipped")
def test_without_a_home_the_error_names_the_variable_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AIOINFER_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("Could not determine home directory.")))
    with pytest.raises(BuildFailed, match="AIOINFER_CACHE"):
        build()


def test_a_cache_that_cannot_be_written_is_named(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler(WORKS)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AIOINFER_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(BuildFailed, match="file/cache cannot be read or written"):
        build()


def test_a_new_cache_can_be_read_by_other_users_and_not_written(compiler: Compiler) -> None:
    """An image is built by root, and runs as somebody else."""
    compiler(WORKS)
    before = os.umask(0)
    try:
        path = build()
    finally:
        os.umask(before)
    assert [each.stat().st_mode & 0o777 for each in (path.parent, path)] == [0o755, 0o755]


@rest(SECONDS)
def test_of_two_processes_that_start_at_once_one_compiles(compiler: Compiler, tmp_path: Path) -> None:
    """The compiler of the first one waits until the other one is there, too."""
    (tmp_path / "here").mkdir()
    meet = f"""
[ "$1" = --version ] && echo fake && exit
until [ "$(ls "{tmp_path}/here" | wc -l)" -ge 2 ]; do :; done
{WORKS.partition("exit")[2]}"""
    script = compiler(meet)
    code = f"""if True:
        import os, pathlib
        from aioinfer.native.build import build
        pathlib.Path("{tmp_path}/here", str(os.getpid())).touch()
        print(build().read_text(), build())
    """
    env = {**os.environ, "PYTHONPATH": str(_ROOT)}
    both = [
        subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = {process.communicate(timeout=240)[0] for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(said) == 1
    assert said.pop().startswith("made")
    assert calls(script) == UNITS + 1
    assert left() == [".so"]


def test_without_locks_no_process_waits(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOLCK, "no locks")))
    compiler(WORKS)
    assert build().read_text() == "made\n"


def test_a_wait_for_the_compiler_of_another_process_can_be_cancelled(compiler: Compiler) -> None:
    script = compiler(WORKS)
    build().unlink()
    with (cache_directory() / "kernels.lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(KeyboardInterrupt):
            build(Mock(side_effect=KeyboardInterrupt))
    assert calls(script) == UNITS + 1
    assert build().read_text() == "made\n"
    assert left() == [".so"]


# -- without kernels -----------------------------------------------------------------------------------


@pytest.mark.parametrize("script", ["\nexit 1", WORKS], ids=["no library", "no library that can be loaded"])
def test_without_kernels_an_engine_says_so_once_and_computes_with_torch(
    compiler: Compiler, unsettled: None, script: str, caplog: pytest.LogCaptureFixture
) -> None:
    compiler(script)
    config = EngineConfig(device="cpu", threads=1, num_pages=20, max_model_len=64)
    with caplog.at_level(logging.WARNING, "aioinfer"):
        device = TorchDevice(config)
        assert "sdpa attention" in device.open().description
        device.close()
        with LLM(config) as llm:
            (result,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(result.token_ids) == 3
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].startswith("no native kernels, the CPU will be slower than it could be: ")


def test_kernels_that_were_asked_for_and_are_missing_are_an_error(
    compiler: Compiler, unsettled: None
) -> None:
    compiler("\nexit 1")
    with pytest.raises(ConfigError, match=r"native was asked for, and .* does not run"):
        TorchDevice(EngineConfig(device="cpu", attention_backend="native")).open()
    with pytest.raises(RuntimeError, match="no native kernels"):
        bindings.kernels()


# -- with kernels --------------------------------------------------------------------------------------


def test_a_cpu_has_native_kernels_where_they_fit_a_model() -> None:
    require("native")
    for dtype in (torch.float32, torch.bfloat16):
        assert choose_attention(CPU, {64}, dtype) == Backend("native", "the device is a cpu")
        assert choose_attention(CPU, {16}, dtype, "native") == Backend("native", "asked for")
    for head_dim, dtype, why in (
        (24, torch.float32, "heads of size 24 are no multiple of 16"),
        (64, torch.float16, "there are no native kernels for float16"),
    ):
        assert choose_attention(CPU, {head_dim}, dtype) == Backend("sdpa", why)
        with pytest.raises(ConfigError, match=f"native was asked for, and {why}"):
            choose_attention(CPU, {head_dim}, dtype, "native")
    with pytest.raises(ConfigError, match="the device is no CPU"):
        choose_attention(torch.device("cuda"), {64}, torch.float32, "native")


def test_layers_of_other_sizes_are_torchs() -> None:
    require("native")
    backend = Backend("native", "a test")
    assert choose_layers(backend, [64, 40]).name == "sdpa"
    assert choose_layers(backend, [64, 48]).name == "native"


def test_a_failure_in_the_library_is_an_error_with_its_reason() -> None:
    require("native")
    kernels = bindings.kernels()
    assert kernels.function("lanes") in (8, 16)
    pool = bindings.shared_thread_pool(1)
    sizes = {"outputs": 1 << 40, "inner": 1 << 20, "bits": 0, "group": 0}
    arguments = WeightsArguments(pool=pool.handle, rows=None, bias=None, gated=False, **sizes)
    with pytest.raises(MemoryError, match=r"weights_float32: .*bad_alloc"):
        kernels.call(arguments, "float32")
