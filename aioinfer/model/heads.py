"""From a layer's fused projection to queries, keys and values of heads. The reference for faster kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from aioinfer.model.rope import Rotary, rotate

__all__ = ["HeadNorm", "split_heads"]


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """The root mean square norm of each head's query and key (Qwen3, LLaDA2)."""

    #: [num_heads + num_kv_heads, head_dim]: the query norm for each head, then the key norm for each KV head
    weight: torch.Tensor
    eps: float


def split_heads(
    qkv: torch.Tensor, num_kv_heads: int, norm: HeadNorm | None, rotary: Rotary
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split a projection into normed and rotated q and k, and v.

    Rounds to the tensors' dtype where transformers does: after the norm, after its weight, after each of the
    two products of the rotation and after their sum.

    Args:
        qkv: [T, num_heads + 2 * num_kv_heads, head_dim].
        num_kv_heads: number of heads of keys, and of values.
        norm: norm of each head's query and key, or None.
        rotary: rotary factors at the tokens' positions.

    Returns:
        q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim]
    """
    _, total, head_dim = qkv.shape
    qk, v = qkv.split((total - num_kv_heads, num_kv_heads), dim=1)
    if norm is not None:
        qk = torch.rms_norm(qk, (head_dim,), None, norm.eps) * norm.weight
    q, k = rotate(qk, rotary).split((total - 2 * num_kv_heads, num_kv_heads), dim=1)
    return q, k, v
