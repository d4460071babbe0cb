"""Request: one sequence being generated, and everything the scheduler knows about it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from aioinfer.cache.radix import Lock, token_key
from aioinfer.outputs import Draft, FinishReason, RequestMetrics, Result, TokenLogprob, Usage
from aioinfer.text.output import OutputText

if TYPE_CHECKING:
    from aioinfer.diffusion.state import BlockState
    from aioinfer.params import SamplingParams
    from aioinfer.text.grammar import GrammarState

__all__ = ["Request", "RequestState"]


class RequestState(Enum):
    """``WAITING -> RUNNING -> FINISHED``; retraction goes back from RUNNING to WAITING."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Columns(Protocol):
    """What a request knows of the decode batch that it is in."""

    #: by row: positions computed so far
    computed: Any


class Request:
    """One sequence. Only the thread that plans (the event loop) reads or writes it.

    Positions of a running request, with two tokens in flight::

        prompt_ids            output_ids     pending
        |---------------------|--------------|--|     length = prompt + output + pending
        |-------- computed ------------------|        KV written by launched steps
        |-------- committed -------------|            KV written by resolved steps
        |-- cached pages ----|-- private pages --|    who owns the pages

    ``pending`` counts placeholders: tokens sampled on the device that the host has not read.
    """

    __slots__ = (
        "_committed",
        "_computed",
        "_prompt_key",
        "_sampled",
        "admitted_at",
        "announced",
        "arrival",
        "batch",
        "batch_index",
        "cacheable",
        "cached_pages",
        "cached_tokens",
        "consumer",
        "error",
        "finish_reason",
        "finished_at",
        "grammar",
        "hit",
        "junk_until",
        "key",
        "last_step",
        "lock",
        "logprobs",
        "max_length",
        "namespace",
        "output_ids",
        "pages",
        "params",
        "parked",
        "passed",
        "prefilled",
        "priority",
        "prompt_ids",
        "prompt_logprobs",
        "ran_out_at",
        "relay_ready",
        "retractions",
        "routing_key",
        "scored",
        "seed",
        "sent_pages",
        "slot",
        "state",
        "stop_ids",
        "stop_reason",
        "text",
        "token_times",
        "void_until",
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
        namespace: str = "",
        routing_key: str | None = None,
    ) -> None:
        #: minted by the engine, increasing with arrival; a client's own id is only a label
        self.key = key
        self.prompt_ids = prompt_ids
        self.params = params
        self.seed = seed
        self.stop_ids = stop_ids
        self.grammar = grammar
        #: prompt and output together never exceed this
        self.max_length = max_length
        #: larger goes first, where the policy looks at it
        self.priority = priority
        #: prefixes are shared within a namespace only
        self.namespace = namespace
        self.routing_key = routing_key
        self.arrival = arrival
        self.admitted_at: float | None = None
        self.finished_at: float | None = None
        self.state = RequestState.WAITING
        #: the consumer is too far behind: nothing is computed until it has read
        self.parked = False
        self.output_ids: list[int] = []
        self.token_times: list[float] = []
        #: one per output token, if they were asked for
        self.logprobs: list[TokenLogprob] = []
        #: of the prompt's tokens from the second on, as far as they are known
        self.prompt_logprobs: list[TokenLogprob] = []
        #: positions whose next token of the prompt has been scored by launched steps
        self.scored = 0
        self._sampled = 0
        self._computed = 0
        self._committed = 0
        #: the last prefill chunk has resolved; from here on every token adds one committed position
        self.prefilled = False
        self.slot = 0
        self.pages: list[int] = []
        #: how many of ``pages`` belong to the prefix cache, where ``lock`` holds them
        self.cached_pages = 0
        self.lock: Lock | None = None
        #: its KV may be offered to others
        self.cacheable = True
        #: prompt tokens that were found in the cache when it was first admitted
        self.cached_tokens = 0
        #: what the last look into the cache found; kept by Memory
        self.hit: tuple[int, int, int, object] = (-1, 0, 0, None)
        #: the device side knows its parameters
        self.announced = False
        #: how many of ``pages`` the device side has been told of
        self.sent_pages = 0
        #: the newest launched step that holds a row of this request, kept by ``batch`` while in it
        self.last_step = 0
        #: the relay cell of ``slot`` holds (or will hold) this request's newest token
        self.relay_ready = False
        #: rows of launched steps up to this one sampled nothing that counts
        self.void_until = 0
        #: and those up to this one computed from nothing, for a step before them failed
        self.junk_until = 0
        #: its ``progress`` when a step of this request last ran out of memory
        self.ran_out_at = -1
        #: the decode batch and the row there, while it decodes
        self.batch: Columns | None = None
        self.batch_index = -1
        self.retractions = 0
        #: rounds of admission in which it was the eldest and somebody else was admitted
        self.passed = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.error: BaseException | None = None
        #: the text side of the output
        self.text: OutputText = text if text is not None else OutputText(None)
        #: who hears of its progress; the engine keeps a StreamCell here
        self.consumer: object | None = None
        self._prompt_key: bytes | None = None

    # -- how far it is --------------------------------------------------------------------------

    @property
    def computed(self) -> int:
        """Positions whose KV is written by launched steps."""
        return self._computed if self.batch is None else int(self.batch.computed[self.batch_index])

    @property
    def length(self) -> int:
        """Tokens of the sequence, placeholders included."""
        return len(self.prompt_ids) + self._sampled if self.batch is None else self.computed + 1

    @property
    def pending(self) -> int:
        """Tokens sampled on the device that the host has not read."""
        return self.length - self.known

    @property
    def resume(self) -> BlockState | None:
        """What a device must know to go on, beside the tokens: nothing, if they come one by one."""
        return None

    @property
    def wants_tokens(self) -> bool:
        """More may be sampled than launched steps do."""
        return self.length < self.max_length

    @property
    def known(self) -> int:
        """Tokens of the sequence that the host has read."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def progress(self) -> int:
        """Rises with all that the host has read of it."""
        return self.known

    @property
    def reusable(self) -> int:
        """Positions that need not be computed if their KV is cached. The last known token always is, and
        so is what precedes a token of the prompt whose logprob is wanted and not there yet."""
        scored = len(self.prompt_logprobs)
        if self.params.prompt_logprobs is not None and scored < len(self.prompt_ids) - 1:
            return scored
        return self.known - 1

    @property
    def committed(self) -> int:
        """Positions whose KV is written by resolved steps."""
        return self.known - 1 if self.prefilled else self._committed

    def advance(self, computed: int, sampled: int) -> None:
        """Launched steps compute up to here; ``sampled`` output tokens are launched or read."""
        self._computed = computed
        self._sampled = sampled

    def commit_prefill(self, positions: int, *, last: bool) -> None:
        """A prefill chunk that ends after ``positions`` has resolved."""
        self._committed = positions
        self.prefilled = last

    def restart(self, cached: int = 0) -> None:
        """Its KV is gone but for ``cached`` positions; the tokens stay."""
        self.scored = len(self.prompt_logprobs)
        self.rewind(cached, self._sampled)

    def rewind(self, computed: int, sampled: int) -> None:
        """Go on from ``computed`` positions of known tokens, as if it had just taken its slot."""
        self._computed = self._committed = computed
        self._sampled = sampled
        self.relay_ready = self.prefilled = self.announced = False
        self.sent_pages = 0

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
        del self.output_ids[count:]
        del self.logprobs[count:]

    # -- what came of it ------------------------------------------------------------------------

    @property
    def step_map(self) -> list[int] | None:
        """By output token, the round of its block that wrote it; None if tokens come one by one."""
        return None

    @property
    def draft_version(self) -> int:
        """Rises with every new draft that somebody wants to see."""
        return 0

    def draft(self) -> Draft | None:
        """What may follow the output, if anything is known of that and somebody wants to see it."""
        return None

    @property
    def finished(self) -> bool:
        return self.state is RequestState.FINISHED

    @property
    def usage(self) -> Usage:
        return Usage(len(self.prompt_ids), len(self.output_ids), self.cached_tokens)

    @property
    def metrics(self) -> RequestMetrics:
        return RequestMetrics(self.arrival, self.admitted_at, self.finished_at, tuple(self.token_times))

    def result(self) -> Result:
        """What there is of the output; final once the request has finished."""
        return Result(
            text=self.text.text,
            token_ids=list(self.output_ids),
            finish_reason=self.finish_reason or "abort",
            usage=self.usage,
            stop_reason=self.stop_reason,
            metrics=self.metrics,
            prompt_token_ids=self.prompt_ids,
            logprobs=None if self.params.logprobs is None else list(self.logprobs),
            step_map=None if self.step_map is None else list(self.step_map),
            prompt_logprobs=None if self.params.prompt_logprobs is None else [None, *self.prompt_logprobs],
        )

    def __repr__(self) -> str:
        return (
            f"<Request {self.key} {self.state.value} prompt={len(self.prompt_ids)} "
            f"output={len(self.output_ids)}+{self.pending} computed={self.computed} slot={self.slot}>"
        )
