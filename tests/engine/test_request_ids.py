"""The caller's name for a request is on all that comes of it, and its context in what is called for it."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import pickle
from typing import Any

import pytest

from aioinfer import EngineConfig, errors
from aioinfer.engine import Engine
from aioinfer.testing import Answer, FakeEngine
from tests.engine.test_chat import SCHEMA, USER


async def test_a_request_id_is_on_stream_result_errors_and_in_logs() -> None:
    async with FakeEngine({"bad": ValueError("x"), "": "fine"}) as engine:
        stream = engine.generate("a", request_id="order 7")
        assert stream.request_id == "order 7"
        assert "'order 7'" in repr(stream.cell.output)
        assert (await stream).request_id == "order 7"
        chat = engine.chat(USER, request_id="chat 8")
        assert (chat.request_id, (await chat).request_id) == ("chat 8", "chat 8")
        with pytest.raises(errors.StepFailed) as failed:
            await engine.generate("bad", request_id="order 9")
        assert failed.value.request_id == "order 9"
        for again in (copy.copy(failed.value), pickle.loads(pickle.dumps(failed.value))):
            assert again.request_id == "order 9"


async def test_refusals_name_the_request_too() -> None:
    async with FakeEngine([errors.Rejected("full"), "x"]) as engine:
        calls: list[Any] = [
            lambda: engine.generate("a", request_id="r"),
            lambda: engine.generate("", request_id="r"),
            lambda: engine.generate([{"role": 7, "content": "x"}], request_id="r"),
            lambda: engine.chat([{"role": 7, "content": "x"}], request_id="r"),
            lambda: engine.chat(
                USER, response_format={**SCHEMA, "properties": {"n": {"type": "?"}}}, request_id="r"
            ),
        ]
        for call in calls:
            with pytest.raises(errors.RequestError) as refused:
                await call()
            assert refused.value.request_id == "r", refused.value
        for wrong in (7, "x" * 257):
            with pytest.raises(errors.InvalidRequest) as caught:
                engine.generate("a", request_id=wrong)  # type: ignore[arg-type]
            assert caught.value.field == "request_id"


async def test_requests_without_a_name_get_one_each() -> None:
    async with FakeEngine("x") as engine:
        first, second = engine.generate("a"), engine.generate("a")
        assert first.request_id.startswith("req_")
        assert first.request_id == first.request_id != second.request_id
        assert (await first).request_id == first.request_id
        results = [each.request_id async for each in engine.map("abc"[at] for at in range(3))]  # type: ignore[union-attr]
        assert len(set(results)) == 3


who = contextvars.ContextVar("who", default="nobody")


async def test_the_progress_of_a_start_has_the_callers_context() -> None:
    """It is called on other threads."""
    seen: set[str] = set()

    def progress(stage: str, done: int, total: int) -> None:
        seen.add(who.get())
        who.set("changed here")

    who.set("the caller")
    async with asyncio.timeout(60):
        engine = Engine(EngineConfig(threads=1))
        await engine.start(progress)
        await engine.aclose()
    assert seen == {"the caller"}
    assert who.get() == "the caller"


async def test_validators_run_in_the_context_of_who_reads_the_result() -> None:
    class Form:
        @classmethod
        def model_json_schema(cls) -> Any:
            return SCHEMA

        @classmethod
        def model_validate_json(cls, text: str) -> Any:
            return who.get(), text

    async with FakeEngine(Answer('{"n": 1}')) as engine:
        result = await engine.chat(USER, response_format=Form)
        who.set("the reader")
        assert result.parsed == ("the reader", '{"n": 1}')


async def test_a_request_is_aborted_by_its_name() -> None:
    async with FakeEngine("a long answer", delay=3600) as engine:
        streams = [engine.generate("x", request_id=name) for name in ("one", "one", "two")]
        assert engine.abort("nobody's") == 0
        assert engine.abort("one") == 2
        for stream in streams[:2]:
            with pytest.raises(errors.Cancelled, match="by its id"):
                await stream
        assert not streams[2].done
        assert await asyncio.wrap_future(engine.threadsafe().abort("two")) == 1
        with pytest.raises(errors.Cancelled):
            await streams[2]
