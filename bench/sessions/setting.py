"""What the parts have in common: the engine's settings, prompts, how requests are timed, pinned processes."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from aioinfer.config import PAGE_SIZE
from aioinfer.engine import Engine
from aioinfer.outputs import Result
from aioinfer.params import SamplingParams
from bench.peers.registry import ROOT

__all__ = [
    "answer", "child", "gap", "greedy", "median", "pin", "settings", "tokens", "ttft", "warm_up",
]  # fmt: skip

#: token ids asked for: above the special tokens of most models, below the size of the smallest
_VOCAB = (100, 500)
#: seconds that a child may take
_PATIENCE = 1800.0
#: seed of a prompt that is not measured; those that are have lesser ones, from 0 on
_WARM = 1 << 40


def settings(options: argparse.Namespace, positions: int, **more: Any) -> dict[str, Any]:
    """Settings of an engine with KV for so many positions, as a process of its own can be given them."""
    found = {
        "model": options.model,
        "device": "cpu",
        "threads": options.threads,
        "quantization": options.quantization,
        "cache_weights": options.cache_weights,
        "deterministic": options.deterministic,
        "speculation": "off",
        "max_running_requests": 8,
        "num_pages": -(-positions // PAGE_SIZE),
        **more,
    }
    return {name: value for name, value in found.items() if value is not None}


def tokens(count: int, seed: int) -> list[int]:
    """A prompt that no other seed begins with."""
    dice = random.Random(seed)
    return [dice.randint(*_VOCAB) for _ in range(count)]


def greedy(count: int, **more: Any) -> SamplingParams:
    """Parameters for exactly ``count`` tokens, whatever the end token is."""
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **more)


def ttft(result: Result) -> float:
    """Seconds from the arrival of a request to its first token."""
    assert result.metrics is not None
    assert result.metrics.ttft is not None
    return result.metrics.ttft


def gap(result: Result) -> float:
    """Seconds between two tokens of a request, the median: those of a decode step where it runs alone."""
    assert result.metrics is not None
    times = result.metrics.token_times
    return statistics.median(now - before for before, now in itertools.pairwise(times))


async def warm_up(engine: Engine) -> None:
    """A request that has nothing in common with others."""
    await engine.generate(tokens(40, _WARM), greedy(4))


def median(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Medians by name."""
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def child(action: str, **arguments: Any) -> dict[str, Any]:
    """What an action of :mod:`bench.sessions.child` returns, in a new process."""
    return answer([sys.executable, "-m", "bench.sessions.child", action], arguments)


def answer(command: list[str], arguments: dict[str, Any]) -> dict[str, Any]:
    """The JSON object that a program prints last, given one on stdin. Raises RuntimeError with the end of
    what it said, and TimeoutExpired."""
    done = subprocess.run(
        command, input=json.dumps(arguments), env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT,
        text=True, capture_output=True, timeout=_PATIENCE,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command[1:4])}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def pin(pid: int, cores: Collection[int]) -> None:
    """Let all threads of a process run on these cores only."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)
