"""Decoder: layers of a mixer and a feed-forward part over a residual: all built-in families.

Families differ in the content of their layers (:mod:`aioinfer.model.families`): norms in front of the parts,
behind them, or both, biases, norms of heads, rotations, windows, blocks, experts. They share one forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from aioinfer.errors import ConfigError
from aioinfer.model.adapters.slots import TorchAdapters
from aioinfer.model.attention.base import Attention
from aioinfer.model.batch import Batch
from aioinfer.model.linear import Linear, TorchLinear
from aioinfer.model.mixers.base import Mixer, MixerStep
from aioinfer.model.mlp import FeedForward
from aioinfer.model.norm import Norm
from aioinfer.model.operations.base import Operations
from aioinfer.model.per_layer import PerLayerInputs, PerLayerPart
from aioinfer.model.spec import ModelSpec

if TYPE_CHECKING:
    from aioinfer.model.updates.recipe import Recipe
    from aioinfer.model.updates.rewriting import Change, Rewriting
    from aioinfer.model.weights import StoredMatrix

__all__ = ["Decoder", "Embedding", "Layer"]


@dataclass(slots=True, kw_only=True)
class Layer:
    """The weights and constants of one layer.

    A part without a norm in front of it reads the residual itself; the norm behind a part is that of its
    output, before it is added to the residual.
    """

    mixer_norm: Norm | None
    mixer: Mixer
    mixer_post_norm: Norm | None = None
    mlp_norm: Norm | None
    mlp: FeedForward
    mlp_post_norm: Norm | None = None
    per_layer: PerLayerPart | None = None
    #: of the residual behind all parts
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Embedding:
    """What becomes of the vectors of tokens before the first layer."""

    #: their factor, as the model's dtype has it (Gemma)
    scale: float = 1.0
    #: [max_model_len, hidden], added by position (GPT-2); None for none
    positions: torch.Tensor | None = None
    #: what layers add to the residual by token; None for none
    per_layer: PerLayerInputs | None = None


class Decoder:
    """See :class:`~aioinfer.model.spec.CausalLM`."""

    capturable = True
    seconds: Mapping[str, float] = MappingProxyType({})

    def __init__(
        self,
        spec: ModelSpec,
        layers: Sequence[Layer],
        *,
        words: torch.Tensor,
        embedding: Embedding,
        norm: Norm,
        head: Linear,
        logit_cap: float | None,
        operations: Operations,
        adapters: TorchAdapters | None = None,
        adapter_reason: str = "its layers compute none",
        variance: str = "products of layers",
    ) -> None:
        """
        Args:
            spec: shapes and limits of the model.
            layers: the layers in order.
            words: [vocab_size, hidden], the vectors of tokens.
            embedding: what becomes of them.
            norm: the last norm.
            head: hidden to logits.
            logit_cap: logits become ``logit_cap * tanh(logit / logit_cap)``; None for none.
            operations: the kernels between matrix products.
            adapters: those of the linear layers; None: they have none.
            adapter_reason: why they have none.
            variance: what adds in an order that may depend on the batch; empty if nothing does.
        """
        self.spec = spec
        self.variance = variance
        #: with an attention that is invariant, too
        self.invariant = not variance
        self.adapters = adapters
        self.adapter_reason = "" if adapters else adapter_reason
        self.classifier: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._layers = layers
        self._words = words
        self._embedding = embedding
        self._norm = norm
        self._head = head
        self._logit_cap = logit_cap
        self._operations = operations
        self.updates: Recipe | None = None
        #: every table once, by its identity
        self._ropes = {id(rope): rope for layer in layers if (rope := layer.mixer.rope) is not None}

    def forward(self, batch: Batch, attention: Attention) -> torch.Tensor:
        """See :class:`~aioinfer.model.spec.CausalLM`."""
        if self.adapters is None or batch.adapter_slots is None:
            return self._forward(batch, attention)
        with self.adapters.computing(batch):
            return self._forward(batch, attention)

    def _forward(self, batch: Batch, attention: Attention) -> torch.Tensor:
        rotaries = {key: rope.at(batch.positions) for key, rope in self._ropes.items()}
        step = MixerStep(batch, attention, rotaries)
        hidden = self._embed(batch)
        inputs = self._embedding.per_layer
        vectors = None if inputs is None else inputs(batch.input_ids, hidden, self._operations)
        # The norm of the next part adds the output of a part to the residual, in one kernel.
        delta = None
        for index, layer in enumerate(self._layers):
            hidden, normed = self._add_norm(hidden, delta, layer.mixer_norm)
            delta = self._post_norm(layer.mixer(normed, step), layer.mixer_post_norm)
            hidden, normed = self._add_norm(hidden, delta, layer.mlp_norm)
            delta = self._post_norm(layer.mlp(normed), layer.mlp_post_norm)
            if vectors is not None and layer.per_layer is not None:
                hidden = hidden + delta
                output = layer.per_layer(hidden, vectors[:, index])
                delta = self._post_norm(output, layer.per_layer.post_norm)
            if layer.scale != 1.0:
                hidden, delta = (hidden + delta) * layer.scale, None
        if batch.hidden_rows is not None:
            batch.hidden = self._last_norm(hidden, delta, batch.hidden_rows).float()
        if not len(batch.logits_rows):
            return hidden.new_empty(0, self.spec.vocab_size)
        rows = None if batch.all_logits else batch.logits_rows
        logits = self._head(self._last_norm(hidden, delta, rows))
        return logits if self._logit_cap is None else (logits / self._logit_cap).tanh() * self._logit_cap

    def rewrite(
        self,
        source: Rewriting,
        layers: Sequence[Layer],
        *,
        words: StoredMatrix,
        embedding: Embedding,
        norm: Norm,
        head: StoredMatrix,
        logit_cap: float | None,
    ) -> Iterator[Change]:
        """See :class:`~aioinfer.model.updates.rewriting.Rewritable`."""
        from aioinfer.model.updates.grafting import constants, graft

        old, new = [self._layers, self._embedding, self._norm], [layers, embedding, norm]
        if self._words.is_cuda and any(constants(old, new)):
            raise ConfigError("model: a factor is not that of the model, and captured graphs have it")
        given, _ = source.weights.parts(words)

        def write() -> None:
            for one, other in zip(old, new, strict=True):
                graft(one, other)
            if not given:
                return
            if self._words.is_cuda:
                self._words.copy_(words.view())
                return
            self._words = words.view().to(self._words, copy=True)
            if one_memory is not None:
                self._head = type(one_memory)(self._words)

        one_memory = self._head if head is words and isinstance(self._head, TorchLinear) else None
        yield write
        if one_memory is None:
            source.write(self._head, head)

    def _last_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """The hidden states [S, hidden] of the tokens ``rows`` [S]; None for all."""
        if rows is not None:
            hidden, delta = hidden[rows], None if delta is None else delta[rows]
        return self._add_norm(hidden, delta, self._norm)[1]

    def _embed(self, batch: Batch) -> torch.Tensor:
        hidden = F.embedding(batch.input_ids, self._words)
        if self._embedding.scale != 1.0:
            hidden = hidden * self._embedding.scale
        if self._embedding.positions is not None:
            hidden = hidden + F.embedding(batch.positions, self._embedding.positions)
        return hidden

    def _add_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, norm: Norm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual with ``delta`` added, and what the next part reads of it."""
        if norm is not None:
            return self._operations.add_norm(hidden, delta, norm)
        hidden = hidden if delta is None else hidden + delta
        return hidden, hidden

    def _post_norm(self, output: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        return output if norm is None else self._operations.add_norm(output, None, norm)[1]
