"""Playing: sends a load to an engine, or a dispatcher, in virtual time or in real time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from aioinfer.errors import AioInferError, InvalidRequest, Rejected
from aioinfer.params import SamplingParams
from aioinfer.prompt_ids import PromptIds
from aioinfer.twin.load import Load, Session, tokens_of
from aioinfer.twin.outcome import Outcome

if TYPE_CHECKING:
    from aioinfer.client.engine_like import EngineLike
    from aioinfer.request import Output
    from aioinfer.twin.virtual_trace import VirtualTrace

__all__ = ["Player"]


class Player:
    """One caller for each session. Times come from the engine: what reading them takes is not in them.

    ``arrives`` is called with the prompt tokens of each request, before it is made.
    """

    def __init__(
        self,
        server: EngineLike,
        *,
        outcome: Outcome | None = None,
        arrives: Callable[[int], None] | None = None,
        trace: VirtualTrace | None = None,
    ) -> None:
        self.outcome = Outcome() if outcome is None else outcome
        self._server = server
        self._vocabulary = server.info.vocab_size
        self._arrives = arrives
        self._trace = trace
        self._zero = 0.0

    async def play(self, load: Load) -> Outcome:
        """Send all of it, and wait for the ends."""
        loop = asyncio.get_running_loop()
        self._zero = loop.time()
        async with asyncio.TaskGroup() as sessions:
            for session in load:
                if (left := self._zero + session.at - loop.time()) > 0:
                    await asyncio.sleep(left)
                sessions.create_task(self._session(session))
        self.outcome.seconds = loop.time() - self._zero
        return self.outcome

    async def _session(self, session: Session) -> None:
        ids = PromptIds.checked([], self._vocabulary)
        options: dict[str, Any] = {**dict(session.options), "priority": session.priority}
        if session.name is not None:
            options["routing_key"] = session.name
        for turn in session.turns:
            if turn.think > 0:
                await asyncio.sleep(turn.think)
            length = len(ids) + sum(tokens for _, tokens in turn.pieces)
            if length > self._server.info.max_model_len or not (length and turn.output_tokens > 0):
                told = f"{length} prompt tokens, {turn.output_tokens} to come"
                self._failed(InvalidRequest("prompt", told), length)  # before its tokens are made
                return
            ids = ids.extended(tokens_of(turn.pieces, self._vocabulary))
            params = SamplingParams(max_tokens=turn.output_tokens, ignore_eos=True, temperature=0.0)
            try:
                if self._arrives is not None:
                    self._arrives(len(ids))
                stream = self._server.generate(ids, params, **options)
                await stream
            except AioInferError as error:
                self._failed(error, len(ids))
                return
            self._ended(stream.cell.output)
            ids = ids.extended(np.asarray(stream.cell.output.token_ids, np.int32))

    def _failed(self, error: AioInferError, tokens: int) -> None:
        now = asyncio.get_running_loop().time() - self._zero
        self.outcome.errors[type(error).__name__] += 1
        retry = error.retry_after if isinstance(error, Rejected) else 0.0
        self.outcome.add(now, np.nan, np.nan, now, tokens, 0, 0, retry)

    def _ended(self, output: Output) -> None:
        times = np.asarray(output.token_times) - self._zero
        admitted = np.nan if output.admitted_at is None else output.admitted_at - self._zero
        tokens = len(output.prompt_ids), output.cached_tokens, len(times)
        self.outcome.add(output.arrival - self._zero, admitted, times[0], times[-1], *tokens, 0.0)
        self.outcome.itl.add(np.diff(times))
        if self._trace is not None:
            begin, end = output.arrival - self._zero, float(times[-1])
            self._trace.request(str(len(self.outcome)), begin, end, len(times))
