"""Who may call: the event loop and the process that an engine belongs to.

The copy of an engine in a child of a fork ends, without touching what it had.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import Protocol

from aioinfer.errors import EngineClosed, WrongLoop
from aioinfer.forks import in_children, this_process

__all__ = [
    "asyncio_loop",
    "end_in_children",
    "fork_error",
    "require_loop",
    "require_process",
    "running_loop",
]


class _Forked(Protocol):
    def forked(self) -> None:
        """This process is a child of a fork: end. Takes no lock and waits for nothing."""


_ending: weakref.WeakSet[_Forked] = weakref.WeakSet()


@in_children
def _forked() -> None:
    for each in list(_ending):
        each.forked()


def end_in_children(each: _Forked) -> None:
    """Have ``forked`` called in children of a fork, as long as the object lives."""
    _ending.add(each)


def require_process(process: object, kind: str = "engine") -> None:
    """Raise EngineClosed unless this was :func:`this_process`, and not before a fork."""
    if process is not this_process():
        raise fork_error(kind)


def fork_error(kind: str) -> EngineClosed:
    """The error of everything that a fork has copied into this process."""
    return EngineClosed(
        f"the {kind} was started in another process, before a fork, and its threads are not in this one: "
        "start one in each process, after the fork"
    )


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The running loop, if there is one."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def asyncio_loop() -> asyncio.AbstractEventLoop:
    """The running loop. Raises WrongLoop where there is none, under trio for example."""
    loop = running_loop()
    if loop is None:
        raise WrongLoop(
            "an engine runs on an asyncio event loop, and none is running here. Under trio, or without any "
            "loop, use Engine.in_thread(config), or the threadsafe() of an engine in another thread, or LLM"
        )
    return loop


def require_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Raise WrongLoop unless ``loop`` is the running one."""
    running = running_loop()
    if running is not loop:
        where = "there is no running loop here" if running is None else "this is another one"
        raise WrongLoop(
            f"the engine belongs to the event loop that started it, and {where}. Use its threadsafe() from "
            "other threads and loops, and Engine.in_thread(config) where there is no loop; else start and "
            "use it in one asyncio.run, on that thread; with pytest-asyncio, give the fixture that starts it "
            "and the tests the same loop_scope"
        )
