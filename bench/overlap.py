"""``python -m bench overlap``: how much of the time the device works, by window and launch mode.

The floor is the same forwards, sampling and reading of tokens in a bare loop: the steps are planned and
packed beforehand by the same scheduler, and nothing else runs. Every way to run the engine takes the same
load through real streams; floor and ways take turns. ``grammar`` has one on every row.

With ``--toy``, a step takes the device as long as it takes the host; a window of one then hides the one
behind the other, and the best that can be is twice the speed. With ``--stall`` the event loop stands still
for 50 ms now and then. ``--prefills`` compares TTFT with and without ``max_overlapped_prefill``.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aioinfer.cache.pages import PageAllocator
from aioinfer.cache.slots import SlotPool
from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.execution.device import DeviceInfo, Flight
from aioinfer.execution.launcher import InlineLauncher, ThreadLauncher
from aioinfer.execution.packing import PackedStep
from aioinfer.execution.torch_device import TorchDevice
from aioinfer.observe.timeline import DeviceLane, Timeline
from aioinfer.params import Grammar, SamplingParams
from aioinfer.scheduling.admission import Limits
from aioinfer.scheduling.memory import Memory
from aioinfer.scheduling.request import Request
from aioinfer.scheduling.scheduler import Scheduler
from aioinfer.scheduling.step import Outcome, Step
from bench.drawing import draw
from bench.fixed_step import bench_stall, bench_toy
from bench.prefill_overlap import bench_prefills
from bench.report import environment, write_line

#: window, launch mode, a grammar on every row
WAYS = [
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
    options: argparse.Namespace, batch: int, window: int = 1, mode: str = "thread"
) -> EngineConfig:
    return EngineConfig(
        model=options.path,
        threads=options.threads,
        overlap_steps=window,  # type: ignore[arg-type]
        launch_mode=mode,  # type: ignore[arg-type]
        max_running_requests=batch,
        prefix_cache=False,
        page_size=16,
    )


def prompts(options: argparse.Namespace, batch: int) -> list[list[int]]:
    return [[100 + (7 * number + at) % 700 for at in range(options.prompt)] for number in range(batch)]


class SharedLane(DeviceLane):
    """Tells the lane of whoever has the device at the time."""

    __slots__ = ("current",)

    def __init__(self) -> None:
        super().__init__()
        self.current = DeviceLane()

    def step(self, step: int, start: float, forward: float, mask: float, end: float) -> None:
        self.current.step(step, start, forward, mask, end)


class SharedDevice:
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

    def prepare(self, step: Step) -> PackedStep:
        return self._device.prepare(step)

    def launch(self, prepared: PackedStep) -> Flight:
        self._lane.current = self.lane
        return self._device.launch(prepared)

    def check(self) -> None:
        self._device.check()

    def close(self) -> None:
        """Others have it still."""


class Floor:
    """The bare loop: the steps of a load, planned and packed beforehand."""

    def __init__(self, options: argparse.Namespace, batch: int) -> None:
        config = make_config(options, batch)
        self._device = TorchDevice(config)
        self._lane = self._device.lane = SharedLane()
        self._info = info = self._device.open()
        memory = Memory(PageAllocator(info.num_pages, 16), SlotPool(config.num_slots), prefix_cache=False)
        limits = Limits(
            max_running_requests=batch, max_step_tokens=config.max_step_tokens, chunk_size=config.chunk_size
        )
        scheduler = Scheduler(memory, limits)
        params = SamplingParams(temperature=0, max_tokens=options.output, ignore_eos=True)
        for number, ids in enumerate(prompts(options, batch), 1):
            length = len(ids) + options.output
            scheduler.submit(Request(number, ids, params, seed=0, stop_ids=frozenset(), max_length=length))
        self._packed = []
        while (step := scheduler.plan()) is not None:
            self._packed.append(self._device.prepare(step))
            scheduler.resolve(step, Outcome([5] * step.num_rows))

    def shared(self) -> SharedDevice:
        """Its device, for an engine."""
        return SharedDevice(self._device, self._info, self._lane)

    def run(self) -> float:
        """Seconds."""
        self._lane.current = DeviceLane()
        start = time.perf_counter()
        for packed in self._packed:
            self._device.launch(packed).wait()
        return time.perf_counter() - start

    def close(self) -> None:
        self._device.close()


async def run(engine: Engine, options: argparse.Namespace, batch: int, *, grammar: bool) -> float:
    """Seconds from the first request to the last token, with a reader for every stream."""
    params = SamplingParams(
        temperature=0, max_tokens=options.output, ignore_eos=True, grammar=GRAMMAR if grammar else None
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
    """One way to run the load, and what came of it, round by round."""

    window: int
    mode: str
    grammar: bool
    engine: Engine
    #: of the floor's speed
    ratios: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"window {self.window}, {self.mode}" + (", grammar" if self.grammar else "")


async def bench_batch(options: argparse.Namespace, batch: int) -> list[dict[str, Any]]:
    """Floor and ways take turns, so that the machine's moods touch all of them."""
    floor, floors = Floor(options, batch), []
    async with AsyncExitStack() as stack:
        ways = []
        for window, mode, grammar in WAYS:
            kind = ThreadLauncher if mode == "thread" else InlineLauncher
            config = make_config(options, batch, window, mode)
            engine = Engine(config, launcher=lambda _, kind=kind: kind(floor.shared()))
            ways.append(Way(window, mode, grammar, await stack.enter_async_context(engine)))
            await run(engine, options, batch, grammar=grammar)
        before = await asyncio.to_thread(floor.run)
        for _ in range(options.rounds):
            for way in ways:
                seconds = await run(way.engine, options, batch, grammar=way.grammar)
                after = await asyncio.to_thread(floor.run)
                way.ratios.append((before + after) / 2 / seconds)
                way.seconds.append(seconds)
                floors.append(after)
                before = after
        lines = report(options, batch, ways, floors)
        if options.trace:
            timeline = next(way.engine.timeline for way in ways if way.window == 1)
            save(timeline, f"{options.trace}-{batch}")
    floor.close()
    return lines


