"""Request: one sequence being generated, and everything the scheduler knows about it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Self

from aioinfer.cache.namespace import COMMON, Namespace
from aioinfer.cache.radix import Lock, token_key
from aioinfer.outputs import Draft, FinishReason, RequestMetrics, Result, TokenLogprob, Usage
from aioinfer.scheduling.cursor import Cursor, PrefillCursor, TokenCursor
from aioinfer.text.output import OutputText

if TYPE_CHECKING:
    from aioinfer.params import SamplingParams
    from aioinfer.scheduling.adapters import AdapterVersion
    from aioinfer.scheduling.pooled import Pooled
    from aioinfer.scheduling.states import RequestStates
    from aioinfer.speculation.drafting import Drafting
    from aioinfer.text.grammar import GrammarState

__all__ = ["Allocation", "MakeCursor", "ParkedFor", "Recovery", "Request", "RequestState"]

#: makes the cursor of a request from its prompt's length, its output ids and its greatest length
MakeCursor = Callable[[int, list[int], int], Cursor]

_NO_PARTINGS: Mapping[int, int] = MappingProxyType({})


class RequestState(Enum):
    """``PREPARING -> WAITING -> RUNNING -> FINISHED``; retraction goes back from RUNNING to WAITING.

    While PREPARING, the prompt is being tokenized, and the scheduler does not know the request.
    """

    PREPARING = "preparing"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class ParkedFor(Enum):
    """What a parked request waits for; it may be both."""

    #: its consumer, who has left too many tokens unread
    READER = "reader"
    #: its own text, which too many tokens do not have yet
    TEXT = "text"
    #: an update of the weights, for which it has not begun
    UPDATE = "update"


class Allocation:
    """The KV memory of a request: its slot and its pages. Managed by
    :class:`~aioinfer.scheduling.memory.Memory`::

        |-- cached pages ----|-- private pages --|
    """

    __slots__ = (
        "announced",
        "cacheable",
        "cached_pages",
        "cached_tokens",
        "hit",
        "last_step",
        "lock",
        "pages",
        "partings",
        "sent_pages",
        "slot",
        "states",
    )

    def __init__(self) -> None:
        self.slot = 0
        self.pages: list[int] = []
        #: how many of ``pages`` belong to the prefix cache, where ``lock`` holds them
        self.cached_pages = 0
        self.lock: Lock | None = None
        #: the KV may be offered to other requests
        self.cacheable = True
        #: prompt tokens that were in the cache at the first admission
        self.cached_tokens = 0
        #: what the last lookup in the cache found; kept by Memory
        self.hit: tuple[int, int, int, object] = (-1, 0, 0, None)
        #: the device side knows the request's parameters
        self.announced = False
        #: how many of ``pages`` the device side knows
        self.sent_pages = 0
        #: the newest launched step with a row of this request; kept by the batch while the request is in it
        self.last_step = 0
        #: while it runs, if the model has recurrent state
        self.states: RequestStates | None = None
        #: where requests that wait for its prefix part from it, by their keys; kept by StateCells
        self.partings: Mapping[int, int] = _NO_PARTINGS

    def forget_device(self) -> None:
        """The next row announces the request and all its pages again."""
        self.announced = False
        self.sent_pages = 0

    def take_new_pages(self) -> tuple[int, list[int]]:
        """Pages that the device side does not know yet, and the index of the first; it is told now."""
        first = self.sent_pages
        self.sent_pages = len(self.pages)
        return first, self.pages[first:]


class Recovery:
    """Which launched steps do not count for a request, and what happened to it before."""

    __slots__ = ("junk_until", "ran_out_at", "retractions", "void_until")

    def __init__(self) -> None:
        #: rows of launched steps up to this one sampled nothing that counts
        self.void_until = 0
        #: rows of launched steps up to this one computed junk, because a step before them failed
        self.junk_until = 0
        #: the cursor's ``progress`` when a step of this request last ran out of memory
        self.ran_out_at = -1
        self.retractions = 0


class Request:
    """One sequence. Only the thread that plans (the event loop) reads or writes it.

    Its concerns are members: ``cursor`` (how far it is), ``kv`` (slot and pages), ``recovery`` (which steps
    in flight do not count) and ``text``. The lists of the output are its own.
    """

    __slots__ = (
        "_prompt_key",
        "adapter",
        "admitted_at",
        "arrival",
        "consumer",
        "cursor",
        "drafting",
        "error",
        "finish_reason",
        "finished_at",
        "grammar",
        "identical",
        "key",
        "kv",
        "label",
        "logprobs",
        "max_length",
        "namespace",
        "output_ids",
        "params",
        "parked_for",
        "passed",
        "place",
        "plain",
        "pooled",
        "priority",
        "prompt_ids",
        "prompt_logprobs",
        "queue_behind",
        "recovery",
        "resumed",
        "routing_key",
        "seed",
        "state",
        "stop_ids",
        "stop_reason",
        "switches",
        "text",
        "text_behind",
        "token_times",
        "weight_version",
    )

    def __init__(
        self,
        key: int,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        stop_ids: frozenset[int],
        max_length: int,
        arrival: float = 0.0,
        text: OutputText | None = None,
        grammar: GrammarState | None = None,
        priority: int = 0,
        namespace: Namespace = COMMON,
        routing_key: str | None = None,
        queue_behind: int = 0,
        cursor: MakeCursor | None = None,
        label: str | None = None,
    ) -> None:
        """``cursor``: of a diffusion model; by default the sequence grows token by token, unless
        ``max_tokens`` is 0."""
        self.params = params
        #: what came so far of the hidden states that are wanted, set before :meth:`set_prompt`; None: none is
        self.pooled: Pooled | None = None
        #: the caller's name for it
        self.label = label
        #: larger goes first, where the policy looks at it
        self.priority = priority
        #: prefixes are shared within a namespace only
        self.namespace = namespace
        #: what computes it besides the model; see AdapterRegistry.take
        self.adapter: AdapterVersion | None = None
        self.routing_key = routing_key
        #: so many requests that arrive later go first
        self.queue_behind = queue_behind
        self.state = RequestState.WAITING
        #: nothing is computed while something is in it; see RequestQueues.park
        self.parked_for: frozenset[ParkedFor] = frozenset()
        #: rounds of admission in which this request was the eldest and another one was admitted
        self.passed = 0

        self.output_ids: list[int] = []
        #: one per output token, if they were asked for
        self.logprobs: list[TokenLogprob] = []
        #: of the prompt's tokens from the second on, as far as they are known
        self.prompt_logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.error: BaseException | None = None
        #: what is told of progress; the engine keeps a StreamCell here
        self.consumer: object | None = None

        self.arrival = arrival
        self.admitted_at: float | None = None
        self.finished_at: float | None = None
        #: one per output token that has its text
        self.token_times: list[float] = []
        #: some tokens have no text yet
        self.text_behind = False

        #: output tokens that it began with, and whether the output is that of an undisturbed request
        self.resumed = 0
        self.identical = True
        #: of the weights that compute its next token; and where these took over from others: how many tokens
        #: there were, how many pieces of text, and the version before
        self.weight_version = 0
        self.switches: list[tuple[int, int, int]] = []

        self.kv = Allocation()
        self.recovery = Recovery()
        #: what is drafted for it; None: nothing is
        self.drafting: Drafting | None = None
        self._prompt_key: bytes | None = None
        self.set_prompt(
            key,
            prompt_ids,
            seed=seed,
            stop_ids=stop_ids,
            max_length=max_length,
            text=text,
            grammar=grammar,
            cursor=cursor,
        )

    @classmethod
    def preparing(
        cls,
        params: SamplingParams,
        *,
        arrival: float,
        priority: int = 0,
        namespace: Namespace = COMMON,
        routing_key: str | None = None,
        queue_behind: int = 0,
        label: str | None = None,
    ) -> Self:
        """A request in state PREPARING, with key 0 until :meth:`set_prompt`."""
        request = cls(
            0,
            (),
            params,
            seed=0,
            stop_ids=frozenset(),
            max_length=0,
            arrival=arrival,
            priority=priority,
            namespace=namespace,
            routing_key=routing_key,
            queue_behind=queue_behind,
            label=label,
        )
        request.state = RequestState.PREPARING
        return request

    def set_prompt(
        self,
        key: int,
        prompt_ids: Sequence[int],
        *,
        seed: int,
        stop_ids: frozenset[int],
        max_length: int,
        text: OutputText | None = None,
        grammar: GrammarState | None = None,
        cursor: MakeCursor | None = None,
        arrivals: int | None = None,
    ) -> None:
        """Everything that is known once the prompt is tokenized. The state stays as it is.

        ``arrivals``: the requests so far that queue behind none; by default as many as ``key``.
        """
        #: minted by the engine, increasing with submission; a client's own id is only a label
        self.key = key
        #: where it queues: in the order of arrival, but for ``queue_behind``
        self.place = ((key if arrivals is None else arrivals) + self.queue_behind, key)
        self.prompt_ids = prompt_ids
        self.seed = seed
        self.stop_ids = stop_ids
        self.grammar = grammar
        #: prompt and output together never exceed this
        self.max_length = max_length
        self.text: OutputText = text if text is not None else OutputText(None)
        sequence = len(prompt_ids), self.output_ids, max_length
        scored = None if self.params.prompt_logprobs is None else self.prompt_logprobs
        self.cursor: Cursor
        if cursor is not None:
            self.cursor = cursor(*sequence)
        elif self.params.max_tokens == 0:
            self.cursor = PrefillCursor(*sequence, scored, self.first_scored, self.pooled)
        else:
            self.cursor = TokenCursor(*sequence, scored, self.first_scored)
        #: what is read of it before its end is text and token ids, which have their text when they come
        self.plain = (
            self.text.enabled
            and not self.text.costly
            and self.params.logprobs is None
            and type(self.cursor) is TokenCursor
        )

    def switch(self, version: int) -> None:
        """Other weights compute the next token, and no KV of those before is read. Its text is not behind."""
        if self.output_ids:
            self.note_switch(self.weight_version)
        elif self.prompt_logprobs:
            self.rescore()
        self.take_version(version)
        self.cursor.forget_draft()

    def rescore(self) -> None:
        """All logprobs of the prompt are computed again. Nothing is in flight, and no KV is kept."""
        self.prompt_logprobs.clear()
        self.cursor.restart(0)

    def take_version(self, version: int) -> None:
        """Weights of this version compute the next token."""
        self.weight_version = version
        self.namespace = self.namespace._replace(weights=version)

    def note_switch(self, before: int) -> None:
        """All tokens that there are were computed by weights of the version ``before``, or of earlier
        ones."""
        count, pieces = len(self.output_ids), len(self.text.pieces)
        if not self.switches or self.switches[-1][:2] != (count, pieces):
            self.switches.append((count, pieces, before))
        self.plain = self.identical = False

    def switch_behind(self, tokens: int, pieces: int) -> tuple[int, int, int] | None:
        """The first switch behind so many tokens, or behind so many pieces of text."""
        return next((each for each in self.switches if each[0] > tokens or each[1] > pieces), None)

    @property
    def newest_version(self) -> int:
        """Of the weights that computed the last token; without one, of those that will compute the first."""
        if not self.switches or len(self.output_ids) > self.switches[-1][0]:
            return self.weight_version
        return self.switches[-1][2]

    def refuse(self, error: BaseException | None) -> None:
        """End a request that the scheduler does not know, or failed to end."""
        self.state = RequestState.FINISHED
        self.finish_reason = "abort"
        self.error = error
        self.text_behind = False

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
    def first_scored(self) -> int:
        """The first position whose next token of the prompt gets a logprob."""
        return max(0, self.params.logprob_start_len - 1)

    @property
    def known(self) -> int:
        """Tokens of the sequence that the host has read."""
        return len(self.prompt_ids) + len(self.output_ids)

    def restart(self, cached: int = 0) -> None:
        """The KV is gone except for ``cached`` positions; the tokens stay."""
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

    def known_ids(self, start: int, stop: int) -> Sequence[int]:
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
            prompt = self._prompt_key = token_key(self.prompt_ids)
        key = prompt[4 * start : 4 * stop]
        over = stop - len(self.prompt_ids)
        if over > 0:
            key += token_key(self.output_ids[max(0, start - len(self.prompt_ids)) : over])
        return key

    def append(self, token: int) -> FinishReason | None:
        """One more token of the output; why that ends with it, if it does."""
        self.output_ids.append(token)
        if token in self.stop_ids:
            self.stop_reason = token
            return "stop"
        return "length" if self.known >= self.max_length else None

    def trim(self, count: int) -> None:
        """Forget all but the first ``count`` output tokens, of a request that has ended."""
        if self.drafting is not None:
            self.drafting.cut(len(self.output_ids) - count)
        del self.output_ids[count:]
        del self.logprobs[count:]
        self.cursor.trim(count)

    # -- results ------------------------------------------------------------------------

    @property
    def draft_version(self) -> int:
        """Rises with every new draft that the caller asked for."""
        return self.cursor.draft_version

    def draft(self) -> Draft | None:
        """What may follow the output, if the caller asked for drafts and anything is known."""
        return self.cursor.draft(self)

    @property
    def parked(self) -> bool:
        """Nothing is computed for it until all that it waits for has come."""
        return bool(self.parked_for)

    @property
    def finished(self) -> bool:
        return self.state is RequestState.FINISHED

    @property
    def ended(self) -> bool:
        """Finished, and the whole output is known: it is final."""
        return self.state is RequestState.FINISHED and not self.text_behind

    @property
    def usage(self) -> Usage:
        usage = Usage(len(self.prompt_ids), self._with_text, self.kv.cached_tokens)
        if self.drafting is None:
            return usage
        drafting = self.drafting
        return replace(
            usage,
            accepted_prediction_tokens=drafting.accepted_prediction,
            rejected_prediction_tokens=drafting.rejected_prediction,
        )

    @property
    def _with_text(self) -> int:
        """Output tokens that are known not to lie behind a stop."""
        return len(self.token_times) if self.text_behind else len(self.output_ids)

    @property
    def computed_times(self) -> list[float]:
        """The times of the tokens that it did not begin with."""
        return self.token_times[self.resumed :] if self.resumed else self.token_times

    @property
    def metrics(self) -> RequestMetrics:
        times = tuple(self.token_times)
        return RequestMetrics(self.arrival, self.admitted_at, self.finished_at, times, self.resumed)

    def result(self) -> Result:
        """What there is of the output; final once the request has finished."""
        step_map = self.cursor.step_map
        count = self._with_text
        return Result(
            text=self.text.text,
            token_ids=self.output_ids[:count],
            finish_reason=self.finish_reason if self.finish_reason and self.ended else "abort",
            usage=self.usage,
            stop_reason=self.stop_reason,
            metrics=self.metrics,
            prompt_token_ids=list(self.prompt_ids),
            logprobs=None if self.params.logprobs is None else self.logprobs[:count],
            step_map=None if step_map is None else list(step_map[:count]),
            prompt_logprobs=self._all_prompt_logprobs(),
            request_id=self.request_id,
            resumed=self.resumed,
            identical=self.identical,
            weight_version=self.newest_version,
            pooled=None if self.pooled is None else self.pooled.result(len(self.prompt_ids)),
        )

    def _all_prompt_logprobs(self) -> list[TokenLogprob | None] | None:
        if self.params.prompt_logprobs is None:
            return None
        without = min(1 + self.first_scored, len(self.prompt_ids))
        return [*([None] * without), *self.prompt_logprobs]

    @property
    def request_id(self) -> str:
        """What callers know it by: their own name for it, or one that is made when it is first asked for."""
        if self.label is None:
            self.label = f"req_{uuid.uuid4().hex[:24]}"
        return self.label

    def __repr__(self) -> str:
        computed, slot = self.cursor.computed, self.kv.slot
        label = "" if self.label is None else f" {self.label!r}"
        return (
            f"<Request {self.key}{label} {self.state.value} prompt={len(self.prompt_ids)} "
            f"output={len(self.output_ids)}+{self.pending} computed={computed} slot={slot}>"
        )
