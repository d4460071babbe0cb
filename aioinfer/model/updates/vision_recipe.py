"""VisionRecipe: new weights for an image encoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from aioinfer.checkpoint.tensors import Tensors
from aioinfer.model.layer_kernels import LayerKernels
from aioinfer.model.spec import CausalLM, Change
from aioinfer.model.updates.grafting import graft
from aioinfer.model.updates.new_weights import Known, NewWeights
from aioinfer.model.updates.rewriting import Rewriting
from aioinfer.model.updates.tensors import check_values
from aioinfer.model.vision.part import VisionPart

__all__ = ["VisionRecipe"]


@dataclass(frozen=True, slots=True)
class VisionRecipe:
    """Updates an encoder: the code that built it runs again, over the new tensors."""

    part: VisionPart
    #: names of its tensors
    names: frozenset[str]
    #: the kernels that made it
    kernels: LayerKernels
    dtype: torch.dtype
    device: torch.device

    def changes(
        self,
        model: CausalLM,
        tensors: Tensors,
        go_on: Callable[[], None],
        claim: Callable[[NewWeights], None],
        *,
        mapped: bool,
    ) -> list[Change]:
        """Those that write the tensors, of which some may be missing unless they are ``mapped`` from a
        checkpoint. ``claim`` is called before they are read. Raises ConfigError."""
        weights = NewWeights(
            tensors,
            Known(self.names, tied=False),
            partial=not mapped,
            mapped=mapped,
            dtype=self.dtype,
            device=self.device,
        )
        rewriting = Rewriting(model, self.kernels, weights)
        made = self.part.build(weights, rewriting)
        claim(weights)
        check_values(tensors, weights.kinds, go_on, rewriting.kept)
        return [*rewriting.changes, partial(_write, model.encoder, made)]


def _write(old: Any, new: Any) -> None:
    for name, value in vars(new).items():
        setattr(old, name, graft(getattr(old, name), value))
