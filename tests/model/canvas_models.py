"""Random small DiffusionGemma checkpoints, and what transformers computes from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

__all__ = ["CANVAS", "VOCAB", "WINDOW", "PlainCanvas", "make_canvas_model"]

CANVAS, VOCAB, WINDOW = 8, 103, 11
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32,
    "num_global_key_value_heads": 1, "sliding_window": WINDOW, "max_position_embeddings": 256,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"], "num_experts": 4,
    "top_k_experts": 2, "moe_intermediate_size": 24, "eos_token_id": None, "bos_token_id": None,
    "pad_token_id": 0, "tie_word_embeddings": True, "use_bidirectional_attention": "vision",
}  # fmt: skip
_VISION = {
    "model_type": "gemma4_vision", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48, "image_size": 16, "patch_size": 4,
    "position_embedding_size": 16,
}  # fmt: skip
#: Of the vectors of tokens, and with them of the logits; of matrices; and of what each part adds. With these,
#: canvases take some rounds and not always as many, and a rounding stays one: most random models, which read
#: their own last distribution, make of it another answer within a few rounds.
_SPREAD, _GAIN, _ADDED = 6.0, 2.0, 0.3


def make_canvas_model(path: Path, *, seed: int = 0, outer: dict[str, Any] | None = None, **text: Any) -> Any:
    """Write a random checkpoint; returns transformers' model in float32. ``text``: other fields of the text
    model's config, ``outer``: of the config around it."""
    fields: dict[str, Any] = {"canvas_length": CANVAS, "image_token_id": VOCAB - 1, **(outer or {})}
    config = transformers.DiffusionGemmaConfig(text_config={**_TEXT, **text}, vision_config=_VISION, **fields)
    model = transformers.DiffusionGemmaForBlockDiffusion(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not tensor.is_floating_point() or "inv_freq" in name or name.endswith("embed_scale"):
                continue
            values = torch.randn(tensor.shape, generator=generator)
            if name.endswith("layer_scalar"):
                tensor.copy_(0.7 + 0.2 * values.abs())
            elif tensor.dim() == 1:
                tensor.copy_((1 + 0.3 * values) * (_ADDED if "post_" in name else 1.0))
            else:
                scale = _SPREAD if "embed_tokens" in name else _GAIN
                tensor.copy_(values * scale / tensor.shape[-1] ** 0.5)
    model.save_pretrained(path)
    return model


class PlainCanvas:
    """The two passes of transformers' model, over a cache that is made anew for each context."""

    def __init__(self, model: Any, dtype: torch.dtype = torch.float32) -> None:
        self._model = model.to(dtype)
        # Of float64 there are no others.
        self._model.set_experts_implementation("eager")
        self._context: list[int] = []
        self._cache: Any = None

    @torch.no_grad()
    def logits(self, context: list[int], canvas: list[int], last: torch.Tensor | None) -> torch.Tensor:
        """[B, V] of a canvas behind a context. ``last``: tempered logits of the last round, [B, V]."""
        if context != self._context:
            self._context = list(context)
            self._cache = self._model.model.encoder(input_ids=torch.tensor([context])).cache
        found: torch.Tensor = self._model(
            decoder_input_ids=torch.tensor([canvas]),
            cache=self._cache,
            self_conditioning_logits=None if last is None else last[None],
        ).logits[0]
        return found
