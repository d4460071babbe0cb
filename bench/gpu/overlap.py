"""Overlap: how well scheduling hides behind the device, by overlapped steps and launch mode.

How long the device computed is taken from a second run under torch's profiler, as the time in which any
kernel or copy ran; its share and the gap refer to the first, undisturbed run. On a CPU, and where the
profiler sees nothing, the engine's own timeline stands in for it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from aioinfer.engine import Engine
from bench.gpu.engines import generate, run_async, started
from bench.gpu.plan import Plan
from bench.gpu.report import PartReport
from bench.gpu.shapes import SHAPES
from bench.gpu.workload import Workload, prompts_of

__all__ = ["covered", "device_seconds", "run", "share"]

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def run(plan: Plan, report: PartReport) -> None:
    """A row per overlapped steps, launch mode and batch."""
    for steps, mode in plan.size.ways:
        report.guarded(
            f"overlap {steps}, {mode}", lambda *way: run_async(_way(plan, report, *way)), steps, mode
        )


async def _way(plan: Plan, report: PartReport, overlap_steps: int, mode: str) -> None:
    size, vocab = plan.size, SHAPES[plan.shape].vocab
    async with started(
        plan, plan.shape, overlap_steps=overlap_steps, launch_mode=mode, prefix_cache=False
    ) as engine:
        for batch, output in size.overlap_loads:
            loads = [
                Workload(prompts_of(batch, size.overlap_prompt, vocab, seed), [output] * batch)
                for seed in (1, 2)
            ]
            row = await _load(plan, report, engine, loads[0], loads[1])
            report.row(overlap_steps=overlap_steps, mode=mode, batch=batch, **row)


async def _load(
    plan: Plan, report: PartReport, engine: Engine, load: Workload, profiled: Workload
) -> dict[str, Any]:
    before, overlap = engine.stats().steps, engine.timeline.overlap()
    seconds, _ = await generate(engine, load, 0.0)
    steps, after = engine.stats().steps - before, engine.timeline.overlap()
    own = (after.busy - overlap.busy, after.gap - overlap.gap, after.steps - overlap.steps)
    kernels = 0.0
    try:
        kernels = await _profiled(plan, engine, profiled)
    except Exception:
        # What was measured without it still counts.
        report.failed(f"profiling {len(load.outputs)} requests")
    busy, gap = share(own[0], own[1]), own[1] / max(1, own[2])
    return {
        "steps": steps,
        "step_ms": 1e3 * seconds / steps,
        "tokens_per_s": sum(load.outputs) / seconds,
        "busy": kernels / seconds if kernels else busy,
        "gap_us": 1e6 * ((seconds - kernels) / steps if kernels else gap),
        "seen_by": "profiler" if kernels else "timeline",
        "timeline_busy": busy,
        "timeline_gap_us": 1e6 * gap,
    }


def share(busy: float, gap: float) -> float:
    """Of seconds that are ``busy`` or a ``gap``; 0 without any."""
    return busy / (busy + gap) if busy + gap else 0.0


async def _profiled(plan: Plan, engine: Engine, load: Workload) -> float:
    """Seconds in which kernels or copies of a load ran, 0 if none were seen, as on a CPU."""
    from torch.profiler import ProfilerActivity, profile

    activity = ProfilerActivity.CPU if plan.device == "cpu" else ProfilerActivity.CUDA
    with tempfile.TemporaryDirectory() as folder:
        with profile(activities=[activity]) as profiler:
            await generate(engine, load, 0.0)
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return device_seconds(json.loads(file.read_text()))


def device_seconds(trace: dict[str, Any]) -> float:
    """Seconds in which anything ran on the device, from a trace of torch's profiler."""
    return covered(
        (event["ts"], event["ts"] + event["dur"])
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in _ON_DEVICE
    ) / 1e6  # fmt: skip


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """How much of the line the spans (from, to) cover together."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
