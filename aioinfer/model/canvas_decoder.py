"""CanvasDecoder: a model with canvases, both passes in one forward; see :mod:`aioinfer.model.canvas`."""

from __future__ import annotations

import torch

from aioinfer.model.attention.base import Attention
from aioinfer.model.batch import Batch
from aioinfer.model.canvas import Canvas
from aioinfer.model.decoder import Decoder
from aioinfer.model.layer import Layer

__all__ = ["CanvasDecoder"]


class CanvasDecoder(Decoder):
    """Computes both passes."""

    capturable = False

    def _forward(self, batch: Batch, attention: Attention) -> torch.Tensor:
        logits = super()._forward(batch, attention)
        if batch.canvas is not None:
            self._remember(logits, batch.canvas)
        return logits

    def _remember(self, logits: torch.Tensor, canvas: Canvas) -> None:
        """Replace the vectors; ``logits`` [K * B, V] are those of the canvases. Row by row: the product has
        the same shape in any batch, and no copy of all logits is made."""
        scale, dtype = self._trunk.embedding.scale, self._words.dtype
        for row, own in enumerate(logits.view(*canvas.tokens.shape, -1)):
            tempered = (own.float() / canvas.temperatures[row]).to(dtype)
            shares = tempered.softmax(-1, dtype=torch.float32).to(dtype)
            torch.mul(shares @ self._words, scale, out=canvas.vectors[row])

    def _embed(self, batch: Batch) -> torch.Tensor:
        hidden, canvas, conditioning = super()._embed(batch), batch.canvas, self._trunk.conditioning
        if canvas is None:
            return hidden
        assert conditioning is not None, "the family said so"
        flat = canvas.tokens.reshape(-1)
        words = hidden[flat]
        normed = self._operations.add_norm(canvas.vectors.view_as(words), None, conditioning.norm)[1]
        mixed = self._operations.add_norm(words, conditioning.mlp(normed), conditioning.post_norm)[1]
        drafts = canvas.drafts.repeat_interleave(canvas.tokens.shape[1]).unsqueeze(1)
        return hidden.index_copy(0, flat, torch.where(drafts, mixed, words))

    def _scale(self, layer: Layer, batch: Batch) -> float | torch.Tensor:
        canvas, own = batch.canvas, layer.canvas_scale
        if canvas is None or own is None or own == layer.scale:
            return layer.scale
        scales = self._words.new_full((len(batch.input_ids),), layer.scale)
        factors = torch.where(canvas.drafts, own, layer.scale).to(scales.dtype)
        flat = canvas.tokens.reshape(-1)
        return scales.index_copy_(0, flat, factors.repeat_interleave(canvas.tokens.shape[1])).unsqueeze(1)
