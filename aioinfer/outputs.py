"""Outputs of a request: chunks while streaming, one result at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = [
    "AdapterInfo",
    "Chunk",
    "Draft",
    "FinishReason",
    "RequestMetrics",
    "Result",
    "TokenLogprob",
    "Usage",
]

#: Why an output ended: at an end token, stop token or stop string; at its maximum length; by an abort.
FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request, as in OpenAI's API."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    #: tokens of the caller's prediction that were verified and right, and those that were not
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    #: of chats: about how many tokens are reasoning: those of its text, tokenized again
    reasoning_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of one request in seconds of the engine's clock; ``None`` for a state that it did not reach.

    The clock is the system's monotonic one, on every event loop, except in loops with a time of their own.

    ``token_times`` has one entry per output token: when the loop read it. Tokens that a restored request
    began with have its arrival there.
    """

    arrival: float
    admitted: float | None
    finished: float | None
    token_times: tuple[float, ...]
    #: how many of them are of tokens that the request began with
    resumed: int = 0
    #: seconds from its arrival in which its first token was expected when it was accepted, without a margin;
    #: of requests with a ``ttft_target`` or a ``deadline``, where that was known
    predicted_ttft: float | None = None

    @property
    def ttft(self) -> float | None:
        """Time to first token: seconds from arrival to the first token that was computed."""
        times = self.token_times[self.resumed :]
        return times[0] - self.arrival if times else None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The natural logarithm of a token's probability, before temperature, filters, penalties and
    grammars."""

    token_id: int
    logprob: float
    #: the requested number of most likely tokens in descending order, as (id, logprob)
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Draft:
    """A diffusion model's provisional tokens after the final ones.

    A draft follows its chunk; the next chunk replaces it, even if that chunk has no draft. It ends where the
    output would: at an end token that is already known, or at the maximum length.
    """

    #: index of the draft's first token in the output
    start: int
    #: one id per position, None for an unknown one
    token_ids: tuple[int | None, ...]
    #: the text after the stream's text so far: text held back for a stop string, then these tokens, with a
    #: light shade (U+2591) for each unknown one. The text of end tokens and special tokens is included if the
    #: output would include it. Stop strings are not searched
    text: str = ""
    #: for each token, the round of its block that wrote it; None for an unknown one
    step_map: tuple[int | None, ...] = ()


@dataclass(slots=True)
class Chunk:
    """The output since the previous chunk of the same stream. The consumer owns it.

    Concatenated texts equal the final text, concatenated ids the final ids. Only the last chunk of a stream
    has ``finish_reason`` and ``usage``. A slow reader receives fewer, larger chunks.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    #: the stop string or stop token id that ended the output, if any
    stop_reason: str | int | None = None
    usage: Usage | None = None
    #: one entry per id, if logprobs were requested
    logprobs: list[TokenLogprob] | None = None
    #: diffusion models: for each id, the round of its block that wrote it, from 0 on
    step_map: list[int] | None = None
    #: the newest draft, if drafts were requested and one exists. A chunk can consist of a draft only, or of
    #: ids whose text is held back
    draft: Draft | None = None
    #: of the weights that computed it: how often they had been replaced. A chunk has tokens of one version
    weight_version: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """A finished generation. ``token_ids`` holds every sampled token, the stop included; ``text`` ends
    before the stop unless ``include_stop`` is set."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    stop_reason: str | int | None = None
    metrics: RequestMetrics | None = field(default=None, compare=False)
    #: one entry per id, if logprobs were requested
    logprobs: list[TokenLogprob] | None = None
    #: the tokenized prompt
    prompt_token_ids: Sequence[int] = field(default=(), compare=False)
    #: diffusion models: for each id, the round of its block that wrote it, from 0 on
    step_map: list[int] | None = None
    #: one entry per prompt token, None for the first and those before ``logprob_start_len``, if requested
    prompt_logprobs: list[TokenLogprob | None] | None = None
    #: the caller's name for the request, or one that was made for it
    request_id: str = field(default="", compare=False)
    #: how many tokens were there when the request was restored from a checkpoint
    resumed: int = field(default=0, compare=False)
    #: the output is that of a request that was never interrupted, to the bit: every engine that had a part in
    #: it had the same arithmetic and was deterministic. True also where nothing was restored; not where the
    #: weights were replaced meanwhile
    identical: bool = field(default=True, compare=False)
    #: of the weights that computed the last token
    weight_version: int = field(default=0, compare=False)
    #: of a request that pools its hidden states: a numpy array of float32, see :mod:`aioinfer.pooling`
    pooled: Any = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """A LoRA adapter that is loaded, at one moment."""

    name: str
    #: where it was loaded from
    path: str
    #: of this load: it rises with every load of an engine, also of the same name
    uid: int
    rank: int
    num_bytes: int
    #: what tells its files from others
    fingerprint: str
    #: requests that have it and have not ended
    requests: int
