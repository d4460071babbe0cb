"""Models: decode through the engine, by batch, as a share of the roofline that this device allows, and of the
one by the bandwidth that its driver states.

With ``--set quantization=fp8`` and ``--set kv_dtype=fp8`` the roofline is that of their bytes. Operations are
bounded by the rate of bfloat16, also with ``fp8-dynamic``, whose products can be faster. ``busy`` is the part
of the time, prefill included, in which the timeline has the device at work.
"""

from __future__ import annotations

from bench.gpu.engines import decoding_rate, run_async, started
from bench.gpu.measure import measure_peaks, specified_bandwidth
from bench.gpu.overlap import share
from bench.gpu.plan import Plan
from bench.gpu.report import PartReport
from bench.gpu.roofline import Peaks, decode_step
from bench.gpu.shapes import shape_of
from bench.gpu.workload import prompts_of

__all__ = ["run"]


def run(plan: Plan, report: PartReport, shape: str) -> None:
    """A row per batch: tokens per second of the steps in which the whole batch decodes."""
    run_async(_run(plan, report, plan.shape if plan.rehearsal else shape))


async def _run(plan: Plan, report: PartReport, name: str) -> None:
    from aioinfer.execution.cuda_device import pick_device

    shape, size = shape_of(name, plan.settings), plan.size
    device = pick_device(plan.device)
    peaks = measure_peaks(plan, device, report)
    stated = specified_bandwidth(device) or peaks.bandwidth
    async with started(plan, name, prefix_cache=False) as engine:
        report.fact("engine", engine.info.description)
        for batch in size.batches:

            async def measure(batch: int = batch) -> None:
                prompts = prompts_of(batch, size.prompt, shape.vocab, seed=batch)
                before = engine.timeline.overlap()
                found = await decoding_rate(engine, prompts, size.output)
                after = engine.timeline.overlap()
                context = size.prompt + size.output // 2
                ideal = decode_step(shape, batch * context, batch, peaks)
                best = decode_step(shape, batch * context, batch, Peaks(stated, peaks.flops))
                report.row(
                    model=name, batch=batch, context=context, tokens_per_s=found.tokens_per_s,
                    step_ms=1e3 * found.step, ideal_ms=1e3 * ideal,
                    of_roofline=ideal / found.step, of_specified=best / found.step,
                    busy=share(after.busy - before.busy, after.gap - before.gap),
                    prefill_tokens_per_s=batch * size.prompt / found.prefill,
                )  # fmt: skip

            await report.guarded_async(f"batch {batch}", measure)
