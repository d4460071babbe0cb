"""AdapterTargets: the linear layers of a model that adapters can change, by the names of their modules."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias

import torch

from aioinfer.checkpoint.adapter import AdapterFiles, Factors, module_key
from aioinfer.errors import ConfigError
from aioinfer.model.weights import StoredMatrix
from aioinfer.system.low_priority import at_low_priority

__all__ = ["HEAD", "AdaptedLayer", "AdapterTargets", "Base", "LowRank", "Target", "stored_bytes"]

#: the key of the head, whatever tensor it is
HEAD = "lm_head"
#: reasons why modules are not adapted, by a part of their names between dots; the first that fits counts
_FIXED = {
    HEAD: "the head is not adapted",
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
_REPLACED = "adapter: it needs the weights that the model was loaded with, and others have replaced them"
#: rows of a weight whose norms are computed at a time
_ROWS = 256
#: bytes of a file that are no numbers
_HEADER = 16 << 20


#: the weight [outputs, inputs] of a target by its index, and its bias or None, as they are computed with;
#: float32
Base: TypeAlias = Callable[[int], tuple[torch.Tensor, torch.Tensor | None]]


class Bound(Protocol):
    """An adapter, as far as it may be made of a model's weights."""

    @property
    def bound(self) -> bool:
        """Whether it is."""


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
    #: [2, count] float32, factors and shifts of the outputs before that is added; None: 1 and 0
    rescaling: torch.Tensor | None = None

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
    base: Base


class AdapterTargets:
    """Filled by :class:`~aioinfer.model.layer_kernels.LayerKernels` while a model is built.

    Some adapters are made of the weights that the model was loaded with (DoRA). They exclude other weights.
    """

    def __init__(self) -> None:
        #: layers by their indices
        self.layers: list[AdaptedLayer] = []
        self._lock = threading.Lock()
        #: slots with adapters that are made of the weights, and whether others have replaced these
        self._bound: set[int] = set()
        #: the embedding: its key, and its weight [vocab_size, hidden]; None: it is not adapted
        self._words: tuple[str, tuple[int, int], Base] | None = None
        self._replaced = False
        #: layers and their targets, by :func:`~aioinfer.checkpoint.adapter.module_key`
        self._places: dict[str, list[tuple[int, int]]] = {}

    def add(self, stored: StoredMatrix) -> int | None:
        """Register a layer that is made of a matrix, and return its index; None: it is not adapted."""
        if any(_why_fixed(name) for name in stored.names):
            return None
        outputs, inputs = stored.shape
        return self._add(AdaptedLayer(inputs, outputs, stored.transposed, _targets(stored), stored.again))

    def add_module(
        self,
        name: str,
        inputs: int,
        outputs: int,
        base: Base,
        *,
        transposed: bool,
    ) -> int | None:
        """Register a layer that is one module, as :meth:`add`."""
        if _why_fixed(name):
            return None
        return self._add(AdaptedLayer(inputs, outputs, transposed, (Target(name, 0, outputs, None),), base))

    def add_head(self, outputs: int, inputs: int, base: Base) -> int:
        """Register the layer to logits, and return its index."""
        return self._add(AdaptedLayer(inputs, outputs, False, (Target(HEAD, 0, outputs, None),), base))

    def add_words(self, name: str, shape: tuple[int, int], base: Base) -> None:
        """Register the embedding [vocab_size, hidden]."""
        if name != HEAD:  # under which name a checkpoint may have a tied one
            self._words = module_key(name), shape, base

    def bind(self, slot: int, found: Bound) -> None:
        """A slot has an adapter. Raises ConfigError if that was made of weights that were replaced."""
        with self._lock:
            if found.bound and self._replaced:
                raise ConfigError(_REPLACED)
            if found.bound:
                self._bound.add(slot)

    def release(self, slot: int) -> None:
        """A slot has none any more."""
        with self._lock:
            self._bound.discard(slot)

    def replace_weights(self) -> None:
        """The model gets other weights. Raises ConfigError if an adapter was made of those that it has."""
        with self._lock:
            if self._bound:
                raise ConfigError(
                    "model: an adapter is loaded that was made of the weights (DoRA, modules_to_save)"
                )
            self._replaced = True

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
        whole = 0 if self._words is None else 2 * math.prod(self._words[1])
        return (4 * max_rank * elements + whole) * 4 + _HEADER

    def match(self, files: AdapterFiles, max_rank: int) -> dict[int, list[LowRank | None]]:
        """The summands of each layer that an adapter changes, an entry for each of the layer's targets.

        Raises:
           ConfigError: it changes a module that the model does not have or that cannot be adapted, its
               shapes are not the model's, a rank is above ``max_rank``, or matrices are missing of a module
               that its config chooses.
        """
        found: dict[int, list[LowRank | None]] = {}
        if self._replaced and (files.saved or files.config.dora):
            raise ConfigError(_REPLACED)
        for key, (name, weight) in files.saved.items():
            if key == HEAD and key in self._places and key not in files.modules:
                index, _ = self._places[key][0]
                found[index] = [_replacing(name, weight, self.layers[index])]
            elif self._words is None or key != self._words[0]:
                self._check_same(key, name, weight)
        for key, factors in files.modules.items():
            if self._words is not None and key == self._words[0]:
                continue
            if key not in self._places:
                raise ConfigError(f"adapter: {factors.name} cannot be adapted: {_why_not(factors.name)}")
            _check_rank(factors, max_rank)
            for index, at in self._places[key]:
                layer = self.layers[index]
                _check(factors, layer, layer.targets[at], transposed=files.config.transposed)
                entries = found.setdefault(index, [None] * len(layer.targets))
                entries[at] = _placed(factors, layer, at)
        self._check_complete(files)
        return {index: entries for index, entries in found.items() if any(entries)}

    def words(self, files: AdapterFiles, max_rank: int) -> torch.Tensor | None:
        """The vectors of tokens [vocab_size, hidden] of an adapter that has its own; float32. Raises
        ConfigError."""
        if self._words is None:
            return None
        key, shape, base = self._words
        factors, (name, weight) = files.modules.get(key), files.saved.get(key, ("", None))
        if weight is not None and weight.shape != shape:
            raise ConfigError(f"adapter: {name} is shaped {tuple(weight.shape)}, the model's {shape}")
        if factors is None:
            return None if weight is None else weight.float()
        if factors.magnitude is not None:
            raise ConfigError(f"adapter: {factors.name} is an embedding, of which DoRA is not supported")
        _check_rank(factors, max_rank)
        if (len(factors.b), factors.a.shape[1]) != shape[::-1]:
            raise ConfigError(f"adapter: {factors.name} is not the embedding of the model, which is {shape}")
        whole = base(0)[0] if weight is None else weight.float()
        return torch.addmm(whole, factors.a.T.float(), factors.b.T.float(), alpha=factors.scale)

    def _check_same(self, key: str, name: str, weight: torch.Tensor) -> None:
        """Raise ConfigError unless a whole weight is that of the model: PEFT writes those beside matrices."""
        index, at = self._places.get(key, [(-1, 0)])[0]
        if index < 0 or not weight.float().equal(self.layers[index].base(at)[0]):
            raise ConfigError(
                f"adapter: {name} is a weight of its own; of modules_to_save, the head and the embedding are "
                "supported where they can be adapted, and not beside matrices"
            )

    def _check_complete(self, files: AdapterFiles) -> None:
        for key in sorted(self._places.keys() - files.modules.keys()):
            if key == HEAD and (files.config.targets == "all-linear" or key in files.saved):
                continue
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


