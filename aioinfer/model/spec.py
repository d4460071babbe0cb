"""ModelSpec: what the rest of the engine must know about a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from aioinfer.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from aioinfer.model.attention.base import Attention
    from aioinfer.model.batch import Batch

__all__ = ["CausalLM", "ModelSpec", "Progress", "eos_token_ids", "read_json_object"]

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
    hidden_size: int
    #: width of the logits
    vocab_size: int
    max_model_len: int
    dtype: torch.dtype
    eos_token_ids: frozenset[int]
    num_parameters: int
    #: what computes a mixture of experts, None in a model without
    expert_kernels: str | None = None
    #: positions that a block diffusion model writes at a time, None if it writes token after token; logits
    #: of such a model are those of the position itself, not of the next one
    block_size: int | None = None
    #: what an unknown position of a block holds; None with ``block_size``
    mask_token_id: int | None = None

    @property
    def unit(self) -> int:
        """Positions that are generated at a time: 1, or those of a block."""
        return self.block_size or 1


class CausalLM(Protocol):
    """A model that computes packed rows."""

    spec: ModelSpec
    #: its forward asks the host for nothing that differs from step to step: a CUDA graph can hold it
    capturable: bool
    #: a token's logits have the same bits in any batch, however its sequence was cut into rows and whoever
    #: computed what its cache holds
    invariant: bool

    @property
    def seconds(self) -> Mapping[str, float]:
        """What each part of all forwards so far has taken; empty where nobody counts."""

    def forward(self, batch: Batch, attention: Attention) -> torch.Tensor:
        """Logits of ``batch.logits_rows``, [S, vocab_size] in the model's type; KV is written on the way."""


def eos_token_ids(path: Path, config: Any) -> frozenset[int]:
    """End tokens of a checkpoint: generation_config.json knows best, config.json is second.

    Raises ConfigError if generation_config.json is not a JSON object.
    """
    eos = getattr(config, "eos_token_id", None)
    file = path / "generation_config.json"
    if file.is_file():
        stated = read_json_object(file).get("eos_token_id")
        eos = eos if stated is None else stated
    if eos is None:
        return frozenset()
    return frozenset(eos) if isinstance(eos, (list, tuple)) else frozenset({eos})


def read_json_object(file: Path) -> dict[str, Any]:
    """The object that a JSON file of a model directory holds. Raises ConfigError."""
    try:
        value = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: {file.name} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"model: {file.name} holds no JSON object")
    return value
