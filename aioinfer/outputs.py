"""What a caller gets back: chunks while streaming, one result at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Chunk", "Draft", "FinishReason", "RequestMetrics", "Result", "TokenLogprob", "Usage"]

#: Why an output ended: an end token, stop token or stop string; the length; or an abort.
FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request, counted as OpenAI's API counts them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of one request in seconds on the engine's clock; ``None`` where it never got that far.

    ``token_times`` has one entry per token of the output: when the loop learnt of it.
    """

    arrival: float
    admitted: float | None
    finished: float | None
    token_times: tuple[float, ...]

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token."""
        return self.token_times[0] - self.arrival if self.token_times else None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely a token was: natural logarithm of the model's own probability, before temperature,
    filters, penalties and grammars."""

    token_id: int
    logprob: float
    #: the likeliest tokens in order, as (id, logprob); as many as were asked for
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Draft:
    """What a diffusion model has so far of the tokens behind those that are final. It may change.

    It is of what follows its chunk, and the next chunk replaces it, also one that has none. It ends where the
    output would: with an end token that is known already, or at its greatest length.
    """

    #: index of its first token in the output
    start: int
    #: None where nothing is known yet
    token_ids: tuple[int | None, ...]
    #: what follows the text of the stream so far: what of it is held back for a stop string, and these
    #: tokens, a light shade (U+2591) for each that is not known. Text of end tokens and special ones is in it
    #: where it would be in the output. Stop strings are not looked for
    text: str = ""
    #: by token, the round of its block that wrote it; None where nothing is known yet
    step_map: tuple[int | None, ...] = ()


@dataclass(slots=True)
class Chunk:
    """What became available since the last chunk of the same stream; its consumer's own.

    Concatenated texts equal the final text, concatenated ids the final ids. The last chunk of a stream,
    and only that one, carries ``finish_reason`` and ``usage``. A slow reader gets fewer, larger chunks.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    #: the stop string or stop token id that ended the output, if one did
    stop_reason: str | int | None = None
    usage: Usage | None = None
    #: one entry per id, if logprobs were asked for
    logprobs: list[TokenLogprob] | None = None
    #: of a diffusion model, by id: the round of its block that wrote it
    step_map: list[int] | None = None
    #: the newest draft of what follows, where drafts were asked for and there is one. A chunk may hold
    #: nothing else, or ids whose text is held back
    draft: Draft | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """A finished generation. ``token_ids`` holds every sampled token, the stop included; ``text`` ends
    before the stop unless ``include_stop`` asked for it."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    stop_reason: str | int | None = None
    metrics: RequestMetrics | None = field(default=None, compare=False)
    #: one entry per id, if logprobs were asked for
    logprobs: list[TokenLogprob] | None = None
    #: the prompt as the model read it
    prompt_token_ids: Sequence[int] = field(default=(), compare=False)
    #: of a diffusion model, by id: the round of its block that wrote it, counted from 0
    step_map: list[int] | None = None
    #: one entry per token of the prompt, the first being None, if they were asked for
    prompt_logprobs: list[TokenLogprob | None] | None = None
