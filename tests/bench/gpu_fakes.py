"""Benches that go wrong in every way; run by tests/bench/test_gpu.py in processes of their own."""

from __future__ import annotations

import os
import signal
import threading

from bench.gpu.plan import Plan
from bench.gpu.report import PartReport


def run(plan: Plan, report: PartReport, how: str) -> None:
    report.row(how=how, value=1.5)
    report.fact("remaining", report.remaining > 0)
    if how == "raises":
        raise ValueError("on purpose")
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hangs":
        threading.Event().wait()
    if how == "guards":
        # And leaves a thread behind that never ends.
        threading.Thread(target=threading.Event().wait).start()
        report.guarded("one case", int, "no number")
    report.row(how=how, value=2.5)
