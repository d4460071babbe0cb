"""Routers and experts over the kernels in C++ (``native/source/routing.hpp`` and ``experts.hpp``), on a CPU.

Among experts of exactly equal score the first is chosen. A token's result is a function of that token alone,
to the bit: the results of its experts are added up best first, for any other tokens of these experts.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from aioinfer.model.gates import Gate
from aioinfer.model.moe.routing import GroupedSigmoidRouter, Rule, SoftmaxRouter
from aioinfer.model.quantization import Rounding
from aioinfer.model.weights_cache import MappedMemory
from aioinfer.native.arguments import ExpertsArguments, MappedExpertsArguments, WeightsArguments
from aioinfer.native.bindings import GATES, ThreadPool
from aioinfer.native.packed import PackedExperts, PackedRouter, PackedWeights
from aioinfer.native.tensors import NUMBERS, address

__all__ = ["NativeExperts", "NativeRouter"]


class NativeRouter:
    """A native version of one of torch's routers; see :class:`~aioinfer.model.moe.routing.Router`.

    Its weights are float32; those of a softmax have been rounded to the type of the tokens, or its rule has a
    bias of the choice.
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
            sigmoid=isinstance(rule, GroupedSigmoidRouter),
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

    __slots__ = ("dtype", "gate", "packed")

    def __init__(
        self,
        pool: ThreadPool,
        dtype: torch.dtype,
        sizes: tuple[int, int, int],
        experts: Iterable[tuple[torch.Tensor, torch.Tensor]] | MappedMemory,
        rounding: Rounding | None = None,
        *,
        gate: Gate = "silu",
        biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """
        Args:
            sizes: number of experts, hidden, middle.
            experts: [2 * middle, hidden] and [hidden, middle] of each; it is packed before the next is taken.
                Or what ``packed.memory`` was when they were packed and written to a file.
            rounding: of their weights; None: not rounded.
            biases: [count, 2 * middle], those of gates first, and [count, hidden]; or None.

        Raises:
            InvalidArguments: experts of these sizes are packed into another size.
        """
        self.dtype, self.gate = dtype, gate
        count, hidden, middle = sizes
        shape = {
            "count": count,
            "hidden": hidden,
            "middle": middle,
            "bits": 0 if rounding is None else rounding.bits,
            "hidden_group": 0 if rounding is None else rounding.for_size(hidden).group,
            "middle_group": 0 if rounding is None else rounding.for_size(middle).group,
        }
        if isinstance(experts, MappedMemory):
            mapped = MappedExpertsArguments(packed=experts.address, size=experts.size, **shape)
            self.packed = PackedExperts(pool, NUMBERS[dtype], mapped, experts.owner)
        else:
            self.packed = PackedExperts(pool, NUMBERS[dtype], ExpertsArguments(**shape))
            self._pack(experts)
        self._set_biases(biases)

    def set(
        self,
        experts: Iterable[tuple[torch.Tensor, torch.Tensor]],
        biases: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        """Pack the weights and biases of other experts in place of the present ones."""
        self._pack(experts)
        self._set_biases(biases)

    def _pack(self, experts: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        packed, dtype = self.packed, self.dtype
        count = packed.middle * packed.hidden
        for index, (gate_up, down) in enumerate(experts):
            gate_up, down = gate_up.contiguous(), down.contiguous()
            packed.pack(index, address(gate_up, dtype, 2 * count), address(down, dtype, count))

    def _set_biases(self, biases: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        packed, dtype = self.packed, self.dtype
        for index in range(0 if biases is None else packed.count):
            assert biases is not None
            first, second = (each[index].contiguous() for each in biases)
            both = address(first, dtype, 2 * packed.middle)
            packed.set_biases(index, both, address(second, dtype, packed.hidden))

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
