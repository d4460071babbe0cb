"""An engine logs one line of what it decided at start, and tells it in ``engine.info``; closing logs what it
waits for."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from aioinfer import errors
from aioinfer.config import EngineConfig
from aioinfer.engine import Engine, EngineState
from aioinfer.params import SamplingParams
from tests.engine.conftest import Gate, MakeEngine
from tests.joining import still_alive
from tests.model.checkpoints import make_checkpoint

LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]


def settings(path: Path, **changes: Any) -> EngineConfig:
    backends: dict[str, Any] = {"attention_backend": "sdpa", "sampling_backend": "torch"}
    return EngineConfig(**{"model": str(path), "threads": 1, "num_pages": 32, **backends, **changes})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    make_checkpoint("qwen3", path)
    return path


async def test_a_start_logs_one_line_of_what_was_decided(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "aioinfer"):
        async with Engine(settings(checkpoint)) as engine:
            info = engine.info
    (line,) = lines(caplog)
    said = re.fullmatch(r"engine (\d+), (\S+), started: (.*)", line)
    assert said is not None
    assert said.group(2, 3) == (checkpoint.name, info.decisions)
    assert "\n" not in line
    for part in ("Qwen3ForCausalLM", "attention sdpa (asked for)", "32 KV pages of 16", "max_model_len 256"):
        assert part in line
    assert (info.implementation, info.fallback_reason, info.length_reason) == ("own", "", "")
    assert (info.dtype, info.device, info.threads, info.overlap_steps) == ("float32", "cpu", 1, 1)
    assert info.kernels["attention"] == "sdpa (asked for)"
    pages, layers, heads, dims = 32, 3, 2, 16
    assert info.kv_bytes == pages * 16 * layers * 2 * heads * dims * 4
    assert info.model_positions == info.max_model_len == 256


async def test_the_lines_of_two_engines_differ(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "aioinfer"):
        async with Engine(settings(checkpoint)), Engine(settings(checkpoint)):
            pass
    first, second = lines(caplog)
    assert first != second


async def test_a_fallback_says_why(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "aioinfer"):
        async with Engine(settings(checkpoint, transformers_fallback=True)) as engine:
            assert (engine.info.implementation, engine.info.fallback_reason) == ("transformers", "asked for")
    assert "by transformers' code (asked for)" in lines(caplog)[0]


async def test_a_fallback_of_an_unknown_family_names_it(tmp_path: Path) -> None:
    make_checkpoint("persimmon", tmp_path)
    async with Engine(settings(tmp_path)) as engine:
        assert engine.info.fallback_reason == "there is no own code for PersimmonForCausalLM"


async def test_a_context_that_the_pool_cuts_is_told_with_the_knob(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "aioinfer"):
        async with Engine(settings(checkpoint, num_pages=4)) as engine:
            assert (engine.info.max_model_len, engine.info.model_positions) == (64, 256)
            with pytest.raises(errors.InvalidRequest, match="num_pages") as caught:
                await engine.generate([1] * 100)
    reason = "the KV pool holds no more, num_pages sets its size; the model knows 256"
    assert f"max_model_len 64 ({reason})" in lines(caplog)[0]
    assert reason in str(caught.value)
    assert "the model takes" not in str(caught.value)


def test_the_wrong_loop_is_told_what_to_do(make_engine: MakeEngine) -> None:
    engine = make_engine()
    loop = asyncio.new_event_loop()
    loop.run_until_complete(engine.start())

    async def use() -> None:
        with pytest.raises(errors.WrongLoop, match=r"one asyncio\.run.*pytest-asyncio.*loop_scope"):
            engine.generate([1])
        with pytest.raises(errors.WrongLoop):
            await engine.aclose()

    asyncio.run(use())
    with pytest.raises(errors.WrongLoop, match="there is no running loop here"):
        engine.generate([1])
    loop.run_until_complete(engine.aclose())
    loop.close()


@pytest.mark.parametrize("drain", [True, False])
@pytest.mark.parametrize("cancels", [1, 3])
def test_a_close_that_is_cancelled_leaves_nothing_behind(
    make_engine: MakeEngine, gate: Gate, drain: bool, cancels: int
) -> None:
    engine = make_engine(fault=gate)
    before = set(threading.enumerate())

    async def run() -> Any:
        await engine.start()
        stream = engine.generate([1, 2], LONG)
        engine.generate("text", LONG)
        await asyncio.to_thread(gate.arrived.acquire)
        closing = asyncio.create_task(engine.aclose(drain=drain))
        await asyncio.sleep(0)
        for _ in range(cancels):
            closing.cancel()
            await asyncio.sleep(0)
        gate.release()
        with pytest.raises(asyncio.CancelledError):
            await closing
        return stream  # the loop ends, and cancels what goes on in the background

    stream = asyncio.run(run())
    assert engine.state is EngineState.CLOSED
    assert stream.cell.output.finished
    assert not still_alive(set(threading.enumerate()) - before)
