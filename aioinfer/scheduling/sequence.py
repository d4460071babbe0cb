"""Sequence: one request in the scheduler, with its tokens, its pages and how far it is computed."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any

from aioinfer.cache.namespace import COMMON, Namespace
from aioinfer.cache.radix import token_key
from aioinfer.outputs import FinishReason
from aioinfer.prompt_ids import key_of
from aioinfer.request import Output
from aioinfer.scheduling.adapters import AdapterVersion
from aioinfer.scheduling.allocation import Allocation
from aioinfer.scheduling.cursor import Cursor, PrefillCursor, TokenCursor
from aioinfer.scheduling.pooled import Pooled
from aioinfer.speculation.drafting import Drafting
from aioinfer.text.output import OutputText

if TYPE_CHECKING:
    from aioinfer.steering.state import SteeringState
    from aioinfer.text.grammar import GrammarState

__all__ = ["MakeCursor", "ParkedFor", "Recovery", "Sequence", "SequenceState"]

#: makes the cursor of a sequence from its prompt's length, its output ids and its greatest length
MakeCursor = Callable[[int, list[int], int], Cursor]


class SequenceState(Enum):
    """``WAITING -> RUNNING -> FINISHED``; retraction goes back from RUNNING to WAITING."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class ParkedFor(Enum):
    """Reason for which nothing is computed for a sequence; it may have several."""

    #: its consumer, who has left too many tokens unread
    READER = "reader"
    #: its own text, which too many tokens do not have yet
    TEXT = "text"
    #: an update of the weights, for which it has not begun
    UPDATE = "update"
    #: its logits processors, which decide how it goes on
    ANSWER = "answer"


class Recovery:
    """Which launched steps do not count for a sequence, and how often it was retracted."""

    __slots__ = ("failed_at", "junk_until", "ran_out_at", "retractions", "void_until")

    def __init__(self) -> None:
        #: rows of launched steps up to this one sampled nothing that counts
        self.void_until = 0
        #: rows of launched steps up to this one computed junk, because a step before them failed
        self.junk_until = 0
        #: the cursor's ``progress`` when a step of this request last ran out of memory
        self.ran_out_at = -1
        #: the same when one last raised
        self.failed_at = -1
        self.retractions = 0


