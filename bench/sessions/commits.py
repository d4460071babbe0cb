"""``commit``: what it costs to make the pages of running requests nodes of the tree as they fill."""

from __future__ import annotations

import argparse
import time

from bench.report import Report
from bench.scheduler import PAGE_SIZE, make_scheduler, measure, turn

__all__ = ["commit"]

_RUNNING = (1, 64, 256)


def commit(options: argparse.Namespace, report: Report) -> None:
    """A row per number of running requests: microseconds of one commit of one page, and spread over the
    tokens of that page, beside those of planning and resolving a row."""
    steps = 2 * PAGE_SIZE if options.quick else 20 * PAGE_SIZE
    for running in _RUNNING:
        scheduler = make_scheduler(running, 0, 0, "slots", "fcfs")
        plan, resolve = measure(scheduler, steps, 3)
        queues, seconds, commits = scheduler.queues, 0.0, 0
        for _ in range(steps):
            turn(scheduler)
            full = [each for each in queues.batch.sequences if (each.length - 1) % PAGE_SIZE == 0]
            start = time.perf_counter()
            for sequence in full:
                queues.share(sequence)
            seconds += time.perf_counter() - start
            commits += len(full)
        row = 1e6 * (plan + resolve) / running
        each = 1e6 * seconds / commits
        report.row(
            running=running,
            commits=commits,
            us_per_commit=each,
            us_per_token=each / PAGE_SIZE,
            us_per_row=row,
            of_row=each / PAGE_SIZE / row,
        )
