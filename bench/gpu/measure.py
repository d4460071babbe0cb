"""Copy bandwidth and matmul rate of a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from bench.gpu.plan import Plan
from bench.gpu.roofline import Peaks
from bench.report import Report

__all__ = ["measure_peaks", "specified_bandwidth"]

#: seconds of device work in one timed block, and how many blocks the median is of
_BLOCK = 0.01
_BLOCKS = 5


def _seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Median seconds of a call, on CUDA from its first to its last kernel."""
    call()
    if device.type == "cpu":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    times = max(1, min(100, int(_BLOCK / max(_elapsed(call, 1), 1e-6))))
    return statistics.median(_elapsed(call, times) / times for _ in range(_BLOCKS))


def _elapsed(call: Callable[[], object], times: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def measure_peaks(plan: Plan, device: torch.device, report: Report) -> Peaks:
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
    """Bytes per second by the faster of a copy and a kernel."""
    source = torch.empty(size // 2, dtype=torch.bfloat16, device=device).fill_(1)
    target = torch.empty_like(source)
    ways: list[Callable[[], object]] = [
        lambda: target.copy_(source),
        lambda: torch.neg(source, out=target),
    ]
    return max(2 * size / _seconds_of(way, device) for way in ways)


def _matmul_rate(side: int, device: torch.device) -> float:
    left, right, out = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(3))
    return 2 * side**3 / _seconds_of(lambda: torch.mm(left, right, out=out), device)
