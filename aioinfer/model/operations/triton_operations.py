"""TritonOperations: one launch per operation, for CUDA.

Results are rounded where :class:`~aioinfer.model.operations.torch_operations.TorchOperations` rounds them.
Sums have the bits of torch's. A norm adds the squares in another order, and gates use another exponential:
the last bit of some elements differs from torch's. Layer norms and clamped gates are torch's.

Nothing is read back from the device and grids follow from shapes, so that launches can be captured in a CUDA
graph. A row has the same bits in any batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from aioinfer.model.attention.triton_common import INTERPRETED, follow, inverse_rms, rounded
from aioinfer.model.gates import Gate, gated
from aioinfer.model.norm import Norm
from aioinfer.model.operations.torch_operations import normed as normed_by_torch
from aioinfer.model.triton_support import launches_early

__all__ = ["TritonOperations"]


@triton.jit
def _norm_kernel(
    hidden: tl.tensor, delta: tl.tensor, weight: tl.tensor, total: tl.tensor, normed: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, ONCE: tl.constexpr,
    INTERPRETED: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """One row: total = hidden + delta, if ADD, and its norm, if ONCE rounded only behind its weight. Grid
    (rows,)."""
    follow(EARLY)
    lane = tl.arange(0, BLOCK)
    inside = lane < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + lane
    raw = tl.load(hidden + at, mask=inside, other=0.0)
    x = raw.to(tl.float32)
    if ADD:
        x += tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        x = rounded(x, raw, INTERPRETED)
        tl.store(total + at, x.to(raw.dtype), mask=inside)
    factor = inverse_rms(tl.sum(x * x, 0), SIZE, eps)
    x = x * factor
    if not ONCE:
        x = rounded(x, raw, INTERPRETED)
    x = x * tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + at, rounded(x, raw, INTERPRETED).to(raw.dtype), mask=inside)


@triton.jit
def _gate_mul_kernel(
    gate_up: tl.tensor, out: tl.tensor,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr, INTERPRETED: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """BLOCK elements of a row; the gate is silu, or GELU by its tangent formula. Grid (rows, blocks)."""
    follow(EARLY)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < SIZE
    raw = tl.load(gate_up + row * (2 * SIZE) + lane, mask=inside, other=0.0)
    up = tl.load(gate_up + row * (2 * SIZE) + SIZE + lane, mask=inside, other=0.0).to(tl.float32)
    gate = raw.to(tl.float32)
    if GELU:
        # (1 + tanh(u)) / 2 = 1 / (1 + exp(-2u)), from an exponential that cannot overflow
        steep = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        shrunk = tl.exp(-tl.abs(steep))
        gate = gate * tl.where(steep < 0.0, shrunk, 1.0) / (1.0 + shrunk)
    else:
        gate = gate / (1.0 + tl.exp(-gate))
    gate = rounded(gate, raw, INTERPRETED)
    tl.store(out + row * SIZE + lane, rounded(gate * up, raw, INTERPRETED).to(raw.dtype), mask=inside)


class TritonOperations:
    """Operations by Triton."""

    __slots__ = ()

    def add_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if norm.bias is not None:
            total = hidden if delta is None else hidden + delta
            return total, normed_by_torch(total, norm)
        size = hidden.shape[-1]
        hidden, weight = hidden.contiguous(), norm.weight.contiguous()
        added = hidden if delta is None else delta.contiguous()
        total = hidden if delta is None else torch.empty_like(hidden)
        normed = torch.empty_like(hidden)
        block, early = triton.next_power_of_2(size), launches_early(hidden.device)
        _norm_kernel[(len(hidden),)](
            hidden, added, weight, total, normed, norm.eps,
            SIZE=size, BLOCK=block, ADD=delta is not None, ONCE=weight.dtype != hidden.dtype,
            INTERPRETED=INTERPRETED, EARLY=early, launch_pdl=early,
            # One vector of 8 elements per thread, up to the warps of a row of 4096.
            num_warps=min(max(block // 256, 1), 16), enable_fp_fusion=False,
        )  # fmt: skip
        return total, normed

    def gate_mul(self, gate_up: torch.Tensor, gate: Gate) -> torch.Tensor:
        if gate == "clamped_silu":
            return gated(gate, *gate_up.chunk(2, dim=-1))
        gate_up = gate_up.contiguous()
        rows, size = len(gate_up), gate_up.shape[-1] // 2
        out = gate_up.new_empty((rows, size))
        block, early = min(1024, triton.next_power_of_2(size)), launches_early(gate_up.device)
        _gate_mul_kernel[(rows, triton.cdiv(size, block))](
            gate_up, out, SIZE=size, BLOCK=block, GELU=gate == "gelu_tanh", INTERPRETED=INTERPRETED,
            EARLY=early, launch_pdl=early, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        return out
