"""Files of requests: one answer for each row, in order, whatever becomes of the program that writes them."""

from __future__ import annotations

import asyncio
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aioinfer import EngineConfig
from aioinfer.config import ServerConfig
from aioinfer.errors import ConfigError, EngineError
from aioinfer.server import batch
from aioinfer.testing import Answer, FakeEngine


def row(name: str, content: str = "hi", url: str = "/v1/chat/completions", **body: Any) -> str:
    if url == "/v1/chat/completions":
        body["messages"] = [{"role": "user", "content": content}]
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": {"model": "fake", **body}})


def engine_with(answers: Any = "x", **settings: Any) -> FakeEngine:
    usual: dict[str, Any] = {"model": "fake", "num_pages": 1024, "overlap_steps": 0}
    return FakeEngine(answers, config=EngineConfig(**{**usual, **settings}))


async def run(engine: FakeEngine, lines: list[str], path: Path, *, concurrency: int = 4) -> batch.Counts:
    rows = batch.read_rows(io.BytesIO("\n".join(lines).encode()))
    with batch.Output(path) as output:
        await batch.Batch(engine, ServerConfig(), concurrency).run(rows, output, lambda: None)
        return output.counts


def answers_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def tear(path: Path, cut: int) -> None:
    """Leave a part of the second line, as the end of a program amid its writing does."""
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:cut])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


async def test_each_row_has_its_answer_in_the_order_of_the_rows(path: Path) -> None:
    def answer(prompt: str) -> Answer:
        return Answer(prompt, delay=0.01 if "3" in prompt else 0.0)

    lines = [row(f"r{number}", f"<{number}>") for number in range(40)]
    async with engine_with(answer) as engine:
        counts = await run(engine, lines, path)
    found = answers_in(path)
    assert [each["custom_id"] for each in found] == [f"r{number}" for number in range(40)]
    for number, each in enumerate(found):
        assert each["error"] is None
        assert each["response"]["status_code"] == 200
        assert f"<{number}>" in each["response"]["body"]["choices"][0]["message"]["content"]
    assert (counts.answered, counts.failed) == (40, 0)


async def test_every_endpoint_reads_its_body_as_the_server_does(path: Path) -> None:
    lines = [
        row("completion", url="/v1/completions", prompt="a"),
        row("embedding", url="/v1/embeddings", input=["a", "b"]),
        row("response", url="/v1/responses", input="a"),
        row("unknown field", nonsense=1),
        row("other model", model="gpt-5"),
        '{"custom_id": "twice", "method": "POST", "url": "/v1/completions", '
        '"body": {"prompt": "a", "prompt": "b"}}',
        '{"custom_id": "no object", "method": "POST", "url": "/v1/completions", "body": 7}',
        '{"custom_id": "no body", "method": "POST", "url": "/v1/completions"}',
    ]
    async with engine_with() as engine:
        await run(engine, lines, path)
    found = {each["custom_id"]: each["response"] for each in answers_in(path)}
    assert len(found["embedding"]["body"]["data"]) == 2
    assert {name: each["status_code"] for name, each in found.items()} == {
        **dict.fromkeys(["completion", "embedding", "response"], 200),
        **dict.fromkeys(["unknown field", "twice", "no object", "no body"], 400),
        "other model": 404,
    }
    assert found["unknown field"]["body"]["error"]["param"] == "nonsense"


@pytest.mark.parametrize(
    ("line", "param"),
    [
        ("not json", "custom_id"),
        ('{"method": "POST"}', "custom_id"),
        ('{"custom_id": 7}', "custom_id"),
        ("[]", "custom_id"),
        ('{"custom_id": "b", "method": "GET", "url": "/v1/completions"}', "method"),
        ('{"custom_id": "b", "url": "/v1/load_lora_adapter", "body": {}}', "url"),
        ('{"custom_id": "b", "url": "/health"}', "url"),
        (row("a"), "custom_id"),
        (row("b", stream=True), "stream"),
        (
            '{"custom_id": "b", "url": "/v1/completions", "body": ' + "[" * 100_000 + "]" * 100_000,
            "custom_id",
        ),
    ],
)
async def test_a_bad_row_is_its_own_error_and_done(path: Path, line: str, param: str) -> None:
    lines = [row("a"), line, "", row("c")]
    async with engine_with() as engine:
        counts = await run(engine, lines, path)
        assert (counts.answered, counts.failed) == (2, 1)
        first, bad, last = answers_in(path)
        assert [first["custom_id"], last["custom_id"]] == ["a", "c"]
        assert bad["response"]["status_code"] == 400
        assert bad["response"]["body"]["error"]["param"] == param
        before = answers_in(path)
        counts = await run(engine, lines, path)
        assert answers_in(path) == before
        assert (counts.answered, counts.failed, counts.earlier) == (2, 1, 3)


async def test_a_byte_order_mark_belongs_to_no_row(path: Path) -> None:
    async with engine_with() as engine:
        counts = await run(engine, ["\ufeff" + row("a"), row("b")], path)
    assert [each["custom_id"] for each in answers_in(path)] == ["a", "b"]
    assert counts.failed == 0


