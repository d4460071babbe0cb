"""Routers and experts over the kernels in C++ (``native/source/routing.hpp`` and ``experts.hpp``), on a CPU.

Among experts of exactly equal score the first is chosen. What a token gets is a function of that token, to
the last bit: its experts are added up best first, whoever else goes to them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from aioinfer.model.moe.routing import GroupedSigmoidRouter, Rule
from aioinfer.native.bindings import Number, PackedExperts, PackedRouter, PackedWeights, ThreadPool

__all__ = ["NativeExperts", "NativeRouter"]

_NUMBERS: dict[torch.dtype, Number] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class NativeRouter:
    """Computes what one of torch's routers does; see :class:`~aioinfer.model.moe.routing.Router`.

    Its weights are float32; a softmax's have been rounded to the type of the tokens.
    """

    __slots__ = ("packed",)

    def __init__(self, team: ThreadPool, rule: Rule, dtype: torch.dtype) -> None:
        """``dtype``: that of the tokens."""
        weight = rule.weight.float().contiguous()
        experts, hidden = weight.shape
        packed = PackedWeights(team, "float32", weight.data_ptr(), None, experts, hidden)
        bias, scale, groups = None, 1.0, (1, 1)
        if isinstance(rule, GroupedSigmoidRouter):
            bias, scale, groups = rule.bias, rule.scale, (rule.num_groups, rule.top_groups)
        bias = None if bias is None else bias.float().contiguous()
        self.packed = PackedRouter(
            *(_NUMBERS[dtype], packed, None if bias is None else bias.data_ptr()),
            sigmoid=isinstance(rule, GroupedSigmoidRouter),
            top_k=rule.top_k,
            groups=groups,
            normalize=rule.normalize,
            scale=scale,
        )

    def __call__(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~aioinfer.model.moe.routing.Router`."""
        hidden = hidden.contiguous()
        weights = torch.empty(len(hidden), self.packed.top_k)
        experts = torch.empty(weights.shape, dtype=torch.int64)
        self.packed.apply(hidden.data_ptr(), len(hidden), weights.data_ptr(), experts.data_ptr())
        return weights, experts


class NativeExperts:
    """See :class:`~aioinfer.model.moe.experts.Experts`."""

    __slots__ = ("packed",)

    def __init__(
        self,
        team: ThreadPool,
        dtype: torch.dtype,
        sizes: tuple[int, int, int],
        experts: Iterable[tuple[torch.Tensor, torch.Tensor]],
        *,
        rounded: bool = False,
    ) -> None:
        """``sizes``: how many experts, hidden, middle. ``experts`` come one by one, [2 * middle, hidden] and
        [hidden, middle]; each is packed before the next is asked for, ``rounded`` to 8 bits."""
        self.packed = PackedExperts(team, _NUMBERS[dtype], *sizes, rounded=rounded)
        for index, (gate_up, down) in enumerate(experts):
            gate_up, down = gate_up.contiguous(), down.contiguous()
            self.packed.pack(index, gate_up.data_ptr(), down.data_ptr())

    def __call__(self, hidden: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """See :class:`~aioinfer.model.moe.experts.Experts`."""
        hidden, weights, experts = hidden.contiguous(), weights.float().contiguous(), experts.contiguous()
        out = torch.empty_like(hidden)
        tokens, top_k = experts.shape
        pointers = experts.data_ptr(), weights.data_ptr(), out.data_ptr()
        self.packed.apply(hidden.data_ptr(), tokens, top_k, *pointers)
        return out
