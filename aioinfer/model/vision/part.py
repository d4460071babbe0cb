"""VisionPart: the image encoder in a multimodal checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aioinfer import plugins
from aioinfer.checkpoint.tensors import Tensors
from aioinfer.images.formats import FAMILIES
from aioinfer.model.backend import Backend
from aioinfer.model.kernels import choose_layers, make_tower_layers
from aioinfer.model.layer_kernels import LayerKernels
from aioinfer.model.multimodal import TextPart, other_tensors
from aioinfer.model.spec import Progress
from aioinfer.model.vision.base import Encoder
from aioinfer.model.vision.source import TowerSource, VisionFamily
from aioinfer.model.weights import RandomWeights, Weights
from aioinfer.model.weights_cache import Blobs

__all__ = ["VisionPart", "vision_part"]

_FOLDER = "model/vision/families"


@dataclass(frozen=True, slots=True)
class VisionPart:
    """An encoder that can be loaded."""

    family: VisionFamily
    #: of the whole model
    config: Any
    #: under the names that the family has for them; None: they are random
    tensors: Tensors | None
    #: where they are
    files: list[Path]

    def weights(
        self,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None,
        check_size: Callable[[int], None] | None,
    ) -> Weights:
        """Its weights, or random ones."""
        if self.tensors is None:
            return RandomWeights(dtype=dtype, device=device, check_size=check_size)
        return Weights(self.tensors, dtype=dtype, device=device, progress=progress, files=self.files)

    def of(self, tensors: Tensors) -> Tensors:
        """Its tensors among those of a checkpoint of the same architecture."""
        return other_tensors(tensors, self.family.prefixes, self.family.renames)

    @property
    def two_way(self) -> bool:
        """Whether the positions of a unit see each other both ways."""
        return self.family.two_way(self.config)

    def native(self, layers: Backend) -> bool:
        """Whether its layers are native, where those of the text model are ``layers``."""
        return choose_layers(layers, self.family.inner_sizes(self.config)).name == "native"

    def kernels(self, layers: Backend, dtype: torch.dtype, blobs: Blobs | None) -> LayerKernels:
        """The kernels of its layers; ``layers``: the backend of those of the text model."""
        return make_tower_layers(dtype, blobs, native=self.native(layers))

    def build(self, weights: Weights, kernels: LayerKernels) -> Encoder:
        """The encoder. Raises ConfigError if a tensor is missing, unknown or has another shape."""
        encoder = self.family.encoder(TowerSource(self.config, weights, kernels))
        weights.check_all_taken()
        weights.give_back()
        return encoder


def vision_part(checkpoint: object, *, stored: bool) -> tuple[VisionPart | None, str]:
    """The encoder of a checkpoint, or None, and then the reason why a multimodal model has none here. Raises
    ConfigError. ``stored``: its weights are to be read."""
    if not isinstance(checkpoint, TextPart):
        return None, ""
    name, config = FAMILIES.get(checkpoint.architecture), checkpoint.outer
    if name is None:
        return None, f"there is no own code for the encoder of {checkpoint.architecture}"
    family = plugins.load(_FOLDER, name)()
    unsupported = family.unsupported_reason(config)
    if unsupported is not None:
        return None, f"{checkpoint.architecture} has {unsupported}"
    tensors = checkpoint.others(family.prefixes, family.renames) if stored else None
    return VisionPart(family, config, tensors, checkpoint.files() if stored else []), ""
