"""Engines under load: their configuration, and tokens per second of requests that all begin at once."""

from __future__ import annotations

import asyncio
import gc
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aioinfer.config import EngineConfig, parse_setting
from aioinfer.engine import Engine
from aioinfer.observe.timeline import Overlap
from aioinfer.params import SamplingParams
from bench.gpu.plan import Plan
from bench.gpu.shapes import SHAPES, write_model, write_tokenizer
from bench.gpu.workload import Workload, prompts_of

__all__ = ["Decoding", "busy_share", "decoding_rate", "engine_config", "generate", "started", "stream"]


def engine_config(plan: Plan, folder: Path, **values: Any) -> EngineConfig:
    """Settings for throughput, over them those of the command line, over these what the bench is about."""
    settings: dict[str, Any] = {
        "model": str(folder),
        "load_format": "random",
        "dtype": plan.dtype,
        "device": plan.device,
        "max_running_requests": 256,
        "max_step_tokens": 16_384,
        "chunk_size": 2048,
        "max_model_len": 2048,
        # Random weights repeat themselves, and drafts of that would be steps of another kind.
        "speculation": "off",
    }
    if plan.device == "cpu":
        settings.update(threads=1, max_running_requests=8, num_pages=256, max_step_tokens=256)
    settings.update({name: parse_setting(EngineConfig, name, text) for name, text in plan.settings.items()})
    return EngineConfig(**{**settings, **values})


@asynccontextmanager
async def started(plan: Plan, *, tokenizer: bool = False, **values: Any) -> AsyncIterator[Engine]:
    """An engine with random weights that has computed prompts and decodes of several sizes already."""
    shape = SHAPES[plan.shape]
    with tempfile.TemporaryDirectory() as name:
        folder = write_model(shape, Path(name))
        if tokenizer:
            write_tokenizer(shape.vocab, folder)
        engine = Engine(engine_config(plan, folder, **values))
        async with engine:
            await _warm_up(engine, shape.vocab)
            yield engine
    del engine
    # What the next engine finds free is what it takes.
    gc.collect()
    if plan.device == "cuda":
        torch.cuda.empty_cache()


async def _warm_up(engine: Engine, vocab: int) -> None:
    """One long sequence alone, then as many as the engine runs: kernels are made for either."""
    rows, length = engine.config.running_requests, engine.info.max_model_len // 2
    for load in (
        Workload(prompts_of(1, length, vocab, seed=98), [6]),
        Workload(prompts_of(rows, 20, vocab, seed=99), [6] * rows),
    ):
        for temperature in (0.0, 0.6):
            await generate(engine, load, temperature)
            engine.flush_cache()


async def generate(engine: Engine, load: Workload, temperature: float) -> float:
    """Seconds from the first request to the last token."""
    start = time.perf_counter()
    results = await asyncio.gather(
        *[
            engine.generate(prompt, _params(output, temperature))
            for prompt, output in zip(load.prompts, load.outputs, strict=True)
        ]
    )
    seconds = time.perf_counter() - start
    _check_counts([len(result.token_ids) for result in results], load.outputs)
    return seconds


async def stream(engine: Engine, load: Workload, temperature: float) -> tuple[float, list[list[float]]]:
    """The same with a consumer for every stream; seconds, and when each of its tokens came."""

    async def read(prompt: list[int], output: int) -> list[float]:
        times: list[float] = []
        async with engine.generate(prompt, _params(output, temperature)) as chunks:
            async for chunk in chunks:
                times += [time.perf_counter()] * len(chunk.token_ids)
        return times

    start = time.perf_counter()
    arrivals = await asyncio.gather(
        *[read(prompt, output) for prompt, output in zip(load.prompts, load.outputs, strict=True)]
    )
    seconds = time.perf_counter() - start
    _check_counts([len(times) for times in arrivals], load.outputs)
    return seconds, arrivals


@dataclass(frozen=True, slots=True)
class Decoding:
    """Decoding of a batch between the last prompt and the first ending."""

    tokens_per_s: float
    #: mean seconds of a step
    step: float
    #: seconds until every prompt was computed
    prefill: float


async def decoding_rate(engine: Engine, prompts: Sequence[list[int]], output: int) -> Decoding:
    """Tokens per second while all of the batch decodes. Raises ArithmeticError if it never does, because
    prefill took longer than the outputs last."""
    start = time.perf_counter()
    _, arrivals = await stream(engine, Workload(list(prompts), [output] * len(prompts)), 0.0)
    begin = max(times[0] for times in arrivals)
    end = min(times[-1] for times in arrivals)
    tokens = sum(begin < at <= end for times in arrivals for at in times)
    if end <= begin or tokens < len(prompts):
        raise ArithmeticError("the first output ended before the last prompt was computed")
    rate = tokens / (end - begin)
    return Decoding(rate, len(prompts) / rate, begin - start)


def _params(output: int, temperature: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_tokens=output, ignore_eos=True)


def _check_counts(counts: list[int], wanted: list[int]) -> None:
    if counts != wanted:
        raise ArithmeticError(f"{sum(counts)} tokens came, {sum(wanted)} were asked for")


def busy_share(before: Overlap, after: Overlap) -> float:
    """Share of the time between two looks at a timeline in which the device worked; 0 without any."""
    busy, gap = after.busy - before.busy, after.gap - before.gap
    return busy / (busy + gap) if busy + gap else 0.0