class Sequence:
    """One request, from its queueing to its end. Only the thread that plans (the event loop) reads or writes
    it; what comes of it is in ``output``.

    Its concerns are members: ``cursor`` (how far it is), ``kv`` (slot and pages), ``recovery`` (which steps
    in flight do not count) and ``text`` (tokens to text).
    """

    __slots__ = (
        "_prompt_key",
        "adapter",
        "consumer",
        "counted",
        "cursor",
        "drafting",
        "expected",
        "forked",
        "grammar",
        "key",
        "kv",
        "max_length",
        "namespace",
        "output",
        "output_ids",
        "params",
        "parked_for",
        "passed",
        "place",
        "pooled",
        "prompt_ids",
        "recovery",
        "request",
        "sampled_in",
        "seed",
        "state",
        "steering",
        "stop_ids",
        "text",
    )

    def __init__(
        self,
        key: int,
        output: Output,
        *,
        stop_ids: frozenset[int],
        max_length: int,
        place: tuple[int, ...] | None = None,
        namespace: Namespace = COMMON,
        adapter: AdapterVersion | None = None,
        text: OutputText | None = None,
        grammar: GrammarState | None = None,
        steering: SteeringState | None = None,
        cursor: MakeCursor | None = None,
        prompt_key: bytes | None = None,
    ) -> None:
        """``output`` has the prompt, the seed, and what was generated before, if it is resumed.

        ``key``: rises with every sequence of an engine. ``max_length``: of prompt and output together.
        ``place``: orders the queue; by default the order of the keys. ``cursor``: of a diffusion model; by
        default the sequence grows token by token, unless ``max_tokens`` is 0.
        """
        request = output.request
        self.key = key
        self.request = request
        self.output = output
        self.params = request.params
        self.prompt_ids: abc.Sequence[int] = output.prompt_ids
        #: the list of the output
        self.output_ids = output.token_ids
        self.seed = output.seed
        self.stop_ids = stop_ids
        self.max_length = max_length
        self.place = (key, key) if place is None else place
        #: prefixes are shared within a namespace only
        self.namespace = namespace
        self.adapter = adapter
        self.grammar = grammar
        self.steering = steering
        self.text = OutputText(None) if text is None else text
        #: tokens of its output that its budget has counted; what it begins with was counted before
        self.counted = len(self.output_ids)
        #: reads the output: a StreamCell, in an engine
        self.consumer: Any = None
        self.state = SequenceState.WAITING
        #: nothing is computed while something is in it; see RequestQueues.park
        self.parked_for: frozenset[ParkedFor] = frozenset()
        #: until it is admitted: the sequence that it was forked from, and how many positions they share
        self.forked: tuple[Sequence, int] | None = None
        #: what it is parked for will come soon: it keeps its slot meanwhile
        self.expected = False
        #: rounds of admission in which this request was the eldest and another one was admitted
        self.passed = 0
        #: the step that has the last of its known tokens, and samples the next one; 0: none yet
        self.sampled_in = 0
        self.kv = Allocation()
        self.recovery = Recovery()
        #: drafts for it; None: nothing is drafted
        self.drafting: Drafting | None = None
        #: hidden states that are wanted, as far as they are computed; None: none are
        self.pooled = None if request.pooling is None else Pooled(request.pooling)
        self._prompt_key = prompt_key

        lengths = len(self.prompt_ids), self.output_ids, max_length
        scored = None if self.params.prompt_logprobs is None else output.prompt_logprobs
        self.cursor: Cursor
        if cursor is not None:
            self.cursor = cursor(*lengths)
        elif self.params.max_tokens == 0:
            self.cursor = PrefillCursor(*lengths, scored, request.first_scored, self.pooled)
        else:
            self.cursor = TokenCursor(*lengths, scored, request.first_scored)
        output.has_text = self.text.enabled
        output.pieces = self.text.pieces
        output.step_map = self.cursor.step_map
        output.plain = (
            self.text.enabled
            and not self.text.costly
            and self.params.logprobs is None
            and type(self.cursor) is TokenCursor
        )
        output.accepted = True

    # -- what was asked: for queue policies -----------------------------------------------------

    @property
    def priority(self) -> int:
        """Larger goes first, where the policy looks at it."""
        return self.request.priority

    @property
    def routing_key(self) -> str | None:
        """Groups requests for the policy ``routing-key``."""
        return self.request.routing_key

    @property
    def arrival(self) -> float:
        """Seconds of the engine's clock."""
        return self.output.arrival

    @property
    def deadline(self) -> float | None:
        """On the same scale, when it should have ended."""
        return self.output.deadline

    @property
    def possible(self) -> int:
        """Output tokens that it may have."""
        return self.max_length - len(self.prompt_ids)

    # -- weights --------------------------------------------------------------------------------

    def switch(self, version: int) -> None:
        """Go on with other weights: no KV of those before is read. Its text is not behind."""
        output = self.output
        if self.output_ids:
            output.note_switch(output.weight_version)
        elif output.prompt_logprobs:
            # All logprobs of the prompt are computed again. Nothing is in flight, and no KV is kept.
            output.prompt_logprobs.clear()
            self.cursor.restart(0)
        self.take_version(version)
        if self.steering is not None:
            self.steering.forget()
        output.block = None
        if self.cursor.forget_draft():
            output.draft_version += 1

    def take_version(self, version: int) -> None:
        """Have weights of this version compute the next token."""
        self.output.weight_version = version
        self.namespace = self.namespace._replace(weights=version)
        self.kv.names = []

    # -- how far it is --------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """Tokens of the sequence, placeholders or the block under way included."""
        return self.cursor.length

    @property
    def pending(self) -> int:
        """Placeholders: tokens sampled on the device that the host has not read."""
        return self.cursor.pending

    @property
    def known(self) -> int:
        """Tokens of the sequence that the host has read."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def parked(self) -> bool:
        """Nothing is computed for it until all that it waits for has come."""
        return bool(self.parked_for)

    @property
    def idle(self) -> bool:
        """It is parked, and others may have its slot and its pages meanwhile."""
        return bool(self.parked_for) and not self.expected

    @property
    def finished(self) -> bool:
        """The scheduler has ended it."""
        return self.state is SequenceState.FINISHED

    def restart(self, cached: int = 0) -> None:
        """Note that the KV is gone except for ``cached`` positions; the tokens stay."""
        self.cursor.restart(cached)
        self._forget_device()

    def rewind(self, computed: int) -> None:
        """Continue from ``computed`` positions of known tokens, as if the slot had just been taken."""
        self.cursor.rewind(computed)
        self._forget_device()

    def _forget_device(self) -> None:
        self.kv.forget_device()
        if self.drafting is not None:
            self.drafting.computed = 0

    # -- tokens ---------------------------------------------------------------------------------

    def known_ids(self, start: int, stop: int) -> abc.Sequence[int]:
        """Host-known token ids at positions [start, stop)."""
        prompt = len(self.prompt_ids)
        if stop <= prompt:
            return self.prompt_ids[start:stop]
        if start >= prompt:
            return self.output_ids[start - prompt : stop - prompt]
        return [*self.prompt_ids[start:], *self.output_ids[: stop - prompt]]

    def token_key(self, start: int, stop: int) -> bytes:
        """The same as a key of the prefix cache."""
        prompt = self._prompt_key
        if prompt is None:
            prompt = self._prompt_key = key_of(self.prompt_ids)
        key = prompt[4 * start : 4 * stop]
        over = stop - len(self.prompt_ids)
        if over > 0:
            key += token_key(self.output_ids[max(0, start - len(self.prompt_ids)) : over])
        return key

    def append(self, token: int) -> FinishReason | None:
        """Append an output token; returns why the output ends with it, if it does."""
        self.output_ids.append(token)
        if token in self.stop_ids:
            self.output.stop_reason = token
            return "stop"
        return "length" if self.known >= self.max_length else None

    def trim(self, count: int) -> None:
        """Drop all but the first ``count`` output tokens of a sequence that has ended."""
        if self.drafting is not None:
            self.drafting.cut(len(self.output_ids) - count)
            self.count_predictions()
        if self.request.budget is not None:
            self.request.budget.left += len(self.output_ids) - count
        self.output.trim(count)

    def count_predictions(self) -> None:
        """Tell the output how much of the caller's prediction was right."""
        output, drafting = self.output, self.drafting
        if drafting is not None:
            output.accepted_prediction = drafting.accepted_prediction
            output.rejected_prediction = drafting.rejected_prediction

    def __repr__(self) -> str:
        label = "" if self.output.label is None else f" {self.output.label!r}"
        return (
            f"<Sequence {self.key}{label} {self.state.value} prompt={len(self.prompt_ids)} "
            f"output={len(self.output_ids)}+{self.pending} computed={self.cursor.computed} "
            f"slot={self.kv.slot}>"
        )
