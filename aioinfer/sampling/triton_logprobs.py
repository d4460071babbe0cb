"""TritonLogprobs: logprobs with the same bits in any batch.

torch's log-softmax adds in an order that depends on where a row lies in memory, and its selection of the
likeliest tokens takes any of those that are equal, which logits of 16 bits often are. Here a row is added in
one order, and among equal tokens the lowest ids come first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["TritonLogprobs"]

_BLOCK = 4096


@triton.jit
def _normalizer_kernel(logits: tl.tensor, out: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """out[row] = log of the sum of the exponentials of a row of float32 logits. Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    peak = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in tl.range(0, SIZE, BLOCK):
        inside = start + lane < SIZE
        values = tl.load(logits + row * SIZE + start + lane, mask=inside, other=float("-inf"))
        peak = tl.maximum(peak, values, propagate_nan=tl.PropagateNan.ALL)
    best = tl.max(peak, 0)
    # Without it a row of -inf would be NaN, and one with NaN is NaN by its sum.
    shift = tl.where(best > float("-inf"), best, 0.0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, SIZE, BLOCK):
        inside = start + lane < SIZE
        values = tl.load(logits + row * SIZE + start + lane, mask=inside, other=float("-inf"))
        total += tl.exp(values - shift)
    tl.store(out + row, shift + tl.log(tl.sum(total, 0)))


class TritonLogprobs:
    """See :class:`~aioinfer.sampling.logprobs.Logprobs`."""

    __slots__ = ("_logits", "_normalizers", "top", "top_ids")

    def __init__(self, logits: torch.Tensor, top: int) -> None:
        """``logits`` are [N, V] float32 and must not change afterwards. ``top`` is the number of likeliest
        tokens, 0 for none."""
        self._logits = logits = logits.contiguous()
        rows, size = logits.shape
        self._normalizers = torch.empty(rows, 1, dtype=torch.float32, device=logits.device)
        if rows:
            _normalizer_kernel[(rows,)](
                logits, self._normalizers, SIZE=size, BLOCK=min(_BLOCK, triton.next_power_of_2(size)),
                num_warps=8, enable_fp_fusion=False,
            )  # fmt: skip
        #: int64 [N, top]
        self.top_ids = _likeliest(logits, min(top, size))
        #: float32 [N, top]
        self.top = self._of(self.top_ids)

    def of(self, tokens: torch.Tensor) -> torch.Tensor:
        """See :class:`~aioinfer.sampling.logprobs.Logprobs`."""
        return self._of(tokens.clamp(min=0).unsqueeze(1)).squeeze(1)

    def _of(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._logits.gather(1, tokens) - self._normalizers


def _likeliest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the ``count`` largest of each row, int64 [N, count], the lower ids first among equals."""
    if count == 0:
        return logits.new_empty((len(logits), 0), dtype=torch.int64)
    bits = (logits + 0.0).view(torch.int32).to(torch.int64)  # no negative zero
    # Bits of negative floats fall as the floats rise.
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ids = torch.arange(logits.shape[1], device=logits.device)
    # All different, so that it does not matter how they are selected.
    return (order * (1 << 31) - ids).topk(count, dim=1).indices
