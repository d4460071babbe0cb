"""Rewriting: run the code of a family again over other tensors, and write the results where the first run put
them.

An update thus replays exactly how each tensor was taken, and families know nothing of it.
:class:`Rewriting` returns the large parts that :class:`~aioinfer.model.layer_kernels.LayerKernels` has
recorded, in the same order, and notes the changes to them. Small tensors are made anew, and copied by the
decoder itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol, cast

import torch

from aioinfer.errors import ConfigError
from aioinfer.model.adapters.slots import AdaptedLinear
from aioinfer.model.float8_linear import Float8Linear
from aioinfer.model.gates import Gate
from aioinfer.model.layer import Trunk
from aioinfer.model.layer_kernels import LayerKernels
from aioinfer.model.linear import Linear
from aioinfer.model.mlp import FeedForward
from aioinfer.model.moe.float8_experts import Float8Experts
from aioinfer.model.moe.routing import Rule
from aioinfer.model.moe.sparse import SparseMLP, StoredExperts
from aioinfer.model.spec import CausalLM, Change, ModelSpec
from aioinfer.model.updates.grafting import graft
from aioinfer.model.updates.new_weights import NewWeights, is_missing
from aioinfer.model.weights import StoredMatrix

__all__ = ["Rewritable", "Rewriting"]


class Rewritable(Protocol):
    """A decoder whose weights can be replaced."""

    @property
    def matrices(self) -> tuple[Linear | None, Linear | None]:
        """The linear layers of the vectors of tokens and of the head that :meth:`rewrite` does not write."""

    def rewrite(self, trunk: Trunk, words: StoredMatrix | None, *, mapped: bool) -> Iterator[Change]:
        """The changes that give it the small tensors of another trunk, whose linear layers are its own.
        Raises ConfigError, before anything is changed.

        Args:
            words: the vectors of tokens; None: they stay.
            mapped: tensors are those of a file, which stays as it is.
        """


class Rewriting(LayerKernels):
    """Makes nothing: returns the recorded parts, and collects ``changes`` to them."""

    def __init__(self, model: CausalLM, kernels: LayerKernels, weights: NewWeights) -> None:
        """``kernels``: those that made the model."""
        super().__init__(kernels.operations, None, kernels.two_way_attention)
        self._model = model
        self._recorded = iter(kernels.made)
        self.weights = weights
        self.changes: list[Change] = []
        #: names of the matrices that are written as they are quantised
        self.kept: set[str] = set()

    def _linear(self, stored: StoredMatrix, *, exact: bool) -> Linear:
        made: Linear = next(self._recorded)
        self._write(made, stored)
        return made

    def _by_head(self, stored: StoredMatrix, heads: int) -> Linear:
        return self._linear(stored, exact=False)

    def _table(self, stored: StoredMatrix) -> torch.Tensor | Linear:
        made: Linear | None = next(self._recorded)
        if made is None:
            return stored.view()
        self._write(made, stored)
        return made

    def _gated_mlp(self, gate_up: StoredMatrix, down: StoredMatrix, gate: Gate) -> FeedForward:
        made = next(self._recorded)
        self._write(made.gate_up, gate_up)
        self._write(made.down, down)
        return cast("FeedForward", made)

    def _plain_mlp(self, up: StoredMatrix, down: StoredMatrix, gate: Gate) -> FeedForward:
        made = next(self._recorded)
        self._write(made.gate_up if hasattr(made, "gate_up") else made.up, up)
        self._write(made.down, down)
        return cast("FeedForward", made)

    def sparse(self, rule: Rule, stored: StoredExperts, shared: FeedForward | None) -> SparseMLP:
        router, experts = next(self._recorded)
        if self._whole(rule, stored.prefix):
            self.changes.append(partial(_set_router, router, rule))
        start = self.weights.num_asked
        stored.declare()
        if self.weights.whole(self.weights.asked_since(start), f"the experts of {stored.prefix}"):
            kept = getattr(experts, "kept", None)
            if kept is not None and stored.roundings() != kept:
                raise ConfigError(
                    f"model: the experts of {stored.prefix} must be quantised as in the checkpoint that was "
                    "loaded"
                )
            self.kept.update(() if kept is None else stored.matrices)
            self.changes.append(partial(_set_experts, experts, stored))
        return SparseMLP(router, experts, shared)

    def _whole(self, rule: Rule, prefix: str) -> bool:
        """Whether the tensors of a router are given; False if none is. Raises ConfigError for some."""
        tensors = [rule.weight, rule.bias, *(getattr(rule, name, None) for name in ("scales", "balance"))]
        there = [tensor for tensor in tensors if tensor is not None]
        if self.weights.partial and all(map(is_missing, there)):
            return False
        if self.weights.partial and any(bool(tensor.isnan().any()) for tensor in there):
            raise ConfigError(f"model: a tensor of the router of {prefix} is missing")
        return True

    def _decoder(self, spec: ModelSpec, trunk: Trunk, words: StoredMatrix, head: StoredMatrix) -> CausalLM:
        assert next(self._recorded, None) is None, "the model has other parts than when it was made"
        decoder = cast("Rewritable", self._model)
        given, _ = self.weights.parts(words)
        changes = decoder.rewrite(trunk, words if given else None, mapped=self.weights.mapped)
        self.changes += changes
        for linear, stored in zip(decoder.matrices, (words, head), strict=True):
            if linear is not None:
                self._write(linear, stored)
        return self._model

    def _write(self, linear: Any, stored: StoredMatrix) -> None:
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
            self.changes.append(lambda: linear.set_quantised(stored.quantised(), stored.bias()))
        elif biases and kept is not None:
            raise ConfigError(f"model: the bias of {stored.name} can be replaced with its weights only")
        elif weights or biases:
            self.changes.append(partial(_set_linear, linear, stored, weight=weights, bias=biases))


def _set_linear(linear: Linear, stored: StoredMatrix, *, weight: bool, bias: bool) -> None:
    inner = linear.linear if isinstance(linear, AdaptedLinear) else linear
    if isinstance(inner, Float8Linear):
        inner.set_stored(stored, weight=weight, bias=bias)
    else:
        linear.set(stored.view() if weight else None, stored.bias() if bias else None)


def _set_router(router: Any, rule: Rule) -> None:
    if hasattr(router, "set"):
        router.set(rule)
    else:
        graft(getattr(router, "rule", router), rule)


def _set_experts(experts: Any, stored: StoredExperts) -> None:
    if hasattr(experts, "set"):
        experts.set(stored)
    elif isinstance(experts, Float8Experts):
        experts.set_stored(stored)
    else:
        graft(experts.stack, stored.stacked())
