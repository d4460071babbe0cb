"""Mixer: the first half of a layer, in which the tokens of a sequence reach each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from aioinfer.model.attention.base import Attention
from aioinfer.model.batch import Batch
from aioinfer.model.rope import Rope, Rotary

__all__ = ["Mixer", "MixerStep"]


class MixerStep:
    """The inputs of one step for the mixers of all layers."""

    __slots__ = ("attention", "batch", "rotaries")

    def __init__(self, batch: Batch, attention: Attention, rotaries: Mapping[int, Rotary]) -> None:
        self.batch = batch
        self.attention = attention
        #: factors at the tokens' positions, by the identity of a :class:`~aioinfer.model.rope.Rope`
        self.rotaries = rotaries


class Mixer(Protocol):
    """One layer's. It adds nothing to the residual itself."""

    @property
    def rope(self) -> Rope | None:
        """The rotation that :class:`MixerStep` must have; None for none."""

    def __call__(self, normed: torch.Tensor, step: MixerStep) -> torch.Tensor:
        """The summand of the residual, [T, hidden], from the normed residual [T, hidden]."""
