"""The emulated device keeps order, time and rules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.emulated

ROOT = Path(__file__).parents[2]


def emulated(program: str, *options: str) -> str:
    """What a program prints and complains of on the device."""
    command = [sys.executable, "-m", "tests.cuda_emulation", *options, "--", sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_memory_is_counted() -> None:
    program = """
import torch
free, total = torch.cuda.mem_get_info()
print(total >> 30, torch.cuda.get_device_capability())
held = torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
print((free - torch.cuda.mem_get_info()[0]) >> 30)
try:
    torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    print("full")
"""
    assert emulated(program, "--gib", "5").split("\n")[:3] == ["5 (9, 0)", "3", "full"]


def test_waiting_in_a_capture_is_refused() -> None:
    program = """
import torch
x, graph = torch.ones(4, device="cuda"), torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        (x + 1).sum().item()
except RuntimeError:
    print("refused")
"""
    printed = emulated(program)
    assert "refused" in printed
    assert "a captured stream is waited for" in printed


def test_time_passes_on_the_device_and_not_on_the_host() -> None:
    program = """
import time, torch
x = torch.ones(4, device="cuda")
begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
torch.cuda.synchronize()
start = time.perf_counter()
begin.record()
for _ in range(20):
    x += 1
end.record()
launched = time.perf_counter() - start
print(end.query(), launched < 0.2)
end.synchronize()
print(round(begin.elapsed_time(end) / 1e3, 1), time.perf_counter() - start >= 0.4)
"""
    assert emulated(program, "--kernel-us", "20000").split() == ["False", "True", "0.4", "True"]


GRAPH = """
import tests.cuda_emulation.compute
import torch
stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
with torch.cuda.stream(stream):
    x = torch.zeros(4, device="cuda")
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        y = x * 2 + 1
    x.fill_(3.0)
    graph.replay()
    host = torch.zeros(4, pin_memory=True)
    host.copy_(y, non_blocking=True)
    event = torch.cuda.Event(blocking=True)
    event.record()
    print(host.tolist())
    event.synchronize()
    print(host.tolist())
    %s
"""


@pytest.mark.parametrize("order", ["early", "late"])
def test_a_replay_computes_and_its_results_come_when_they_are_waited_for(order: str) -> None:
    printed = emulated(GRAPH % "", "--compute", "--order", order)
    assert printed.split("\n")[:2] == [str([0.0] * 4), str([7.0] * 4)]


@pytest.mark.parametrize(("order", "seen"), [("early", 1.0), ("late", 2.0)])
def test_pinned_memory_that_is_overwritten_too_early_is_noticed_late(order: str, seen: float) -> None:
    program = """
    host.fill_(1.0)
    x.copy_(host, non_blocking=True)
    host.fill_(2.0)
    print(x.tolist())
    """
    printed = emulated(GRAPH % program.strip(), "--compute", "--order", order)
    assert printed.split("\n")[2] == str([seen] * 4)
