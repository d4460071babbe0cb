"""Sampling on a CPU by the kernels in C++ (``sampling.hpp``): from logits and the parameters of rows to one
token per row, without the interpreter's lock and without waking torch's threads.

With the same logits the token is that of the torch path, but for masses and noise that round otherwise: exp
may be two ulp off torch's, and top-p keeps a token more or less if a sum of probabilities comes that close to
it; the logarithms of noise are rounded correctly nearly always, and torch's within one ulp.
"""

from __future__ import annotations

import torch

from aioinfer.native.bindings import ThreadPool
from aioinfer.sampling.batch import SamplingBatch
from aioinfer.sampling.outcomes import BAD_LOGITS

__all__ = ["sample_tokens"]


def sample_tokens(team: ThreadPool, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """One token per row, as :meth:`aioinfer.sampling.sampler.Sampler.sample` says, without penalties. The
    batch's flags are not looked at: a neutral parameter is off for its row.

    Args:
        team: threads that share the rows, and the stretches of few rows.
        logits: [S, V] float32; as they were when this returns.
        batch: the rows' parameters.

    Returns:
        [S] int64: token ids, BAD_LOGITS for broken rows.
    """
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64)
    banned = batch.banned_rows, batch.banned_ids
    bans = 0 if banned[0] is None else len(banned[0])
    # Bans are written into rows for a while: rows that share memory need their own.
    if logits.stride(1) != 1 or (bans and logits.stride(0) < vocab):
        logits = logits.contiguous()
    columns = batch.temperature, batch.top_p, batch.min_p, batch.top_k, batch.seeds, batch.positions
    kept = [None if column is None else column.contiguous() for column in (*columns, *banned)]
    *at, banned_rows, banned_ids = (None if column is None else column.data_ptr() for column in kept)
    team.kernels.call(
        "sample", team.handle, logits.data_ptr(), rows, vocab, logits.stride(0), *at,
        bans, banned_rows, banned_ids, BAD_LOGITS, tokens.data_ptr(),
    )  # fmt: skip
    return tokens
