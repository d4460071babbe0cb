"""DeltaRule: linear attention by the gated delta rule (Yang et al., arXiv 2412.06464), as Qwen3-Next has it.

A head keeps a matrix [key_dim, value_dim], the state S. A token with key k, value v and query q, a decay
d in (0, 1] and a strength beta in (0, 1) leaves::

    S' = d * S + k (beta * (v - d * S^T k))^T        and reads S'^T q

It is computed token by token, in float32, also where a whole prompt is there: the result does not depend on
how the prompt was cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from aioinfer.model.linear import Linear
from aioinfer.model.mixers.base import MixerStep
from aioinfer.model.mixers.scan import scan
from aioinfer.model.mixers.short_conv import CausalConv
from aioinfer.model.rope import Rope
from aioinfer.model.state import StateShape

__all__ = ["DeltaHeads", "DeltaRule"]

#: added to the sum of squares by which queries and keys are normed
_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """The heads of a layer. ``value_heads`` is a multiple of ``key_heads``: neighbours share queries and
    keys."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def keys(self) -> int:
        """Elements of the keys of a token, and of its queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Elements of the values of a token."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Elements that are convolved: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def state_shape(self) -> StateShape:
        """Shape of one layer's state, which a token changes by what is convolved and by its gates."""
        shape = self.value_heads, self.key_dim, self.value_dim
        return StateShape(shape, torch.float32, 2 * self.value_heads)


@dataclass(slots=True, kw_only=True)
class DeltaRule:
    """Projections, convolution, the rule, a gated norm of each head's result, and back to the residual.

    See :class:`~aioinfer.model.mixers.base.Mixer`.
    """

    heads: DeltaHeads
    #: hidden to queries, keys, values and output gates: [T, heads.channels + heads.values]
    into: Linear
    #: hidden to strengths and decays before their functions: [T, 2 * value_heads]
    gates: Linear
    #: convolution of queries, keys and values, followed by SiLU
    conv: CausalConv
    #: [value_heads] float32: the logarithm of a decay is ``-rate * softplus(gate + bias)``
    rate: torch.Tensor
    bias: torch.Tensor
    #: [value_dim] float32, of the norm of each head's result
    norm: torch.Tensor
    eps: float
    out: Linear
    #: index of the state in a cell
    state: int

    @property
    def rope(self) -> Rope | None:
        return None

    def __call__(self, normed: torch.Tensor, step: MixerStep) -> torch.Tensor:
        heads, batch = self.heads, step.batch
        states = batch.states
        assert states is not None, "a step of a model with recurrent state has cells"
        mixed, z = self.into(normed).split((heads.channels, heads.values), dim=-1)
        mixed = F.silu(self.conv(mixed, batch))
        count = len(mixed)
        q, k, v = mixed.float().split((heads.keys, heads.keys, heads.values), dim=-1)
        group = heads.value_heads // heads.key_heads
        q, k = (
            _normed(each.reshape(count, heads.key_heads, heads.key_dim)).repeat_interleave(group, dim=1)
            for each in (q, k)
        )
        gates = states.extend(self.state, self.gates(normed), batch)
        strength, decay = gates.float().split(heads.value_heads, dim=-1)
        decay = (-self.rate * F.softplus(decay + self.bias)).exp()
        tokens = _Tokens(
            q * heads.key_dim**-0.5, k, v.view(count, heads.value_heads, -1), decay, strength.sigmoid()
        )
        result = states.own(scan(tokens, states, self.state, batch), batch).to(normed.dtype).float()
        result = torch.rms_norm(result, (heads.value_dim,), self.norm, self.eps)
        gated = result * F.silu(z.float()).view_as(result)
        return self.out(gated.to(normed.dtype).flatten(1))


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The inputs of the rule for all tokens of a step, float32."""

    #: [T, value_heads, key_dim], normed, the queries scaled
    q: torch.Tensor
    k: torch.Tensor
    #: [T, value_heads, value_dim]
    v: torch.Tensor
    #: [T, value_heads]
    decay: torch.Tensor
    strength: torch.Tensor

    def step(self, at: slice, state: torch.Tensor) -> torch.Tensor:
        """One token of each of R sequences: the results [R, value_heads, value_dim]; changes their states
        [R, value_heads, key_dim, value_dim]."""
        q, k = self.q[at, ..., None], self.k[at, ..., None]
        state.mul_(self.decay[at, :, None, None])
        change = (self.v[at] - (state * k).sum(-2)) * self.strength[at, :, None]
        state.addcmul_(k, change[..., None, :])
        return (state * q).sum(-2)


def _normed(heads: torch.Tensor) -> torch.Tensor:
    return heads * (heads.square().sum(-1, keepdim=True) + _EPS).rsqrt()
