"""Encoder: the interface of an image encoder, and Features: what a step takes of its results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from aioinfer.images.support import ImageSupport

__all__ = ["Encoder", "Features"]


class Encoder(Protocol):
    """Computes one unit at a time, so that its bits depend on nothing else; in slices of layers, if that
    takes long: ``end(layer(depth - 1, ... layer(0, begin(pixels))))``. Launch thread only."""

    support: ImageSupport
    #: layers
    depth: int

    def begin(self, pixels: Mapping[str, npt.NDArray[np.generic]]) -> Any:
        """The state in front of the first layer, from the arrays of a unit."""

    def layer(self, index: int, state: Any) -> Any:
        """The state behind a layer."""

    def end(self, state: Any) -> torch.Tensor:
        """The features, [1 + deep, length, hidden] in the model's dtype: the vectors that stand in place of
        those of tokens, and what is added behind each of the first ``deep`` layers (DeepStack, arXiv
        2406.04334)."""


@dataclass(slots=True)
class Features:
    """The features of images in a step."""

    #: int64 [F]: tokens of the step whose vectors they are
    rows: torch.Tensor
    #: [1 + deep, F, hidden]; see :meth:`Encoder.end`
    vectors: torch.Tensor
