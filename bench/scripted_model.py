"""A model of which only the time counts: random weights in a real shape, and blocks of scripted rounds.

With random weights no token is ever likely, so every block would take as many rounds as it has positions.
The forward is computed in full; then a script says which positions are sure, and of which token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from aioinfer.config import EngineConfig
from aioinfer.execution.device import Progress
from aioinfer.execution.torch_device import TorchDevice
from aioinfer.model.attention.base import Attention
from aioinfer.model.batch import Batch
from aioinfer.model.spec import CausalLM
from tests.toys.scripted import ScriptedLogits

__all__ = ["SHAPES", "ScriptedDevice", "write_shape"]

#: a logit beside which those of random weights are nothing
_CERTAIN = 1e4

_LLADA2: dict[str, Any] = {
    "architectures": ["LLaDA2MoeModelLM"],
    "model_type": "llada2_moe",
    "dtype": "bfloat16",
    "num_hidden_layers": 20,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 5120,
    "first_k_dense_replace": 1,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 512,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "partial_rotary_factor": 0.5,
    "rope_theta": 600_000.0,
    "use_qk_norm": True,
    "use_bias": False,
    "use_qkv_bias": False,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "vocab_size": 157_184,
    "tie_word_embeddings": False,
    "max_position_embeddings": 16_384,
    "pad_token_id": 156_892,
    "eos_token_id": 156_892,
    "mask_token_id": 156_895,
    "block_size": 32,
}
SHAPES: dict[str, dict[str, Any]] = {
    #: LLaDA2.0-mini, 16 B parameters
    "llada2-mini": _LLADA2,
    #: for rehearsals on a CPU
    "tiny": {
        **_LLADA2,
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 2,
        "topk_group": 1,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "pad_token_id": 1,
        "eos_token_id": 1,
        "mask_token_id": 2,
        "block_size": 16,
    },
}


def write_shape(name: str, folder: Path) -> Path:
    """A model directory with nothing but a config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[name]))
    return folder


class ScriptedDevice(TorchDevice):
    """A device whose model computes, and does not decide.

    ``variation``: standard deviation of the rounds of a block, relative to their mean of 8. Which block takes
    how many depends on the pages it is in; 0 makes all equal.
    """

    def __init__(self, config: EngineConfig, variation: float = 0.6) -> None:
        super().__init__(config)
        self._variation = variation

    def _load(self, device: torch.device, progress: Progress | None, path: Path | None = None) -> CausalLM:
        return _Scripted(super()._load(device, progress, path), device, 8.0, self._variation)


class _Scripted:
    """See :class:`~aioinfer.model.spec.CausalLM`."""

    classifier: Any = None
    adapters = None
    adapter_reason = "it is scripted"
    updates: Any = None
    encoder: Any = None

    def __init__(self, model: CausalLM, device: torch.device, mean_steps: float, variation: float) -> None:
        self.spec = model.spec
        self.invariant = model.invariant
        self.capturable = model.capturable
        self._model = model
        assert model.spec.block_size is not None
        assert model.spec.mask_token_id is not None
        self._size = model.spec.block_size
        self._script = ScriptedLogits(
            model.spec.vocab_size,
            model.spec.mask_token_id,
            mean_steps=mean_steps,
            variation=variation,
            device=device,
        )

    @property
    def seconds(self) -> Mapping[str, float]:
        return self._model.seconds

    def forward(self, batch: Batch, attention: Attention) -> torch.Tensor:
        logits = self._model.forward(batch, attention)
        rows = batch.logits_rows
        if not len(rows):
            return logits
        first = rows.view(-1, self._size)[:, 0]
        # The same for all rounds of a block, and for each block its own.
        key = (batch.positions[first] << 32) + batch.slot_mapping[first]
        tokens, sure = self._script.sure(key, batch.input_ids[rows].view(-1, self._size))
        tokens = tokens.view(-1, 1)
        certain = torch.where(sure.view(-1, 1), _CERTAIN, logits.gather(1, tokens))
        return logits.scatter_(1, tokens, certain)
