"""What the parts of the sessions bench measure with: prompts, plain files, processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from aioinfer.outputs import RequestMetrics, Result, Usage
from bench.sessions.disk import drop, plain_read, plain_write, size_of
from bench.sessions.setting import answer, gap, median, pin, tokens, ttft


def test_prompts_of_different_seeds_do_not_share_their_beginning() -> None:
    assert tokens(16, 3) == tokens(16, 3)
    assert tokens(16, 3) == tokens(32, 3)[:16]
    assert len({tuple(tokens(4, seed)) for seed in range(1000)}) == 1000


def test_times_of_a_request_are_those_of_its_tokens() -> None:
    metrics = RequestMetrics(1.0, 1.5, 9.0, (3.0, 4.0, 4.5, 6.5))
    result = Result("", [1, 2, 3, 4], "length", Usage(1, 4), metrics=metrics)
    assert (ttft(result), gap(result)) == (2.0, 1.0)
    assert median([{"a": 1.0}, {"a": 5.0}, {"a": 2.0}]) == {"a": 2.0}


def test_plain_files_have_all_bytes(tmp_path: Path) -> None:
    data = memoryview(bytearray(os.urandom((9 << 20) + 5)))
    (tmp_path / "folder").mkdir()
    path, found = tmp_path / "folder" / "file", memoryview(bytearray(len(data)))
    for _ in range(2):
        assert plain_write(path, data) > 0
    drop(tmp_path)
    assert plain_read(path, found) > 0
    assert found == data
    assert size_of(tmp_path) == size_of(path) == len(data)


def test_a_process_that_fails_says_why() -> None:
    program = "import json, sys; print('noise'); print(json.dumps({'twice': 2 * json.load(sys.stdin)['x']}))"
    assert answer([sys.executable, "-c", program], {"x": 21}) == {"twice": 42}
    with pytest.raises(RuntimeError, match="out of luck"):
        answer([sys.executable, "-c", "raise SystemExit('out of luck')"], {})


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_a_process_is_kept_on_its_cores() -> None:
    core = max(os.sched_getaffinity(0))
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            pin(process.pid, {core})
            assert os.sched_getaffinity(process.pid) == {core}
        finally:
            process.kill()
