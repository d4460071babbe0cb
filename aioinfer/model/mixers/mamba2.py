"""Mamba2: a state space with one decay for each head (Dao and Gu, arXiv 2405.21060).

A head keeps a matrix [state_size, head_dim], the state S. A token has inputs x [head_dim] of each head, a
step dt and a decay d = e^(-rate * dt) of each head, and two vectors b and c [state_size] of each group of
heads. It leaves::

    S' = d * S + b (dt * x)^T        and reads S'^T c + skip * x

It is computed token by token, in float32, also where a whole prompt is there: the result does not depend on
how the prompt was cut, which that of a scan over chunks would do.
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

__all__ = ["Mamba2", "MambaHeads"]


@dataclass(frozen=True, slots=True)
class MambaHeads:
    """The heads of a layer. ``heads`` is a multiple of ``groups``: neighbours share b and c."""

    heads: int
    head_dim: int
    groups: int
    state_size: int

    @property
    def values(self) -> int:
        """Elements of the inputs of a token, and of its results."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Elements that are convolved: x, b and c."""
        return self.values + 2 * self.groups * self.state_size

    @property
    def width(self) -> int:
        """Elements of the projection of a token: gates of the results, what is convolved, and steps."""
        return self.values + self.channels + self.heads

    @property
    def state_shape(self) -> StateShape:
        """Shape of one layer's state, which a token changes by what is convolved and by its steps."""
        return StateShape((self.heads, self.state_size, self.head_dim), torch.float32, self.heads)


@dataclass(slots=True, kw_only=True)
class Mamba2:
    """Projection, convolution, the state space, gates, a norm of each group's results, and back to the
    residual.

    See :class:`~aioinfer.model.mixers.base.Mixer`.
    """

    heads: MambaHeads
    #: hidden to gates of the results, x, b, c and steps: [T, heads.width]
    into: Linear
    #: convolution of x, b and c, followed by SiLU
    conv: CausalConv
    #: [heads] float32: a step is ``softplus(step_scale * value + bias)``
    bias: torch.Tensor
    #: [heads] float32
    rate: torch.Tensor
    #: [heads] float32
    skip: torch.Tensor
    #: [values] float32, of the norm of the gated results of each group; None for none
    norm: torch.Tensor | None
    eps: float
    #: factors of the gates and of the steps, before their functions (Falcon-H1)
    gate_scale: float = 1.0
    step_scale: float = 1.0
    out: Linear
    #: index of the state in a cell
    state: int

    @property
    def rope(self) -> Rope | None:
        return None

    def __call__(self, normed: torch.Tensor, step: MixerStep) -> torch.Tensor:
        heads, batch, states = self.heads, step.batch, step.batch.states
        assert states is not None, "a step of a model with recurrent state has cells"
        parts = heads.values, heads.channels, heads.heads
        gates, mixed, steps = self.into(normed).split(parts, dim=-1)
        mixed = F.silu(self.conv(mixed, batch)).float()
        count = len(mixed)
        of_group = heads.groups * heads.state_size
        x, b, c = mixed.split((heads.values, of_group, of_group), dim=-1)
        each = heads.heads // heads.groups
        b, c = (v.view(count, heads.groups, -1).repeat_interleave(each, dim=1) for v in (b, c))
        x = x.view(count, heads.heads, -1)
        steps = states.extend(self.state, steps, batch).float()
        steps = F.softplus(steps * self.step_scale + self.bias)
        tokens = _Tokens(x * steps[..., None], b, c, (-self.rate * steps).exp())
        result = torch.addcmul(scan(tokens, states, self.state, batch), x, self.skip[:, None])
        gated = states.own(result, batch).flatten(1) * F.silu(gates.float() * self.gate_scale)
        if self.norm is not None:
            groups = gated.unflatten(1, (heads.groups, -1))
            gated = torch.rms_norm(groups, groups.shape[-1:], None, self.eps).flatten(1) * self.norm
        return self.out(gated.to(normed.dtype))


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The inputs of the state space for all tokens of a step, float32."""

    #: [T, heads, head_dim], times their steps
    x: torch.Tensor
    #: [T, heads, state_size]
    b: torch.Tensor
    c: torch.Tensor
    #: [T, heads]
    decay: torch.Tensor

    def step(self, at: slice, state: torch.Tensor) -> torch.Tensor:
        """One token of each of R sequences: what they read, [R, heads, head_dim]; changes their states
        [R, heads, state_size, head_dim]."""
        state.mul_(self.decay[at, :, None, None])
        state.addcmul_(self.b[at, ..., None], self.x[at, :, None])
        return (state * self.c[at, ..., None]).sum(-2)
