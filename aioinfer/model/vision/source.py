"""TowerSource: the inputs from which a family makes its encoder; VisionFamily: the interface of a family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch

from aioinfer.images.support import ImageSupport
from aioinfer.model.families.base import NormWeight
from aioinfer.model.gates import CONFIG_GATES, Gate
from aioinfer.model.layer_kernels import LayerKernels
from aioinfer.model.linear import Linear, TorchLinear
from aioinfer.model.mlp import FeedForward
from aioinfer.model.norm import Norm
from aioinfer.model.vision.base import Encoder
from aioinfer.model.vision.tower import Product, TowerAttention
from aioinfer.model.weights import StoredMatrix, Weights

__all__ = ["GELUS", "TowerSource", "VisionFamily"]

#: the activations of feed-forward parts that :meth:`TowerSource.mlp` knows
GELUS: dict[str, Gate] = {**CONFIG_GATES, "gelu": "gelu"}


@dataclass(frozen=True, slots=True)
class TowerSource:
    """The inputs of an encoder: a config, a checkpoint, and the chosen kernels."""

    #: of the whole model
    config: Any
    #: tensors of the encoder, without "model." in front of their names
    weights: Weights
    kernels: LayerKernels

    def linear(self, names: Sequence[str], rows: Sequence[int], width: int, *, bias: bool) -> Linear:
        """The projections ``names``, of [rows[i], width] each, as one linear layer."""
        return self.kernels.linear(StoredMatrix(self.weights, names, rows, width, bias=bias))

    def mlp(
        self,
        names: tuple[str, str],
        sizes: tuple[int, int, int],
        activation: str,
        *,
        bias: bool = True,
    ) -> FeedForward:
        """Two products with a function between them.

        Args:
            names: of the tensors of both.
            sizes: inputs, those between the products, and outputs.
            activation: one of :data:`GELUS`.
        """
        inputs, middle, outputs = sizes
        up = StoredMatrix(self.weights, [names[0]], [middle], inputs, bias=bias)
        down = StoredMatrix(self.weights, [names[1]], [outputs], middle, bias=bias)
        return self.kernels.plain_mlp(up, down, GELUS[activation])

    def patch_embedding(self, name: str, outputs: int, *shape: int, bias: bool = True) -> TorchLinear:
        """A convolution whose strides are its sizes as a linear layer over unfolded patches; ``shape``: of
        the weight, but for the outputs. By torch: it takes less than a hundredth of the time, and its inner
        dimension is none of native kernels as a rule."""
        weight = self.weights.take(f"{name}.weight", (outputs, *shape)).reshape(outputs, prod(shape))
        return TorchLinear(weight, self.weights.take(f"{name}.bias", (outputs,)) if bias else None)

    def attention(self, qkv: Product, out: Product, heads: int, scale: float, **norms: Any) -> TowerAttention:
        """Self-attention of a layer; ``norms``: the other fields of TowerAttention."""
        return TowerAttention(qkv, out, heads, scale, self.kernels.two_way_attention, **norms)

    def layer_norm(self, name: str, size: int, eps: float) -> Norm:
        """A layer norm with its bias."""
        weight, bias = (self.weights.take(f"{name}.{end}", (size,)) for end in ("weight", "bias"))
        return Norm(weight, eps, bias)

    def rms_norm(self, name: str, size: int, eps: float, stored: NormWeight = "rounded") -> Norm:
        """A root mean square norm."""
        dtype = None if stored == "rounded" else torch.float32
        weight = self.weights.take(f"{name}.weight", (size,), dtype=dtype)
        return Norm(weight + 1 if stored == "offset" else weight, eps)

    def support(
        self,
        longest: int,
        *,
        token_id: int | None = None,
        filler_id: int | None = None,
        deep: int = 0,
        **facts: bool,
    ) -> ImageSupport:
        """The facts about the encoder.

        Args:
            longest: positions of the longest unit.
            token_id: of images; None: the config's.
            filler_id: of what the text model gets there; None: the same.
            deep: number of the layers of the text model behind which features are added.
            facts: the other fields of :class:`~aioinfer.images.support.ImageSupport`.
        """
        hidden = self.config.get_text_config().hidden_size
        return ImageSupport(
            token_id=self.config.image_token_id if token_id is None else token_id,
            filler_id=filler_id,
            position_bytes=(1 + deep) * hidden * self.weights.dtype.itemsize,
            longest=longest,
            **facts,
        )


class VisionFamily(Protocol):
    """Reads the image encoders of one family of multimodal checkpoints. Configs are those of the whole
    model; names of tensors have no "model." in front."""

    #: of the names of its tensors
    prefixes: tuple[str, ...]
    #: beginnings of names in older checkpoints, and what they are called here
    renames: tuple[tuple[str, str], ...] = ()

    def unsupported_reason(self, config: Any) -> str | None:
        """The feature of a config that the encoder does not support, in words; None if there is none."""

    def two_way(self, config: Any) -> bool:
        """Whether the positions of a unit see each other both ways."""
        return False

    def inner_sizes(self, config: Any) -> list[int]:
        """Inner dimensions of its matrix products, but for the patch embedding."""

    def encoder(self, source: TowerSource) -> Encoder:
        """The encoder of a checkpoint. Raises ConfigError if a tensor is missing or has another shape."""
