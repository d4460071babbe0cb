"""``python -m bench overlap``: how much of the time the device works, by window and launch mode.

The floor is the same forwards, sampling and reading of tokens in a bare loop: the steps are planned and
packed beforehand by the same scheduler, and nothing else runs. Every way to run the engine takes the same
load through real streams; floor and ways take turns. ``grammar`` has one on every row.

With ``--toy``, the device does nothing for as long as the host needs for a step; a window of one then hides
the one behind the other, and the best that can be is twice the speed.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from aioinfer.cache.pages import PageAllocator
from aioinfer.cache.slots import SlotPool
from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.execution.device import DeviceInfo, Landed, StepResult
from aioinfer.execution.launcher import InlineLauncher, ThreadLauncher
from aioinfer.execution.torch_device import TorchDevice
from aioinfer.observe.timeline import DeviceLane, Timeline, now
from aioinfer.params import Grammar, SamplingParams
from aioinfer.request import Request
from aioinfer.scheduling.admission import Limits
from aioinfer.scheduling.memory import Memory
from aioinfer.scheduling.scheduler import Scheduler
from aioinfer.scheduling.step import Step
from bench.report import environment, write_line

WAYS = [(0, "thread"), (1, "thread"), (2, "thread"), (0, "inline"), (1, "inline")]
GRAMMAR = Grammar("regex", "[a-z ]{4000}")


def make_config(
    options: argparse.Namespace, batch: int, window: int = 1, mode: str = "thread"
) -> EngineConfig:
    return EngineConfig(
        model=options.path,
        threads=options.threads,
        window=window,  # type: ignore[arg-type]
        launch_mode=mode,  # type: ignore[arg-type]
        max_running_requests=batch,
        prefix_cache=False,
        page_size=16,
    )


def prompts(options: argparse.Namespace, batch: int) -> list[list[int]]:
    return [[100 + (7 * number + at) % 700 for at in range(options.prompt)] for number in range(batch)]


def floor(options: argparse.Namespace, batch: int) -> float:
    """Seconds of the bare loop."""
    config = make_config(options, batch)
    device = TorchDevice(config)
    info = device.open()
    memory = Memory(PageAllocator(info.num_pages, 16), SlotPool(config.num_slots), prefix_cache=False)
    limits = Limits(
        max_running_requests=batch, max_step_tokens=config.max_step_tokens, chunk_size=config.chunk_size
    )
    scheduler = Scheduler(memory, limits)
    params = SamplingParams(temperature=0, max_tokens=options.output, ignore_eos=True)
    for number, ids in enumerate(prompts(options, batch), 1):
        length = len(ids) + options.output
        scheduler.submit(Request(number, ids, params, seed=0, stop_ids=frozenset(), max_length=length))
    packed = []
    while (step := scheduler.plan()) is not None:
        packed.append(device.prepare(step))
        scheduler.resolve(step, [5] * step.num_rows)
    start = time.perf_counter()
    for each in packed:
        device.launch(each).wait()
    seconds = time.perf_counter() - start
    device.close()
    return seconds


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


async def measure(
    options: argparse.Namespace, batch: int, window: int, mode: str, grammar: bool
) -> tuple[float, dict[str, float], Timeline]:
    async with Engine(make_config(options, batch, window, mode)) as engine:
        if grammar:
            warm = SamplingParams(max_tokens=2, grammar=GRAMMAR)
            await engine.generate([100] * 4, warm)
        seconds = await run(engine, options, batch, grammar=grammar)
        stats = engine.stats()
        figures = {
            "busy": stats.overlap_ratio,
            "gap_us": 1e6 * stats.host_gap,
            "loop_lag_us": 1e6 * stats.loop_lag,
        }
        return seconds, figures, engine.timeline


class SleepingDevice:
    """Takes a fixed time for every step and lets other threads run meanwhile. Its tokens mean nothing."""

    synchronous = True

    def __init__(self, seconds: float) -> None:
        self.lane = DeviceLane()
        self.seconds = seconds

    def open(self, progress: Any = None) -> DeviceInfo:
        return DeviceInfo(1000, 4096, 100_000, frozenset(), "sleeps")

    def prepare(self, step: Step) -> Step:
        return step

    def launch(self, step: Step) -> Landed:
        start = now()
        if self.seconds:
            time.sleep(self.seconds)
        self.lane.step(step.id, start, start, start, now())
        return Landed(StepResult([5] * step.num_rows))

    def check(self) -> None:
        """Never lost."""

    def close(self) -> None:
        """Nothing to give back."""


async def toy(options: argparse.Namespace, batch: int, window: int, seconds: float) -> float:
    """Seconds per step."""
    config = EngineConfig(model="toy", window=window, max_running_requests=batch, max_step_tokens=8 * batch)  # type: ignore[arg-type]
    device = SleepingDevice(seconds)
    kind = ThreadLauncher if seconds else InlineLauncher
    async with Engine(config, launcher=lambda _: kind(device), tokenizer=lambda _: None) as engine:
        elapsed = await run(engine, options, batch, grammar=False)
        return elapsed / engine.stats().steps


def bench_toy(options: argparse.Namespace) -> list[dict[str, float]]:
    lines = []
    print(
        f"{'batch':>6s}{'host us':>9s}{'window 0':>10s}{'window 1':>10s}{'window 2':>10s}"
        f"{'1 over 0':>10s}{'2 over 0':>10s}"
    )
    for batch in options.batch:
        host = statistics.median(_run(toy(options, batch, 0, 0.0)) for _ in range(options.rounds))
        times = {
            window: statistics.median(_run(toy(options, batch, window, host)) for _ in range(options.rounds))
            for window in (0, 1, 2)
        }
        line = {
            "batch": batch,
            "host_us": 1e6 * host,
            **{f"window_{window}_us": 1e6 * seconds for window, seconds in times.items()},
            "gain_1": times[0] / times[1],
            "gain_2": times[0] / times[2],
        }
        lines.append(line)
        print(
            f"{batch:6d}{1e6 * host:9.0f}"
            + "".join(f"{1e6 * times[window]:10.0f}" for window in (0, 1, 2))
            + f"{line['gain_1']:9.2f}x{line['gain_2']:9.2f}x"
        )
    return lines


def bench_model(options: argparse.Namespace) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    ways = [(window, mode, False) for window, mode in WAYS] + [(1, "thread", True), (2, "thread", True)]
    print(
        f"{'batch':>6s}  {'way':22s}{'tokens/s':>10s}{'of floor':>10s}{'busy':>8s}{'gap us':>9s}"
        f"{'loop lag us':>13s}"
    )
    for batch in options.batch:
        ratios: dict[Any, list[float]] = {way: [] for way in ways}
        speeds: dict[Any, list[float]] = {way: [] for way in [None, *ways]}
        seen: dict[Any, dict[str, float]] = {}
        tokens = batch * options.output
        floor(options, batch)
        for _ in range(options.rounds):
            before = floor(options, batch)
            for way in ways:
                window, mode, grammar = way
                seconds, seen[way], timeline = _run(measure(options, batch, window, mode, grammar))
                after = floor(options, batch)
                # Floors on both sides: the machine's moods touch all three.
                ratios[way].append((before + after) / 2 / seconds)
                speeds[way].append(tokens / seconds)
                speeds[None].append(tokens / after)
                before = after
                if options.trace and way == (1, "thread", False):
                    Path(f"{options.trace}-{batch}.json").write_text(timeline.chrome_trace())
                    draw(timeline, Path(f"{options.trace}-{batch}.png"))
        print(f"{batch:6d}  {'floor':22s}{statistics.median(speeds[None]):10.0f}")
        for way in ways:
            window, mode, grammar = way
            name = f"window {window}, {mode}" + (", grammar" if grammar else "")
            ratio = statistics.median(ratios[way])
            speed = statistics.median(speeds[way])
            figures = seen[way]
            print(
                f"{'':6s}  {name:22s}{speed:10.0f}{100 * ratio:9.1f}%{100 * figures['busy']:7.1f}%"
                f"{figures['gap_us']:9.0f}{figures['loop_lag_us']:13.0f}"
            )
            lines.append(
                {
                    "batch": batch,
                    "way": name,
                    "tokens_per_s": speed,
                    "of_floor": ratio,
                    **figures,
                    "floor_tokens_per_s": statistics.median(speeds[None]),
                }
            )
    return lines


def draw(timeline: Timeline, path: Path, milliseconds: float = 30.0) -> None:
    """The last steps of a timeline as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = {"plan": "#4c78a8", "pack": "#72b7b2", "resolve": "#f58518", "deliver": "#eeca3b",
               "launch": "#9d755d", "forward": "#54a24b", "mask": "#e45756", "sample": "#b279a2"}  # fmt: skip
    end = timeline.device.events[-1][3]
    start = end - milliseconds / 1e3
    figure, axes = pyplot.subplots(figsize=(14, 2.6))
    lanes = [timeline.device, timeline.launch, timeline.loop]
    for height, lane in enumerate(lanes):
        for what, _, begin, stop in lane.events:
            if stop > start:
                axes.barh(
                    height, 1e3 * (stop - begin), left=1e3 * (begin - start), color=colours[what], height=0.8
                )
    axes.set_yticks(range(3), [lane.name for lane in lanes])
    axes.set_xlim(0, milliseconds)
    axes.set_xlabel("milliseconds")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    axes.legend(handles, list(colours), ncol=8, loc="upper center", bbox_to_anchor=(0.5, 1.25), frameon=False)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


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
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--toy", action="store_true", help="a device that sleeps as long as the host works")
    parser.add_argument("--trace", help="write PREFIX-BATCH.json and .png of window 1")
    parser.add_argument("--json", type=Path, help="append the JSON line to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options.path = options.model
        if options.model.startswith("random:"):
            layers, hidden = map(int, options.model.removeprefix("random:").split("x"))
            options.path = make_model(layers, hidden, folder)
        lines = bench_toy(options) if options.toy else bench_model(options)
    settings = {key: value for key, value in vars(options).items() if key not in ("json", "path", "trace")}
    write_line(
        {"bench": "overlap", "cases": lines, "options": settings, "environment": environment()}, options.json
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
