"""Grafting: the tensors of one object into another one of the same structure, which torch's kernels read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch

from aioinfer.model.rope import Rope
from aioinfer.model.updates.new_weights import is_missing, merged

__all__ = ["constants", "graft"]


def graft(old: Any, new: Any) -> Any:
    """Return ``old`` with the tensors and factors of ``new`` in it. On CUDA tensors are copied, since
    captured graphs read them in place; on a CPU they are replaced, since the old memory may be a file's.
    Common values stay, and so do values that are missing."""
    if old is new or isinstance(old, Rope):
        return old
    if isinstance(old, torch.Tensor):
        if is_missing(new):
            return old
        if old.is_cuda:
            return old.copy_(torch.where(new.isnan(), old, new.to(old)))
        return merged(old, new)
    if isinstance(old, float):
        return old if math.isnan(new) else new
    if isinstance(old, (list, tuple)):
        parts = [graft(one, other) for one, other in zip(old, new, strict=True)]
        if isinstance(old, list):
            old[:] = parts
            return old
        return old if type(old) is not tuple else tuple(parts)
    for name in _fields(old):
        before = getattr(old, name)
        after = graft(before, getattr(new, name))
        if after is not before:
            object.__setattr__(old, name, after)
    return old


def constants(old: Any, new: Any) -> Iterator[tuple[float, float]]:
    """The factors that differ, which captured graphs have as constants."""
    if old is new or isinstance(old, (Rope, torch.Tensor)):
        return
    if isinstance(old, float):
        if not math.isnan(new) and new != old:
            yield old, new
    elif isinstance(old, (list, tuple)):
        for one, other in zip(old, new, strict=True):
            yield from constants(one, other)
    else:
        for name in _fields(old):
            yield from constants(getattr(old, name), getattr(new, name))


def _fields(part: Any) -> list[str]:
    if dataclasses.is_dataclass(part):
        return [field.name for field in dataclasses.fields(part)]
    names = [name for kind in type(part).__mro__ for name in getattr(kind, "__slots__", ())]
    return [name for name in names if hasattr(part, name)]
