"""Offline: the workload of nano-vllm and mini-sglang, all requests at once, through the engine."""

from __future__ import annotations

from bench.gpu.engines import generate, run_async, started
from bench.gpu.measure import measure_peaks
from bench.gpu.plan import Plan
from bench.gpu.report import PartReport
from bench.gpu.roofline import offline
from bench.gpu.shapes import shape_of
from bench.gpu.workload import Workload, offline_workload

__all__ = ["run", "workload"]


def workload(plan: Plan) -> Workload:
    size = plan.size
    return offline_workload(size.requests, *size.lengths, size.largest_id)


def run(plan: Plan, report: PartReport) -> None:
    """A row per temperature: 0.6 as published, and greedy."""
    run_async(_run(plan, report))


async def _run(plan: Plan, report: PartReport) -> None:
    from aioinfer.execution.cuda_device import pick_device

    load = workload(plan)
    peaks = measure_peaks(plan, pick_device(plan.device), report)
    prefill, decode = offline(shape_of(plan.shape, plan.settings), load.prompt_lengths, load.outputs, peaks)
    report.fact("prompt_tokens", sum(load.prompt_lengths))
    report.fact("output_tokens", sum(load.outputs))
    async with started(plan, plan.shape) as engine:
        report.fact("engine", engine.info.description)
        for temperature in (0.6, 0.0):

            async def measure(temperature: float = temperature) -> None:
                engine.flush_cache()
                steps = engine.stats().steps
                seconds, _ = await generate(engine, load, temperature)
                report.row(
                    model=plan.shape, temperature=temperature, requests=len(load.outputs), seconds=seconds,
                    tokens_per_s=sum(load.outputs) / seconds, steps=engine.stats().steps - steps,
                    ideal_s=prefill + decode, of_roofline=(prefill + decode) / seconds,
                )  # fmt: skip

            await report.guarded_async(f"temperature {temperature}", measure)
