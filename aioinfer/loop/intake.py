"""Intake: the worker threads that tokenize prompts and compile grammars."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from aioinfer.execution.workers import WorkerExecutor
from aioinfer.params import SamplingParams

if TYPE_CHECKING:
    from aioinfer.loop.core import Core
    from aioinfer.loop.options import Prepared, PromptSource

__all__ = ["Intake"]

_T = TypeVar("_T")


class Intake:
    """Two thread pools: one for tokenizing, one for requests that need a grammar.

    They are separate so that a grammar, however large, never delays plain prompts.
    """

    __slots__ = ("_compilers", "_workers", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._workers = WorkerExecutor(2, "aioinfer-text")
        self._compilers = WorkerExecutor(2, "aioinfer-text-grammar")

    async def run(self, call: Callable[..., _T], *arguments: Any) -> _T:
        """The result of a blocking call, made on a worker thread."""
        return await self.loop.run_in_executor(self._workers, call, *arguments)

    def prepare(self, core: Core, prompt: PromptSource, params: SamplingParams) -> asyncio.Future[Prepared]:
        """The token ids of a prompt and the grammar of its output, from a worker thread."""
        workers = self._compilers if params.masked else self._workers
        return self.loop.run_in_executor(workers, core.prepare, prompt, params)

    def close(self) -> None:
        """Let the threads end, and drop the calls that have not begun."""
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._compilers.shutdown(wait=False, cancel_futures=True)
