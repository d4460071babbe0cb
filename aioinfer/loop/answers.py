"""Answers: logits processors that a step does not wait for.

::

    launch thread   row: ASKED, its logits copied ──► resolve: parked ──┐
    loop                         a task calls the processors ◄──────────┘
                                 unpark, with the logits that they left ──► the row is computed once more
                                 or with tokens ──────────────────────────► the request goes on behind them
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from aioinfer.errors import EngineError, ProcessorFailed, RequestError, StepFailed
from aioinfer.loop.logprobs import complete_logprobs
from aioinfer.scheduling.sequence import ParkedFor
from aioinfer.steering.processors import waits
from aioinfer.steering.state import Answer, Question, SteeringState, checked

if TYPE_CHECKING:
    from aioinfer.loop.core import Core
    from aioinfer.loop.intake import Intake
    from aioinfer.scheduling.sequence import Sequence as ModelSequence

__all__ = ["Answers"]

_log = logging.getLogger("aioinfer")

#: seconds for which closing waits for coroutines that were cancelled
_PATIENCE = 10.0
#: a request that waits longer than once or twice these seconds gives way to others
_SOON = 0.1


class Answers:
    """The requests that wait for their logits processors, with a task each."""

    def __init__(
        self,
        core: Core,
        intake: Intake,
        patience: float,
        *,
        updated: Callable[[ModelSequence], None],
        end: Callable[[ModelSequence, RequestError | EngineError], None],
        wake: Callable[[], None],
    ) -> None:
        """``patience``: seconds that plain processors may take in a step. ``updated``: a request has tokens,
        or its end; ``end`` ends one; ``wake``: some can be computed."""
        self._core = core
        self._intake = intake
        self._patience = patience
        self._updated, self._end, self._wake = updated, end, wake
        self._tasks: dict[ModelSequence, asyncio.Task[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        #: of requests that have ended
        self._leaving: set[asyncio.Task[None]] = set()

    def ask(self, sequences: Sequence[ModelSequence]) -> None:
        """Have the processors of these requests decide."""
        for sequence in sequences:
            steering = sequence.steering
            if sequence.finished or steering is None or steering.question is None:
                continue
            sequence.expected = True
            # Not by the loop's task factory, which may begin with it at once.
            self._tasks[sequence] = asyncio.Task(
                self._answer(sequence, steering, steering.question),
                name="aioinfer-processors",
                context=sequence.consumer.context,
            )
        if self._tasks and self._timer is None:
            self._look_later([])

    def _look_later(self, waiting: Sequence[asyncio.Task[None]]) -> None:
        """See soon which of these still wait. One timer for all: there can be thousands of questions."""
        self._timer = asyncio.get_running_loop().call_later(_SOON, self._look, waiting)

    def _look(self, waiting: Sequence[asyncio.Task[None]]) -> None:
        late = {*waiting}
        for sequence, task in self._tasks.items():
            sequence.expected = task not in late
        if late:
            self._wake()
        self._timer = None
        if self._tasks:
            self._look_later([*self._tasks.values()])

    def drop(self, sequence: ModelSequence) -> None:
        """The request has ended: nothing is asked for it any more."""
        task = self._tasks.pop(sequence, None)
        if task is not None:
            task.cancel()
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def aclose(self) -> None:
        """Wait for the coroutines of requests that have ended, as all have."""
        if self._timer is not None:
            self._timer.cancel()
        if self._leaving:
            _, left = await asyncio.wait(self._leaving, timeout=_PATIENCE)
            if left:
                _log.warning("%d logits processors go on though they were cancelled", len(left))

    async def _answer(self, sequence: ModelSequence, steering: SteeringState, question: Question) -> None:
        try:
            forced = await self._decide(steering, question)
            if not (forced or np.isfinite(question.logits.max())):
                raise ValueError("a logits processor left no finite maximum of the logits")
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # the request has ended
            if self._tasks.pop(sequence, None) is not None:
                self._end(sequence, ProcessorFailed.because(error))
            return
        if self._tasks.pop(sequence, None) is None:
            return  # the request has ended, and its processors have not minded
        answer, state = None, sequence.steering
        if state is None or state.question is not question:  # asked about logits of earlier weights
            if sequence.params.prompt_logprobs is not None:
                forced = []  # these may end it, and its prompt is to be scored again before
        elif not forced:
            answer = Answer(len(question.ids), question.logits)
        try:
            self._settle(sequence, forced, answer)
        except Exception as error:
            _log.error("%s could not go on", sequence, exc_info=error)
            failed = StepFailed(f"the request could not go on: {error}")
            failed.__cause__ = error
            self._end(sequence, failed)
        self._wake()

    def _settle(self, sequence: ModelSequence, forced: Sequence[int], answer: Answer | None) -> None:
        """Go on with these tokens, or with one that is sampled from the logits of ``answer``; without both,
        the processors are asked again. Raises PolicyFailed."""
        queues, steering = self._core.scheduler.queues, sequence.steering
        assert steering is not None
        steering.question, steering.answer = None, answer
        if sequence.finished:
            return  # only its text is behind
        changed: Sequence[ModelSequence] = ()
        if forced:
            steering.extend(forced)
            computed = sequence.known
            ended = next((reason for token in forced if (reason := sequence.append(token)) is not None), None)
            queues.rewind(sequence, min(computed, sequence.known - 1))
            if ended is not None:
                queues.finish(sequence, ended)
            changed = self._core.scheduler.budgets.charge([sequence])
            if sequence.params.logprobs is not None:
                complete_logprobs(sequence)
            if sequence.grammar is not None:
                sequence.grammar = sequence.grammar.restarted(sequence.output_ids)
            self._core.texts.all_advanced(changed, self._core.clock())
        queues.unpark(sequence, ParkedFor.ANSWER)
        for each in changed:
            if not each.output.text_behind:
                self._updated(each)

    async def _decide(self, steering: SteeringState, question: Question) -> list[int]:
        """What the processors force; they change the logits of the question in place."""
        began = time.monotonic()
        for each in steering.at(()):
            if waits(each):
                forced = await each(question.ids, question.logits)  # type: ignore[misc]
            else:
                forced = await self._intake.work_out(each, question.ids, question.logits)
            if tokens := checked(forced, len(question.logits)):
                return tokens
        steering.rest()
        if not steering.coroutines and time.monotonic() - began < self._patience:
            steering.late = False
        return []
