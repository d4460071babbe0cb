"""DraftHead: layers that draft tokens from the hidden states of a model, over pages of its own pool.

A head has an *entry* for each position e of a sequence, the keys and values of its layers there, made of the
model's hidden states at e, and, but in a head that drafts a block, of the token that follows. Heads of one
layer need no attention for that, and blocks none of their own. A head drafts from the entries of all
positions but the newest token's::

    position        0     1     2    ...  e          the row's own token is x[e + 1]
    hidden states   h0    h1    h2        he
    tokens          x1    x2    x3        x[e + 1]   drafts x[e + 2]; then its own hidden states and that
                                                     stand for those of the model, and so on

A draft changes speed and nothing else: an entry that is missing or stale costs a worse one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch

from aioinfer.errors import ConfigError
from aioinfer.model.attention.base import Attention
from aioinfer.model.attention.pool import KVShape
from aioinfer.model.batch import Batch
from aioinfer.model.layer import Embedding, Layer, Trunk
from aioinfer.model.mixers.base import MixerStep
from aioinfer.model.mixers.latent_attention import LatentAttention
from aioinfer.model.mixers.self_attention import SelfAttention
from aioinfer.model.native import NativeDecoder
from aioinfer.model.norm import Norm
from aioinfer.model.operations.base import Operations
from aioinfer.model.spec import ModelSpec
from aioinfer.model.vision.base import Features

__all__ = ["DraftHead", "Target"]


class Target(Protocol):
    """What a head shares with the model that it drafts for."""

    spec: ModelSpec

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """The vectors of tokens, [N, hidden]."""

    def to_logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Logits [N, vocab_size] of normed hidden states [N, hidden]."""


class DraftHead(ABC):
    """A head of one kind; subclasses say what its layers read. Launch thread only, once it is made.

    ``features`` are the inputs of a position besides its token, [N, hidden] in the model's dtype: made of the
    model's hidden states, or what :meth:`draft` returns.
    """

    #: for messages
    kind = ""
    #: tokens that one forward drafts, its first one's own included; None: one after the other
    block: int | None = None

    def __init__(
        self,
        target: Target,
        layers: Sequence[Layer | None],
        norm: Norm,
        operations: Operations,
        places: Sequence[int],
        positions: int,
    ) -> None:
        """
        Args:
            norm: in front of the head's logits.
            places: of the hidden states that it reads: see :attr:`~aioinfer.model.batch.Batch.places`.
            positions: that it knows.
        """
        self.target = target
        self.operations = operations
        self.places = torch.tensor(places)
        #: numbers of the hidden states of a position
        self.width = len(places) * target.spec.hidden_size
        self.positions = positions
        self.num_parameters = 0
        self._layers: list[Layer] = []
        self._norm = norm
        shapes: list[KVShape] = []
        for layer in layers:
            plain = layer is not None and layer.mlp is not None and not layer.parallel
            if not plain or layer is None or not isinstance(layer.mixer, SelfAttention | LatentAttention):
                raise ConfigError("its layers are of a kind that cannot draft yet")
            layer.mixer.kv_layer = len(target.spec.kv_layers) + len(shapes)
            shapes.append(layer.mixer.kv)
            self._layers.append(layer)
        #: behind those of the model
        self.kv_layers = tuple(shapes)
        #: computes drafts in one call; None: layer by layer
        self._decoder: NativeDecoder | None = None
        if isinstance(target, NativeDecoder):
            self._decoder = target.beside(Trunk(Embedding(), self._layers, norm, None), positions)
            self._behind = len(self._layers) + torch.arange(2)
        latent = any(isinstance(layer.mixer, LatentAttention) for layer in self._layers)
        if latent and isinstance(target, NativeDecoder) and self._decoder is None:
            raise ConfigError("its layers attend to latents, and are not all native")
        #: entries are made by all of the layer
        self._whole = latent and self._decoder is not None
        self._ropes = {id(rope): rope for layer in layers if layer and (rope := layer.mixer.rope)}

    @property
    def native(self) -> bool:
        """Whether one call computes all layers."""
        return self._decoder is not None

    def features(self, captured: torch.Tensor) -> torch.Tensor:
        """Of the model's hidden states, [N, width]."""
        return captured

    def store(self, ids: torch.Tensor, features: torch.Tensor, batch: Batch, attention: Attention) -> None:
        """Make the entries of positions, which ``batch`` has as rows of one token each; ``ids``: the tokens
        that follow them, [N]."""
        hidden = self._residual(ids, features)
        if self._whole:
            self._at_once(ids, hidden, batch, attention)
            return
        layer = self._layers[0]
        layer.mixer(self._read(layer, ids, hidden), self._step(batch, attention))

    def draft(
        self, ids: torch.Tensor, features: torch.Tensor, batch: Batch, attention: Attention
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Make entries as :meth:`store` does, and return what :meth:`logits` reads of each, and its
        features."""
        hidden = self._residual(ids, features)
        if self._decoder is not None:
            hidden, normed = self._at_once(ids, hidden, batch, attention)
        else:
            hidden = self._through(ids, hidden, self._step(batch, attention))
            normed = self._normed(hidden, self._norm)
        return normed, self._next_features(hidden, normed)

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Logits of the tokens of the model, [N, vocab_size]."""
        return self.target.to_logits(normed)

    @abstractmethod
    def _residual(self, ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """In front of the first layer, [N, hidden]."""

    def _at_once(
        self, ids: torch.Tensor, hidden: torch.Tensor, batch: Batch, attention: Attention
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual behind all layers, and its norm, by one call."""
        assert self._decoder is not None
        tokens = torch.arange(len(hidden))
        batch.input_ids, batch.logits_rows = ids.clamp(min=0), tokens[:0]
        batch.features, batch.places = Features(tokens, hidden.unsqueeze(0)), self._behind
        self._decoder.forward(batch, attention)
        assert batch.captured is not None
        behind, normed = batch.captured.chunk(2, dim=1)
        return behind.contiguous(), normed.contiguous()

    def _next_features(self, hidden: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        return normed

    def _step(self, batch: Batch, attention: Attention) -> MixerStep:
        rotaries = {key: rope.at(batch.positions, None) for key, rope in self._ropes.items()}
        return MixerStep(batch, attention, rotaries)

    def _through(self, ids: torch.Tensor, hidden: torch.Tensor, step: MixerStep) -> torch.Tensor:
        """The residual behind all layers."""
        for layer in self._layers:
            mixed = layer.mixer(self._read(layer, ids, hidden), step)
            hidden = hidden + self._normed(mixed, layer.mixer_post_norm)
            assert layer.mlp is not None, "a layer without such a part is refused"
            mixed = layer.mlp(self._normed(hidden, layer.mlp_norm))
            hidden = hidden + self._normed(mixed, layer.mlp_post_norm)
        return hidden

    def _read(self, layer: Layer, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """What a layer's mixer reads."""
        normed = self._normed(hidden, layer.mixer_norm)
        if layer.word_norm is None:
            return normed
        return torch.cat((self._normed(self.target.embed(ids), layer.word_norm), normed), dim=1)

    def _normed(self, values: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        return values if norm is None else self.operations.add_norm(values, None, norm)[1]
