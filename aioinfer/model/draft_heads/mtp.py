"""MTP: the layer of a checkpoint that predicts one token further (DeepSeek-V3, arXiv 2412.19437, section
2.2).

Its input is a product of the normed vector of a token and the normed hidden states in front of it, which the
last norm of the model has normed before; vectors of tokens and head are the model's. The layer is one of the
model's family. Names are those of DeepSeek-V3 and GLM-4.5, behind the last layer's, or those of Qwen3-Next
and Qwen3.5.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import torch

from aioinfer.errors import ConfigError
from aioinfer.model.draft_heads.base import DraftHead, Target
from aioinfer.model.families.base import Family, Source
from aioinfer.model.layer_kernels import LayerKernels
from aioinfer.model.weights import Weights

__all__ = ["MTPHead", "mtp_names"]

#: names here, by those behind the prefix of a layer
_DEEPSEEK = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj.weight": "fc.weight",
    "shared_head.norm.weight": "model.norm.weight",
}
#: what they share with the model
_SHARED = ("shared_head.head.", "embed_tokens.")
_QWEN = {
    "mtp.pre_fc_norm_embedding.weight": "enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "hnorm.weight",
    "mtp.fc.weight": "fc.weight",
    "mtp.norm.weight": "model.norm.weight",
}
_QWEN_LAYERS, _LAYER = "mtp.layers.", "model.layers.0."


def mtp_names(names: Collection[str], num_layers: int) -> dict[str, str]:
    """Names in a checkpoint of the tensors of its first MTP layer, by the names that a model of this one
    layer has; empty if it has none. ``num_layers``: of the model."""
    found: dict[str, str] = {}
    behind = f"model.layers.{num_layers}."
    for name in names:
        if name in _QWEN:
            found[_QWEN[name]] = name
        elif name.startswith(f"{_QWEN_LAYERS}0."):
            found[_LAYER + name.removeprefix(f"{_QWEN_LAYERS}0.")] = name
        elif name.startswith(behind):
            inner = name.removeprefix(behind)
            if not inner.startswith(_SHARED):
                found[_DEEPSEEK.get(inner, _LAYER + inner)] = name
    # A model may be cut off in front of its last layers, which are ordinary then.
    return found if "fc.weight" in found or any(name.startswith("mtp.") for name in found.values()) else {}


class MTPHead(DraftHead):
    """See the module."""

    kind = "MTP"

    def __init__(
        self, target: Target, family: Family, config: Any, weights: Weights, kernels: LayerKernels
    ) -> None:
        """``config``: of the model; ``weights``: named by :func:`mtp_names`. Raises ConfigError."""
        spec, config = target.spec, _of_one_layer(config)
        device = weights.take("model.norm.weight", (spec.hidden_size,)).device
        source = Source(config, weights, kernels, 1, device, spec.max_model_len)
        if family.recurrent(config):
            raise ConfigError("its layer has a recurrent state")
        layer = family.layer(source, 0)
        norm = family.final_norm(source)
        self._enorm, self._hnorm = (self._of_inputs(family, source, name) for name in ("enorm", "hnorm"))
        self._fc = source.linear(["fc"], [spec.hidden_size], 2 * spec.hidden_size, bias=False)
        weights.check_all_taken()
        super().__init__(target, [layer], norm, kernels.operations, [spec.num_layers + 1], spec.max_model_len)

    @staticmethod
    def _of_inputs(family: Family, source: Source, name: str) -> Any:
        return source.norm(name, getattr(family, "norm_weight", "rounded"))

    def _residual(self, ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        words = self._normed(self.target.embed(ids), self._enorm)
        return self._fc(torch.cat((words, self._normed(features, self._hnorm)), dim=1))


def _of_one_layer(config: Any) -> Any:
    """The config of a model of one layer, of the kind that attends, with experts if any layer has some."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"]
    if getattr(config, "mlp_layer_types", None):
        config.mlp_layer_types = config.mlp_layer_types[-1:]
    if getattr(config, "first_k_dense_replace", None):
        config.first_k_dense_replace = 0
    return config
