"""Routers and experts over the kernels in C++ (``native/source/routing.hpp`` and ``experts.hpp``), on a CPU.

Among experts of exactly equal score the first is chosen. A token's result is a function of that token alone,
to the bit: the results of its experts are added up best first, for any other tokens of these experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from aioinfer.checkpoint.tensors import QuantisedMatrix
from aioinfer.model.gates import Gate
from aioinfer.model.moe.routing import GroupedSigmoidRouter, Rule, SoftmaxRouter
from aioinfer.model.moe.sparse import StoredExperts
from aioinfer.model.native_linear import NativeLinear
from aioinfer.model.quantization import Rounding
from aioinfer.native.arguments import WeightsArguments
from aioinfer.native.bindings import GATES, ThreadPool
from aioinfer.native.packed import PackedExperts, PackedRouter, PackedWeights
from aioinfer.native.tensors import NUMBERS, address

__all__ = ["NativeExperts", "NativeRouter"]


class NativeRouter:
    """A native version of one of torch's routers; see :class:`~aioinfer.model.moe.routing.Router`.

    Its weights are float32; those of a softmax alone have been rounded to the type of the tokens, or its rule
    has a bias of the choice.
    """

    __slots__ = ("dtype", "packed")

    def __init__(self, pool: ThreadPool, rule: Rule, dtype: torch.dtype) -> None:
        """``dtype``: that of the tokens."""
        weight = rule.weight.float().contiguous()
        experts, hidden = weight.shape
        softmax_bias = rule.bias if isinstance(rule, SoftmaxRouter) else None
        scales = rule.scales if isinstance(rule, SoftmaxRouter) else None
        scales = None if scales is None else scales.float().contiguous()
        if softmax_bias is not None:
            softmax_bias = softmax_bias.float().contiguous()
        arguments = WeightsArguments(
            pool=pool.handle,
            rows=address(weight, torch.float32, experts * hidden),
            bias=None if softmax_bias is None else address(softmax_bias, torch.float32, experts),
            outputs=experts,
            inner=hidden,
            bits=0,
            group=0,
            gated=False,
        )
        packed = PackedWeights(pool, "float32", arguments)
        bias, scale, groups, top_groups = getattr(rule, "balance", None), 1.0, 1, 1
        if isinstance(rule, GroupedSigmoidRouter):
            bias, scale, groups, top_groups = rule.bias, rule.scale, rule.num_groups, rule.top_groups
        bias = None if bias is None else bias.float().contiguous()
        self.dtype = dtype
        self.packed = PackedRouter(
            NUMBERS[dtype],
            packed,
            None if bias is None else address(bias, torch.float32, experts),
            sigmoid=isinstance(rule, GroupedSigmoidRouter) and not rule.softmax,
            rounds=isinstance(rule, SoftmaxRouter),
            top_k=rule.top_k,
            groups=groups,
            top_groups=top_groups,
            normalize=rule.normalize,
            scale=scale,
            scales=None if scales is None else address(scales, torch.float32, experts),
        )

    def set(self, rule: Rule) -> None:
        """Follow a rule with other weights, and the same sizes."""
        self.packed.exchange(NativeRouter(self.packed.weight.pool, rule, self.dtype).packed)

    def __call__(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, count, packed = hidden.contiguous(), len(hidden), self.packed
        weights = torch.empty(count, packed.top_k)
        experts = torch.empty(weights.shape, dtype=torch.int64)
        values = address(hidden, self.dtype, count * packed.weight.inner)
        packed.apply(values, count, weights.data_ptr(), experts.data_ptr())
        return weights, experts


class NativeExperts:
    """Experts with packed weights."""

    __slots__ = ("dtype", "gate", "layers", "packed")

    def __init__(
        self, pool: ThreadPool, layers: Sequence[tuple[NativeLinear, NativeLinear]], gate: Gate = "silu"
    ) -> None:
        """
        Args:
            layers: of each expert, at least one, a gated layer from hidden to middle, and one back.

        Raises:
            InvalidArguments: their sizes or formats differ.
        """
        self.layers, self.gate, self.dtype = layers, gate, layers[0][0].dtype
        gate_up, down = ([pair[at].packed for pair in layers] for at in (0, 1))
        self.packed = PackedExperts(pool, NUMBERS[self.dtype], gate_up, down)

    @property
    def kept(self) -> tuple[Rounding, Rounding] | None:
        """How gate and up, and down, were quantised already when they were given; None: they were not."""
        first, second = (layer.kept for layer in self.layers[0])
        return None if first is None or second is None else (first, second)

    def set(self, stored: StoredExperts) -> None:
        """Pack the weights and biases of other experts in place of the present ones; quantised alike."""
        biases = stored.biases()
        matrices: Iterator[Sequence[torch.Tensor | QuantisedMatrix]] = stored.each()
        if self.kept is not None:
            matrices = stored.each_quantised()
        pair: Sequence[torch.Tensor | QuantisedMatrix]
        for index, pair in enumerate(matrices):
            for at, layer in enumerate(self.layers[index]):
                matrix, bias = pair[at], None if biases is None else biases[at][index]
                if isinstance(matrix, QuantisedMatrix):
                    layer.set_quantised(matrix, bias)
                else:
                    layer.set(matrix, bias)

    def __call__(self, hidden: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        hidden, weights, experts = hidden.contiguous(), weights.float().contiguous(), experts.contiguous()
        out = torch.empty_like(hidden)
        tokens, top_k = experts.shape
        self.packed.apply(
            address(hidden, self.dtype, tokens * self.packed.hidden),
            tokens,
            top_k,
            address(experts, torch.int64, tokens * top_k),
            address(weights, torch.float32, tokens * top_k),
            out.data_ptr(),
            GATES[self.gate],
        )
        return out
