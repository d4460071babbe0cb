"""Packed: objects of the library that are made of weights: layers, routers, experts, decoders, adapters.

They are freed with their Python objects. Sizes and addresses are as in :mod:`aioinfer.native.bindings`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

from aioinfer.native.arguments import (
    AdaptArguments,
    AdaptedLayer,
    DecoderArguments,
    DequantiseArguments,
    EmbedArguments,
    ExpertsArguments,
    ForwardArguments,
    LayerArguments,
    LinearArguments,
    MappedWeightsArguments,
    MixArguments,
    QuantisedWeightsArguments,
    RepackArguments,
    RouteArguments,
    RouterArguments,
    WeightsArguments,
)
from aioinfer.native.bindings import GATES, Number, ThreadPool, release
from aioinfer.native.structures import Address

__all__ = ["PackedAdapter", "PackedExperts", "PackedRouter", "PackedWeights", "Stack"]


class PackedWeights:
    """Weights of a linear layer in the layout of the kernels; the original can be dropped."""

    def __init__(
        self,
        pool: ThreadPool,
        number: Number,
        arguments: WeightsArguments | QuantisedWeightsArguments | MappedWeightsArguments,
        keep: object = None,
    ) -> None:
        """
        Args:
            number: the type of activations and results, and of weights that are not quantised already.
            keep: the owner of weights that are packed already; it lives as long as they are used.
        """
        self.pool, self.number, self._kept = pool, number, keep
        self.outputs, self.inner = arguments.outputs, arguments.inner
        self.handle: int = pool.kernels.call(arguments, number)
        release(self, pool.kernels, f"free_weights_{number}", self.handle)

    @property
    def memory(self) -> tuple[int, int]:
        """Address and size in bytes of the packed weights, without their bias."""
        function = self.pool.kernels.function
        return (
            function(f"weights_data_{self.number}", self.handle),
            function(f"weights_bytes_{self.number}", self.handle),
        )

    @property
    def factors(self) -> int:
        """How their scales are stored, a number of the kernels' own."""
        found: int = self.pool.kernels.function(f"weights_factors_{self.number}", self.handle)
        return found

    def repack(self, rows: Address, bias: Address) -> None:
        """Pack other weights, a bias or both in place of the present ones, None to keep them; in the
        form in which they were given at first. Raises InvalidArguments: they are mapped, or were quantised
        already."""
        arguments = RepackArguments(pool=self.pool.handle, weights=self.handle, rows=rows, bias=bias)
        self.pool.kernels.call(arguments, self.number)

    def exchange(self, other: PackedWeights) -> None:
        """Exchange the weights with those of another layer of the same shape and format; the handles stay.
        Raises InvalidArguments."""
        self.pool.kernels.function(f"exchange_weights_{self.number}", self.handle, other.handle)
        self._kept, other._kept = other._kept, self._kept

    def apply(self, values: int, count: int, out: int, gate: int = GATES["none"]) -> None:
        """[count, inner] to [count, outputs], ``gate(outputs)``; gated: ``gate(gates) * up``."""
        pool = self.pool
        arguments = LinearArguments(
            pool=pool.handle,
            weights=self.handle,
            values=values,
            count=count,
            inner=self.inner,
            gate=gate,
            out=out,
        )
        pool.kernels.call(arguments, self.number)

    def dequantise(self, out: int) -> None:
        """The weights to float32 [outputs, inner]; gated [2 * outputs, inner], gates first.

        Raises InvalidArguments: they are not quantised."""
        arguments = DequantiseArguments(pool=self.pool.handle, weights=self.handle, out=out)
        self.pool.kernels.call(arguments, self.number)


class PackedRouter:
    """Chooses the experts of tokens; see ``routing.hpp``."""

    def __init__(
        self,
        number: Number,
        weight: PackedWeights,
        bias: Address,
        *,
        sigmoid: bool,
        rounds: bool,
        top_k: int,
        groups: int,
        top_groups: int,
        normalize: bool,
        scale: float,
        scales: Address = None,
    ) -> None:
        """
        Args:
            weight: float32, one output per expert.
            bias: address of one float32 per expert, or None.
            rounds: scores and weights are rounded to the type of the tokens.
            groups: number of groups of experts; a token goes to ``top_groups`` of them.
            scales: address of one float32 per expert, the factors of its weights, or None.
        """
        self.number, self.top_k, self.weight = number, top_k, weight
        arguments = RouterArguments(
            weight=weight.handle,
            bias=bias,
            scales=scales,
            top_k=top_k,
            groups=groups,
            top_groups=top_groups,
            scale=scale,
            sigmoid=sigmoid,
            rounds=rounds,
            normalize=normalize,
        )
        kernels = weight.pool.kernels
        self.handle: int = kernels.call(arguments, number)
        release(self, kernels, f"free_router_{number}", self.handle)

    def exchange(self, other: PackedRouter) -> None:
        """Exchange everything with another router of the same sizes; the handles stay. Raises
        InvalidArguments."""
        kernels = self.weight.pool.kernels
        kernels.function(f"exchange_routers_{self.number}", self.handle, other.handle)
        self.weight, other.weight = other.weight, self.weight

    def apply(self, values: int, count: int, weights: int, experts: int) -> None:
        """[count, inner] to weights, float32, and experts, int64, [count, top_k] each."""
        pool = self.weight.pool
        arguments = RouteArguments(
            pool=pool.handle,
            router=self.handle,
            values=values,
            count=count,
            hidden=self.weight.inner,
            weights=weights,
            experts=experts,
        )
        pool.kernels.call(arguments, self.number)


