"""Request and Output: what was asked for, and what came of it.

A :class:`Request` is made and checked once, when it is accepted, on any thread, and never changes. Its
:class:`Output` grows on the loop of the engine. Streams, checkpoints and replicas read these two, and nothing
of the scheduler, whose own :class:`~aioinfer.scheduling.sequence.Sequence` holds pages, slot and cursor::

    generate() ─► Request ──► Sequence (scheduling/) ──► Output ──► Stream, StreamCheckpoint, Result
                  frozen      pages, slot, cursor        grows
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import TYPE_CHECKING, Any, TypedDict

from aioinfer.budget import TokenBudget
from aioinfer.errors import InvalidRequest, shown
from aioinfer.inputs import keep_plain
from aioinfer.outputs import Draft, FinishReason, RequestMetrics, Result, TokenLogprob, Usage
from aioinfer.params import SamplingParams
from aioinfer.pooling import Pooling

if TYPE_CHECKING:
    import asyncio

    from aioinfer.diffusion.state import BlockState
    from aioinfer.images.prompt import PromptImages

__all__ = ["MAX_LABEL", "SOON", "JobOptions", "Output", "Request", "RequestOptions", "SentOptions", "Switch",
           "check_timeout"]  # fmt: skip

#: characters of a label that a caller gives
MAX_LABEL = 256
#: seconds that are left when none are
SOON = 1e-6


class _Options(TypedDict, total=False):
    priority: int
    cache_salt: str
    routing_key: str | None
    waiting_timeout: float | None
    running_timeout: float | None
    max_lag: int | None
    request_id: str | None
    adapter: str | None


class SentOptions(_Options, total=False):
    """Those that travel to other processes."""

    deadline: float | None
    ttft_target: float | None
    itl_target: float | None
    queue_behind: int
    pooling: Pooling | None


class JobOptions(_Options, total=False):
    """Keyword arguments of calls that make several requests: fields of :class:`Request`, which documents
    them."""

    deadline: float | asyncio.Timeout | None
    ttft_target: float | None
    itl_target: float | None
    budget: TokenBudget | None


class RequestOptions(JobOptions, total=False):
    """Keyword arguments of calls that make one: all fields of :class:`Request` but ``params``."""

    queue_behind: int
    pooling: Pooling | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Parameters and options of one output. Raises InvalidRequest, by the name of the field."""

    params: SamplingParams = field(default_factory=SamplingParams)
    #: larger goes first, with the policy ``priority``; 32 bits
    priority: int = 0
    #: prefixes are shared only between requests with the same salt
    cache_salt: str = ""
    #: groups requests for the policy ``routing-key``
    routing_key: str | None = None
    #: number of later arrivals that may overtake this one; the choices of a prompt have 0, 1, 2 ...
    queue_behind: int = 0
    #: seconds until the first step, and from there on; None for no limit
    waiting_timeout: float | None = None
    running_timeout: float | None = None
    #: seconds from its arrival in which it should end, and have its first token; it is refused if it would
    #: not; None: no hurry
    deadline: float | None = None
    ttft_target: float | None = None
    #: seconds that steps with prompts of others should take while it generates; None: as long as the engine's
    itl_target: float | None = None
    #: output tokens that it shares with others; None: no such bound
    budget: TokenBudget | None = None
    #: unread output tokens beyond which nothing more is computed until the consumer reads; None for no limit
    max_lag: int | None = None
    #: the caller's name for it, in results, errors and logs
    request_id: str | None = None
    #: name of the LoRA adapter that computes it; None: the model alone
    adapter: str | None = None
    #: what is wanted of the prompt's hidden states; nothing is generated then
    pooling: Pooling | None = None

    def __post_init__(self) -> None:
        keep_plain(self)
        if not isinstance(self.pooling, (Pooling, NoneType)):
            raise InvalidRequest("pooling", f"must be a Pooling, got {shown(self.pooling)}")
        check_timeout("waiting_timeout", self.waiting_timeout)
        check_timeout("running_timeout", self.running_timeout)
        for name in ("deadline", "ttft_target", "itl_target"):
            check_timeout(name, getattr(self, name))
        if not isinstance(self.budget, (TokenBudget, NoneType)):
            raise InvalidRequest("budget", f"must be a TokenBudget, got {shown(self.budget)}")
        if self.budget is not None and self.params.max_tokens == 0:
            raise InvalidRequest("budget", "has no effect where nothing is generated")
        if self.max_lag is not None and (type(self.max_lag) is not int or self.max_lag < 1):
            raise InvalidRequest("max_lag", f"must be a positive number of tokens, got {shown(self.max_lag)}")
        if type(self.priority) is not int or not -(2**31) <= self.priority < 2**31:
            raise InvalidRequest("priority", f"must be an integer of 32 bits, got {shown(self.priority)}")
        if type(self.queue_behind) is not int or not 0 <= self.queue_behind < 2**31:
            raise InvalidRequest(
                "queue_behind", f"must be a number of requests, got {shown(self.queue_behind)}"
            )
        for name in ("cache_salt", "routing_key", "request_id", "adapter"):
            value = getattr(self, name)
            if value is not None and (type(value) is not str or len(value) > MAX_LABEL):
                raise InvalidRequest(name, f"must be a string of at most {MAX_LABEL} characters")

    def options(self) -> SentOptions:
        """All of it but ``params`` and ``budget``."""
        names = [each.name for each in fields(self) if each.name not in ("params", "budget")]
        return {name: getattr(self, name) for name in names}  # type: ignore[return-value]

    @property
    def first_scored(self) -> int:
        """First position whose next token of the prompt gets a logprob, if these are wanted."""
        return max(0, self.params.logprob_start_len - 1)


