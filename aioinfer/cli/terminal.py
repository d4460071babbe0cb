"""Progress, signals and event loop of commands."""

from __future__ import annotations

import argparse
import asyncio
import atexit
import dataclasses
import gc
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from aioinfer.checkpoint.libraries import import_extensions, preload_torch
from aioinfer.cli.flags import read_settings
from aioinfer.cli.streams import note
from aioinfer.config import EngineConfig

__all__ = ["Progress", "ending_signals", "interrupted", "loop_factory", "own_engine", "started"]


#: said before the stage of that name, on a terminal and elsewhere: a first start would be silent for long
_SAID = {"kernels": "compiling native kernels, once for this processor: takes about half a minute"}


class Progress:
    """Bars on a terminal, one for each stage; elsewhere, a line about compiling only."""

    def __init__(self) -> None:
        self._stage = ""
        self._bar: Any = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        with suppress(OSError):  # a terminal that is gone
            self._show(stage, done, total)

    def _show(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage:
            self._stage = stage
            if stage in _SAID:
                note(f"aioinfer: {_SAID[stage]}")
            if self._bar is not None:
                self._bar.close()
            self._bar = self._new_bar(stage, total) if sys.stderr.isatty() else None
        if self._bar is None:
            return
        self._bar.total = total
        self._bar.update(done - self._bar.n)
        if done >= total > 0:
            self._bar.close()

    def _new_bar(self, stage: str, total: int) -> Any:
        from tqdm import tqdm

        unit: dict[str, Any] = {"unit": "B", "unit_scale": True} if stage == "download" else {}
        return tqdm(total=total, desc=stage, leave=False, **unit)


async def own_engine(options: argparse.Namespace) -> Any:
    """Start the engine of a command for one person, who waits for it and asks for no grammars. Raises
    ConfigError, also for its settings among the ``options``."""
    config = read_settings(EngineConfig, options)
    # What imports make is no garbage; to look through it again and again takes a fifth of their time.
    # When the process ends, nothing is.
    atexit.register(_end_quickly)
    collected = gc.isenabled()
    gc.disable()
    try:
        import_extensions()
        # Nothing else needs this loop yet. The device waits for them where it imports torch.
        libraries = asyncio.get_running_loop().run_in_executor(None, preload_torch)
        try:
            from aioinfer.engine import Engine

            engine = Engine(dataclasses.replace(config, prepare_grammars=False))
            await engine.start(Progress())
        finally:
            await libraries
    finally:
        if collected:
            gc.enable()
    return engine


def _end_quickly() -> None:
    """Leave what is left to the system. Triton, which transformers imports for images, would report leaks."""
    if "triton" not in sys.modules:
        gc.freeze()


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The loop factory of uvloop where it is installed, else None."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def ending_signals() -> tuple[signal.Signals, ...]:
    """The signals that end a command in order; that of a terminal which is closed, unless it is ignored, as
    ``nohup`` has it."""
    hangup = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hangup else ()))


def interrupted(number: int) -> int:
    """Say that a signal ended the command; returns the exit status of a shell for it."""
    note(f"aioinfer: interrupted by {signal.Signals(number).name}")
    return 128 + number


async def started(start: Coroutine[Any, Any, None], stopped: asyncio.Future[Any]) -> bool:
    """Start an engine; False if ``stopped`` is done first, which ends the start."""
    starting = asyncio.ensure_future(start)
    await asyncio.wait([starting, stopped], return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.wait([starting])
        return False
    starting.result()
    return True
