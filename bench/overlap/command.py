"""``python -m bench overlap``: how much of the time the device works, by overlapped steps and launch mode.

The floor is the same forwards, sampling and reading of tokens in a bare loop: the steps are planned and
packed beforehand by the same scheduler, and nothing else runs. Every way to run the engine takes the same
load through real streams; floor and ways take turns. ``grammar`` has one on every row.

With ``--toy``, a step takes the device as long as it takes the host; one overlapped step then hides the one
behind the other, and the best that can be is twice the speed. With ``--stall`` the event loop stands still
for 50 ms now and then. ``--prefills`` compares TTFT with and without ``max_overlapped_prefill``.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from aioinfer.cache.pages import PageAllocator
from aioinfer.cache.slots import SlotPool
from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.execution.device import DeviceInfo, Flight, NoAdapters
from aioinfer.execution.launcher import InlineLauncher, ThreadLauncher
from aioinfer.execution.torch_device import TorchDevice
from aioinfer.observe.timeline import DeviceLane, Timeline
from aioinfer.params import Grammar, SamplingParams
from aioinfer.scheduling.memory import Memory
from aioinfer.scheduling.request import Request
from aioinfer.scheduling.scheduler import Scheduler
from aioinfer.scheduling.step import Outcome, Step
from bench.overlap.drawing import draw
from bench.overlap.fixed_step import OverlapSteps, bench_stall, bench_toy
from bench.overlap.prefills import bench_prefills
from bench.report import Report

#: overlapped steps, launch mode, a grammar on every row
WAYS: list[tuple[OverlapSteps, Literal["thread", "inline"], bool]] = [
    (0, "thread", False),
    (1, "thread", False),
    (2, "thread", False),
    (0, "inline", False),
    (1, "inline", False),
    (1, "thread", True),
    (2, "thread", True),
]
GRAMMAR = Grammar("regex", "[a-z ]{4000}")


def make_config(
    options: argparse.Namespace,
    path: str,
    batch: int,
    overlap_steps: OverlapSteps = 1,
    mode: Literal["thread", "inline"] = "thread",
) -> EngineConfig:
    return EngineConfig(
        model=path,
        threads=options.threads,
        overlap_steps=overlap_steps,
        launch_mode=mode,
        max_running_requests=batch,
        prefix_cache=False,
        page_size=16,
    )


def prompts(options: argparse.Namespace, batch: int) -> list[list[int]]:
    return [[100 + (7 * number + at) % 700 for at in range(options.prompt)] for number in range(batch)]


class SharedLane(DeviceLane):
    """Passes steps on to the lane of the engine whose turn it is."""

    __slots__ = ("current",)

    def __init__(self) -> None:
        super().__init__()
        self.current = DeviceLane()

    def step(self, step: int, start: float, forward: float, mask: float, end: float) -> None:
        self.current.step(step, start, forward, mask, end)


class SharedDevice(NoAdapters):
    """One device for the floor and all engines, which take turns: where in memory a model lies makes more of
    a difference than what is compared here."""

    synchronous = True

    def __init__(self, device: TorchDevice, info: DeviceInfo, lane: SharedLane) -> None:
        self._device = device
        self._info = info
        self._lane = lane
        self.lane = DeviceLane()

    def open(self, progress: Any = None) -> DeviceInfo:
        return self._info

    def prepare(self, step: Step) -> Any:
        return self._device.prepare(step)

    def launch(self, prepared: Any) -> Flight:
        self._lane.current = self.lane
        return self._device.launch(prepared)

    def check(self) -> None:
        self._device.check()

    def close(self) -> None:
        """The floor closes the device."""


class Floor:
    """The bare loop: the steps of a load, planned and packed beforehand."""

    def __init__(self, options: argparse.Namespace, path: str, batch: int) -> None:
        config = make_config(options, path, batch)
        self._device = TorchDevice(config)
        self._lane = self._device.lane = SharedLane()
        self._info = info = self._device.open()
        memory = Memory(PageAllocator(info.num_pages, 16), SlotPool(config.num_slots), prefix_cache=False)
        scheduler = Scheduler(memory, config)
        params = SamplingParams(temperature=0, max_tokens=options.output, ignore_eos=True)
        for number, ids in enumerate(prompts(options, batch), 1):
            length = len(ids) + options.output
            scheduler.submit(Request(number, ids, params, seed=0, stop_ids=frozenset(), max_length=length))
        self._packed = []
        while (step := scheduler.plan()) is not None:
            self._packed.append(self._device.prepare(step))
            scheduler.resolve(step, Outcome([5] * step.num_rows))

    def thread(self, config: EngineConfig) -> ThreadLauncher:
        """A launcher for an engine, on the floor's device."""
        return ThreadLauncher(SharedDevice(self._device, self._info, self._lane))

    def inline(self, config: EngineConfig) -> InlineLauncher:
        """The same without a thread."""
        return InlineLauncher(SharedDevice(self._device, self._info, self._lane))

    def run(self) -> float:
        """Seconds."""
        self._lane.current = DeviceLane()
        start = time.perf_counter()
        for packed in self._packed:
            self._device.launch(packed).wait()
        return time.perf_counter() - start

    def close(self) -> None:
        self._device.close()


