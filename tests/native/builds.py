"""The tests of the native kernels on other builds of them: ``python -m tests.native.builds [name ...]``.

For older processors with narrower vectors, with models of other instructions and of tiles, and with the
sanitizers for undefined behaviour, addresses and races. Takes some minutes; needs g++ and its sanitizers.
``test_builds`` has a part of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from aioinfer.native.processor import MODELLED, instruction_sets

_ROOT = Path(__file__).parents[2]
_SOURCE = _ROOT / "aioinfer" / "native" / "source"
#: The tests of compilers and of engines without kernels do not depend on the build.
_TESTS = ["tests/native", "tests/model/test_oracle.py::test_mixed_with_staggered_arrivals"]
_OTHERS = ("build", "build_cache", "builds", "processor", "tiles")
_TESTS += [f"--ignore=tests/native/test_{name}.py" for name in _OTHERS]
_TIERS = ("--quick", "--rest", "--nightly")
#: Checks for undefined behaviour make too much code of the many tile sizes of AVX-512.
_ADDRESS = "-O1 -g1 -fno-omit-frame-pointer -fsanitize=address"
_UNDEFINED = "-fsanitize=undefined -fno-sanitize=null,object-size -fno-sanitize-recover=undefined"
#: name -> flags; what the tests are run with, those of names that begin with "tiles" on modelled tiles
FLAGS = {
    "avx2": "-march=x86-64-v3",
    "baseline": "-march=x86-64-v2",
    "vnni model": "-march=native -DAIOINFER_PLAIN_DOT=16",
    "avx vnni model": "-march=x86-64-v3 -DAIOINFER_PLAIN_DOT=8",
    "address": f"-march=native {_ADDRESS}",
    "undefined": f"-march=x86-64-v3 {_ADDRESS} {_UNDEFINED}",
    "tiles": "-march=native",
    "tiles baseline": "-march=x86-64-v2",
    "tiles address": f"-march=native {_ADDRESS}",
    "tiles undefined": f"-march=x86-64-v3 {_ADDRESS} {_UNDEFINED}",
}
if "avx_vnni" in instruction_sets().split():
    FLAGS["avx vnni"] = "-march=x86-64-v3 -mavxvnni"


def main(names: list[str]) -> int:
    """Run the named builds, or all. Returns the number of failures."""
    failed = 0
    for name in names or [*FLAGS, "threads"]:
        print(f"-- {name}", flush=True)
        failed += not (_races() if name == "threads" else passes(name, _TESTS, *_TIERS))
    print(f"-- {failed} failed")
    return failed


def passes(name: str, tests: Sequence[str], *tiers: str) -> bool:
    """Whether the kernels of a build pass these tests."""
    flags, tiles = FLAGS[name], "model" if name.startswith("tiles") else "off"
    env = {**os.environ, "AIOINFER_CXXFLAGS": flags, "AIOINFER_TILES": tiles, "PYTHONPATH": str(_ROOT)}
    # Compiled first: with these flags it takes longer than the limit of a test.
    code = "from aioinfer.native import build; build._PATIENCE = 3600; print(build.build())"
    if subprocess.run([sys.executable, "-c", code], cwd=_ROOT, env=env).returncode:
        return False
    if "sanitize" in flags:
        # They must be loaded first, and find what throws exceptions. Leaks are not reported: Python keeps
        # memory until it exits.
        asked = [["g++", f"-print-file-name={name}.so"] for name in ("libasan", "libstdc++")]
        found = [subprocess.run(each, capture_output=True, text=True, check=True).stdout for each in asked]
        env["LD_PRELOAD"] = " ".join(path.strip() for path in found)
        env["ASAN_OPTIONS"] = "detect_leaks=0:allocator_may_return_null=1"
        env["UBSAN_OPTIONS"] = "print_stacktrace=1"
    # In one process: threads are what the detectors look at, and workers would compete with them.
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        *tiers,
        *tests,
    ]
    if "sanitize" in flags:
        # Sanitizers need more address space than this test leaves.
        command += ["-k", "not threads_that_cannot_be_created"]
    return subprocess.run(command, cwd=_ROOT, env=env).returncode == 0


def _races() -> bool:
    """The race detector does not support Python and torch, so a program in C++ runs the kernels."""
    results = []
    for number, bits, tiles in (
        ("float", 0, ()),
        ("bfloat16", 0, ()),
        ("bfloat16", 0, MODELLED.flags),
        ("float", 8, ()),
        ("bfloat16", 4, ()),
        ("bfloat16", 4, MODELLED.flags),
    ):
        with tempfile.TemporaryDirectory() as directory:
            program = str(Path(directory) / "races")
            sources = [
                Path(__file__).with_name("races.cpp"),
                *(_SOURCE / name for name in ("common.cpp", "quantised.cpp")),
            ]
            flags = f"-std=c++20 -O1 -g -march=native -pthread -fsanitize=thread -I{_SOURCE}".split()
            flags += [f"-DNUMBER={number}", f"-DWEIGHT_BITS={bits}", *tiles]
            subprocess.run(["g++", *flags, *map(str, sources), "-o", program], check=True)
            env = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
            results.append(subprocess.run([program], env=env).returncode == 0)
    return all(results)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
