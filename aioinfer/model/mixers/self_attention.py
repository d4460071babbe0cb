"""SelfAttention: the mixer of layers with keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from aioinfer.model.attention.base import AttentionParams
from aioinfer.model.attention.pool import KVShape
from aioinfer.model.heads import HeadNorm, norm_projection, norm_rotated
from aioinfer.model.linear import Linear
from aioinfer.model.mixers.base import MixerStep
from aioinfer.model.rope import Rope

__all__ = ["Growth", "SelfAttention"]


@dataclass(frozen=True, slots=True)
class Growth:
    """Queries grow with their position (Llama 4, Ministral 3), so that attention over more keys is as sharp:
    ``1 + rate * log(1 + position // length)``."""

    rate: float
    #: positions
    length: int

    def of(self, positions: torch.Tensor) -> torch.Tensor:
        """The factors, float32, at positions [T] int64."""
        return 1 + self.rate * (1 + positions // self.length).float().log()


@dataclass(slots=True, kw_only=True)
class SelfAttention:
    """Attention over the keys and values of a sequence."""

    #: heads of queries
    num_heads: int
    kv: KVShape
    #: which of the model's ``kv_layers`` has them; of shared ones, that of an earlier layer
    kv_layer: int
    #: hidden to queries, keys and values: [T, (num_heads + 2 * num_kv_heads) * head_dim]; if keys and values
    #: are shared, to queries only. Gated, and then the gates of the results: num_heads * head_dim
    qkv: Linear
    qk_norm: HeadNorm | None = None
    #: None: queries and keys are not rotated
    rope: Rope | None
    params: AttentionParams
    #: [num_heads] float32, see :class:`~aioinfer.model.attention.base.Attention`; None for none
    sinks: torch.Tensor | None = None
    #: whether the results are multiplied by the sigmoids of gates, elementwise (Qwen3-Next)
    gated: bool = False
    #: None: queries do not grow; not with a norm of each head
    growth: Growth | None = None
    out: Linear

    def __call__(self, normed: torch.Tensor, step: MixerStep) -> torch.Tensor:
        (kv_heads, size, _), norm = self.kv, self.qk_norm
        heads = self.num_heads + (0 if self.params.shared else 2 * kv_heads)
        qkv, gates = self.qkv(normed), None
        if self.gated:
            qkv, gates = qkv.split((heads * size, self.num_heads * size), dim=-1)
        qkv = qkv.reshape(len(normed), heads, size)
        if norm is not None and norm.whole:
            qkv, norm = norm_projection(qkv, kv_heads, norm), None
        if self.growth is not None:
            scales = self.growth.of(step.batch.positions).to(qkv.dtype)
            qkv[:, : self.num_heads] *= scales[:, None, None]
        rotary = None if self.rope is None else step.rotaries[id(self.rope)]
        if norm is not None and norm.last:
            qkv, norm, rotary = norm_rotated(qkv, kv_heads, norm, rotary), None, None
        mixed = step.attention.fused(self.kv_layer, qkv, norm, rotary, step.batch, self.params, self.sinks)
        mixed = mixed.flatten(1)
        return self.out(mixed if gates is None else mixed * gates.sigmoid())
