"""Offline: the workload of nano-vllm and mini-sglang, all requests at once, through the engine."""

from __future__ import annotations

from bench.gpu.engines import generate, started
from bench.gpu.plan import Plan
from bench.gpu.workload import workload
from bench.report import Report

__all__ = ["run"]


async def run(plan: Plan, report: Report) -> None:
    """A row per temperature: 0.6 as published, and greedy."""
    load = workload(plan.size)
    report.fact("prompt_tokens", sum(load.prompt_lengths))
    report.fact("output_tokens", sum(load.outputs))
    async with started(plan) as engine:
        report.fact("engine", engine.info.description)
        for temperature in (0.6, 0.0):
            with report.case(f"temperature {temperature}"):
                engine.flush_cache()
                steps = engine.stats().steps
                seconds = await generate(engine, load, temperature)
                report.row(
                    model=plan.shape, temperature=temperature, requests=len(load.outputs), seconds=seconds,
                    tokens_per_s=sum(load.outputs) / seconds, steps=engine.stats().steps - steps,
                )  # fmt: skip
