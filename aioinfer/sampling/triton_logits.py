"""Logits processors and penalties in Triton.

Each is one launch that reads and writes a logit once, or only the logits that it changes; torch's operations
need several temporaries as large as the logits, or sort their indices. Every operation is rounded separately,
as in torch: the results are bitwise equal.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from aioinfer.sampling.batch import SamplingBatch
from aioinfer.sampling.penalties import IN_PROMPT

__all__ = ["add_biases_", "apply_masks_", "ban_", "penalise"]

_CHUNK = 2048
_PAIRS = 128
_NEVER = tl.constexpr(float("-inf"))


@triton.jit(do_not_specialize=["slots", "repetition", "presence", "frequency"])
def _penalise_kernel(
    logits: tl.tensor, out: tl.tensor, counts: tl.tensor, row_of: tl.tensor, slots: tl.tensor,
    repetition: tl.tensor, presence: tl.tensor, frequency: tl.tensor, vocab: tl.tensor, stride: tl.tensor,
    IN_PROMPT: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """Penalise a chunk of a row by the counts of its slot. Grid (chunks, rows)."""
    row = tl.program_id(1).to(tl.int64)
    ids = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = ids < vocab
    x = tl.load(logits + row * stride + ids, mask=inside)
    counted = tl.load(row_of + tl.load(slots + row))
    seen = tl.load(counts + counted * vocab + ids, mask=inside, other=0)
    factor = tl.load(repetition + row)
    x = tl.where(seen > 0, tl.where(x > 0.0, tl.div_rn(x, factor), x * factor), x)
    generated = seen & (IN_PROMPT - 1)
    x = x - tl.load(frequency + row) * generated.to(tl.float32)
    x = x - tl.load(presence + row) * (generated > 0).to(tl.float32)
    tl.store(out + row * vocab + ids, x, mask=inside)


@triton.jit(do_not_specialize=["rows", "ids", "bits", "number"])
def _add_kernel(
    logits: tl.tensor, rows: tl.tensor, ids: tl.tensor, bits: tl.tensor, number: tl.tensor, stride: tl.tensor,
    BAN: tl.constexpr, PAIRS: tl.constexpr,
) -> None:  # fmt: skip
    """Add to single logits, with BAN -inf (which may be added twice). Grid (pairs / PAIRS,)."""
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    inside = pair < number
    row = tl.load(rows + pair, mask=inside, other=0)
    at = logits + row * stride + tl.load(ids + pair, mask=inside, other=0)
    x = tl.load(at, mask=inside)
    if BAN:
        change = tl.full([PAIRS], _NEVER, tl.float32)
    else:
        change = tl.load(bits + pair, mask=inside).to(tl.int32).to(tl.float32, bitcast=True)
    tl.store(at, x + change, mask=inside)


@triton.jit(do_not_specialize=["rows", "masks", "words"])
def _mask_kernel(
    logits: tl.tensor, rows: tl.tensor, masks: tl.tensor, words: tl.tensor, vocab: tl.tensor,
    stride: tl.tensor, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """Write -inf to the forbidden tokens in a chunk of a row, and nothing else. Grid (chunks, masks)."""
    mask = tl.program_id(1).to(tl.int64)
    ids = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    word = tl.load(masks + mask * words + ids // 32, mask=ids // 32 < words, other=0)
    forbidden = ((word >> (ids % 32)) & 1) == 0
    to = logits + tl.load(rows + mask) * stride + ids
    tl.store(to, tl.full([CHUNK], _NEVER, tl.float32), mask=forbidden & (ids < vocab))


def penalise(
    logits: torch.Tensor, counts: torch.Tensor, row_of: torch.Tensor, batch: SamplingBatch
) -> torch.Tensor:
    """See :data:`~aioinfer.sampling.penalties.Penalise`."""
    rows, vocab = logits.shape
    out = torch.empty((rows, vocab), dtype=logits.dtype, device=logits.device)
    penalties = batch.repetition_penalty, batch.presence_penalty, batch.frequency_penalty
    columns = (column.contiguous() for column in penalties)
    if out.numel():
        _penalise_kernel[(triton.cdiv(vocab, _CHUNK), rows)](
            logits, out, counts, row_of, batch.slots, *columns, vocab, logits.stride(0),
            IN_PROMPT=IN_PROMPT, CHUNK=_CHUNK, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def add_biases_(logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, bits: torch.Tensor) -> None:
    """As :func:`aioinfer.sampling.logits_processors.add_biases_`."""
    if len(rows):
        _add_kernel[(triton.cdiv(len(rows), _PAIRS),)](
            logits, rows, ids, bits, len(rows), logits.stride(0),
            BAN=False, PAIRS=_PAIRS, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip


def ban_(logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor) -> None:
    """As :func:`aioinfer.sampling.logits_processors.ban_`."""
    if len(rows):
        _add_kernel[(triton.cdiv(len(rows), _PAIRS),)](
            logits, rows, ids, ids, len(rows), logits.stride(0),
            BAN=True, PAIRS=_PAIRS, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip


def apply_masks_(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """As :func:`aioinfer.sampling.logits_processors.apply_masks_`."""
    vocab = logits.shape[1]
    if len(rows):
        _mask_kernel[(triton.cdiv(vocab, _CHUNK), len(rows))](
            logits, rows, masks.contiguous(), masks.shape[1], vocab, logits.stride(0),
            CHUNK=_CHUNK, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
