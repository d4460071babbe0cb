"""``aioinfer batch``, as a program that is killed and started again; and thousands of rows."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from aioinfer import AioInferError, EngineConfig, Result, SamplingParams
from aioinfer.cli.main import main
from aioinfer.embeddings.embedding import Embedding
from aioinfer.testing import Answer, FakeEngine
from tests.tiers import PROGRAM, SECONDS, SIMULATION, nightly, rest

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
        pytest.param(300, [signal.SIGINT], marks=rest(PROGRAM)),
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


# -- thousands of rows beside a full queue ---------------------------------------------------------------


@pytest.mark.parametrize("count", [200, pytest.param(5000, marks=nightly(SIMULATION))])
async def test_each_row_has_one_result_beside_a_full_queue(count: int) -> None:
    """Others fill the queue again and again: no row is lost, and none is there twice."""
    config = EngineConfig(
        model="fake", num_pages=1024, overlap_steps=0, max_running_requests=8, max_queued_requests=8
    )
    texts: list[Any] = [7 if number % BAD == BAD // 2 else f"row {number}" for number in range(count)]
    async with FakeEngine(lambda prompt: Answer(prompt), config=config) as engine:
        others: set[asyncio.Task[Any]] = set()

        async def fill() -> None:
            while True:
                try:
                    other = asyncio.ensure_future(engine.generate("other"))
                except AioInferError:
                    await asyncio.sleep(0.001)
                    continue
                others.add(other)
                other.add_done_callback(others.discard)

        filling = asyncio.create_task(fill())
        params = [SamplingParams(max_tokens=16) for _ in texts]
        mapped = [each async for each in engine.map(texts, params, on_error="return")]
        embedded = await engine.embed(texts, on_error="return")
        filling.cancel()
        await asyncio.wait([filling, *others])
        for found, kind in ((mapped, Result), (embedded, Embedding)):
            assert len(found) == count
            good = [number for number, each in enumerate(found) if isinstance(each, kind)]
            assert good == [number for number in range(count) if number % BAD != BAD // 2]
        assert [each.text for each in mapped if isinstance(each, Result)] == [
            each for each in texts if each != 7
        ]
