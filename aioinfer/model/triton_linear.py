"""TritonLinear: a product whose sums have one order, for any number of rows.

cuBLAS chooses its kernel by the number of rows, and with it the order in which it adds: a token's logits then
depend on who else is in the batch. Here tiles and their order follow from the layer alone, and rows of a tile
are independent (He and others, Defeating Nondeterminism in LLM Inference, 2025). That costs speed: a step of
few tokens multiplies tiles that are mostly padding, one of many tokens has tiles that are small for it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from aioinfer.model.attention.triton_common import INTERPRETED
from aioinfer.model.linear import TorchLinear

__all__ = ["TritonLinear", "fixed_order_product"]


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    values: tl.tensor, weight: tl.tensor, bias: tl.tensor, out: tl.tensor, rows: tl.tensor,
    stride_values: tl.tensor,
    OUTPUTS: tl.constexpr, INNER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr, WIDEN: tl.constexpr,
) -> None:  # fmt: skip
    """BLOCK_M rows of BLOCK_N outputs, [rows, OUTPUTS], each rounded once. Grid (blocks of rows, of outputs):
    rows vary fastest, since the programs of one block of outputs read the same weights."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows and outputs out of range repeat the work of valid ones and are not stored.
    left = values + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * stride_values
    right = weight + tl.minimum(column, OUTPUTS - 1).to(tl.int64)[:, None] * INNER
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, INNER, BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)[None, :]
        if INNER % BLOCK_K == 0:
            a = tl.load(left + at)
            b = tl.load(right + at)
        else:
            a = tl.load(left + at, mask=at < INNER, other=0.0)
            b = tl.load(right + at, mask=at < INNER, other=0.0)
        if WIDEN:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias + column, mask=column < OUTPUTS, other=0.0).to(tl.float32)[None, :]
    to = out + row.to(tl.int64)[:, None] * OUTPUTS + column[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < OUTPUTS)[None, :])


def fixed_order_product(
    values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``values @ weight.T + bias``, added in float32, each row with the same bits in any company.

    Args:
        values: [T, inner], float32, float16 or bfloat16.
        weight: [outputs, inner], of the same type, contiguous, else ValueError.
        bias: [outputs], or None.

    Returns:
        [T, outputs], of the same type
    """
    rows, inner = values.shape
    outputs = len(weight)
    if weight.shape[1] != inner or not weight.is_contiguous():
        raise ValueError(f"a weight {tuple(weight.shape)} does not fit values {tuple(values.shape)}")
    out = torch.empty((rows, outputs), dtype=values.dtype, device=values.device)
    if rows == 0:
        return out
    values = values if values.stride(1) == 1 else values.contiguous()
    # Tiles of float32, which has no matrix unit, are small enough for the registers.
    block, block_k = (32, 32) if values.dtype == torch.float32 else (64, 64)
    _linear_kernel[(triton.cdiv(rows, block), triton.cdiv(outputs, block))](
        values, weight, weight if bias is None else bias, out, rows, values.stride(0),
        OUTPUTS=outputs, INNER=inner, BLOCK_M=block, BLOCK_N=block, BLOCK_K=block_k,
        BIAS=bias is not None, WIDEN=INTERPRETED,
        num_warps=4, num_stages=3, enable_fp_fusion=False,
    )  # fmt: skip
    return out


class TritonLinear(TorchLinear):
    """Plain weights, multiplied by :func:`fixed_order_product`."""

    __slots__ = ()

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        return fixed_order_product(values, self.weight, self.bias)
