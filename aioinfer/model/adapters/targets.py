"""AdapterTargets: the linear layers of a model that adapters can change, by the names of their modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from aioinfer.checkpoint.adapter import AdapterFiles, Factors, module_key
from aioinfer.errors import ConfigError
from aioinfer.model.weights import StoredMatrix

__all__ = ["AdaptedLayer", "AdapterTargets", "LowRank", "Target", "stored_bytes"]

#: reasons why modules are not adapted, by a part of their names between dots; the first that fits counts
_FIXED = {
    "lm_head": "the head is not adapted",
    "embed_tokens": "embeddings are not adapted",
    "wte": "embeddings are not adapted",
    "wpe": "embeddings are not adapted",
    "experts": "experts are not adapted",
    "shared_expert": "shared experts are not adapted",
    "shared_experts": "shared experts are not adapted",
    "shared_mlp": "shared experts are not adapted",
    "shared_expert_gate": "shared experts are not adapted",
    "router": "routers are not adapted",
    "gate": "routers are not adapted",
    "block_sparse_moe": "experts and their routers are not adapted",
    "kv_b_proj": "heads are not expanded from latents",
    "conv1d": "convolutions are not adapted",
    "per_layer_model_projection": "inputs by layer are not adapted",
    "per_layer_input_gate": "inputs by layer are not adapted",
    "per_layer_projection": "inputs by layer are not adapted",
    **dict.fromkeys(
        (
            *("visual", "vision_tower", "vision_model", "vision_embedder", "audio_tower"),
            *("multi_modal_projector", "connector", "embed_vision", "embed_audio"),
        ),
        "it is in no part of the text model, which alone is adapted",
    ),
}
#: bytes of a file that are no numbers
_HEADER = 16 << 20


class LowRank(NamedTuple):
    """The summand of the outputs ``[start, start + len(b))`` of a layer, for inputs x: ``scale * (x @ a.T) @
    b.T``."""

    #: [rank, inputs], as it is stored
    a: torch.Tensor
    #: [count, rank], as it is stored, in the order of the layer's outputs. Rows of 0 are between those of one
    #: target whose outputs are not side by side.
    b: torch.Tensor
    scale: float
    start: int

    @property
    def rank(self) -> int:
        """Numbers between the two products."""
        return len(self.a)


@dataclass(frozen=True, slots=True)
class Target:
    """One module of a layer: a tensor of the checkpoint."""

    name: str
    #: [start, stop) are the outputs of the layer among which are the module's
    start: int
    stop: int
    #: [module's rows] int64, where in [start, stop) each of its outputs is; None: in order, without others
    places: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class AdaptedLayer:
    """A linear layer from one or more modules with the same inputs. A module that a layer has twice (keys
    that are values, too) is two targets."""

    inputs: int
    outputs: int
    #: whether the weights are stored as [inputs, outputs]
    transposed: bool
    targets: tuple[Target, ...]


class AdapterTargets:
    """Filled by :class:`~aioinfer.model.layer_kernels.LayerKernels` while a model is built."""

    def __init__(self) -> None:
        #: layers by their indices
        self.layers: list[AdaptedLayer] = []
        #: layers and their targets, by :func:`~aioinfer.checkpoint.adapter.module_key`
        self._places: dict[str, list[tuple[int, int]]] = {}

    def add(self, stored: StoredMatrix) -> int | None:
        """Register a layer that is made of a matrix, and return its index; None: it is not adapted."""
        if any(_why_fixed(name) for name in stored.names):
            return None
        return self._add(AdaptedLayer(stored.shape[1], stored.shape[0], stored.transposed, _targets(stored)))

    def add_module(self, name: str, inputs: int, outputs: int, *, transposed: bool) -> int | None:
        """Register a layer that is one module, as :meth:`add`."""
        if _why_fixed(name):
            return None
        return self._add(AdaptedLayer(inputs, outputs, transposed, (Target(name, 0, outputs, None),)))

    def _add(self, layer: AdaptedLayer) -> int:
        index = len(self.layers)
        self.layers.append(layer)
        for at, target in enumerate(layer.targets):
            self._places.setdefault(module_key(target.name), []).append((index, at))
        return index

    def most_bytes(self, max_rank: int) -> int:
        """Above that a file cannot be an adapter of this model: four times what ``max_rank`` takes in
        float32 in all layers, so that a rank that is too high is refused as such."""
        elements = sum((each.inputs + each.outputs) * len(each.targets) for each in self.layers)
        return 4 * max_rank * elements * 4 + _HEADER

    def match(self, files: AdapterFiles, max_rank: int) -> dict[int, list[LowRank | None]]:
        """The summands of each layer that an adapter changes, an entry for each of the layer's targets.

        Raises:
           ConfigError: it changes a module that the model does not have or that cannot be adapted, its
               shapes are not the model's, a rank is above ``max_rank``, or matrices are missing of a module
               that its config chooses.
        """
        found: dict[int, list[LowRank | None]] = {}
        for key, factors in files.modules.items():
            if key not in self._places:
                raise ConfigError(f"adapter: {factors.name} cannot be adapted: {_why_not(factors.name)}")
            if len(factors.a) > max_rank:
                raise ConfigError(
                    f"adapter: {factors.name} has rank {len(factors.a)}; max_lora_rank is {max_rank}"
                )
            for index, at in self._places[key]:
                layer = self.layers[index]
                _check(factors, layer, layer.targets[at], transposed=files.config.transposed)
                entries = found.setdefault(index, [None] * len(layer.targets))
                entries[at] = _placed(factors, layer.targets[at])
        self._check_complete(files)
        return found

    def _check_complete(self, files: AdapterFiles) -> None:
        for key in sorted(self._places.keys() - files.modules.keys()):
            if files.selects(key):
                name = files.name_of(key)
                raise ConfigError(
                    f"adapter: the config chooses {name} (target_modules), of which there are no tensors"
                )


def _targets(stored: StoredMatrix) -> tuple[Target, ...]:
    ends = torch.tensor([0, *stored.rows]).cumsum(0).tolist()
    place = None
    if stored.order is not None:
        place = torch.empty(ends[-1], dtype=torch.int64)
        place[stored.order.cpu()] = torch.arange(ends[-1])
    targets = []
    for name, first, end in zip(stored.names, ends, ends[1:], strict=False):
        if place is None:
            targets.append(Target(name, first, end, None))
            continue
        own = place[first:end]
        start, stop = int(own.min()), int(own.max()) + 1
        targets.append(Target(name, start, stop, own - start))
    return tuple(targets)


def _placed(factors: Factors, target: Target) -> LowRank:
    b = factors.b
    if target.places is not None:
        b = factors.b.new_zeros(target.stop - target.start, factors.b.shape[1])
        b[target.places] = factors.b
    return LowRank(factors.a, b, factors.scale, target.start)


def _check(factors: Factors, layer: AdaptedLayer, target: Target, *, transposed: bool) -> None:
    name, inputs = factors.name, layer.inputs
    outputs = target.stop - target.start if target.places is None else len(target.places)
    if factors.a.shape[1] != inputs:
        raise ConfigError(
            f"adapter: lora_A of {name} has {factors.a.shape[1]} inputs, the layer has {inputs}"
        )
    if len(factors.b) != outputs:
        raise ConfigError(f"adapter: lora_B of {name} has {len(factors.b)} outputs, the layer has {outputs}")
    if transposed != layer.transposed:
        stored = "[inputs, outputs]" if layer.transposed else "[outputs, inputs]"
        said = "true" if transposed else "false"
        raise ConfigError(
            f"adapter: fan_in_fan_out is {said}, and the weight of {name} is stored as {stored}"
        )


def _why_fixed(name: str) -> str | None:
    return next((_FIXED[part] for part in name.split(".") if part in _FIXED), None)


def _why_not(name: str) -> str:
    return _why_fixed(name) or "the model has no such linear layer"


def stored_bytes(found: Mapping[int, list[LowRank | None]]) -> int:
    """Bytes of the matrices that :meth:`AdapterTargets.match` found, as they are stored."""
    parts = [part for entries in found.values() for part in entries if part is not None]
    return sum(part.a.nbytes + part.b.nbytes for part in parts)
