"""``python -m bench.sessions.child ACTION``: an engine in a process of its own.

Arguments are a JSON object on stdin, the answer is the last line of stdout.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.outputs import Result
from bench.sessions.setting import greedy, ttft, warm_up


async def ask(settings: dict[str, Any], prompt: list[int], output: int, store: bool) -> dict[str, Any]:
    """Compute a prompt; with ``store``, what is written behind is whole at the end."""
    async with Engine(EngineConfig(**settings)) as engine:
        await warm_up(engine)
        result = await engine.generate(prompt, greedy(output, logprobs=0))
        stored = await engine.store_prefix(prompt) if store else 0
        return {"ttft": ttft(result), "stored": stored, **_said(result)}


async def save(
    settings: dict[str, Any], prompt: list[int], output: int, path: str, more: list[int]
) -> dict[str, Any]:
    """Save a session behind its first turn, and go on in it: what comes without a restore."""
    async with Engine(EngineConfig(**settings)) as engine:
        await warm_up(engine)
        async with engine.session() as session:
            first = await session.generate(prompt, greedy(1))
            start = time.perf_counter()
            await session.save(path)
            seconds = time.perf_counter() - start
            result = await session.generate(more, greedy(output, logprobs=0))
        return {
            "ttft": ttft(first),
            "seconds": seconds,
            "bytes": os.stat(path).st_size,
            **_said(result),
        }


async def load(settings: dict[str, Any], output: int, path: str, more: list[int]) -> dict[str, Any]:
    """Load a session, and go on in it."""
    async with Engine(EngineConfig(**settings)) as engine:
        await warm_up(engine)
        start = time.perf_counter()
        async with await engine.load_session(path) as session:
            seconds = time.perf_counter() - start
            result = await session.generate(more, greedy(output, logprobs=0))
        return {"seconds": seconds, "ttft": ttft(result), **_said(result)}


def _said(result: Result) -> dict[str, Any]:
    assert result.usage is not None
    assert result.logprobs is not None
    return {
        "ids": result.token_ids,
        "logprobs": [each.logprob for each in result.logprobs],
        "cached": result.usage.cached_tokens,
    }


_ACTIONS: dict[str, Callable[..., Coroutine[Any, Any, Any]]] = {"ask": ask, "save": save, "load": load}

if __name__ == "__main__":
    answer = asyncio.run(_ACTIONS[sys.argv[1]](**json.loads(sys.stdin.read())))
    print(json.dumps(answer))
