"""``aioinfer batch``, as a program that is killed and started again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from aioinfer.cli.main import main
from tests.tiers import PROGRAM, SECONDS, nightly, rest

BAD = 100


def write_rows(path: Path, count: int) -> None:
    """Rows of every kind, one in ``BAD`` of them bad."""
    with path.open("w") as file:
        for number in range(count):
            body: dict[str, Any] = {"max_tokens": 4, "temperature": 0}
            url = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")[number % 3]
            if url == "/v1/embeddings":
                body = {"input": f"text {number}"}
            elif url == "/v1/completions":
                body["prompt"] = f"Once {number}"
            else:
                body["messages"] = [{"role": "user", "content": f"What is {number} + 1?"}]
            if number % BAD == BAD // 2:
                body["nonsense"] = True
            file.write(
                json.dumps({"custom_id": f"row-{number}", "method": "POST", "url": url, "body": body}) + "\n"
            )


def start(folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "aioinfer", "batch", "in.jsonl", "out.jsonl", "--threads", "1"]
    return subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE)


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def stop_after(process: subprocess.Popen[bytes], path: Path, count: int, number: int) -> int:
    """Send a signal when so many rows are written; the exit status."""
    end = time.monotonic() + 120
    while lines(path) < count and process.poll() is None and time.monotonic() < end:
        time.sleep(0.01)
    process.send_signal(number)
    process.communicate(timeout=120)
    return process.returncode


def check(path: Path, count: int) -> None:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(each["custom_id"] for each in found) == sorted(f"row-{number}" for number in range(count))
    failed = {each["custom_id"] for each in found if each["response"]["status_code"] != 200}
    assert failed == {f"row-{number}" for number in range(count) if number % BAD == BAD // 2}


@pytest.mark.parametrize(
    ("count", "signals"),
    [
        pytest.param(120, [signal.SIGINT], marks=rest(PROGRAM)),
        pytest.param(5000, [signal.SIGKILL, signal.SIGINT], marks=nightly(PROGRAM)),
    ],
)
def test_a_batch_that_is_killed_or_interrupted_has_each_row_once(
    tmp_path: Path, count: int, signals: list[signal.Signals]
) -> None:
    output = tmp_path / "out.jsonl"
    write_rows(tmp_path / "in.jsonl", count)
    for done, number in enumerate(signals, 1):
        status = stop_after(start(tmp_path), output, done * count // 4, number)
        assert status == (-number if number is signal.SIGKILL else 128 + number)
        with output.open("ab") as file:
            file.write(b'{"id":"batch_req_0123456789abcdef","custom_id":"row-')  # torn amid its writing
    last = start(tmp_path)
    _, said = last.communicate(timeout=600)
    assert last.returncode == 1
    assert f"{count // BAD} with errors" in said.decode()
    check(output, count)


@rest(SECONDS)
def test_the_exit_status_says_whether_all_rows_were_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_rows(source, 6)
    arguments = ["batch", str(source), str(output), "--threads", "1"]
    assert main(arguments) == 0
    assert "6 rows answered, 0 with errors" in capsys.readouterr().err
    assert main(["batch", str(source), str(source)]) == 2
    assert main(["batch", str(tmp_path / "absent"), str(output)]) == 1
    other = tmp_path / "other"
    other.write_text("mine\n")
    assert main(["batch", str(source), str(other)]) == 2
    assert other.read_text() == "mine\n"
