"""The tests in which nothing is compiled, as another operating system has it: runs of pytest of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.simulated import VARIABLE, simulated
from tests.tiers import PROGRAM, nightly, rest

TESTS = Path(__file__).parents[1]
#: Folders of tests without kernels and devices. On Windows no model runs, and no server: the rest must work
#: for programs that are written and tested there.
ROOMS = {
    "darwin": "cache checkpoint cli engine examples observe parallel scheduling server speculation "
    "system text",
    "win32": "cache scheduling speculation text",
}
#: files of tests that ask the system most
FILES = {
    "darwin": "system test_ledger.py checkpoint/test_adapter.py cli/test_signals.py "
    "engine/test_disconnects.py parallel/test_agent.py parallel/test_processes.py "
    "parallel/test_socket_streams.py server/test_batch.py server/test_connections.py server/test_unix.py",
    "win32": "system/test_door.py test_settings.py engine/test_fake_engine.py engine/test_streams.py",
}
POINTS = [(system, room) for system, rooms in ROOMS.items() for room in rooms.split()]

pytestmark = pytest.mark.skipif(simulated() is not None, reason="within a simulated system")


def run(system: str, places: str, *tiers: str) -> int:
    """Run the tests of these tiers in files and folders, of which none fails. Their number."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "--tb=short", "-p", "no:cacheprovider", *tiers]
        + [str(TESTS / place) for place in places.split()],
        cwd=TESTS.parent,
        env={**env, VARIABLE: system},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    return int(passed[1])


@rest(PROGRAM)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("system", FILES)
def test_what_asks_the_system_works(system: str) -> None:
    assert run(system, FILES[system]) > 50


@nightly(PROGRAM)
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("system", "room"), POINTS)
def test_a_room_works(system: str, room: str) -> None:
    assert run(system, room, "--quick", "--rest") > 5


@rest(PROGRAM)
@pytest.mark.parametrize(("system", "machine"), [("darwin", "arm64"), ("win32", "AMD64")])
def test_programs_that_tests_start_see_the_system(system: str, machine: str) -> None:
    code = (
        "import os, sys; from aioinfer.system import support, files\n"
        "print(support.sys.platform, support.os.name, sys.platform, hasattr(files.os, 'memfd_create'),"
        " hasattr(os, 'memfd_create'), files.open_files() is None)"
    )
    env = {**os.environ, "PYTHONPATH": f"{TESTS}/system/site:{TESTS.parent}", VARIABLE: system}
    said = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    name = {"darwin": "posix", "win32": "nt"}[system]
    assert said.stdout.split()[:5] == [system, name, "linux", "False", "True"]
