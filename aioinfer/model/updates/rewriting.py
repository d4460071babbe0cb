"""Rewriting: the code of a family is run again, over other tensors, and what it makes is written where its
first run has put it.

So an update replays exactly how each tensor was taken, and families know nothing of it. Big matrices are the
affair of :class:`~aioinfer.model.layers.LayerKernels`: :class:`Recording` remembers what these have made, and
:class:`Rewriting` gives it out again in the same order, and notes what is to be written there. What is small
is made anew, and copied by the decoder itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol, cast

from aioinfer.errors import ConfigError
from aioinfer.model.adapters.slots import AdaptedLinear
from aioinfer.model.backend import Backend
from aioinfer.model.decoder import Layer
from aioinfer.model.float8 import Float8Linear
from aioinfer.model.gates import Gate
from aioinfer.model.layers import LayerKernels
from aioinfer.model.linear import Linear
from aioinfer.model.mlp import FeedForward
from aioinfer.model.moe.backend import make_experts, make_router
from aioinfer.model.moe.float8_experts import Float8Experts
from aioinfer.model.moe.routing import Rule
from aioinfer.model.moe.sparse import SparseMLP, StoredExperts
from aioinfer.model.operations.base import Operations
from aioinfer.model.spec import CausalLM, ModelSpec
from aioinfer.model.updates.grafting import graft
from aioinfer.model.updates.new_weights import NewWeights, is_missing
from aioinfer.model.weights import StoredMatrix

__all__ = ["Change", "Recording", "Rewritable", "Rewriting"]

#: writes one part of a model; on the launch thread, between steps
Change = Callable[[], object]


class Rewritable(Protocol):
    """A decoder whose weights can be replaced."""

    def rewrite(self, source: Rewriting, layers: Sequence[Layer], **parts: Any) -> Iterator[Change]:
        """The changes that make it what it would be if it were made of these parts, whose linear layers
        are its own. Raises ConfigError, before anything is changed.

        Args:
            parts: those of :meth:`~aioinfer.model.layers.LayerKernels.decoder`.
        """


class Recording:
    """:class:`~aioinfer.model.layers.LayerKernels` that remembers what others have made."""

    def __init__(self, kernels: LayerKernels) -> None:
        self._kernels = kernels
        #: in order; of sparse parts, routers and experts
        self.made: list[Any] = []
        #: the head is the embedding
        self.tied = False

    @property
    def native(self) -> bool:
        return self._kernels.native

    @property
    def kept_bits(self) -> Collection[int]:
        return self._kernels.kept_bits

    @property
    def operations(self) -> Operations:
        return self._kernels.operations

    def linear(self, stored: StoredMatrix, *, exact: bool = False) -> Linear:
        made = self._kernels.linear(stored, exact=exact)
        self.made.append(made)
        return made

    def gated_mlp(
        self, gate_up: StoredMatrix, down: StoredMatrix, gate: Gate, *, shared: bool = False
    ) -> FeedForward:
        made = self._kernels.gated_mlp(gate_up, down, gate, shared=shared)
        self.made.append(made)
        return made

    def plain_mlp(self, up: StoredMatrix, down: StoredMatrix, gate: Gate) -> FeedForward:
        made = self._kernels.plain_mlp(up, down, gate)
        self.made.append(made)
        return made

    def sparse(
        self, rule: Rule, stored: StoredExperts, shared: FeedForward | None, backend: Backend
    ) -> FeedForward:
        made = self._kernels.sparse(rule, stored, shared, backend)
        assert isinstance(made, SparseMLP)
        self.made.append((made.router, made.experts))
        return made

    def decoder(self, spec: ModelSpec, layers: Sequence[Layer], **parts: Any) -> CausalLM:
        self.tied = parts["head"] is parts["words"]
        return self._kernels.decoder(spec, layers, **parts)


class Rewriting:
    """:class:`~aioinfer.model.layers.LayerKernels` that makes nothing: it returns what was made before, and
    ``changes`` has what is to be written there."""

    kept_bits: Collection[int] = ()

    def __init__(
        self, model: CausalLM, made: Sequence[Any], kernels: LayerKernels, weights: NewWeights
    ) -> None:
        """``kernels``: those that have made it."""
        self._model = model
        self._made = iter(made)
        self._kernels = kernels
        self.weights = weights
        self.changes: list[Change] = []
        #: names of the matrices that are written as they are quantised
        self.kept: set[str] = set()

    @property
    def native(self) -> bool:
        return self._kernels.native

    @property
    def operations(self) -> Operations:
        return self._kernels.operations

    def linear(self, stored: StoredMatrix, *, exact: bool = False) -> Linear:
        made: Linear = next(self._made)
        self.write(made, stored)
        return made

    def gated_mlp(
        self, gate_up: StoredMatrix, down: StoredMatrix, gate: Gate, *, shared: bool = False
    ) -> FeedForward:
        made = next(self._made)
        self.write(made.gate_up, gate_up)
        self.write(made.down, down)
        return cast("FeedForward", made)

    def plain_mlp(self, up: StoredMatrix, down: StoredMatrix, gate: Gate) -> FeedForward:
        made = next(self._made)
        self.write(made.gate_up if hasattr(made, "gate_up") else made.up, up)
        self.write(made.down, down)
        return cast("FeedForward", made)

    def sparse(
        self, rule: Rule, stored: StoredExperts, shared: FeedForward | None, backend: Backend
    ) -> FeedForward:
        router, experts = next(self._made)
        self._route(router, rule, stored, backend)
        start = self.weights.num_asked
        stored.declare()
        if self.weights.whole(self.weights.asked_since(start), f"the experts of {stored.prefix}"):
            self.changes.append(lambda: _write_experts(experts, stored, backend))
        return SparseMLP(router, experts, shared)

    def _route(self, router: Any, rule: Rule, stored: StoredExperts, backend: Backend) -> None:
        tensors = [rule.weight, rule.bias, getattr(rule, "scales", None)]
        there = [tensor for tensor in tensors if tensor is not None]
        if self.weights.partial and all(map(is_missing, there)):
            return
        if self.weights.partial and any(bool(tensor.isnan().any()) for tensor in there):
            raise ConfigError(f"model: a tensor of the router of {stored.prefix} is missing")
        if backend.name == "native":
            self.changes.append(lambda: router.set(rule))
        else:
            self.changes.append(lambda: _graft(router, make_router(rule, backend)))

    def decoder(self, spec: ModelSpec, layers: Sequence[Layer], **parts: Any) -> CausalLM:
        assert next(self._made, None) is None, "the model has other parts than when it was made"
        decoder = cast("Rewritable", self._model)
        self.changes += decoder.rewrite(self, layers, **parts)
        return self._model

    def write(self, linear: Any, stored: StoredMatrix) -> None:
        """Note that a linear layer gets another matrix, as far as that is given. Raises ConfigError if a part
        of it is missing, or if it is quantised in another way."""
        weights, biases = self.weights.parts(stored)
        kept = getattr(linear, "kept", None)
        if weights and kept is not None:
            if stored.rounding != kept:
                raise ConfigError(
                    f"model: {stored.name} must be quantised as in the checkpoint that was loaded: to "
                    f"{kept.bits} bits, {f'in groups of {kept.group}' if kept.group else 'one group a row'}"
                )
            self.kept.update(stored.tensors[0])
            self.changes.append(lambda: _exchange(linear, stored))
        elif biases and kept is not None:
            raise ConfigError(f"model: the bias of {stored.name} can be replaced with its weights only")
        elif weights or biases:
            self.changes.append(lambda: _set(linear, stored, weight=weights, bias=biases))


def _graft(old: Any, new: Any) -> None:
    graft(old, new)


def _set(linear: Linear, stored: StoredMatrix, *, weight: bool, bias: bool) -> None:
    inner = linear.linear if isinstance(linear, AdaptedLinear) else linear
    if isinstance(inner, Float8Linear):
        inner.set_stored(stored, weight=weight, bias=bias)
    else:
        linear.set(stored.view() if weight else None, stored.bias() if bias else None)


def _exchange(linear: Any, stored: StoredMatrix) -> None:
    """For a native layer of weights that stay as they are quantised."""
    matrix, bias = stored.quantised(), stored.bias()
    made = type(linear).given(
        linear.packed.pool,
        matrix.values,
        matrix.scales,
        matrix.offsets,
        None if bias is None else bias.float(),
        matrix.rounding,
        dtype=linear.dtype,
        gated=linear.gated,
    )
    linear.exchange(made)


def _write_experts(experts: Any, stored: StoredExperts, backend: Backend) -> None:
    if backend.name == "native":
        experts.set(stored.each(), stored.biases())
    elif isinstance(experts, Float8Experts):
        experts.set_stored(stored)
    else:
        graft(experts, make_experts(stored.stacked(), backend))
