"""LayerKernels: the interface by which families make the parts of a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch

from aioinfer.model.gates import Gate
from aioinfer.model.layer import Trunk
from aioinfer.model.linear import Linear
from aioinfer.model.mlp import FeedForward
from aioinfer.model.moe.experts import Experts
from aioinfer.model.moe.routing import Router, Rule
from aioinfer.model.moe.sparse import SparseMLP, StoredExperts
from aioinfer.model.operations.base import Operations
from aioinfer.model.spec import CausalLM, ModelSpec
from aioinfer.model.vision.attention import TwoWayAttention, torch_attention
from aioinfer.model.weights import StoredMatrix

__all__ = ["ExpertKernels", "LayerKernels"]


class ExpertKernels(NamedTuple):
    """Makes the parts of a mixture of experts."""

    router: Callable[[Rule], Router]
    experts: Callable[[StoredExperts], Experts]


class LayerKernels(ABC):
    """Makes the parts of a model from its checkpoint, and remembers them for updates of their weights."""

    def __init__(
        self,
        operations: Operations,
        experts: ExpertKernels | None,
        two_way_attention: TwoWayAttention = torch_attention,
    ) -> None:
        """
        Args:
            operations: those between matrix products.
            experts: None in a model without experts.
            two_way_attention: that of an image encoder.
        """
        self.operations = operations
        self.two_way_attention = two_way_attention
        self._experts = experts
        #: linear layers, dense parts, and pairs of router and experts, in the order in which they were made
        self.made: list[Any] = []
        #: whether the head is the embedding
        self.tied = False

    @property
    def kept_bits(self) -> Collection[int]:
        """Bit widths of the weights that stay quantised as they are stored."""
        return ()

    def linear(self, stored: StoredMatrix, *, exact: bool = False) -> Linear:
        """A linear layer from a weight [outputs, inner]; ``exact``: it is not to be rounded."""
        self.made.append(made := self._linear(stored, exact=exact))
        return made

    def by_head(self, stored: StoredMatrix, heads: int) -> Linear:
        """A product of each head's own, [T, heads, inner] to [T, heads, outputs], from the weight [heads *
        outputs, inner]. By native kernels only decoders compute it."""
        self.made.append(made := self._by_head(stored, heads))
        return made

    def table(self, stored: StoredMatrix) -> torch.Tensor | Linear:
        """Rows to be looked up: a tensor, or a linear layer if they are quantised and stay so."""
        made = self._table(stored)
        # Tensors are made anew for an update.
        self.made.append(None if isinstance(made, torch.Tensor) else made)
        return made

    def gated_mlp(self, gate_up: StoredMatrix, down: StoredMatrix, gate: Gate) -> FeedForward:
        """A dense feed-forward part, from ``gate_up`` [2 * middle, hidden], the rows of gate first, and
        ``down`` [hidden, middle]."""
        self.made.append(made := self._gated_mlp(gate_up, down, gate))
        return made

    def plain_mlp(self, up: StoredMatrix, down: StoredMatrix, gate: Gate) -> FeedForward:
        """A dense feed-forward part, from ``up`` [middle, hidden] and ``down`` [hidden, middle]."""
        self.made.append(made := self._plain_mlp(up, down, gate))
        return made

    def sparse(self, rule: Rule, stored: StoredExperts, shared: FeedForward | None) -> SparseMLP:
        """The feed-forward part of a mixture of experts. Raises ConfigError if a tensor is missing.

        Args:
            rule: the rule by which tokens are routed to experts.
            stored: the experts in the checkpoint.
            shared: experts that compute every token, or None.
        """
        assert self._experts is not None
        experts, router = self._experts.experts(stored), self._experts.router(rule)
        self.made.append((router, experts))
        return SparseMLP(router, experts, shared)

    def decoder(self, spec: ModelSpec, trunk: Trunk, words: StoredMatrix, head: StoredMatrix) -> CausalLM:
        """The model.

        Args:
            words: [vocab_size, hidden], the vectors of tokens.
            head: the weight of the linear layer to logits, of the same shape; the same object if it is tied.
        """
        self.tied = head is words
        return self._decoder(spec, trunk, words, head)

    def _table(self, stored: StoredMatrix) -> torch.Tensor | Linear:
        return stored.view()

    @abstractmethod
    def _linear(self, stored: StoredMatrix, *, exact: bool) -> Linear: ...

    @abstractmethod
    def _by_head(self, stored: StoredMatrix, heads: int) -> Linear: ...

    @abstractmethod
    def _gated_mlp(self, gate_up: StoredMatrix, down: StoredMatrix, gate: Gate) -> FeedForward: ...

    @abstractmethod
    def _plain_mlp(self, up: StoredMatrix, down: StoredMatrix, gate: Gate) -> FeedForward: ...

    @abstractmethod
    def _decoder(
        self, spec: ModelSpec, trunk: Trunk, words: StoredMatrix, head: StoredMatrix
    ) -> CausalLM: ...
