"""Isolation: each part in a process of its own, so that a fault of the device or a hang costs one part.

A fault leaves a CUDA context unusable for the rest of its process, and a kernel that hangs can only be
ended with it. Processes are started one ahead: the next one imports while this one measures.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

from bench.gpu.plan import Part, Plan
from bench.gpu.report import PartReport
from bench.report import environment

__all__ = ["Isolated"]

#: seconds that a part whose time is up has to notice it
_GRACE = 5.0
#: seconds that importing and finding the device may take before a start counts as failed
_START = 120.0


class Isolated:
    """A part in a process that has been started and waits for :meth:`run`."""

    def __init__(self, part: Part, plan: Plan) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_child, args=(theirs, part, plan))
        self._process.start()
        theirs.close()

    def run(self, seconds: float) -> Iterator[tuple[str, Any]]:
        """Let it go, and hear what it says: (kind, value) as :class:`~bench.gpu.report.PartReport` has them.

        First comes an "environment". An "error" is the last that is heard of a part that dies, or that takes
        much longer than ``seconds`` from then on.
        """
        end = time.monotonic() + _START
        try:
            while True:
                if not self._pipe.poll(max(0.0, end - time.monotonic())):
                    yield "error", "cut off: it did not end in time"
                    return
                kind, value = self._pipe.recv()
                if kind == "ready":
                    self._pipe.send(seconds)
                elif kind == "done":
                    return
                else:
                    if kind == "environment":
                        end = time.monotonic() + seconds + _GRACE
                    yield kind, value
        except (EOFError, OSError):
            self._process.join(timeout=_GRACE)
            yield "error", f"its process died with exit code {self._process.exitcode}"
        finally:
            self.end()

    def end(self) -> None:
        """End its process, and those that it started. Idempotent."""
        self._process.join(timeout=0.5)
        if self._process.is_alive() and self._process.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            # A process that the driver holds does not even end now; it must not hold up the others.
            self._process.join(timeout=_GRACE)
        self._pipe.close()


def _child(pipe: Any, part: Part, plan: Plan) -> None:
    """The process: import, say so, wait, run."""
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    try:
        module = importlib.import_module(part.module)
        pipe.send(("ready", None))
        seconds = pipe.recv()
        # Only now, for it looks at the device, which another part has had so far.
        pipe.send(("environment", environment()))
        report = PartReport(lambda kind, value: pipe.send((kind, value)), seconds)
        module.run(plan, report, *part.arguments)
    except EOFError:
        pass  # nobody waits for it any more
    except BaseException:
        pipe.send(("error", traceback.format_exc(limit=-8)))
    with contextlib.suppress(OSError):
        pipe.send(("done", None))
    sys.stdout.flush()
    # Threads that a failed part has left behind must not keep its process.
    os._exit(0)