def check_timeout(name: str, value: float | None) -> None:
    """Raise InvalidRequest unless it is None or a positive number of seconds."""
    # This form also refuses NaN, and integers that no float can hold.
    if value is not None and not (type(value) in (int, float) and 0 < value <= sys.float_info.max):
        raise InvalidRequest(name, f"must be a positive number of seconds, got {shown(value)}")


#: output tokens, pieces of text, and the version of the weights that computed what comes before these
Switch = tuple[int, int, int]


class Output:
    """Everything that came of one request so far. Lists only grow, so that readers keep an index into them,
    except where :meth:`trim` drops tokens after a stop."""

    __slots__ = (
        "accepted",
        "accepted_prediction",
        "adapter_fingerprint",
        "admitted_at",
        "arrival",
        "block",
        "cached_tokens",
        "draft_version",
        "error",
        "finish_reason",
        "finished",
        "finished_at",
        "has_text",
        "identical",
        "images",
        "label",
        "logprobs",
        "make_draft",
        "numerics",
        "pieces",
        "plain",
        "pooled",
        "predicted_ttft",
        "prompt_ids",
        "prompt_logprobs",
        "rejected_prediction",
        "request",
        "resumed",
        "seed",
        "step_map",
        "stop_reason",
        "switches",
        "text_behind",
        "token_ids",
        "token_times",
        "weight_version",
    )

    def __init__(self, request: Request, arrival: float = 0.0) -> None:
        """``arrival``: seconds of the engine's clock."""
        self.request = request
        #: the caller's name for it
        self.label = request.request_id
        #: the prompt is tokenized and the request queued: ``prompt_ids`` and ``seed`` are known
        self.accepted = False
        self.prompt_ids: Sequence[int] = ()
        #: the images in it, whose positions have words in ``prompt_ids``; None: it has none
        self.images: PromptImages | None = None
        #: seed of the sampling noise
        self.seed = 0
        self.token_ids: list[int] = []
        #: non-empty pieces of the text released so far
        self.pieces: list[str] = []
        #: the engine has a tokenizer
        self.has_text = True
        #: one per output token, if they were asked for
        self.logprobs: list[TokenLogprob] = []
        #: known logprobs of the prompt's tokens, from ``request.first_scored`` + 1 on
        self.prompt_logprobs: list[TokenLogprob] = []
        #: diffusion models: by output token, the round of its block that wrote it
        self.step_map: list[int] | None = None
        #: rises with every new draft, which ``make_draft`` makes; None if its block is gone
        self.draft_version = 0
        #: newest state of the block that is not done
        self.block: BlockState | None = None
        self.make_draft: Callable[[], Draft | None] | None = None

        self.finished = False
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.error: BaseException | None = None
        #: some tokens have no text yet: the output has not ended, and these are not delivered
        self.text_behind = False
        #: before its end only text and ids are read of it, and tokens have their text when they come
        self.plain = False

        self.arrival = arrival
        self.admitted_at: float | None = None
        #: seconds from then in which its first token was expected
        self.predicted_ttft: float | None = None
        self.finished_at: float | None = None
        #: one per output token that has its text
        self.token_times: list[float] = []
        #: prompt tokens that were in the prefix cache at the first admission
        self.cached_tokens = 0
        #: tells the files of its adapter from others; empty without one
        self.adapter_fingerprint = ""
        #: tokens of the caller's prediction that were verified and right, and that were not
        self.accepted_prediction, self.rejected_prediction = 0, 0
        #: what was pooled of the prompt: a numpy array of float32
        self.pooled: Any = None

        #: output tokens that it began with, and whether the output is that of an undisturbed request
        self.resumed = 0
        self.identical = True
        #: version of the weights that compute the next token, and where they took over from others
        self.weight_version = 0
        #: names the arithmetic that computed its tokens; empty: that of its engine
        self.numerics = ""
        self.switches: tuple[Switch, ...] = ()

    # -- how far it is --------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """Finished, and the whole output is known: it is final."""
        return self.finished and not self.text_behind

    @property
    def request_id(self) -> str:
        """The caller's name for it, or one that is made when it is first asked for."""
        if self.label is None:
            self.label = f"req_{uuid.uuid4().hex[:24]}"
        return self.label

    @property
    def text(self) -> str:
        """The text released so far."""
        return "".join(self.pieces)

    @property
    def deadline(self) -> float | None:
        """When it should have ended, on the scale of ``arrival``."""
        seconds = self.request.deadline
        return None if seconds is None else self.arrival + seconds

    def deadline_left(self, now: float) -> float | None:
        """Seconds until then."""
        return None if self.deadline is None else max(SOON, self.deadline - now)

    @property
    def shown_ids(self) -> Sequence[int]:
        """The prompt's ids, with the model's image token in place of words of images."""
        return self.prompt_ids if self.images is None else self.images.shown(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        """Output tokens that are known not to follow a stop."""
        return len(self.token_times) if self.text_behind else len(self.token_ids)

    @property
    def usage(self) -> Usage:
        """The token counts so far."""
        return Usage(
            len(self.prompt_ids),
            self.num_tokens,
            self.cached_tokens,
            self.accepted_prediction,
            self.rejected_prediction,
        )

    @property
    def computed_times(self) -> list[float]:
        """The times of the tokens that it did not begin with."""
        return self.token_times[self.resumed :] if self.resumed else self.token_times

    @property
    def metrics(self) -> RequestMetrics:
        """The times so far."""
        times = tuple(self.token_times)
        ends = self.admitted_at, self.finished_at
        return RequestMetrics(self.arrival, *ends, times, self.resumed, self.predicted_ttft)

    def result(self) -> Result:
        """A snapshot of the output; final once it has ended."""
        count = self.num_tokens
        return Result(
            text=self.text,
            token_ids=self.token_ids[:count],
            finish_reason=self.finish_reason if self.finish_reason and self.ended else "abort",
            usage=self.usage,
            stop_reason=self.stop_reason,
            metrics=self.metrics,
            prompt_token_ids=list(self.shown_ids),
            logprobs=None if self.request.params.logprobs is None else self.logprobs[:count],
            step_map=None if self.step_map is None else self.step_map[:count],
            prompt_logprobs=self._all_prompt_logprobs(),
            request_id=self.request_id,
            resumed=self.resumed,
            identical=self.identical,
            weight_version=self.newest_version,
            pooled=self.pooled,
        )

    def _all_prompt_logprobs(self) -> list[TokenLogprob | None] | None:
        if self.request.params.prompt_logprobs is None:
            return None
        without = min(1 + self.request.first_scored, len(self.prompt_ids))
        return [*([None] * without), *self.prompt_logprobs]

    def draft(self) -> Draft | None:
        """Tokens that may follow the output, if the caller asked for drafts and anything is known."""
        return None if self.make_draft is None or self.finished else self.make_draft()

    def known_ids(self, start: int, stop: int) -> list[int]:
        """Token ids of prompt and output at positions [start, stop)."""
        prompt = len(self.prompt_ids)
        after = self.token_ids[max(0, start - prompt) : max(0, stop - prompt)]
        return [*self.prompt_ids[start:stop], *after]

    # -- weights --------------------------------------------------------------------------------

    def note_switch(self, before: int) -> None:
        """Note that weights of the version ``before``, or of earlier ones, computed all tokens so far."""
        count, pieces = len(self.token_ids), len(self.pieces)
        if not self.switches or self.switches[-1][:2] != (count, pieces):
            self.switches += ((count, pieces, before),)
        self.plain = self.identical = False

    def switch_after(self, tokens: int, pieces: int) -> Switch | None:
        """The first switch after a number of tokens or of pieces of text."""
        if not self.switches:  # most have none, and this is asked once per token
            return None
        return next((each for each in self.switches if each[0] > tokens or each[1] > pieces), None)

    @property
    def newest_version(self) -> int:
        """Version of the weights that computed the last token; without one, that will compute the first."""
        return self.version_at(len(self.token_ids))

    def version_at(self, count: int) -> int:
        """Version of the weights that computed the last of the first ``count`` tokens."""
        if not self.switches:
            return self.weight_version
        return next((before for tokens, _, before in self.switches if count <= tokens), self.weight_version)

    # -- its end --------------------------------------------------------------------------------

    def finish(self, reason: FinishReason, error: BaseException | None = None) -> None:
        """End it, but for text that is behind."""
        self.finished, self.finish_reason, self.error = True, reason, error

    def refuse(self, error: BaseException | None) -> None:
        """End the output of a request that was never queued, or that its scheduler failed to end."""
        self.finish("abort", error)
        self.text_behind = False

    def trim(self, count: int) -> None:
        """Drop all but the first ``count`` tokens of an output that has finished."""
        del self.token_ids[count:]
        del self.logprobs[count:]
        if self.step_map is not None:
            del self.step_map[count:]

    def __repr__(self) -> str:
        state = "ended" if self.ended else "open" if self.accepted else "preparing"
        label = "" if self.label is None else f" {self.label!r}"
        return f"<Output{label} {state} prompt={len(self.prompt_ids)} tokens={len(self.token_ids)}>"
