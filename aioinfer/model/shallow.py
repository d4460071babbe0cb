"""Shallow: the first layers of a model of transformers in float32, for its self-check.

A model is not copied as a whole: it may fill the memory. Of one that is not small, only so many layers are
taken that one of each kind is among them; deeper ones compute in the same way, with other weights.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["block_size", "kinds", "shallow"]

#: parameters up to which all layers are taken: a copy of a gigabyte
_SMALL = 1 << 28
#: fields of a config that may state the length of what is computed in another way when it is full
_BLOCKS = re.compile(r"^(?!.*(num_|layers)).*(block|chunk|window|conv|kernel|local|stride|compress)")
#: the longest of them that a check can exceed in little time
_LONGEST = 512


def kinds(model: Any) -> int:
    """The number of layers, from the first on, that stand for all: all of a small model."""
    config = model.config.get_text_config()
    depth: int = config.num_hidden_layers
    if sum(parameter.numel() for parameter in model.parameters()) <= _SMALL:
        return depth
    types = getattr(config, "layer_types", None) or [None] * depth
    count = 1
    for _, _, stack in _stacks(model, depth):
        found = [(types[index], _kind(layer)) for index, layer in enumerate(stack)]
        count = max(count, 1 + max(map(found.index, found)))
    return count


@contextlib.contextmanager
def shallow(model: Any, count: int) -> Iterator[None]:
    """Within it, the model computes in float32, and only the first ``count`` of its layers."""
    config = model.config.get_text_config()
    depth = config.num_hidden_layers
    stacks = _stacks(model, depth)
    tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        if count < depth:
            config.num_hidden_layers = count
            for parent, name, stack in stacks:
                setattr(parent, name, stack[:count])
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point() and tensor.dtype != torch.float32:
                tensors.append((tensor, tensor.data))
                tensor.data = tensor.data.float()
        yield
    finally:
        for tensor, data in tensors:
            tensor.data = data
        if count < depth:
            config.num_hidden_layers = depth
            for parent, name, stack in stacks:
                setattr(parent, name, stack)


def block_size(model: Any) -> int:
    """The longest block, window or chunk that the config states, of those that a check can exceed, or 0."""
    config = model.config.get_text_config()
    room = min(_LONGEST, (getattr(config, "max_position_embeddings", None) or _LONGEST) - 32)
    found = [0]
    parts = [config.to_dict()]
    while parts:
        for name, value in parts.pop().items():
            if isinstance(value, dict):
                parts.append(value)
            elif isinstance(value, int) and not isinstance(value, bool) and _BLOCKS.search(name):
                found.append(value)
    return max(size for size in found if size <= max(0, room))


def _stacks(model: Any, depth: int) -> list[tuple[Any, str, torch.nn.ModuleList]]:
    """The lists of as many layers as the model has, and where they are."""
    return [
        (parent, name, stack)
        for parent in model.modules()
        for name, stack in parent.named_children()
        if isinstance(stack, torch.nn.ModuleList) and len(stack) == depth
    ]


def _kind(layer: torch.nn.Module) -> list[Any]:
    """What a layer is, apart from its weights, sizes and place."""
    return [
        (name, type(module), sorted(filter(None, map(_told, vars(module).items()))))
        for name, module in layer.named_modules()
    ]


def _told(attribute: tuple[str, Any]) -> tuple[str, str] | None:
    name, value = attribute
    if isinstance(value, int):
        return None if "idx" in name or "index" in name else (name, str(bool(value)))
    return (name, repr(value)) if value is None or isinstance(value, str) else None
