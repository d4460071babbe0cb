"""Forecast: when a new request would have its first token, and when it would end.

The steps to come are run through, as coarsely as the queue allows. What goes before the request under the
policy waits for slots and pages, as it does; between two events all steps are alike, and their seconds are
those of :class:`~aioinfer.scheduling.step_time.StepTime`. Outputs are as long as those of about the same
``max_tokens`` were: requests that run end at different places of what was seen. What comes later is not
foreseen, nor whatever else makes a forecast wrong: its margin is learned from the requests that it accepted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from heapq import heappop, heappush
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from aioinfer.scheduling.costs import Sizes
from aioinfer.scheduling.policy import PolicyFailed

if TYPE_CHECKING:
    from aioinfer.config import EngineConfig
    from aioinfer.scheduling.memory import Memory
    from aioinfer.scheduling.queues import RequestQueues
    from aioinfer.scheduling.reserve import NewTokenRatio
    from aioinfer.scheduling.sequence import Sequence
    from aioinfer.scheduling.step import Step
    from aioinfer.scheduling.step_time import StepTime

__all__ = ["Forecast", "Late", "Prediction"]

#: requests in front of a new one that are looked at; more of them are taken for as many alike
_LOOK = 64
#: newest outputs of about a length that tell how long others are, and how many of them do
_OUTPUTS, _ENOUGH = 64, 4
#: tokens of a request that tells how many steps they take, and its share in that
_TELLING, _STEADY = 8, 0.02
#: share of the requests that were accepted which may be late, by how much one that is raises the margin, and
#: its bounds
_LATE, _RAISED, _MARGIN = 0.03, 0.1, (0.8, 10.0)
#: requests of each priority have margins of their own, from minus to plus this one
_PRIORITIES = 8
#: an idle engine learns nothing from what it refuses: each time, a request counts as this much shorter
_FORGIVEN = 0.98
#: tokens that a prompt has in a step for which there is no time
_LEAST = 8
#: steps of a prompt that are taken for equally long where time bounds them
_ALIKE = 8
#: places of the requests among the outputs that were seen: they lie evenly, however many they are
_GOLDEN = 0.6180339887


class Prediction(NamedTuple):
    """Seconds from now until the first token of a request, and until its end: None, if that is not known."""

    first: float
    end: float | None


class Late(NamedTuple):
    """What a new request would miss."""

    #: the name of the field
    limit: str
    #: seconds until its first token, or its end, and by how much that is too late
    seconds: float
    late: float


class Forecast:
    """Learns how long outputs are and how many steps tokens take; predicts from that and the queue."""

    def __init__(self, config: EngineConfig, memory: Memory, times: StepTime, ratio: NewTokenRatio) -> None:
        self.config, self.memory, self.times, self.ratio = config, memory, times, ratio
        #: the newest steps: id, rows that generate, tokens of prefill
        self._newest: deque[tuple[int, int, int]] = deque(maxlen=4)
        #: steps of a token: drafts have several in one
        self.pace = 1.0
        self._lengths: dict[int, _Lengths] = {}
        #: what predictions of the first token, and of the end, are multiplied by, by priority: later requests
        #: overtake those of a low one
        self._margins: defaultdict[int, list[float]] = defaultdict(lambda: [1.0, 1.0])
        self._forgiven = 1.0

    # -- what it learns -------------------------------------------------------------------------

    def planned(self, step: Step, prefill_tokens: int) -> None:
        self._newest.append((step.id, step.num_tokens - prefill_tokens, prefill_tokens))

    def ended(self, sequence: Sequence) -> None:
        """A request that ran has ended."""
        self._forgiven = 1.0
        output, tokens = sequence.output, len(sequence.output_ids)
        finished, made = output.finish_reason in ("stop", "length"), tokens - output.resumed
        # What was parked for its reader has waited for that.
        steady = not sequence.recovery.retractions and sequence.request.max_lag is None
        if sequence.sampled_in and made >= _TELLING and steady:
            steps = self.memory.pages.last_resolved - sequence.sampled_in
            self.pace += _STEADY * (max(0.0, steps / (made - 1)) - self.pace)
        if possible := sequence.possible:
            lengths = self._lengths.setdefault(possible.bit_length(), _Lengths())
            if finished or tokens > lengths.share * possible:  # else it was cut short, or goes on later
                lengths.add(tokens / possible)
        if sequence.output.predicted_ttft is not None and steady:
            request, margins = sequence.request, self._margin(sequence)
            took = (output.computed_times or [self.times.now])[0] - output.arrival
            for at, limit, seconds in (
                (0, request.ttft_target, took),
                (1, request.deadline if finished else None, self.times.now - output.arrival),
            ):
                if limit is not None:
                    margins[at] *= 1 + _RAISED * ((1.0 if seconds > limit else 0.0) - _LATE)
                    margins[at] = min(max(_MARGIN[0], margins[at]), _MARGIN[1])

    def _margin(self, sequence: Sequence) -> list[float]:
        return self._margins[min(max(-_PRIORITIES, sequence.priority), _PRIORITIES)]

    def lengths(self, sequence: Sequence) -> _Lengths:
        """Of outputs that may have about as many tokens."""
        return self._lengths.get(sequence.possible.bit_length(), _UNKNOWN)

    # -- what follows ---------------------------------------------------------------------------

    def alone(self, sequence: Sequence, rows: int) -> float:
        """Seconds that a request needs in one of ``rows`` slots that are taken; 0 before steps were
        measured."""
        if not self.times.known:
            return 0.0
        start, length = sequence.length - self.memory.uncached(sequence), sequence.length
        tokens = self.lengths(sequence).share * max(0, sequence.cursor.remaining)
        return self.times.prefill(start, length - start) + tokens * self._token(sequence, rows)

    def _token(self, sequence: Sequence, rows: int) -> float:
        """Seconds of a token in a step with so many rows like that of a request."""
        return self.pace * self.times.generating(rows, rows * (sequence.length + sequence.max_length) / 2)

    def late(self, queues: RequestQueues, sequence: Sequence, now: float) -> Late | None:
        """What a new request would miss of its ``ttft_target`` and its ``deadline``; None: nothing, or that
        is not known. Its output has the prediction. Raises PolicyFailed."""
        found = self.expect(queues, sequence, now)
        if found is None:
            return None
        request, sure, (margin, end_margin) = sequence.request, self._forgiven, self._margin(sequence)
        late, gone = None, now - sequence.arrival
        first = found.first * margin
        sequence.output.predicted_ttft = gone + found.first
        if request.ttft_target is not None:
            late = Late("ttft_target", first, gone + sure * first - request.ttft_target)
        if (late is None or late.late <= 0) and request.deadline is not None and found.end is not None:
            end = found.end * end_margin
            late = Late("deadline", end, gone + sure * end - request.deadline)
        if late is None or late.late <= 0:
            return None
        if not (queues.running or len(queues.waiting)):
            self._forgiven *= _FORGIVEN
        return late

    def expect(self, queues: RequestQueues, sequence: Sequence, now: float) -> Prediction | None:
        """What comes of a new request, without a margin, if nothing overtakes it that comes later; None: not
        known. O(requests that run, and _LOOK that go before it). Raises PolicyFailed."""
        if not self.times.known:
            return None
        try:
            ahead = queues.waiting.ahead(sequence)
            looked = [*islice(queues.waiting.order(), min(ahead, _LOOK))]
        except Exception as error:
            raise PolicyFailed.because(queues.waiting, error) from error
        course, half = _Course(self, queues, sequence.priority), 0.0
        course.seconds = self._in_flight(now)
        for at, each in enumerate((*looked, sequence)):
            if not course.admit(each):
                return None
            if at == len(looked) // 2:
                half = course.seconds
        # As many more alike take as long as the second half of those that were looked at.
        beyond = (ahead - len(looked)) / max(1, len(looked) - len(looked) // 2) * (course.seconds - half)
        while course.prompts:
            course.go_on()
        first, lengths = course.seconds + beyond, self.lengths(sequence)
        if not lengths.known:
            return Prediction(first, None)
        rows = min(self.config.running_requests, len(course.rows) + len(queues.waiting) - ahead)
        tokens = max(0.0, lengths.share * sequence.cursor.remaining - 1)
        return Prediction(first, first + tokens * self._token(sequence, max(1, rows)))

    def _in_flight(self, now: float) -> float:
        """Seconds that the steps in flight still take."""
        times, left = self.times, 0.0
        context = times.of(1) - times.seconds(Sizes(1))
        for step, rows, prefill in self._newest:
            if step > self.memory.pages.last_resolved:
                seconds = times.seconds(Sizes(rows, 0, prefill, prefill * prefill / 2)) + rows * context
                # The first one has begun when the one before it ended.
                left += seconds if left else max(1e-9, seconds - max(0.0, now - times.now))
        return left


class _Lengths:
    """Which share of the tokens that they may have outputs use."""

    def __init__(self) -> None:
        self._newest: deque[float] = deque(maxlen=_OUTPUTS)
        self._sorted: list[float] = []
        #: the mean; all of them, until any was seen
        self.share = 1.0

    def add(self, share: float) -> None:
        self._newest.append(share)
        self._sorted = []
        self.share = sum(self._newest) / len(self._newest)

    @property
    def known(self) -> bool:
        return len(self._newest) >= _ENOUGH

    def left(self, sequence: Sequence, remaining: int) -> int:
        """Tokens that come of such an output which may have so many more."""
        if not (remaining and self._newest):
            return remaining
        if not self._sorted:
            self._sorted = sorted(self._newest)
        shares, possible = self._sorted, sequence.possible
        used = possible - remaining
        longer = bisect_right(shares, used / possible)
        if longer == len(shares):
            return remaining
        at = longer + int(sequence.key * _GOLDEN % 1 * (len(shares) - longer))
        return min(remaining, max(1, round(shares[at] * possible) - used))


_UNKNOWN = _Lengths()


class _Prompt:
    """A prompt under way: ``left`` positions are to compute from ``start`` on, then ``tokens`` come."""

    __slots__ = ("left", "pages", "start", "tokens")

    def __init__(self, start: int, left: int, tokens: int, pages: float) -> None:
        self.start, self.left, self.tokens, self.pages = start, max(1, left), tokens, pages


class _Course:
    """The steps to come, one after the other: rows that generate, and prompts under way."""

    def __init__(self, forecast: Forecast, queues: RequestQueues, priority: int) -> None:
        """Of what runs now. With preemption, requests of lower ``priority`` are not in the way."""
        config, self._times, self._memory = forecast.config, forecast.times, queues.memory
        self._forecast, self._config, self._pace = forecast, config, forecast.pace
        self._overlap, self._chunk = config.overlap_steps or 0, max(config.chunk_tokens, queues.batch.grain)
        self._per_context = self._times.seconds(Sizes(0, 1)) - self._times.seconds(Sizes(0))
        #: steps so far, and their seconds
        self.step = self.seconds = 0.0
        #: by the step after which a request has all its tokens: its length then, and its pages
        self.rows: list[tuple[float, int, float]] = []
        #: positions that they read, and seconds of a step without these, by their number
        self._context, self._alone = 0.0, dict[int, float]()
        #: by the step for which this is known: pages that come back with a slot
        self._ended: deque[tuple[float, float]] = deque()
        self.prompts: list[_Prompt] = []
        self._lengths_known = True
        self._slots, self._pages = config.running_requests, float(self._memory.available)
        for each in queues.running.values():
            held = len(each.kv.pages)
            if each.idle or (config.preemption and each.priority < priority):
                self._pages += held
                continue
            tokens, more = self._follow(each)
            self._lengths_known = self._lengths_known and forecast.lengths(each).known
            self._pages -= more
            self._slots -= 1
            start = each.cursor.computed
            if not each.cursor.relay_ready:
                self.prompts.append(_Prompt(start, each.length - start, tokens, held + more))
                continue
            heappush(self.rows, (tokens * self._pace, each.length + tokens, held + more))
            self._context += each.length
        self._end()

    def _follow(self, sequence: Sequence) -> tuple[int, float]:
        """Tokens that come of a request, and pages that admission keeps back for what may come."""
        lengths, remaining = self._forecast.lengths(sequence), max(0, sequence.cursor.remaining)
        kept = min(remaining, self._config.clip_new_tokens) * self._forecast.ratio.value
        return lengths.left(sequence, remaining), kept / self._memory.pages.page_size

    def admit(self, sequence: Sequence) -> bool:
        """Go on until there are a slot and pages for a request; False: when is not known."""
        memory, (tokens, more) = self._memory, self._follow(sequence)
        hit = memory.lookup(sequence)[0]
        pages = memory.pages.pages_for(sequence.length) - hit + more
        while self._slots <= 0 or (pages > self._pages and (self.rows or self.prompts)):
            if not (self._lengths_known and self.go_on()):
                return False
        self._lengths_known = self._lengths_known and self._forecast.lengths(sequence).known
        self._slots -= 1
        self._pages -= pages
        start = hit * memory.pages.page_size
        self.prompts.append(_Prompt(start, sequence.length - start, tokens, pages))
        return True

    def go_on(self) -> bool:
        """To the next event; False: there is none."""
        if self.prompts:
            self._prefill()
        elif self.rows:
            until = self.rows[0][0] if not self._ended else min(self.rows[0][0], self._ended[0][0])
            self.seconds += (until - self.step) * self._decoding(until - self.step)
            self._pass(until - self.step)
        elif self._ended:
            self.step = self._ended[0][0]
        else:
            return False
        self._end()
        return True

    def _end(self) -> None:
        """Rows that have all their tokens leave, and what ended is known ``overlap_steps`` later."""
        rows, ended, now = self.rows, self._ended, self.step + 1e-6
        while rows and rows[0][0] <= now:
            end, length, pages = heappop(rows)
            self._context -= length
            ended.append((end + self._overlap, pages))
        while ended and ended[0][0] <= now:
            self._slots += 1
            self._pages += ended.popleft()[1]

    def _decoding(self, steps: float = 1) -> float:
        """Mean seconds of so many steps without prefill."""
        rows = len(self.rows)
        alone = self._alone.get(rows)
        if alone is None:
            alone = self._alone[rows] = self._times.seconds(Sizes(rows))
        return alone + self._per_context * (self._context + rows * (steps - 1) / 2)

    def _pass(self, steps: float) -> None:
        self.step += steps
        self._context += len(self.rows) * steps / max(1.0, self._pace)

    def _prefill(self) -> None:
        """A step with prefill, or several that are alike."""
        rows, mixed, times = len(self.rows), self._config.mixed, self._times
        taken, left = self._chunks(rows if mixed else 0)
        tokens = sum(length for _, length in taken)
        pairs = sum(length * (prompt.start + length / 2) for prompt, length in taken)
        steps, (first, length) = 1, taken[0]
        if len(taken) == 1 and first.left >= 2 * length:
            until = self.rows[0][0] - self.step if rows else first.left
            steps = int(max(1, min(first.left // length, until, _ALIKE if left else first.left)))
            pairs += length * length * (steps - 1) / 2
        decodes = mixed or self._config.step_priority == "decode"
        if not mixed:
            decoding = self._decoding(steps) if rows and decodes else 0.0
            self.seconds += steps * (times.seconds(Sizes(0, 0, tokens, pairs)) + decoding)
        else:
            context = self._context + rows * (steps - 1) / 2
            self.seconds += steps * times.seconds(Sizes(rows, context, tokens, pairs))
        if decodes:
            self._pass(steps)
        for prompt, length in taken:
            prompt.start += steps * length
            prompt.left -= steps * length
            if prompt.left <= 0:  # it has its first token
                more = max(0, prompt.tokens - 1)
                heappush(self.rows, (self.step + more * self._pace, prompt.start + more, prompt.pages))
                self._context += prompt.start
        self.prompts = [each for each in self.prompts if each.left > 0]

    def _chunks(self, beside: int) -> tuple[list[tuple[_Prompt, int]], bool]:
        """The prompts that the next step has, each with its tokens; whether time bounds them."""
        config, times = self._config, self._times
        most = config.max_prefill_tokens or config.step_tokens
        left = times.left(self._decoding()) if times.target and self.rows else 0.0
        bounded, taken, before = left > 0, list[tuple[_Prompt, int]](), beside
        for prompt in self.prompts:
            room = min(config.step_tokens - before, max(most + beside - before, 0 if taken else self._chunk))
            length = min(prompt.left, self._chunk, room)
            if bounded and times.prefill(prompt.start, length, before) > left:
                length = times.fitting(prompt.start, left, before)
                least = self._memory.pages.page_size
                length = max(length, _LEAST) if not taken else length if length >= least else 0
            if length <= 0:
                break
            if bounded:
                left = max(0.0, left - times.prefill(prompt.start, length, before))
            taken.append((prompt, length))
            before += length
        return taken, bounded
