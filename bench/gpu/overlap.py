"""Overlap: how well scheduling hides behind the device, by overlapped steps and launch mode."""

from __future__ import annotations

from bench.gpu.engines import busy_share, generate, started
from bench.gpu.plan import Plan
from bench.gpu.shapes import SHAPES
from bench.gpu.workload import Workload, prompts_of
from bench.report import Report

__all__ = ["run"]


async def run(plan: Plan, report: Report) -> None:
    """A row per overlapped steps, launch mode and batch; ``busy`` and ``gap_us`` are the timeline's."""
    size, vocab = plan.size, SHAPES[plan.shape].vocab
    for steps, mode in size.ways:
        with report.case(f"overlap {steps}, {mode}"):
            async with started(plan, overlap_steps=steps, launch_mode=mode, prefix_cache=False) as engine:
                for batch, output in size.overlap_loads:
                    load = Workload(prompts_of(batch, size.overlap_prompt, vocab, seed=1), [output] * batch)
                    before = engine.timeline.overlap()
                    seconds = await generate(engine, load, 0.0)
                    after = engine.timeline.overlap()
                    done = max(1, after.steps - before.steps)
                    report.row(
                        overlap_steps=steps, mode=mode, batch=batch, step_ms=1e3 * seconds / done,
                        tokens_per_s=sum(load.outputs) / seconds, busy=busy_share(before, after),
                        gap_us=1e6 * (after.gap - before.gap) / done,
                    )  # fmt: skip
