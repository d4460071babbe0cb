"""TorchThreads: the threads that torch computes with, for the steps of one device on a CPU.

Kernels of this package have a pool of as many. Where these compute all of a step but small operations,
torch is left one: those that OpenMP keeps spin for milliseconds behind each operation that is divided, on
the cores that the pool computes on. Drafts of a head took 15.0 ms so and take 8.4, on two cores of a Xeon.
"""

from __future__ import annotations

import logging
import os
import threading

from aioinfer.config import EngineConfig
from aioinfer.forks import forked_here, in_children
from aioinfer.system.cores import check_threads, cpu_quota, default_threads

__all__ = ["TorchThreads"]

_log = logging.getLogger("aioinfer")
#: names of threads on which nothing but an engine computes: of ThreadLauncher, and of an LLM
_OWN = ("aioinfer-launch", "aioinfer-loop")
#: held while torch's number of threads is read and changed: engines of one process open side by side
_lock = threading.Lock()


@in_children
def _replace_lock() -> None:
    """A thread that is not in a child may hold it."""
    global _lock
    _lock = threading.Lock()


class TorchThreads:
    """Launch thread only."""

    def __init__(self) -> None:
        #: before :meth:`take`; None: it has changed nothing
        self._before: int | None = None
        #: of this thread, before :meth:`leave_one`
        self._here: int | None = None

    def take(self, config: EngineConfig) -> None:
        """Those that the config asks for, or that are of use. Raises ConfigError."""
        import torch

        with _lock:
            before = torch.get_num_threads()
            threads = config.threads or default_threads(before, cpu_quota())
            if forked_here() and threads > 1:
                _log.warning(
                    "one thread computes: others cannot where launch_mode is inline in a forked process"
                )
                threads = 1
            check_threads(threads, os.cpu_count() or 1)
            if threads != before:
                self._before = before
                torch.set_num_threads(threads)

    def leave_one(self) -> None:
        """One for operations of this thread, if it is an engine's own; those of other threads keep theirs."""
        import torch

        if threading.current_thread().name in _OWN:
            self._here = torch.get_num_threads()
            _set_here(1)

    def give_back(self) -> None:
        """As it was before. Idempotent."""
        if self._here is not None:
            _set_here(self._here)
        if self._before is not None:
            import torch

            with _lock:
                torch.set_num_threads(self._before)
        self._here = self._before = None


def _set_here(threads: int) -> None:
    """``torch.set_num_threads`` is of the calling thread, and of those that have not computed yet: another
    one sets the latter back."""
    import torch

    ready, changed = threading.Event(), threading.Event()

    def restore() -> None:
        kept = torch.get_num_threads()
        ready.set()
        changed.wait()
        torch.set_num_threads(kept)

    other = threading.Thread(target=restore, name="aioinfer-threads", daemon=True)
    with _lock:
        try:
            other.start()
        except RuntimeError:
            return  # the interpreter ends
        ready.wait()
        torch.set_num_threads(threads)
        changed.set()
        other.join()
