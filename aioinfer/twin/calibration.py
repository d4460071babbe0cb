"""Calibration: has an engine compute steps of all sizes, and fits costs to what they took.

Rounds of random size give steps with few and many rows, short and long contexts, and prompts beside them; in
random order, so that a neighbour that is busy for a while disturbs all sizes alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from aioinfer._version import __version__
from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.execution.device import Progress
from aioinfer.params import SamplingParams
from aioinfer.scheduling.costs import IDLE, Costs
from aioinfer.system.cores import processor_name
from aioinfer.twin.fitting import WARM, fit_host, fit_steps, idle_before, line, seconds_of
from aioinfer.twin.recording import RecordedStep, Recording

__all__ = ["Check", "calibrate", "check", "compare", "fitted", "measured"]

#: settings that a simulation needs as they were decided here
_SETTINGS = (
    *("max_running_requests", "max_step_tokens", "chunk_size", "max_prefill_tokens", "itl_target"),
    "overlap_steps",
)
#: share of the memory and of the context that the requests of a round may fill
_SHARE = 0.7
#: share of the time that does not count
_WARM = 0.1
#: share of the rounds that find an idle device
_IDLE = 1 / 8
#: deviation of a self-check from which on costs are wrong
_WRONG = 0.1
#: of a self-check
_WINDOWS = 10


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """What steps took, against what they were thought to."""

    steps: int
    #: what steps took over what was predicted: of all, of decode steps, of steps with prefill
    ratio: float
    decode: float
    prefill: float

    @property
    def agrees(self) -> bool:
        """No ratio is more than a tenth off."""
        return all(abs(each - 1) <= _WRONG for each in (self.ratio, self.decode, self.prefill))


async def calibrate(
    config: EngineConfig, *, seconds: float = 120.0, seed: int = 0, progress: Progress | None = None
) -> Costs:
    """Costs of a model on this machine, of steps that an engine computes for so long. Raises as
    :meth:`aioinfer.Engine.start`, and ConfigError: the time was too short for a fit."""
    return fitted(config, *await measured(config, seconds, seed, progress))


def fitted(
    config: EngineConfig,
    steps: Sequence[RecordedStep],
    arrivals: Sequence[tuple[float, float]],
    engine: Engine,
) -> Costs:
    """Costs from what :func:`measured` returned. Raises ConfigError."""
    warm = idle_before(steps) < WARM
    sizes = [step.sizes for step, counts in zip(steps, warm, strict=True) if counts]
    costs, noise, fit = fit_steps(sizes, seconds_of(steps)[warm])
    host = msgspec.structs.replace(fit_host(steps, costs), arrive=line(*np.array(arrivals).T))
    info, runtime = engine.info, engine._started()
    settings = {name: getattr(runtime.config, name) for name in _SETTINGS}
    memory = {"num_pages": info.num_pages, "page_size": info.page_size, "max_model_len": info.max_model_len}
    named = {"model": Path(config.model_name).name, "engine": info.description, "processor": processor_name()}
    return Costs(
        step=costs,
        noise=noise[0],
        prefill_noise=noise[1],
        host=host,
        fit=fit,
        engine=settings | memory,
        fingerprint=named | {"aioinfer": __version__},
    )


async def check(
    costs: Costs,
    config: EngineConfig,
    *,
    seconds: float = 30.0,
    seed: int = 1,
    progress: Progress | None = None,
) -> Check:
    """Compare costs with the steps of so many seconds. Raises as :func:`calibrate`."""
    steps, *_ = await measured(config, seconds, seed, progress)
    return compare(costs, steps)


def compare(costs: Costs, steps: Sequence[RecordedStep]) -> Check:
    """What steps took, against what they were thought to: in all, or in the lower quartile of some windows
    of time, whichever is nearer to 1, as a neighbour that is busy for a while moves one of both."""
    took = seconds_of(steps)
    expected = np.array([costs.step.seconds(each.sizes) for each in steps])
    decode = np.array([not each.prefilling for each in steps])
    window = (np.cumsum(expected) / expected.sum() * (_WINDOWS - 1e-9)).astype(int)

    def ratio(of: Any) -> float:
        sums = [np.bincount(window[of], each[of], _WINDOWS) for each in (took, expected)]
        measured = sums[0][sums[1] > 0] / sums[1][sums[1] > 0]
        if not len(measured):
            return 1.0
        whole = float(sums[0].sum() / sums[1].sum())
        return min(whole, float(np.quantile(measured, 0.25)), key=lambda each: abs(each - 1))

    return Check(len(steps), ratio(decode | True), ratio(decode), ratio(~decode))


async def measured(
    config: EngineConfig, seconds: float, seed: int = 0, progress: Progress | None = None
) -> tuple[list[RecordedStep], list[tuple[float, float]], Engine]:
    """Steps of an engine that starts and ends here; how long requests took until they were queued, by the
    length of their prompts; and the engine, which is closed."""
    fixed: dict[str, Any] = {"speculation": "off", "prefix_cache": False, "costs": None}
    engine = Engine(dataclasses.replace(config, **fixed))
    rounds = _Rounds(engine, seed)
    async with engine:
        began = time.perf_counter()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_WARM * seconds):
                while True:
                    await rounds.play(None)  # steps that load code, and touch memory first
        recording = Recording(engine)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(began + seconds - time.perf_counter()):
                while True:
                    await rounds.play(None)
                    if progress is not None:
                        progress("calibrate", int(time.perf_counter() - began), int(seconds))
        steps = recording.stop()
        if progress is not None:
            progress("calibrate", int(seconds), int(seconds))
        return steps, rounds.arrivals, engine


class _Rounds:
    """Requests that come together, or one soon after the other."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._engine = engine
        self._dice, self._tokens = random.Random(seed), np.random.default_rng(seed)
        #: tokens of a prompt, and seconds that generate() took
        self.arrivals: list[tuple[float, float]] = []

    async def play(self, requests: int | None) -> None:
        """So many of them, or any number."""
        engine, dice, info = self._engine, self._dice, self._engine.info
        most = engine._started().config.running_requests
        if requests is None:
            requests = min(most, round(2 ** dice.uniform(0, np.log2(most))))
        room = int(_SHARE * min(info.max_model_len, info.num_pages * (info.page_size or 1) / requests))
        longest = max(1, min(room - 48, 2 * engine._started().config.step_tokens))
        pause = dice.choice([0.0, 0.0, 0.02, 0.1])
        # Seldom: some steps after it are slower, too, and would count for loads without idle times.
        await asyncio.sleep(1.1 * IDLE if dice.random() < _IDLE else 0.0)
        async with asyncio.TaskGroup() as group:
            for _ in range(requests):
                prompt = round(2 ** dice.uniform(2, max(2.0, np.log2(longest))))
                group.create_task(self._ask(min(longest, prompt), dice.randint(8, 48)))
                await asyncio.sleep(pause * dice.random())

    async def _ask(self, prompt: int, output: int) -> None:
        # Made by numpy: the loop has little to do beside the steps, as when a server has them.
        ids: Any = self._tokens.integers(self._engine.info.vocab_size, size=prompt)
        began = time.perf_counter()
        params = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0)
        stream = self._engine.generate(ids, params)
        self.arrivals.append((prompt, time.perf_counter() - began))
        await stream
