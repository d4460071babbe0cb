"""LatentAttention: the mixer of layers whose heads share one latent of a position (multi-head latent
attention, DeepSeek-V2, arXiv 2405.04434).

A position has a latent c of ``rank`` elements and a rotated key r that all heads share; these are stored. A
head's key is (W_k c, r) and its value W_v c. A head's query (p, s) can be multiplied into the space of the
latents instead, since p . W_k c = (W_k^T p) . c, and the result out of it: then no head has keys and values
of its own, and each position is read once for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from aioinfer.model.attention.base import AttentionParams
from aioinfer.model.attention.pool import KVShape
from aioinfer.model.attention.sdpa import SDPAAttention
from aioinfer.model.linear import HeadsLinear, Linear
from aioinfer.model.mixers.base import MixerStep
from aioinfer.model.norm import Norm
from aioinfer.model.rope import Rope, Rotary, rotate

__all__ = ["LatentAttention"]


@dataclass(slots=True, kw_only=True)
class LatentAttention:
    """Attention over the latents of a sequence."""

    num_heads: int
    #: one head of ``rank`` elements and the rotated ones behind them
    kv: KVShape
    #: which of the model's ``kv_layers`` has them
    kv_layer: int
    #: elements of a head's query that are not rotated
    plain: int
    #: elements of a head's result
    value_dim: int
    #: hidden to queries, or to what they are made of, and then to the latent and the rotated key
    into: Linear
    #: of what queries are made of; None with ``queries``
    query_norm: Norm | None
    #: to queries [T, num_heads * (plain + rotated)]; None: ``into`` makes them
    queries: Linear | None
    latent_norm: Norm
    rope: Rope
    params: AttentionParams
    #: of each head, ``plain`` to ``rank``: by torch a HeadsLinear, as the next one
    absorb: Linear
    #: of each head, ``rank`` to ``value_dim``
    expand: Linear
    out: Linear

    @property
    def rank(self) -> int:
        """Elements of the latent before the rotated ones."""
        assert self.kv.value_dim is not None
        return self.kv.value_dim

    def __call__(self, normed: torch.Tensor, step: MixerStep) -> torch.Tensor:
        attention = step.attention
        assert isinstance(attention, SDPAAttention), "latents are attended to by torch or by native decoders"
        projected, width, rotary = self.into(normed), self.kv.head_dim, step.rotaries[id(self.rope)]
        q, latents = projected[:, :-width], projected[:, None, -width:]
        if self.queries is not None:
            assert self.query_norm is not None
            q = self.queries(_normed(q, self.query_norm))
        q = _rotated_behind(q.reshape(len(q), self.num_heads, -1), self.plain, rotary)
        latents = torch.cat(
            (_normed(latents[..., : self.rank], self.latent_norm), latents[..., self.rank :]), -1
        )
        latents = _rotated_behind(latents, self.rank, rotary)
        return self.out(attention.latent(self.kv_layer, q, latents, self, step.batch, self.params).flatten(1))

    def absorbed(self, q: torch.Tensor) -> torch.Tensor:
        return torch.cat((self.absorb(q[..., : self.plain]), q[..., self.plain :]), dim=-1)

    def results(self, mixed: torch.Tensor) -> torch.Tensor:
        return self.expand(mixed)

    def expanded(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert isinstance(self.absorb, HeadsLinear)
        assert isinstance(self.expand, HeadsLinear)
        latent, rotated = latents[..., : self.rank], latents[..., self.rank :]
        keys = (latent[:, 0] @ self.absorb.each).transpose(0, 1)
        values = (latent[:, 0] @ self.expand.each.mT).transpose(0, 1)
        return torch.cat((keys, rotated.expand(-1, self.num_heads, -1)), dim=-1), values

    def expands(self, tokens: int) -> bool:
        """Multiplications of a query and a position that expanding them saves, against what it takes."""
        own = self.plain + self.value_dim
        return tokens * (2 * self.rank - own) > self.rank * own


def _normed(values: torch.Tensor, norm: Norm) -> torch.Tensor:
    """The root mean square norm of vectors; rounded before it is multiplied by the weights."""
    wide = values.float()
    factors = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
    return (wide * factors).to(values.dtype) * norm.weight


def _rotated_behind(heads: torch.Tensor, plain: int, rotary: Rotary) -> torch.Tensor:
    """Heads with the elements behind the first ``plain`` rotated."""
    return torch.cat((heads[..., :plain], rotate(heads[..., plain:], rotary)), dim=-1)
