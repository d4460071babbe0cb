"""The sampling kernels in C++ for a CPU (``sampling.hpp``, ``logits_processors.hpp``, ``logprobs.hpp``): they
run without the interpreter's lock and without waking torch's threads.

With the same logits a token is that of the torch path, except where masses and noise round differently: exp
can be two ulp off torch's, and top-p keeps a token more or less if a sum of probabilities comes that close to
it; the logarithms of noise are almost always rounded correctly, and torch's within one ulp. Where torch's
operations compute whole rows, masks and penalties write only the tokens that change, with the same result to
the bit. Logprobs are within rounding of torch's, and a function of their own row.
"""

from __future__ import annotations

import torch

from aioinfer.native.bindings import ThreadPool
from aioinfer.native.sampling_arguments import (
    LogprobsArguments,
    MasksArguments,
    PenaliseArguments,
    SampleArguments,
)
from aioinfer.native.tensors import address, rows_address
from aioinfer.sampling import logits_processors
from aioinfer.sampling.batch import SamplingBatch
from aioinfer.sampling.outcomes import BAD_LOGITS
from aioinfer.sampling.penalties import IN_PROMPT

__all__ = ["NativeLogits", "NativeLogprobs", "sample_tokens"]


def sample_tokens(pool: ThreadPool, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """One token per row, like :meth:`aioinfer.sampling.sampler.Sampler.sample` without penalties. The batch's
    flags are not used: a neutral parameter is off for its row.

    Args:
        pool: threads that share the rows, or the parts of rows where there are few.
        logits: [S, V] float32; changed during the call and restored.
        batch: the parameters of the rows.

    Returns:
        [S] int64: token ids, BAD_LOGITS for broken rows.
    """
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64)
    banned_rows, banned_ids = batch.banned_rows, batch.banned_ids
    bans = 0
    if banned_rows is not None and banned_ids is not None:
        bans, banned_rows, banned_ids = len(banned_rows), banned_rows.contiguous(), banned_ids.contiguous()
    # Bans are written into the rows: rows that share memory need a copy each.
    if logits.stride(1) != 1 or (bans and logits.stride(0) < vocab):
        logits = logits.contiguous()
    temperature, top_p = batch.temperature.contiguous(), batch.top_p.contiguous()
    min_p, top_k = batch.min_p.contiguous(), batch.top_k.contiguous()
    seeds, positions = batch.seeds.contiguous(), batch.positions.contiguous()
    arguments = SampleArguments(
        pool=pool.handle,
        logits=rows_address(logits, torch.float32),
        rows=rows,
        vocab=vocab,
        stride=logits.stride(0),
        temperature=address(temperature, torch.float32, rows),
        top_p=address(top_p, torch.float32, rows),
        min_p=address(min_p, torch.float32, rows),
        top_k=address(top_k, torch.int64, rows),
        seeds=address(seeds, torch.int64, rows),
        positions=address(positions, torch.int64, rows),
        bans=bans,
        banned_rows=None if banned_rows is None else address(banned_rows, torch.int64, bans),
        banned_ids=None if banned_ids is None else address(banned_ids, torch.int64, bans),
        bad=BAD_LOGITS,
        tokens=tokens.data_ptr(),
    )
    pool.kernels.call(arguments)
    return tokens


class NativeLogits:
    """See :class:`~aioinfer.sampling.logits_processors.LogitsProcessors`."""

    # These change single tokens: torch is fast enough.
    add_biases_ = staticmethod(logits_processors.add_biases_)
    ban_ = staticmethod(logits_processors.ban_)

    def __init__(self, pool: ThreadPool) -> None:
        self._pool = pool

    def apply_masks_(self, logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
        """See :func:`~aioinfer.sampling.logits_processors.apply_masks_`; tokens of a row are contiguous."""
        rows, masks = rows.contiguous(), masks.contiguous()
        count, words = len(rows), masks.shape[1]
        arguments = MasksArguments(
            pool=self._pool.handle,
            logits=rows_address(logits, torch.float32),
            num_rows=len(logits),
            vocab=logits.shape[1],
            stride=logits.stride(0),
            count=count,
            rows=address(rows, torch.int64, count),
            masks=address(masks, torch.int32, count * words),
            words=words,
        )
        self._pool.kernels.call(arguments)

    def penalise(
        self, logits: torch.Tensor, counts: torch.Tensor, row_of: torch.Tensor, batch: SamplingBatch
    ) -> torch.Tensor:
        """See :data:`~aioinfer.sampling.penalties.Penalise`."""
        rows, vocab = logits.shape
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        out = torch.empty((rows, vocab), dtype=torch.float32)
        slots, repetition = batch.slots.contiguous(), batch.repetition_penalty.contiguous()
        presence, frequency = batch.presence_penalty.contiguous(), batch.frequency_penalty.contiguous()
        arguments = PenaliseArguments(
            pool=self._pool.handle,
            logits=rows_address(logits, torch.float32),
            rows=rows,
            vocab=vocab,
            stride=logits.stride(0),
            counts=address(counts, torch.int32, len(counts) * vocab),
            lines=len(counts),
            row_of=address(row_of, torch.int64, len(row_of)),
            num_slots=len(row_of),
            slots=address(slots, torch.int64, rows),
            repetition=address(repetition, torch.float32, rows),
            presence=address(presence, torch.float32, rows),
            frequency=address(frequency, torch.float32, rows),
            in_prompt=IN_PROMPT,
            out=out.data_ptr(),
        )
        self._pool.kernels.call(arguments)
        return out


class NativeLogprobs:
    """See :class:`~aioinfer.sampling.logprobs.Logprobs`."""

    __slots__ = ("_logits", "_totals", "top", "top_ids")

    def __init__(self, pool: ThreadPool, logits: torch.Tensor, top: int) -> None:
        """``logits``: [N, V] float32, kept. ``top``: likeliest tokens to report, 0 for none."""
        self._logits = logits.contiguous()
        rows, vocab = logits.shape
        top = min(top, vocab)
        self._totals = torch.empty((2, rows), dtype=torch.float32)
        self.top = torch.empty((rows, top), dtype=torch.float32)
        self.top_ids = torch.empty((rows, top), dtype=torch.int64)
        arguments = LogprobsArguments(
            pool=pool.handle,
            logits=address(self._logits, torch.float32, rows * vocab),
            vocab=vocab,
            stride=vocab,
            count=rows,
            top=top,
            totals=self._totals.data_ptr(),
            top_values=self.top.data_ptr(),
            top_ids=self.top_ids.data_ptr(),
        )
        pool.kernels.call(arguments)

    def of(self, tokens: torch.Tensor) -> torch.Tensor:
        """See :class:`~aioinfer.sampling.logprobs.Logprobs`."""
        chosen = self._logits.gather(1, tokens.clamp(min=0).unsqueeze(1)).squeeze(1)
        return chosen - self._totals[0] - self._totals[1]
