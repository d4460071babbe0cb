"""Decoder: layers of pre-norm attention and a feed-forward part, the architecture of all built-in families.

Families differ in the content of their layers (:mod:`aioinfer.model.families`): biases, norms of heads,
windows, blocks, experts. They share one forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F

from aioinfer.model.attention.base import Attention, AttentionParams
from aioinfer.model.batch import Batch
from aioinfer.model.heads import HeadNorm
from aioinfer.model.linear import Linear
from aioinfer.model.mlp import FeedForward
from aioinfer.model.operations.base import Operations
from aioinfer.model.rope import Rope, Rotary
from aioinfer.model.spec import ModelSpec

__all__ = ["Decoder", "Layer"]


@dataclass(slots=True)
class Layer:
    """The weights and constants of one layer."""

    #: [hidden]
    attention_norm: torch.Tensor
    #: hidden to queries, keys and values: [T, (num_heads + 2 * num_kv_heads) * head_dim]
    qkv: Linear
    qk_norm: HeadNorm | None
    attention_params: AttentionParams
    out: Linear
    #: [hidden]
    mlp_norm: torch.Tensor
    mlp: FeedForward


class Decoder:
    """See :class:`~aioinfer.model.spec.CausalLM`."""

    capturable = True
    invariant = False
    seconds: Mapping[str, float] = MappingProxyType({})

    def __init__(
        self,
        spec: ModelSpec,
        layers: Sequence[Layer],
        *,
        embedding: torch.Tensor,
        norm: torch.Tensor,
        head: Linear,
        eps: float,
        rope: Rope,
        operations: Operations,
    ) -> None:
        """
        Args:
            spec: shapes and limits of the model.
            layers: the layers in order.
            embedding: [vocab_size, hidden].
            norm: [hidden], the weight of the last norm.
            head: hidden to logits.
            eps: added to the mean square in every norm of the residual.
            rope: rotary factors by position.
            operations: the kernels between matrix products.
        """
        self.spec = spec
        self._layers = layers
        self._embedding = embedding
        self._norm = norm
        self._head = head
        self._eps = eps
        self._rope = rope
        self._operations = operations

    def forward(self, batch: Batch, attention: Attention) -> torch.Tensor:
        """See :class:`~aioinfer.model.spec.CausalLM`."""
        norm, eps = self._operations.add_rms_norm, self._eps
        rotary = self._rope.at(batch.positions)
        hidden = F.embedding(batch.input_ids, self._embedding)
        # The norm of the next part adds the output of a part to the residual, in one kernel.
        delta = None
        for index, layer in enumerate(self._layers):
            hidden, normed = norm(hidden, delta, layer.attention_norm, eps)
            delta = self._attend(index, layer, normed, rotary, batch, attention)
            hidden, normed = norm(hidden, delta, layer.mlp_norm, eps)
            delta = layer.mlp(normed)
        rows = batch.logits_rows
        _, normed = norm(hidden[rows], None if delta is None else delta[rows], self._norm, eps)
        return self._head(normed)

    def _attend(
        self,
        index: int,
        layer: Layer,
        normed: torch.Tensor,
        rotary: Rotary,
        batch: Batch,
        attention: Attention,
    ) -> torch.Tensor:
        spec = self.spec
        shape = len(normed), spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim
        qkv = layer.qkv(normed).view(shape)
        mixed = attention.fused(index, qkv, layer.qk_norm, rotary, batch, layer.attention_params)
        return layer.out(mixed.flatten(1))
