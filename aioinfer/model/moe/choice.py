"""Which kernels compute a model's experts, and choose among them, and why. The one place where that is
decided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from aioinfer.errors import ConfigError
from aioinfer.model.attention.choice import dtype_unsupported
from aioinfer.model.mlp import FeedForward
from aioinfer.model.moe.experts import Experts, ExpertWeights, GroupedExperts, LoopExperts, grouped_mm
from aioinfer.model.moe.routing import Router, Rule
from aioinfer.model.moe.sparse import SparseMLP, StoredExperts
from aioinfer.model.triton_support import triton_unsupported

__all__ = ["Choice", "Wanted", "choose_experts", "make_experts", "make_router", "make_sparse"]

Wanted = Literal["auto", "triton", "native", "grouped", "loop"]
#: what torch's grouped multiplication asks of the distance between rows
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernels that run, and the reason in words for people."""

    kernels: Literal["triton", "native", "grouped", "loop"]
    reason: str


def choose_experts(
    device: torch.device,
    hidden: int,
    middle: int,
    dtype: torch.dtype,
    wanted: Wanted = "auto",
    *,
    native: bool = False,
) -> Choice:
    """``auto`` is native where the layers are (``native``), Triton on a CUDA device that it compiles for,
    else torch's grouped multiplication, else one expert after the other.

    Raises ConfigError if what is wanted cannot run. Triton on a CPU is for tests, as it is for attention.
    """
    if wanted == "loop":
        return Choice("loop", "asked for")
    if native and wanted in ("auto", "native"):
        return Choice("native", "asked for" if wanted == "native" else "so are the layers")
    if wanted == "native":
        raise ConfigError("experts: native was asked for, and the layers are not")
    why = f"the device is a {device.type}"
    if wanted == "triton" or (wanted == "auto" and device.type == "cuda"):
        unsupported_reason = dtype_unsupported(dtype) or triton_unsupported(device)
        if unsupported_reason is None:
            return Choice("triton", "asked for" if wanted == "triton" else "the device is CUDA")
        if wanted == "triton":
            raise ConfigError(f"experts: triton was asked for, and {unsupported_reason}")
        why = unsupported_reason
    unsupported_reason = _grouped_unsupported(device, hidden, middle, dtype)
    if unsupported_reason is None:
        return Choice("grouped", "asked for" if wanted == "grouped" else why)
    if wanted == "grouped":
        raise ConfigError(f"experts: grouped was asked for, and {unsupported_reason}")
    return Choice("loop", f"{why}, and {unsupported_reason}")


def make_sparse(rule: Rule, stored: StoredExperts, shared: FeedForward | None, choice: Choice) -> SparseMLP:
    """A layer's feed-forward part by the kernels of ``choice``, which are torch's or Triton's."""
    return SparseMLP(make_router(rule, choice), make_experts(stored.stacked(), choice), shared)


def make_experts(stack: ExpertWeights, choice: Choice) -> Experts:
    """The kernels of ``choice``, torch's or Triton's, over a layer's weights."""
    if choice.kernels == "loop":
        return LoopExperts(stack)
    if choice.kernels == "grouped":
        return GroupedExperts(stack)
    from aioinfer.model.moe.triton_experts import TritonExperts

    return TritonExperts(stack)


def make_router(rule: Rule, choice: Choice) -> Router:
    """What follows ``rule``: Triton's kernels if the experts' are and they can, else torch's."""
    if choice.kernels != "triton":
        return rule
    from aioinfer.model.moe.triton_routing import TritonRouter

    return rule if TritonRouter.unsupported_reason(rule) else TritonRouter(rule)


def _grouped_unsupported(device: torch.device, hidden: int, middle: int, dtype: torch.dtype) -> str | None:
    """What keeps torch's grouped multiplication from running there, if anything does. Types and devices
    that it takes changed with every version of torch, so it is asked."""
    step = _ALIGNMENT // dtype.itemsize
    if hidden % step or middle % step:
        return f"sizes {hidden} and {middle} are no multiples of {step}"
    rows = torch.zeros(2, 64, dtype=dtype, device=device)
    ends = torch.ones(1, dtype=torch.int32, device=device)
    try:
        grouped_mm(rows, rows.new_zeros(1, 64, 64).mT, ends)
    except RuntimeError as error:
        return f"torch says: {str(error).splitlines()[0]}"
    return None
