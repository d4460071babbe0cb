"""Intake: what has to be done with a prompt before it is a request, on worker threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from aioinfer.errors import InvalidRequest, RequestError
from aioinfer.params import SamplingParams
from aioinfer.scheduling.request import Request
from aioinfer.stream import StreamCell

if TYPE_CHECKING:
    from aioinfer.loop.core import Core
    from aioinfer.text.grammar import GrammarState

__all__ = ["Intake"]

_T = TypeVar("_T")
_Prepared = tuple[list[int], "GrammarState | None"]


class Intake:
    """Tokenizes prompts and compiles grammars, and hands over the requests that come of them.

    ``submit`` is called on the loop with a stream's cell and its request, ``refused`` with a cell whose
    ``error`` says why there is none.
    """

    __slots__ = ("_compilers", "_loop", "_refused", "_submit", "_workers", "arriving")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        submit: Callable[[StreamCell, Request], None],
        refused: Callable[[StreamCell], None],
    ) -> None:
        self._loop = loop
        self._submit = submit
        self._refused = refused
        self._workers = ThreadPoolExecutor(2, thread_name_prefix="aioinfer-text")
        # Apart, so that no grammar, however large, keeps plain prompts waiting.
        self._compilers = ThreadPoolExecutor(2, thread_name_prefix="aioinfer-text-grammar")
        #: streams whose prompts are being worked on; who is taken out is not heard of again
        self.arriving: set[StreamCell] = set()

    async def run(self, call: Callable[..., _T], *arguments: Any) -> _T:
        """Something that blocks, on a worker thread."""
        return await self._loop.run_in_executor(self._workers, call, *arguments)

    def take(
        self,
        cell: StreamCell,
        core: Core,
        params: SamplingParams,
        prompt: Any,
        encode: Callable[[], list[int]] | None,
        make: Callable[..., Request],
    ) -> None:
        """Make the request of a stream: at once, or when its prompt is tokenized and its grammar compiled.

        ``encode`` makes ids of the prompt, None if it is ids; ``make`` makes a request of ids and a grammar.
        Raises what making and submitting raise, as far as that is done at once.
        """
        if params.masked:
            self._prepare(cell, self._compilers, make, lambda: _compile(core, params, prompt, encode))
        elif encode is not None:
            self._prepare(cell, self._workers, make, lambda: (encode(), None))
        else:
            self._submit(cell, make(prompt))

    def close(self) -> None:
        """Let the threads end, and forget what they have not begun."""
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._compilers.shutdown(wait=False, cancel_futures=True)

    def _prepare(
        self,
        cell: StreamCell,
        workers: ThreadPoolExecutor,
        make: Callable[..., Request],
        prepare: Callable[[], _Prepared],
    ) -> None:
        def prepared(future: asyncio.Future[_Prepared]) -> None:
            error = asyncio.CancelledError() if future.cancelled() else future.exception()
            if cell not in self.arriving:
                return
            self.arriving.discard(cell)
            if error is None:
                try:
                    ids, grammar = future.result()
                    self._submit(cell, make(ids, grammar=grammar))
                except Exception as refused:
                    error = refused
            if error is None:
                return
            if not isinstance(error, RequestError):
                # Anything that a thread can raise, panics of libraries in Rust included.
                cause, error = error, InvalidRequest("prompt", f"could not be tokenized: {error!r}")
                error.__cause__ = cause
            cell.error = error
            self._refused(cell)

        self.arriving.add(cell)
        self._loop.run_in_executor(workers, prepare).add_done_callback(prepared)


def _compile(
    core: Core, params: SamplingParams, prompt: Sequence[int], encode: Callable[[], list[int]] | None
) -> _Prepared:
    """On a worker thread: the prompt's ids and the grammar of what follows them."""
    ids = list(prompt) if encode is None else encode()
    return ids, core.compile(params, ids)