def _placed(factors: Factors, layer: AdaptedLayer, at: int) -> LowRank:
    target, b, rescaling = layer.targets[at], factors.b, None
    if factors.magnitude is not None:
        b, rescaling = at_low_priority(partial(_rescaled, factors, *layer.base(at)))
    elif factors.bias is not None:
        shift = factors.scale * factors.bias.float()
        rescaling = torch.stack((torch.ones_like(shift), shift))
    if target.places is not None:
        count = target.stop - target.start
        placed = b.new_zeros(count, b.shape[1])
        placed[target.places] = b
        b = placed
        if rescaling is not None:
            whole = torch.stack((torch.ones(count), torch.zeros(count)))
            whole[:, target.places] = rescaling
            rescaling = whole
    return LowRank(factors.a, b, factors.scale, target.start, rescaling)


def _replacing(name: str, weight: torch.Tensor, layer: AdaptedLayer) -> LowRank | None:
    """What is added to a layer's outputs for another weight, by a first matrix that is the identity; None if
    it is the same one. Raises ConfigError."""
    base, _ = layer.base(0)
    if weight.shape != base.shape:
        raise ConfigError(f"adapter: {name} is shaped {tuple(weight.shape)}, the model's {tuple(base.shape)}")
    change = weight.float() - base
    return LowRank(torch.eye(layer.inputs), change, 1.0, 0) if bool(change.any()) else None


def _rescaled(
    factors: Factors, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """B, and the factors and shifts of outputs, with DoRA (arXiv 2402.09353): a row of the weight with its
    summand has the norm that is its magnitude; the bias is not changed. Raises ConfigError."""
    assert factors.magnitude is not None
    a, b = factors.a.float(), factors.b.float()
    norms = torch.empty(len(b))
    for first in range(0, len(b), _ROWS):
        part = slice(first, first + _ROWS)
        torch.linalg.vector_norm(weight[part] + factors.scale * (b[part] @ a), dim=1, out=norms[part])
    factor = factors.magnitude.float() / norms
    if not bool(factor.isfinite().all()):
        raise ConfigError(f"adapter: rows of the weight of {factors.name} have no norm to divide by (DoRA)")
    shift = torch.zeros_like(factor) if bias is None else bias * (1 - factor)
    return b * factor[:, None], torch.stack((factor, shift))


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


def _check_rank(factors: Factors, most: int) -> None:
    if len(factors.a) > most:
        raise ConfigError(f"adapter: {factors.name} has rank {len(factors.a)}; max_lora_rank is {most}")


def _why_fixed(name: str) -> str | None:
    return next((_FIXED[part] for part in name.split(".") if part in _FIXED), None)


def _why_not(name: str) -> str:
    return _why_fixed(name) or "the model has no such linear layer"


def stored_bytes(found: Mapping[int, list[LowRank | None]]) -> int:
    """Bytes of the matrices that :meth:`AdapterTargets.match` found, as they are stored."""
    parts = [part for entries in found.values() for part in entries if part is not None]
    return sum(part.a.nbytes + part.b.nbytes for part in parts)
