"""SideBySide: a state space and attention with the same inputs (Falcon-H1, arXiv 2507.22448)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from aioinfer.model.mixers.base import MixerStep
from aioinfer.model.mixers.mamba2 import Mamba2
from aioinfer.model.mixers.self_attention import SelfAttention
from aioinfer.model.rope import Rope

__all__ = ["SideBySide"]


@dataclass(slots=True, kw_only=True)
class SideBySide:
    """See :class:`~aioinfer.model.mixers.base.Mixer`."""

    mamba: Mamba2
    attention: SelfAttention
    #: factors of their results
    mamba_scale: float
    attention_scale: float

    @property
    def rope(self) -> Rope | None:
        return self.attention.rope

    def __call__(self, normed: torch.Tensor, step: MixerStep) -> torch.Tensor:
        scanned, attended = self.mamba(normed, step), self.attention(normed, step)
        return scanned * self.mamba_scale + attended * self.attention_scale
