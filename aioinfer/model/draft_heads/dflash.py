"""DFlash: a small diffusion model that drafts a block in one forward (Chen et al., arXiv 2602.06036).

Each of its layers attends to keys and values that it makes of the model's hidden states at all positions,
and to those of a block: the row's own token, and masks, which all see each other. Vectors of tokens and head
are the model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from aioinfer.errors import ConfigError
from aioinfer.model.attention.base import Attention
from aioinfer.model.batch import Batch
from aioinfer.model.draft_heads.base import DraftHead, Target
from aioinfer.model.families.base import Family, Source
from aioinfer.model.layer_kernels import LayerKernels
from aioinfer.model.rope import longest
from aioinfer.model.weights import Weights

__all__ = ["DFlashHead", "dflash_places"]

#: so that all positions are of one block, and a row's tokens see each other
_WHOLE = 1 << 30


def dflash_places(stated: Mapping[str, Any], num_layers: int, own_layers: int) -> list[int]:
    """Places of the hidden states that a head with this config.json reads of a model of so many layers: the
    outputs of the layers that it names, or of as many as it has layers, evenly from the second to the third
    last. Raises ConfigError."""
    inner = stated.get("dflash_config")
    named = inner.get("target_layer_ids") if isinstance(inner, dict) else None
    if named is None and own_layers == 1:
        named = [num_layers // 2]
    if named is None:
        last = num_layers - 4
        named = [round(1 + at * last / (own_layers - 1)) for at in range(own_layers)]
    if not isinstance(named, list) or not named or not all(type(each) is int for each in named):
        raise ConfigError("target_layer_ids of dflash_config are no numbers of layers")
    if not all(0 <= layer < num_layers for layer in named):
        raise ConfigError(f"it reads layers {named}, and the model has {num_layers}")
    return [layer + 1 for layer in named]


class DFlashHead(DraftHead):
    """See the module."""

    kind = "DFlash"

    def __init__(
        self,
        target: Target,
        family: Family,
        config: Any,
        stated: Mapping[str, Any],
        weights: Weights,
        kernels: LayerKernels,
        device: torch.device,
    ) -> None:
        """``config``: of a Qwen3 with the head's layers; ``stated``: its config.json. Raises ConfigError."""
        spec, count = target.spec, config.num_hidden_layers
        # Heads state the length that they were trained with, and have entries of all positions.
        positions = max(longest(config), spec.max_model_len)
        places, hidden = dflash_places(stated, spec.num_layers, count), spec.hidden_size
        block, inner = stated.get("block_size"), stated.get("dflash_config")
        mask = inner.get("mask_token_id") if isinstance(inner, dict) else None
        if type(block) is not int or block < 2:
            raise ConfigError(f"block_size must be a number of tokens, got {block!r}")
        if type(mask) is not int or not 0 <= mask < spec.vocab_size:
            raise ConfigError(
                f"mask_token_id of dflash_config must be one of the model's tokens, got {mask!r}"
            )
        self.block, self._mask = block, mask
        source = Source(config, weights, kernels, _WHOLE, device, positions)
        self._fc = source.linear(["fc"], [hidden], len(places) * hidden, bias=False)
        self._hidden_norm = source.norm("hidden_norm")
        layers = [family.layer(source, index) for index in range(count)]
        norm = family.final_norm(source)
        weights.check_all_taken(("rotary_emb.inv_freq",))
        super().__init__(target, layers, norm, kernels.operations, places, positions)

    def features(self, captured: torch.Tensor) -> torch.Tensor:
        return self._normed(self._fc(captured), self._hidden_norm)

    def store(self, ids: torch.Tensor, features: torch.Tensor, batch: Batch, attention: Attention) -> None:
        step = self._step(batch, attention)
        for layer in self._layers:
            layer.mixer(features, step)

    def _residual(self, ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        return self.target.embed(torch.where(ids < 0, self._mask, ids))
