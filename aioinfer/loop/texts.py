"""Texts: turns the tokens of resolved steps into text, in bounded time per turn of the loop."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from typing import TYPE_CHECKING

from aioinfer.errors import EngineError, InvalidRequest, OutOfMemory, RequestError, StepFailed
from aioinfer.execution.device import StepOutOfMemory
from aioinfer.scheduling.faults import end_with
from aioinfer.scheduling.sequence import ParkedFor, SequenceState
from aioinfer.text.output import OutputText
from aioinfer.text.reader import AnswerReader
from aioinfer.text.stop import TooSlow
from aioinfer.text.tokenizer import end_of

if TYPE_CHECKING:
    from aioinfer.params import SamplingParams
    from aioinfer.scheduling.queues import RequestQueues
    from aioinfer.scheduling.sequence import Sequence
    from aioinfer.text.tokenizer import Tokenizer

__all__ = ["Texts", "output_text"]

_FINISHED = SequenceState.FINISHED
#: tokens without text beyond which nothing is computed for a request
_MOST_BEHIND = 8


class Texts:
    """The text of every request: stop strings end requests in the scheduler, and held text is released.

    Tokens become text as they are read, at microseconds each. Stop patterns can take milliseconds for a
    token, so requests that have them wait in ``behind``, where each gets the text of one token in turn, for
    as long as a turn of the loop may take. Until its text has caught up, a request has not ended, and its
    newer tokens are not delivered: what it returns does not depend on how long it waited.
    """

    __slots__ = ("_clock", "_queues", "behind", "output_tokens", "raised")

    def __init__(self, queues: RequestQueues, clock: Callable[[], float]) -> None:
        self._queues = queues
        self._clock = clock
        #: requests with tokens that have no text yet, in the order in which they get it
        self.behind: dict[Sequence, None] = {}
        #: of all requests since the start
        self.output_tokens = 0
        #: what ended a request last, if the state of all others was not checked since
        self.raised: BaseException | None = None

    def all_advanced(self, sequences: abc.Sequence[Sequence], now: float) -> None:
        """A step gave these requests tokens, or their end.

        Most got one token whose text is known, and nothing to search it for: these take one short pass.
        """
        passed = 0
        for sequence in sequences:
            text, times = sequence.text, sequence.output.token_times
            texts, at = text.texts, len(times)
            if sequence.state is not _FINISHED and len(sequence.output_ids) == at + 1:
                token = sequence.output_ids[at]
                piece = None if text.enabled else ""
                if texts is not None and 0 <= token < len(texts):
                    piece = texts[token]
                if piece is not None:
                    times.append(now)
                    if piece:
                        text.pieces.append(piece)
                    passed += 1
                    continue
            self.advanced(sequence, now)
        self.output_tokens += passed

    def advanced(self, sequence: Sequence, now: float) -> None:
        """A step gave the request tokens, or its end."""
        if sequence.output.error is not None:
            self.failed(sequence, sequence.output.error)
        elif sequence.text.costly:
            missing = len(sequence.output_ids) - len(sequence.output.token_times)
            if not (missing or sequence.finished):
                return  # a draft only
            self.behind[sequence] = None
            sequence.output.text_behind = True
            if missing > _MOST_BEHIND and not sequence.finished:
                self._queues.park(sequence, ParkedFor.TEXT)
        else:
            while len(sequence.output.token_times) < len(sequence.output_ids) and self._append(sequence, now):
                pass
            self._close(sequence, now)

    def catch_up(self, seconds: float | None = None) -> list[Sequence]:
        """Go on with the requests that are behind, one token each in turn, for ``seconds`` and at least one
        token; returns those that have caught up."""
        now = self._clock()
        caught_up: list[Sequence] = []
        late = False
        while self.behind and not late:
            sequence = next(iter(self.behind))
            del self.behind[sequence]
            more = len(sequence.output.token_times) < len(sequence.output_ids) and self._append(sequence, now)
            if more and len(sequence.output.token_times) < len(sequence.output_ids):
                self.behind[sequence] = None
            else:
                self._caught_up(sequence)
                self._close(sequence, now)
                caught_up.append(sequence)
            late = seconds is not None and self._clock() - now >= seconds
        return caught_up

    def abort(self, sequence: Sequence, error: BaseException | None) -> bool:
        """End a request, whatever its state; False if it and its text had ended already."""
        if sequence.output.finished_at is not None:
            return False
        # A request that has finished, but for the text of its last tokens, ends without them.
        self._queues.finish(sequence, "abort", error)
        sequence.output.finish_reason, sequence.output.error = "abort", error
        self._caught_up(sequence)
        sequence.output.finished_at = self._clock()
        return True

    def failed(self, sequence: Sequence, error: BaseException) -> None:
        """The scheduler ended a request because its step failed. If its text is behind, it fails only when
        the text has caught up without a stop: a request does not fail because its text was late."""
        if sequence.output.text_behind:
            sequence.output.error = error
        else:
            self._fail(sequence, error, self._clock())

    def end(self, sequence: Sequence, error: BaseException, *, distrust: bool = False) -> None:
        """End a request with what one of its own parts raised; tokens without a time are forgotten.

        ``distrust``: its KV must not be shared. Raises RuntimeError if the request cannot be ended.
        """
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise error
        if not isinstance(error, TooSlow):  # a refusal, which leaves nothing half changed
            self.raised = error
        end_with(self._queues, sequence, error, distrust=distrust)
        self.failed(sequence, error)

    def _append(self, sequence: Sequence, now: float) -> bool:
        """Detokenize the next token; False at the end of the text."""
        ids, at = sequence.output_ids, len(sequence.output.token_times)
        sequence.output.token_times.append(now)
        self.output_tokens += 1
        last = at == len(ids) - 1
        if last and sequence.output.finish_reason == "stop" and not sequence.params.include_stop:
            return False
        try:
            stop = sequence.text.push(ids[at])
        except BaseException as error:  # panics of libraries in Rust are no Exceptions
            # A detokenizer that raises on this output must not stop the other requests.
            sequence.output.text_behind = False
            self.end(sequence, error)
            return False
        if stop is not None:
            # Also where the token that completes the stop string is the last one that was allowed.
            self._queues.finish(sequence, "stop")
            self._stop(sequence, stop)
            sequence.trim(at + 1)
        return stop is None

    def _close(self, sequence: Sequence, now: float) -> None:
        """Release the held text of a request that has ended, unless it was aborted."""
        if not sequence.finished:
            return
        if sequence.output.error is not None and sequence.output.finished_at is None:
            self._fail(sequence, sequence.output.error, now)
        sequence.output.finished_at = now
        if sequence.output.finish_reason == "abort":
            return
        # Text held back as the possible begin of a stop string is final now, and what the detokenizer held
        # back can complete one.
        try:
            if sequence.pooled is not None:
                sequence.output.pooled = sequence.pooled.result(len(sequence.prompt_ids))
            stop = sequence.text.finish()
        except BaseException as error:
            self.end(sequence, error)
        else:
            if stop is not None:
                self._stop(sequence, stop)

    def _stop(self, sequence: Sequence, stop: str) -> None:
        sequence.output.finish_reason, sequence.output.stop_reason, sequence.output.error = "stop", stop, None

    def _fail(self, sequence: Sequence, error: BaseException, now: float) -> None:
        self._queues.finish(sequence, "abort", error)
        sequence.output.finish_reason, sequence.output.error = "abort", _reported(error)
        sequence.output.finished_at = now
        self._caught_up(sequence)

    def _caught_up(self, sequence: Sequence) -> None:
        """A request is not behind any more; tokens that it ended without are forgotten."""
        self.behind.pop(sequence, None)
        sequence.output.text_behind = False
        if len(sequence.output_ids) > len(sequence.output.token_times):
            sequence.trim(len(sequence.output.token_times))
        if ParkedFor.TEXT in sequence.parked_for and not sequence.finished:
            try:
                self._queues.unpark(sequence, ParkedFor.TEXT)
            except Exception as error:
                self.end(sequence, error)


def output_text(
    tokenizer: Tokenizer | None, prompt_ids: abc.Sequence[int], params: SamplingParams
) -> OutputText:
    """The text of a new output."""
    if tokenizer is None:
        return OutputText(None)
    detokenizer = tokenizer.detokenizer(prompt_ids, skip_special_tokens=params.skip_special_tokens)
    answer = None
    if params.stop_format is not None:
        answer = AnswerReader.named(params.stop_format, end_of(prompt_ids, tokenizer))
    stops = params.stop, params.include_stop, params.stop_regex
    return OutputText(detokenizer, *stops, answer, params.min_tokens)


def _step_failed(cause: BaseException) -> EngineError:
    """A new exception for each request, since several tasks may raise theirs."""
    error: EngineError = StepFailed(f"the step of this request failed: {cause}")
    if isinstance(cause, StepOutOfMemory):
        error = OutOfMemory(f"two steps in turn that held this request ran out of memory: {cause}")
    error.__cause__ = cause
    return error


def _reported(cause: BaseException) -> BaseException:
    if isinstance(cause, TooSlow):
        refused = InvalidRequest("stop_regex", str(cause))
        refused.__cause__ = cause
        return refused
    if isinstance(cause, (RequestError, EngineError)):
        return cause
    return _step_failed(cause)
