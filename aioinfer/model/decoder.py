"""Decoder: layers of a mixer and a feed-forward part over a residual: all built-in families.

Families differ in the content of their layers (:mod:`aioinfer.model.families`): norms in front of the parts,
after them, or both, biases, norms of heads, rotations, windows, blocks, experts. They share one forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F

from aioinfer.errors import ConfigError
from aioinfer.model.adapters.slots import TorchAdapters
from aioinfer.model.attention.base import Attention
from aioinfer.model.batch import Batch
from aioinfer.model.layer import Layer, Trunk
from aioinfer.model.linear import Linear, TorchLinear
from aioinfer.model.mixers.base import MixerStep
from aioinfer.model.norm import Norm
from aioinfer.model.operations.base import Operations
from aioinfer.model.spec import Change, ModelSpec, Recipe
from aioinfer.model.updates.grafting import constants, graft
from aioinfer.model.vision.base import Encoder
from aioinfer.model.weights import StoredMatrix

__all__ = ["Decoder"]


class Decoder:
    """A :class:`~aioinfer.model.spec.CausalLM` of layers that are called one by one."""

    capturable = True
    seconds: Mapping[str, float] = MappingProxyType({})

    def __init__(
        self,
        spec: ModelSpec,
        trunk: Trunk,
        words: torch.Tensor,
        head: Linear,
        operations: Operations,
        adapters: TorchAdapters | None = None,
        adapter_reason: str = "its layers compute none",
        *,
        variance: str = "products of layers",
    ) -> None:
        """
        Args:
            words: [vocab_size, hidden], the vectors of tokens.
            head: hidden to logits.
            operations: the kernels between matrix products.
            adapters: those of the linear layers; None: they have none.
            adapter_reason: why they have none.
            variance: the part that adds in an order that may depend on the batch; empty if none does.
        """
        self.spec = spec
        self.variance = variance
        #: with an attention that is invariant, too
        self.invariant = not variance
        self.adapters = adapters
        self.adapter_reason = adapter_reason
        self.classifier: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._trunk = trunk
        self._words = words
        self._head = head
        self._operations = operations
        self.updates: Recipe | None = None
        self.encoder: Encoder | None = None
        #: every table once, by its identity
        self._ropes = {id(rope): rope for layer in trunk.layers if (rope := layer.mixer.rope) is not None}

    def forward(self, batch: Batch, attention: Attention) -> torch.Tensor:
        if self.adapters is None or batch.adapter_slots is None:
            return self._forward(batch, attention)
        with self.adapters.computing(batch):
            batch.features = self.adapters.with_words(batch, self._trunk.embedding.scale)
            return self._forward(batch, attention)

    def _forward(self, batch: Batch, attention: Attention) -> torch.Tensor:
        rotaries = {key: rope.at(batch.positions, batch.rotary) for key, rope in self._ropes.items()}
        step = MixerStep(batch, attention, rotaries)
        hidden = self._embed(batch)
        trunk = self._trunk
        inputs = trunk.embedding.per_layer
        vectors = None if inputs is None else inputs(batch.input_ids, hidden, self._operations)
        # The norm of the next part adds the output of a part to the residual, in one kernel.
        delta = None
        captures = _Captures(batch)
        for index, layer in enumerate(trunk.layers):
            captures.add(index, hidden, delta)
            hidden, normed = self._add_norm(hidden, delta, layer.mixer_norm)
            delta = self._summand(layer, layer.mixer(normed, step), layer.mixer_post_norm)
            if layer.mlp is not None:
                if not layer.parallel:
                    hidden, normed = self._add_norm(hidden, delta, layer.mlp_norm)
                else:
                    if layer.mlp_norm is not layer.mixer_norm:
                        normed = self._add_norm(hidden, None, layer.mlp_norm)[1]
                    hidden = hidden + delta
                delta = self._summand(layer, layer.mlp(normed), layer.mlp_post_norm)
            if vectors is not None and layer.per_layer is not None:
                hidden = hidden + delta
                output = layer.per_layer(hidden, vectors[:, index])
                delta = self._post_norm(output, layer.per_layer.post_norm)
            scale = self._scale(layer, batch)
            if not isinstance(scale, float) or scale != 1.0:
                hidden, delta = (hidden + delta) * scale, None
            if batch.features is not None and index + 1 < len(batch.features.vectors):
                hidden, delta = hidden if delta is None else hidden + delta, None
                hidden.index_add_(0, batch.features.rows, batch.features.vectors[index + 1])
        if captures.places:
            captures.add(len(trunk.layers), hidden, delta)
            captures.add(len(trunk.layers) + 1, self._last_norm(hidden, delta, None))
            batch.captured = captures.all()
        if batch.hidden_rows is not None:
            batch.hidden = self._last_norm(hidden, delta, batch.hidden_rows).float()
        if not len(batch.logits_rows):
            return hidden.new_empty(0, self.spec.vocab_size)
        rows = None if batch.all_logits else batch.logits_rows
        values = self._last_norm(hidden, delta, rows)
        logits = self._head(values)
        if self.adapters is not None and batch.adapter_slots is not None:
            self.adapters.to_logits(batch, values, logits)
        return self._finished(logits)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """The vectors of tokens, [N, hidden], without positions."""
        vectors, scale = F.embedding(ids, self._words), self._trunk.embedding.scale
        return vectors if scale == 1.0 else vectors * scale

    def to_logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Logits [N, vocab_size] of normed hidden states [N, hidden]."""
        return self._finished(self._head(normed))

    def _finished(self, logits: torch.Tensor) -> torch.Tensor:
        trunk = self._trunk
        if trunk.logit_scale != 1.0:
            logits = logits * trunk.logit_scale
        cap = trunk.logit_cap
        return logits if cap is None else (logits / cap).tanh() * cap

    @property
    def matrices(self) -> tuple[Linear | None, Linear | None]:
        """The linear layers of the vectors of tokens and of the head that :meth:`rewrite` does not write."""
        return None, None if self._shares_memory else self._head

    @property
    def _shares_memory(self) -> bool:
        return isinstance(self._head, TorchLinear) and self._head.weight.data_ptr() == self._words.data_ptr()

    def rewrite(self, trunk: Trunk, words: StoredMatrix | None, *, mapped: bool) -> Iterator[Change]:
        if self._words.is_cuda and any(constants(self._trunk, trunk)):
            raise ConfigError("model: a factor is not that of the model, and captured graphs have it")
        shares_memory = self._shares_memory

        def write() -> None:
            graft(self._trunk, trunk)
            if words is None:
                return
            if self._words.is_cuda:
                self._words.copy_(words.view())
                return
            self._words = words.view().to(self._words, copy=True)
            if shares_memory:
                self._head = type(self._head)(self._words)  # type: ignore[call-arg]

        yield write

    def _last_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """The hidden states [S, hidden] of the tokens ``rows`` [S]; None for all."""
        if rows is not None:
            hidden, delta = hidden[rows], None if delta is None else delta[rows]
        return self._add_norm(hidden, delta, self._trunk.norm)[1]

    def _embed(self, batch: Batch) -> torch.Tensor:
        hidden, embedding = F.embedding(batch.input_ids, self._words), self._trunk.embedding
        if embedding.scale != 1.0:
            hidden = hidden * embedding.scale
        if embedding.positions is not None:
            hidden = hidden + F.embedding(batch.positions, embedding.positions)
        if batch.features is not None:
            hidden.index_copy_(0, batch.features.rows, batch.features.vectors[0])
        return hidden

    def _scale(self, layer: Layer, batch: Batch) -> float | torch.Tensor:
        """The factor of the residual after a layer; of each token, [T, 1]."""
        return layer.scale

    def _add_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, norm: Norm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual with ``delta`` added, and the input of the next part."""
        if norm is not None:
            return self._operations.add_norm(hidden, delta, norm)
        hidden = hidden if delta is None else hidden + delta
        return hidden, hidden

    def _summand(self, layer: Layer, output: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """What a part adds to the residual."""
        normed = self._post_norm(output, norm)
        return normed if layer.part_scale == 1.0 else normed * layer.part_scale

    def _post_norm(self, output: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        return output if norm is None else self._operations.add_norm(output, None, norm)[1]


class _Captures:
    """Residuals at the places that a batch wants."""

    __slots__ = ("_found", "places")

    def __init__(self, batch: Batch) -> None:
        self.places: list[int] = [] if batch.places is None else batch.places.tolist()
        self._found: dict[int, torch.Tensor] = {}

    def add(self, place: int, hidden: torch.Tensor, delta: torch.Tensor | None = None) -> None:
        if place in self.places:
            self._found[place] = hidden if delta is None else hidden + delta

    def all(self) -> torch.Tensor:
        return torch.cat([self._found[place] for place in self.places], dim=1)