def save(timeline: Timeline, name: str) -> None:
    Path(f"{name}.json").write_text(timeline.chrome_trace())
    draw(timeline, Path(f"{name}.png"))


def report(
    options: argparse.Namespace, batch: int, ways: list[Way], floors: list[float]
) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    tokens = batch * options.output
    speed = tokens / statistics.median(floors)
    print(f"{batch:6d}  {'floor':26s}{speed:10.0f}")
    for way in ways:
        stats = way.engine.stats()
        line = {
            "batch": batch,
            "way": way.name,
            "tokens_per_s": tokens / statistics.median(way.seconds),
            "of_floor": statistics.median(way.ratios),
            "of_floor_rounds": way.ratios,
            "busy": stats.overlap_ratio,
            "gap_us": 1e6 * stats.host_gap,
            "loop_lag_us": 1e6 * stats.loop_lag,
            "floor_tokens_per_s": speed,
        }
        lines.append(line)
        low, high = min(way.ratios), max(way.ratios)
        print(
            f"{'':6s}  {way.name:26s}{line['tokens_per_s']:10.0f}{100 * line['of_floor']:9.1f}%"
            f"{f'{100 * low:.0f}-{100 * high:.0f}':>10s}"
            f"{100 * stats.overlap_ratio:7.1f}%{line['gap_us']:9.0f}{line['loop_lag_us']:13.0f}"
        )
    return lines


async def bench_model(options: argparse.Namespace) -> list[dict[str, Any]]:
    print(
        f"{'batch':>6s}  {'way':26s}{'tokens/s':>10s}{'of floor':>10s}{'range':>10s}"
        f"{'busy':>8s}{'gap us':>9s}{'loop lag us':>13s}"
    )
    return [line for batch in options.batch for line in await bench_batch(options, batch)]


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


def _run(work: Any) -> Any:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    parser.add_argument("--trace", help="write PREFIX-BATCH.json and .png of window 1")
    parser.add_argument("--json", type=Path, help="append the JSON line to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options.path = options.model
        if options.model.startswith("random:"):
            layers, hidden = map(int, options.model.removeprefix("random:").split("x"))
            options.path = make_model(layers, hidden, folder)
        if options.prefills:
            bench: Any = bench_prefills
        else:
            bench = bench_toy if options.toy else bench_stall if options.stall else bench_model
        lines = _run(bench(options))
    settings = {key: value for key, value in vars(options).items() if key not in ("json", "path", "trace")}
    write_line(
        {"bench": "overlap", "cases": lines, "options": settings, "environment": environment()}, options.json
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
