"""Sampler: one token per row, from the logits and sampling parameters of a step's rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from aioinfer.model.backend import Backend
from aioinfer.sampling import logits_processors
from aioinfer.sampling.backend import SamplingBackend, choose_sampling
from aioinfer.sampling.batch import PenaltyReset, SamplingBatch
from aioinfer.sampling.filters import apply_further, floors
from aioinfer.sampling.logits_processors import LogitsProcessors
from aioinfer.sampling.logprobs import Logprobs, TorchLogprobs
from aioinfer.sampling.noise import gumbel_of_keys, row_keys
from aioinfer.sampling.outcomes import BAD_LOGITS, NO_TOKEN
from aioinfer.sampling.penalties import Penalise, Penalties, penalised
from aioinfer.sampling.verification import Drafts, accepted, select

__all__ = ["COLUMNS", "Sampler"]

_NEVER = float("-inf")
#: lower temperatures are raised to this one: no division by 0 (greedy rows) or denormals
_MIN_TEMPERATURE = 1e-37
#: on a CPU, rows of a larger vocabulary are computed one at a time: their intermediate results then stay
#: in the cache, and a row skips the filters that it does not use
_MANY_TOKENS = 4096
#: fields of a batch that have an entry per row
COLUMNS = (
    *("slots", "positions", "seeds", "temperature", "top_p", "min_p", "top_k"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


class Sampler:
    """Applies to each row in order: penalties, banned ids, further filters, temperature, top-k, top-p, min-p,
    Gumbel-max.

    Gumbel-max takes the token with the largest sum of scaled logit and noise. The noise is a function of
    seed, position and token id alone (:mod:`aioinfer.sampling.noise`), so a row gets the same token in any
    batch, and the noise is needed only for tokens that the filters keep (:mod:`aioinfer.sampling.filters`).
    Among equal sums the lowest id is taken.

    :mod:`aioinfer.sampling.backend` chooses between Triton kernels (:mod:`aioinfer.sampling.triton_sampler`),
    native kernels (:mod:`aioinfer.sampling.native_sampler`) and torch's operations. All draw the same tokens.

    Nothing is read back from a device other than the CPU, and input logits are not changed. With Triton,
    :meth:`sample` can be captured in a CUDA graph if no row is penalised or has banned ids. Of the flags it
    then reads ``all_greedy`` and the hints of wide rows alone: graphs for these serve rows of any parameters.
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        device: torch.device,
        backend: SamplingBackend = "auto",
        *,
        invariant: bool = False,
    ) -> None:
        """``invariant``: logprobs, too, have the same bits in any batch, with Triton kernels and native ones.
        Raises ConfigError if the device cannot run ``backend``."""
        self.backend: Backend = choose_sampling(device, backend)
        #: biases, bans and masks single tokens
        self.logits_processors: LogitsProcessors = logits_processors
        #: makes the logprobs of logits [N, V] float32, which must not change afterwards, and
        #: of a number of likeliest tokens per row
        self.logprobs: Callable[[torch.Tensor, int], Logprobs] = TorchLogprobs
        #: samples one token per row, after penalties; None for torch's operations
        self._kernel: Callable[[torch.Tensor, SamplingBatch], torch.Tensor] | None = None
        penalise: Penalise | None = None
        if self.backend.name == "triton":
            from aioinfer.sampling import triton_logits, triton_sampler

            self.logits_processors, penalise = triton_logits, triton_logits.penalise
            self._kernel = triton_sampler.sample_tokens
            if invariant:
                from aioinfer.sampling.triton_logprobs import TritonLogprobs

                self.logprobs = TritonLogprobs
        elif self.backend.name == "native":
            from aioinfer.native.bindings import shared_thread_pool
            from aioinfer.sampling import native_sampler

            thread_pool = shared_thread_pool(torch.get_num_threads())
            self.logits_processors = native = native_sampler.NativeLogits(thread_pool)
            self._kernel, penalise = partial(native_sampler.sample_tokens, thread_pool), native.penalise
            self.logprobs = partial(native_sampler.NativeLogprobs, thread_pool)
        self._device, self._vocab_size = device, vocab_size
        self._penalties = Penalties(num_slots, vocab_size, device, penalise)
        #: torch's operations on a CPU, which may read the parameters of rows without synchronisation
        self._on_host = device.type == "cpu" and self._kernel is None
        ids = vocab_size if self._kernel is None else 0
        self._token_ids = torch.arange(ids, dtype=torch.int32, device=device)

    def reset(self, resets: Sequence[PenaltyReset]) -> None:
        """Replace the token counts of slots that have new requests. :meth:`sample` does it for the
        ``penalty_resets`` of its batch; a step without sampling rows passes them to this method."""
        self._penalties.reset(resets)

    def warm_up(self) -> None:
        """Run every kernel that a request may need once, so that no request waits for compilation."""
        device = self._device
        logits = torch.zeros(1, self._vocab_size, device=device)
        zero, one = torch.zeros(1, dtype=torch.int64, device=device), torch.ones(1, device=device)
        self.logits_processors.add_biases_(logits, zero, zero, zero)
        self.logits_processors.apply_masks_(logits, zero, torch.zeros(1, 1, dtype=torch.int32, device=device))
        batch = SamplingBatch(
            *(zero, zero, zero, one, one, one, zero, one, one, one),
            all_greedy=False, any_top_k=True, any_top_p=True, any_min_p=True, any_penalty=True,
            banned_rows=zero, banned_ids=zero,
        )  # fmt: skip
        flagged = ("all_greedy", "wide_nucleus", "wide_top_k")
        kinds: list[dict[str, Any]] = [{}, *({flag: True} for flag in flagged)]
        for flags in kinds:
            self.sample(logits, replace(batch, **flags))

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """Sample one token per row.

        Args:
            logits: [S, V] float32; -inf is a token that cannot be sampled.
            batch: parameters of the rows.

        Returns:
            [S] int64: token ids, and BAD_LOGITS for rows with a NaN, a +inf, or no token that can be sampled
        """
        if batch.penalty_resets:
            self._penalties.reset(batch.penalty_resets)
        tokens = self._all_rows(logits, batch)
        if batch.any_penalty:
            self._penalties.record(batch, tokens)
        return tokens

    def verify(
        self, logits: torch.Tensor, batch: SamplingBatch, drafts: Drafts
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same for a step with rows that verify drafts; arguments as of :meth:`sample`.

        Returns:
            [S] int64: as of :meth:`sample`, and NO_TOKEN after the first draft of a row that differs from
            the sampled token
            [S] int64: slots; that of a row at its last token, 0 elsewhere
        """
        if batch.penalty_resets:
            self._penalties.reset(batch.penalty_resets)
        tokens = self._by_level(logits, batch, drafts) if drafts.levels else self._all_rows(logits, batch)
        counts, last = accepted(tokens, drafts)
        tokens = torch.where(counts, tokens, NO_TOKEN)
        if batch.any_penalty and not drafts.levels:
            self._penalties.record(batch, tokens)
        return tokens, torch.where(last, batch.slots, 0)

    def draw(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """As :meth:`sample`, for tokens that are not sampled yet: nothing is counted."""
        return self._all_rows(logits, batch)

    def _by_level(self, logits: torch.Tensor, batch: SamplingBatch, drafts: Drafts) -> torch.Tensor:
        """All first positions, then all second ones and so on, each with the counts of those before it."""
        tokens = torch.full_like(batch.slots, NO_TOKEN)
        going = torch.ones_like(batch.slots, dtype=torch.bool)
        for at in drafts.levels:
            if self._device.type == "cpu":
                at = at[going[drafts.start[at]]]
            part = select(batch, at, COLUMNS)
            found = self._all_rows(logits[at], part)
            begun = going[drafts.start[at]]
            found = torch.where(begun, found, NO_TOKEN)
            self._penalties.record(part, found)
            tokens[at] = found
            going[drafts.start[at]] = begun & (found == drafts.expected[at])
        return tokens

    def _all_rows(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """:meth:`sample` without the counts of penalties, a row at a time where that is faster."""
        split = self._on_host and logits.shape[1] > _MANY_TOKENS and len(logits) > 1
        if split and not (batch.all_greedy or batch.filters):
            rows = zip(logits.split(1), _single_rows(batch), strict=True)
            return torch.cat([self._rows(line, row) for line, row in rows])
        return self._rows(logits, batch)

    def _rows(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        if batch.any_penalty:
            logits = self._penalties.apply(logits, batch)
        # Native kernels write bans into the logits and restore them; further filters must see them before.
        ban = self.backend.name != "native" or batch.filters
        if ban and batch.banned_ids is not None and batch.banned_rows is not None:
            logits = logits if batch.any_penalty else logits.clone()
            self.logits_processors.ban_(logits, batch.banned_rows, batch.banned_ids)
        if batch.filters and not batch.all_greedy:
            logits = apply_further(logits, batch.filters)
        if self._kernel is not None:
            return self._kernel(logits, batch)
        return self._by_torch(logits, batch)

    def _by_torch(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """One token per row, from logits after penalties and bans."""
        if batch.all_greedy:
            return _checked(*logits.max(dim=1))
        greedy = batch.temperature == 0
        if self._on_host:
            num_greedy = int(greedy.sum())
            if num_greedy == len(logits):
                return _checked(*logits.max(dim=1))
            if num_greedy == 0:
                best = logits.amax(dim=1)
                return _checked(best, self._draw(logits, best, batch))
        best, likeliest = logits.max(dim=1)
        return _checked(best, torch.where(greedy, likeliest, self._draw(logits, best, batch)))

    def _draw(self, logits: torch.Tensor, best: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """Gumbel-max over the tokens that the filters keep, [S] int64. Arbitrary for greedy or broken
        rows."""
        # Relative to the maximum: the likeliest token stays at 0 for any temperature.
        scaled = (logits - best.unsqueeze(1)).div_(
            batch.temperature.clamp(min=_MIN_TEMPERATURE).unsqueeze_(1)
        )
        keys = row_keys(batch.seeds, batch.positions)
        if not (batch.any_top_k or batch.any_top_p or batch.any_min_p):
            return gumbel_of_keys(keys, self._token_ids).add_(scaled).argmax(dim=1)
        flags = {name: getattr(batch, name) for name in ("any_top_k", "any_top_p", "any_min_p")}
        floor = floors(scaled, batch.top_k, batch.top_p, batch.min_p, **flags)
        if len(logits) == 1 and self._on_host:
            survivors = (scaled[0] >= floor[0]).nonzero().flatten()
            if len(survivors) == 0:
                return survivors.new_zeros(1)
            noise = gumbel_of_keys(keys, self._token_ids[survivors])
            return survivors[noise.add_(scaled[0, survivors]).argmax(dim=1)]
        noisy = gumbel_of_keys(keys, self._token_ids).add_(scaled)
        return noisy.masked_fill_(scaled < floor, _NEVER).argmax(dim=1)


def _checked(best: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """``tokens``, with BAD_LOGITS in rows whose maximum ``best`` is not finite; in place."""
    return tokens.masked_fill_(~(best.abs() < float("inf")), BAD_LOGITS)


def _single_rows(batch: SamplingBatch) -> Iterator[SamplingBatch]:
    """One batch per row, with the flags of its own parameters. Reads the device."""
    on = zip(
        (batch.temperature == 0).tolist(),
        (batch.top_k > 0).tolist(),
        (batch.top_p < 1).tolist(),
        (batch.min_p > 0).tolist(),
        penalised(batch).tolist(),
        strict=True,
    )
    for at, (greedy, top_k, top_p, min_p, penalty) in enumerate(on):
        banned = None
        if batch.banned_rows is not None and batch.banned_ids is not None:
            banned = batch.banned_ids[batch.banned_rows == at]
        yield replace(
            batch,
            **{name: getattr(batch, name)[at : at + 1] for name in COLUMNS},
            all_greedy=greedy,
            any_top_k=top_k,
            any_top_p=top_p,
            any_min_p=min_p,
            any_penalty=penalty,
            banned_rows=None if banned is None else torch.zeros_like(banned),
            banned_ids=banned,
        )
