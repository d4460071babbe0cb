"""ModelSpec: what the rest of the engine must know about a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from aioinfer.model.attention.base import Attention
    from aioinfer.model.batch import Batch

__all__ = ["CausalLM", "ModelSpec", "Progress", "eos_token_ids"]

#: ``progress(stage, done, total)`` while a model loads
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shapes and limits of a loaded model."""

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    #: width of the logits
    vocab_size: int
    max_model_len: int
    dtype: torch.dtype
    eos_token_ids: frozenset[int]
    num_parameters: int


class CausalLM(Protocol):
    """A model that computes packed rows."""

    spec: ModelSpec

    def forward(self, batch: Batch, attention: Attention) -> torch.Tensor:
        """Logits of ``batch.logits_rows``, float32 [S, vocab_size]; KV is written on the way."""


def eos_token_ids(path: Path, config: Any) -> frozenset[int]:
    """End tokens of a checkpoint: generation_config.json knows best, config.json is second."""
    eos = config.eos_token_id
    file = path / "generation_config.json"
    if file.is_file():
        eos = json.loads(file.read_text("utf-8")).get("eos_token_id", eos)
    if eos is None:
        return frozenset()
    return frozenset(eos) if isinstance(eos, (list, tuple)) else frozenset({eos})