async def test_a_line_that_is_too_long_is_an_error_and_is_not_held(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "_MOST_LINE", 1000)
    lines = [row("a"), row("b", "x" * 5000), row("c")]
    async with engine_with() as engine:
        await run(engine, lines, path)
    assert [each["response"]["status_code"] for each in answers_in(path)] == [200, 400, 200]


@pytest.mark.parametrize("cut", [1, 10, 17, 60, -2])
async def test_a_torn_last_line_is_cut_off_and_computed_again(path: Path, cut: int) -> None:
    lines = [row("a"), row("b"), row("c")]
    async with engine_with() as engine:
        await run(engine, lines[:2], path)
        tear(path, cut)
        await run(engine, lines, path)
    assert [each["custom_id"] for each in answers_in(path)] == ["a", "b", "c"]


@pytest.mark.parametrize("content", [b"some text of mine", b"some\ntext\n", b'{"a": 1}\n'])
def test_a_file_of_something_else_is_refused_and_unchanged(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="no answer of a batch"):
        batch.Output(path)
    assert path.read_bytes() == content


def test_an_output_that_cannot_be_read_again_is_refused_and_not_waited_for(path: Path) -> None:
    os.mkfifo(path)
    for pipe in (path, Path("/dev/null")):
        with pytest.raises(ConfigError, match=f"{pipe}: is no file that can be read again"):
            batch.Output(pipe)


def test_two_programs_do_not_write_one_file(path: Path) -> None:
    with batch.Output(path), pytest.raises(ConfigError, match="another batch"):
        batch.Output(path)
    with batch.Output(path):
        pass


async def test_what_was_done_behind_an_unfinished_row_is_written_when_it_is_cancelled(path: Path) -> None:
    answers = {"slow": Answer("s", delay=1e6), "": "x"}
    lines = [row("a"), row("b", "slow"), row("c"), row("d")]
    async with engine_with(answers) as engine:
        job = asyncio.create_task(run(engine, lines, path))
        while len(engine.requests) < 4 or engine.stats().running + engine.stats().waiting > 1:
            await asyncio.sleep(0)
        for _ in range(50):
            await asyncio.sleep(0)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        assert [each["custom_id"] for each in answers_in(path)] == ["a", "c", "d"]
        engine.answers = "x"
        await run(engine, lines, path)
        assert sorted(each["custom_id"] for each in answers_in(path)) == ["a", "b", "c", "d"]


async def test_rows_wait_while_their_own_batch_fills_the_queue(path: Path) -> None:
    lines = [row(f"r{number}", n=3) for number in range(8)]
    lines.append(row("more than the queue has room for", n=8))
    async with engine_with(max_running_requests=1, max_queued_requests=4) as engine:
        counts = await run(engine, lines, path, concurrency=8)
    *found, last = answers_in(path)
    assert [each["response"]["status_code"] for each in found] == [200] * 8
    assert last["response"]["status_code"] == 429
    assert counts.failed == 1


async def test_a_lost_engine_ends_the_batch_and_costs_no_row(path: Path) -> None:
    async with engine_with(Answer("x", delay=1e6)) as engine:
        job = asyncio.create_task(run(engine, [row(f"r{number}") for number in range(20)], path))
        while not engine.stats().running:
            await asyncio.sleep(0)
        engine.lose_device()
        with pytest.raises(EngineError, match="failed"):
            await job
    assert answers_in(path) == []


async def test_a_full_disk_ends_the_batch_and_leaves_whole_lines(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = 0

    class Full:
        def __init__(self, file: Any) -> None:
            self._file = file

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def write(self, data: Any) -> int:
            nonlocal written
            written += 1
            if written == 3:
                return int(self._file.write(data[:5]))
            if written == 4:
                raise OSError(28, "No space left on device")
            return int(self._file.write(data))

    lines = [row(f"r{number}") for number in range(6)]
    async with engine_with() as engine:
        with batch.Output(path) as output:
            monkeypatch.setattr(output, "_file", Full(output._file))
            rows = batch.read_rows(io.BytesIO("\n".join(lines).encode()))
            with pytest.raises(OSError, match="No space"):
                await batch.Batch(engine, ServerConfig(), 4).run(rows, output, lambda: None)
        assert {each["custom_id"] for each in answers_in(path)} >= {"r0", "r1"}
        await run(engine, lines, path)
    names = [each["custom_id"] for each in answers_in(path)]
    assert sorted(names) == [f"r{number}" for number in range(6)]


async def test_the_input_is_read_as_rows_are_done(path: Path) -> None:
    read = 0

    def rows() -> Iterator[batch.Row]:
        nonlocal read
        for each in batch.read_rows(io.BytesIO("\n".join(lines).encode())):
            read += 1
            yield each

    lines = [row(f"r{number}", "slow" if number == 0 else "hi") for number in range(100)]
    async with engine_with({"slow": Answer("s", delay=1e6), "": "x"}) as engine:
        with batch.Output(path) as output:
            job = asyncio.create_task(
                batch.Batch(engine, ServerConfig(), 2).run(rows(), output, lambda: None)
            )
            while engine.stats().running + engine.stats().waiting != 1 or len(engine.requests) < 8:
                await asyncio.sleep(0)
            assert read == 8
            job.cancel()
            await asyncio.wait([job])