class PackedExperts:
    """The SwiGLUs of a layer; see ``experts.hpp``."""

    def __init__(
        self, pool: ThreadPool, number: Number, gate_up: list[PackedWeights], down: list[PackedWeights]
    ) -> None:
        """
        Args:
            gate_up: the first layer of each expert, at least one, gated, from hidden to middle.
            down: the second one of each, from middle to hidden.

        Raises:
            InvalidArguments: their sizes or formats differ.
        """
        self.pool, self.number, self.count = pool, number, len(down)
        self._kept = gate_up, down
        first, second = (
            (ctypes.c_void_p * len(each))(*(one.handle for one in each)) for each in (gate_up, down)
        )
        arguments = ExpertsArguments(
            count=self.count, gate_up=ctypes.addressof(first), down=ctypes.addressof(second)
        )
        self.handle: int = pool.kernels.call(arguments, number)
        self.hidden, self.middle = down[0].outputs, down[0].inner
        release(self, pool.kernels, f"free_experts_{number}", self.handle)

    def apply(
        self, values: int, count: int, top_k: int, chosen: int, weights: int, out: int, gate: int
    ) -> None:
        """[count, hidden] to the same, by ``chosen`` int64 and ``weights`` float32, [count, top_k] each."""
        pool = self.pool
        arguments = MixArguments(
            pool=pool.handle,
            experts=self.handle,
            values=values,
            count=count,
            top_k=top_k,
            chosen=chosen,
            weights=weights,
            gate=gate,
            out=out,
        )
        pool.kernels.call(arguments, self.number)


class Stack:
    """All layers of a decoder, computed by one call."""

    def __init__(
        self, pool: ThreadPool, number: Number, arguments: DecoderArguments, keep: Iterable[object]
    ) -> None:
        """``keep``: the owners of what the arguments refer to; they live as long as the stack."""
        self.pool, self.number = pool, number
        self._kept = list(keep)
        self._adapters: dict[int, PackedAdapter | None] = {}
        self.handle: int = pool.kernels.call(arguments, number)
        release(self, pool.kernels, f"free_decoder_{number}", self.handle)

    def add_layer(self, arguments: LayerArguments, keep: Iterable[object]) -> None:
        """Append a layer; ``keep`` as above."""
        self._kept += keep
        self.pool.kernels.call(arguments, self.number)

    def adapter(self, layers: Sequence[AdaptedLayer]) -> PackedAdapter:
        """An adapter of these layers, which are read and copied. On any thread. Raises InvalidArguments: a
        number is not finite in the type of the model."""
        return PackedAdapter(self, layers)

    def set_adapter(self, slot: int, adapter: PackedAdapter | None) -> None:
        """The rows with this slot have the adapter, from the next step on. Between two steps."""
        self.pool.kernels.function(
            f"set_adapter_{self.number}", self.handle, slot, None if adapter is None else adapter.handle
        )
        self._adapters[slot] = adapter

    def set_residual_scale(self, layer: int, scale: float) -> None:
        """Scale the residual after a layer. Raises InvalidArguments."""
        self.pool.kernels.function(f"set_residual_scale_{self.number}", self.handle, layer, scale)

    def set_table(self, table: int) -> None:
        """Another table of inputs by layer, of the same shape; the caller keeps it. Raises
        InvalidArguments."""
        self.pool.kernels.function(f"set_table_{self.number}", self.handle, table)

    def forward(self, arguments: ForwardArguments) -> None:
        """Compute one step."""
        self.pool.kernels.call(arguments, self.number)

    def embed(self, arguments: EmbedArguments) -> None:
        """Read the vectors of tokens."""
        self.pool.kernels.call(arguments, self.number)


class PackedAdapter:
    """An adapter in the form that the layers of a stack read; see ``adapters.hpp``."""

    def __init__(self, stack: Stack, layers: Sequence[AdaptedLayer]) -> None:
        kernels, number = stack.pool.kernels, stack.number
        self.handle: int = kernels.function(f"adapter_{number}", stack.handle)
        release(self, kernels, f"free_adapter_{number}", self.handle)
        given = (AdaptedLayer * len(layers))(*layers)
        arguments = AdaptArguments(
            decoder=stack.handle,
            adapter=self.handle,
            layers=ctypes.addressof(given),
            count=len(layers),
        )
        kernels.call(arguments, number)
