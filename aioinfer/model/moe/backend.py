"""The backends that compute the experts of a mixture of experts and route tokens to them."""

from __future__ import annotations

from typing import Literal

import torch

from aioinfer.model.backend import Backend, choose_backend
from aioinfer.model.mlp import FeedForward
from aioinfer.model.moe.experts import Experts, ExpertWeights, GroupedExperts, LoopExperts, grouped_mm
from aioinfer.model.moe.routing import Router, Rule
from aioinfer.model.moe.sparse import SparseMLP, StoredExperts
from aioinfer.model.triton_support import dtype_unsupported, triton_unsupported

__all__ = ["MoEBackend", "choose_experts", "make_experts", "make_router", "make_sparse"]

#: values of the option ``moe_backend``
MoEBackend = Literal["auto", "triton", "native", "grouped", "loop"]

#: what "auto" tries, by device type
_AUTOMATIC = {"cuda": ("triton", "grouped", "loop"), "cpu": ("native", "grouped", "loop")}
#: torch's grouped multiplication asks for rows that begin at multiples of this many bytes
_ALIGNMENT = 16


def choose_experts(
    device: torch.device,
    hidden: int,
    middle: int,
    dtype: torch.dtype,
    wanted: MoEBackend = "auto",
    *,
    native: bool = False,
) -> Backend:
    """The backend of experts: "triton", "native", "grouped" (torch's grouped multiplication) or "loop" (one
    expert after the other).

    "auto" is Triton on a CUDA device for which it compiles, native kernels where the layers are native, else
    "grouped" where torch supports it, else "loop".

    Args:
        device: the device that holds the experts.
        hidden: size of the residual.
        middle: inner size of one expert.
        dtype: type of the weights.
        wanted: value of ``moe_backend``.
        native: the layers of the model are native.

    Raises:
        ConfigError: if ``wanted`` cannot run. Triton runs on a CPU in its interpreter only, for tests.
    """
    return choose_backend(
        "moe_backend",
        wanted,
        {
            "triton": lambda: dtype_unsupported(dtype) or triton_unsupported(device),
            "native": lambda: None if native else "the layers are not native",
            "grouped": lambda: _grouped_unsupported(device, hidden, middle, dtype),
            "loop": lambda: None,
        },
        _AUTOMATIC.get(device.type, ("grouped", "loop")),
        device,
    )


def make_sparse(
    rule: Rule,
    stored: StoredExperts,
    shared: FeedForward | None,
    backend: Backend,
    *,
    invariant: bool = False,
) -> SparseMLP:
    """A layer's sparse feed-forward part by ``backend``, any but "native". ``invariant``: see
    :func:`make_experts`."""
    experts = make_experts(stored.stacked(), backend, invariant=invariant)
    return SparseMLP(make_router(rule, backend), experts, shared)


def make_experts(stack: ExpertWeights, backend: Backend, *, invariant: bool = False) -> Experts:
    """The experts of one layer by ``backend``, any but "native". ``invariant``: if Triton computes them, a
    token has the same bits in any batch."""
    if backend.name == "loop":
        return LoopExperts(stack)
    if backend.name == "grouped":
        return GroupedExperts(stack)
    from aioinfer.model.moe.triton_experts import TritonExperts

    return TritonExperts(stack, invariant=invariant)


def make_router(rule: Rule, backend: Backend) -> Router:
    """The router of ``rule``: in Triton where ``backend`` is Triton and its kernel supports the rule."""
    if backend.name != "triton":
        return rule
    from aioinfer.model.moe.triton_routing import TritonRouter

    return rule if TritonRouter.unsupported_reason(rule) else TritonRouter(rule)


def _grouped_unsupported(device: torch.device, hidden: int, middle: int, dtype: torch.dtype) -> str | None:
    """Calls torch's grouped multiplication on a small problem: the dtypes and devices that it supports differ
    between versions of torch."""
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
