"""Queries, keys and values of heads from a layer's fused projection. The reference for faster kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from aioinfer.model.rope import Rotary, rotate

__all__ = ["HeadNorm", "norm_projection", "norm_rotated", "split_heads"]


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """The root mean square norm of queries and keys: of each head by itself (Qwen3, LLaDA2, Gemma 3), or of
    all heads of a token as one vector (OLMo 2)."""

    #: [num_heads + num_kv_heads, head_dim]: the query norm for each head, then the key norm for each KV head;
    #: if values are normed, too (Gemma 4), num_kv_heads more, and with shared KV [num_heads, head_dim].
    #: In the model's dtype or float32, see :class:`~aioinfer.model.norm.Norm`
    weight: torch.Tensor
    eps: float
    #: whether all queries are normed as one vector, and all keys
    whole: bool = False
    #: whether each head is rotated first, by factors that keep its length (Hunyuan)
    last: bool = False


def norm_projection(qkv: torch.Tensor, num_kv_heads: int, norm: HeadNorm) -> torch.Tensor:
    """A projection [T, num_heads + 2 * num_kv_heads, head_dim] with all queries normed as one vector, and all
    keys as another."""
    heads = qkv.shape[1] - 2 * num_kv_heads
    counts = (heads, num_kv_heads)
    parts = [
        _normed(part.flatten(1), weight.flatten(), norm.eps).view(part.shape)
        for part, weight in zip(
            qkv[:, :-num_kv_heads].split(counts, dim=1), norm.weight.split(counts), strict=True
        )
    ]
    return torch.cat((*parts, qkv[:, -num_kv_heads:]), dim=1)


def norm_rotated(qkv: torch.Tensor, num_kv_heads: int, norm: HeadNorm, rotary: Rotary | None) -> torch.Tensor:
    """A projection [T, num_heads + 2 * num_kv_heads, head_dim] with queries and keys rotated, then normed."""
    q, k, v = split_heads(qkv, num_kv_heads, None, rotary)
    return torch.cat((_normed(torch.cat((q, k), dim=1), norm.weight, norm.eps), v), dim=1)


def split_heads(
    qkv: torch.Tensor, num_kv_heads: int, norm: HeadNorm | None, rotary: Rotary | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split a projection into normed and rotated q and k, and v.

    Rounds to the tensors' dtype where transformers does: after the norm, after its weight, after each of the
    two products of the rotation and after their sum.

    Args:
        qkv: [T, num_heads + 2 * num_kv_heads, head_dim].
        num_kv_heads: number of heads of keys, and of values; 0 if there are queries only.
        norm: norm of each head's query and key, or value, too; or None.
        rotary: rotary factors at the tokens' positions; None: nothing is rotated.

    Returns:
        q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim]
    """
    total = qkv.shape[1]
    if norm is not None and len(norm.weight) == total:
        qkv, norm = _normed(qkv, norm.weight, norm.eps), None
    qk, v = qkv.split((total - num_kv_heads, num_kv_heads), dim=1)
    if norm is not None:
        qk = _normed(qk, norm.weight, norm.eps)
    if rotary is not None:
        qk = rotate(qk, rotary)
    q, k = qk.split((total - 2 * num_kv_heads, num_kv_heads), dim=1)
    return q, k, v


def _normed(values: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    size = values.shape[-1]
    if weight.dtype == values.dtype:
        return torch.rms_norm(values, (size,), None, eps) * weight
    return (torch.rms_norm(values.float(), (size,), None, eps) * weight).to(values.dtype)
