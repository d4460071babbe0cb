"""Measuring on a device: seconds of a call, copy bandwidth, matmul rate. Imports torch."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from bench.gpu.plan import Plan
from bench.gpu.report import PartReport
from bench.gpu.roofline import Peaks

__all__ = ["measure_peaks", "seconds_per_call", "specified_bandwidth", "synchronize"]

#: seconds of device work in one timed block, and how many blocks the median is of
_BLOCK = 0.01
_BLOCKS = 5


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_per_call(calls: Sequence[Callable[[], object]], device: torch.device) -> tuple[float, str]:
    """Median seconds of one of the calls, and how it was found out.

    The calls run one after the other: different memory in each keeps the caches out of it. On CUDA they are
    captured in a graph, so that the host's part in launching does not count ("graph"); where that fails it
    does ("eager").
    """
    for call in calls:
        call()
    synchronize(device)
    if device.type == "cpu":
        start = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - start) / len(calls), "cpu"
    graph = _capture(calls)

    def run() -> None:
        if graph is not None:
            graph.replay()
        else:
            for call in calls:
                call()

    once = _elapsed(run, 1)
    times = max(1, min(100, int(_BLOCK / max(once, 1e-6))))
    seconds = statistics.median(_elapsed(run, times) / times for _ in range(_BLOCKS))
    return seconds / len(calls), "eager" if graph is None else "graph"


def _capture(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph | None:
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        graph.replay()
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"no CUDA graph of this: {error}")
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize()
        return None
    return graph


def _elapsed(run: Callable[[], None], times: int) -> float:
    """Seconds on the device from the first to the last kernel."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def measure_peaks(plan: Plan, device: torch.device, report: PartReport) -> Peaks:
    """Bytes per second that a copy reads and writes, and FLOP per second of a bf16 product of random data;
    both are told as facts, and the bandwidth that the driver states."""
    peaks = Peaks(_copy_bandwidth(plan.size.copy_bytes, device), _matmul_rate(plan.size.matmul, device))
    if device.type == "cuda":
        # An engine that starts after this takes what is free.
        torch.cuda.empty_cache()
    report.fact("copy_gb_per_s", peaks.bandwidth / 1e9)
    if (stated := specified_bandwidth(device)) is not None:
        report.fact("specified_gb_per_s", stated / 1e9)
    report.fact("matmul_tflop_per_s", peaks.flops / 1e12)
    return peaks


def specified_bandwidth(device: torch.device) -> float | None:
    """Bytes per second by a device's memory clock and the width of its bus, of which each line moves two bits
    per clock; None where the driver does not say."""
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    bandwidth = 2 * 1e3 * found.memory_clock_rate * found.memory_bus_width / 8
    return bandwidth or None


def _copy_bandwidth(size: int, device: torch.device) -> float:
    """By the faster of a copy, which is a node of its own in a graph, and a kernel."""
    source = torch.empty(size // 2, dtype=torch.bfloat16, device=device).fill_(1)
    target = torch.empty_like(source)
    ways: list[Callable[[], object]] = [
        lambda: target.copy_(source),
        lambda: torch.neg(source, out=target),
    ]
    return max(2 * size / seconds_per_call([way], device)[0] for way in ways)


def _matmul_rate(side: int, device: torch.device) -> float:
    left, right, out = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(3))
    seconds, _ = seconds_per_call([lambda: torch.mm(left, right, out=out)], device)
    return 2 * side**3 / seconds
