"""Engines that are killed while they write, move and read pages and sessions."""

from __future__ import annotations

import subprocess
import sys

from tests.tiers import PROGRAM, rest, scaled


@rest(PROGRAM)
def test_every_start_after_a_kill_serves_and_no_token_is_wrong() -> None:
    """25 kills in the rest, 200 in nightly; the module runs as many as one likes."""
    command = [
        sys.executable,
        "-m",
        "tests.engine.killed_engines",
        "--kills",
        str(scaled(200)),
        "--seed",
        "7",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