async def stream_all(engine: Engine, options: argparse.Namespace, batch: int, *, grammar: bool) -> float:
    """Seconds from the first request to the last token, with a reader for every stream."""
    # The grammar does not end within this many tokens.
    params = SamplingParams(
        temperature=0,
        max_tokens=options.output,
        ignore_eos=not grammar,
        grammar=GRAMMAR if grammar else None,
    )

    async def read(prompt: list[int]) -> int:
        count = 0
        async with engine.generate(prompt, params) as stream:
            async for chunk in stream:
                count += len(chunk.token_ids)
        return count

    start = time.perf_counter()
    counts = await asyncio.gather(*[read(prompt) for prompt in prompts(options, batch)])
    seconds = time.perf_counter() - start
    assert set(counts) == {options.output}, counts
    return seconds


@dataclass
class Way:
    """One way to run the load, and its results, round by round."""

    overlap_steps: OverlapSteps
    mode: str
    grammar: bool
    engine: Engine
    #: of the floor's speed
    ratios: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"overlap {self.overlap_steps}, {self.mode}" + (", grammar" if self.grammar else "")


async def bench_batch(options: argparse.Namespace, path: str, batch: int, report: Report) -> None:
    """Floor and ways take turns, so that what disturbs the machine disturbs all of them."""
    floor, floors = Floor(options, path, batch), []
    async with AsyncExitStack() as stack:
        ways = []
        for steps, mode, grammar in WAYS:
            config = make_config(options, path, batch, steps, mode)
            engine = Engine(config, launcher=floor.thread if mode == "thread" else floor.inline)
            ways.append(Way(steps, mode, grammar, await stack.enter_async_context(engine)))
            await stream_all(engine, options, batch, grammar=grammar)
        before = await asyncio.to_thread(floor.run)
        for _ in range(options.rounds):
            for way in ways:
                seconds = await stream_all(way.engine, options, batch, grammar=way.grammar)
                after = await asyncio.to_thread(floor.run)
                way.ratios.append((before + after) / 2 / seconds)
                way.seconds.append(seconds)
                floors.append(after)
                before = after
        tell(options, batch, ways, floors, report)
        if options.trace:
            timeline = next(way.engine.timeline for way in ways if way.overlap_steps == 1)
            save(timeline, f"{options.trace}-{batch}")
    floor.close()


def save(timeline: Timeline, name: str) -> None:
    Path(f"{name}.json").write_text(timeline.chrome_trace())
    draw(timeline, Path(f"{name}.png"))


def tell(
    options: argparse.Namespace, batch: int, ways: list[Way], floors: list[float], report: Report
) -> None:
    tokens = batch * options.output
    for way in ways:
        stats = way.engine.stats()
        report.row(
            batch=batch,
            way=way.name,
            tokens_per_s=tokens / statistics.median(way.seconds),
            of_floor=statistics.median(way.ratios),
            of_floor_min=min(way.ratios),
            of_floor_max=max(way.ratios),
            of_floor_rounds=way.ratios,
            busy=stats.overlap_ratio,
            gap_us=1e6 * stats.host_gap,
            loop_lag_us=1e6 * stats.loop_lag,
            floor_tokens_per_s=tokens / statistics.median(floors),
        )


async def bench_model(options: argparse.Namespace, path: str, report: Report) -> None:
    for batch in options.batch:
        await bench_batch(options, path, batch, report)


def make_model(layers: int, hidden: int, folder: str) -> str:
    """A random Qwen3-shaped checkpoint in bf16, with the bundled tokenizer."""
    import shutil

    import torch
    import transformers

    bundled = EngineConfig().model_path
    config = transformers.Qwen3Config(
        vocab_size=864, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 128), head_dim=64, intermediate_size=3 * hidden,
        max_position_embeddings=1024, tie_word_embeddings=True, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled / name, folder)
    return folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="tiny-chat", help="a model, or random:LAYERSxHIDDEN")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--toy", action="store_true", help="a device as fast as the host")
    parser.add_argument("--stall", action="store_true", help="what a loop that stands still costs the device")
    parser.add_argument("--prefills", action="store_true", help="with and without max_overlapped_prefill")
    parser.add_argument("--most", type=int, default=256, help="the max_overlapped_prefill of --prefills")
    parser.add_argument("--trace", help="write PREFIX-BATCH.json and .png of one overlapped step")


def run(options: argparse.Namespace, report: Report) -> None:
    """A row per batch and way, or of what ``--toy``, ``--stall`` or ``--prefills`` measures."""
    import uvloop

    with tempfile.TemporaryDirectory() as folder:
        path = options.model
        if path.startswith("random:"):
            layers, hidden = map(int, path.removeprefix("random:").split("x"))
            path = make_model(layers, hidden, folder)
        if options.prefills:
            work = bench_prefills(options, path, report)
        elif options.toy:
            work = bench_toy(options, report)
        elif options.stall:
            work = bench_stall(options, report)
        else:
            work = bench_model(options, path, report)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(work)
