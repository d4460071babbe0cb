"""TorchLayers: layers by torch's matrix products, with operations between them in torch or Triton."""

from __future__ import annotations

from collections.abc import Collection

from aioinfer.model.adapters.slots import TorchAdapters
from aioinfer.model.canvas_decoder import CanvasDecoder
from aioinfer.model.decoder import Decoder
from aioinfer.model.float8_linear import Float8Layers
from aioinfer.model.gates import Gate
from aioinfer.model.invariance import variant_part
from aioinfer.model.layer import Trunk
from aioinfer.model.layer_kernels import ExpertKernels, LayerKernels
from aioinfer.model.linear import HeadsLinear, Linear, MakeLinear
from aioinfer.model.mlp import FeedForward, GatedMLP, PlainMLP
from aioinfer.model.operations.base import Operations
from aioinfer.model.spec import CausalLM, ModelSpec
from aioinfer.model.weights import StoredMatrix

__all__ = ["TorchLayers"]


class TorchLayers(LayerKernels):
    """Makes layers of torch's tensors."""

    def __init__(
        self,
        operations: Operations,
        make_linear: MakeLinear,
        experts: ExpertKernels | None,
        adapters: TorchAdapters | None = None,
        float8: Float8Layers | None = None,
        *,
        invariant: bool = False,
    ) -> None:
        """
        Args:
            adapters: those of the layers; None: they are not adapted.
            float8: makes layers of floats of 8 bits; None: there are none.
            invariant: products and operations add in one order for any batch.
        """
        super().__init__(operations, experts)
        self._make_linear = make_linear
        self._adapters = adapters
        self._float8 = float8
        self._invariant = invariant

    @property
    def kept_bits(self) -> Collection[int]:
        return () if self._float8 is None else self._float8.kept_bits

    def _linear(self, stored: StoredMatrix, *, exact: bool = False) -> Linear:
        made = None if exact or self._float8 is None else self._float8.linear(stored)
        if made is None:
            made = self._make_linear(stored.load(), stored.bias())
        return made if self._adapters is None else self._adapters.linear(stored, made)

    def _by_head(self, stored: StoredMatrix, heads: int) -> Linear:
        return HeadsLinear(stored.load(), heads)

    def _gated_mlp(self, gate_up: StoredMatrix, down: StoredMatrix, gate: Gate) -> FeedForward:
        return GatedMLP(self._linear(gate_up), self._linear(down), gate, self.operations)

    def _plain_mlp(self, up: StoredMatrix, down: StoredMatrix, gate: Gate) -> FeedForward:
        return PlainMLP(self._linear(up), self._linear(down), gate)

    def _decoder(self, spec: ModelSpec, trunk: Trunk, words: StoredMatrix, head: StoredMatrix) -> CausalLM:
        vectors = words.view()
        to_logits = self._make_linear(vectors if head is words else head.view(), head.bias())
        variance = variant_part(trunk) if self._invariant else "products of layers"
        adapters, reason = self._adapters, "" if self._adapters else "max_lora_rank is 0"
        if adapters is not None:
            adapters.add_head(*head.shape, head.again)
            if trunk.embedding.positions is None:
                adapters.targets.add_words(words.name, words.shape, words.again)
        kind = Decoder if trunk.conditioning is None else CanvasDecoder
        return kind(spec, trunk, vectors, to_logits, self.operations, adapters, reason, variance=variance)
