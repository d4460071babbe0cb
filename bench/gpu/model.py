"""Model: decode through the engine, by batch, as a share of the roofline that this device allows, and of the
one by the bandwidth that its driver states.

With ``--set quantization=fp8`` and ``--set kv_dtype=fp8`` the roofline is that of their bytes. Operations are
bounded by the rate of bfloat16. ``busy`` is the share of the time, prefill included, in which the device
works by the timeline.
"""

from __future__ import annotations

from aioinfer.execution.cuda_device import pick_device
from bench.gpu.engines import busy_share, decoding_rate, started
from bench.gpu.measure import measure_peaks, specified_bandwidth
from bench.gpu.plan import Plan
from bench.gpu.roofline import Peaks, decode_step
from bench.gpu.shapes import shape_of
from bench.gpu.workload import prompts_of
from bench.report import Report

__all__ = ["run"]


async def run(plan: Plan, report: Report) -> None:
    """A row per batch: tokens per second of the steps in which the whole batch decodes."""
    shape, size = shape_of(plan.shape, plan.settings), plan.size
    device = pick_device(plan.device)
    peaks = measure_peaks(plan, device, report)
    stated = specified_bandwidth(device) or peaks.bandwidth
    async with started(plan, prefix_cache=False) as engine:
        report.fact("engine", engine.info.description)
        for batch in size.batches:
            with report.case(f"batch {batch}"):
                prompts = prompts_of(batch, size.prompt, shape.vocab, seed=batch)
                before = engine.timeline.overlap()
                found = await decoding_rate(engine, prompts, size.output)
                context = size.prompt + size.output // 2
                ideal = decode_step(shape, batch * context, batch, peaks)
                best = decode_step(shape, batch * context, batch, Peaks(stated, peaks.flops))
                report.row(
                    model=plan.shape, batch=batch, context=context, tokens_per_s=found.tokens_per_s,
                    step_ms=1e3 * found.step, ideal_ms=1e3 * ideal,
                    of_roofline=ideal / found.step, of_specified=best / found.step,
                    busy=busy_share(before, engine.timeline.overlap()),
                    prefill_tokens_per_s=batch * size.prompt / found.prefill,
                )  # fmt: skip
