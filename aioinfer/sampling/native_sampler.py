"""Sampling on a CPU by the kernels in C++ (``sampling.hpp``): from logits and the parameters of rows to one
token per row, without the interpreter's lock and without waking torch's threads.

With the same logits the token is that of the torch path, except where masses and noise round differently: exp
can be two ulp off torch's, and top-p keeps a token more or less if a sum of probabilities comes that close to
it; the logarithms of noise are almost always rounded correctly, and torch's within one ulp.
"""

from __future__ import annotations

import torch

from aioinfer.native.bindings import ThreadPool
from aioinfer.native.sampling_arguments import SampleArguments
from aioinfer.native.tensors import address, rows_address
from aioinfer.sampling.batch import SamplingBatch
from aioinfer.sampling.outcomes import BAD_LOGITS

__all__ = ["sample_tokens"]


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
