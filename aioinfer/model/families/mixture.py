"""Mixtures of experts over Llama's other parts: Qwen2-MoE and 3, Mixtral, OLMoE, Granite, ERNIE 4.5, Hunyuan,
GLM-4.5, dots.llm1, MiniMax-M2, and more.

They differ in the rule by which experts are chosen, in the layers that have some, in shared experts, and in
names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from aioinfer.errors import ConfigError, shown
from aioinfer.model.families.base import Source, expert_count, expert_middle, inner_sizes, own
from aioinfer.model.families.llama import LlamaLike
from aioinfer.model.gates import CONFIG_GATES
from aioinfer.model.mlp import FeedForward
from aioinfer.model.moe.routing import Rule, SoftmaxRouter
from aioinfer.model.moe.sparse import GATE_UP_DOWN, TOGETHER, GatedExpert

__all__ = ["Mixture"]

#: beginnings of the names of layers that predict further tokens, in K-EXAONE and Mellum, and in ERNIE 4.5
_FURTHER = ("mtp.", "model.mtp_")


@dataclass(frozen=True, slots=True)
class Mixture(LlamaLike):
    """Families with experts, by their differences."""

    #: layers with experts: none, those that the config states if it states a number of experts, or all that
    #: it states
    experts: Literal["none", "config", "all"] = "all"
    #: scores of experts
    routing: Literal["softmax", "sigmoid"] = "softmax"
    #: name of the module of a layer with experts, those of its router, of a bias of the choice, or None, and
    #: of the experts
    module: str = "mlp"
    router: str = "gate"
    bias: str | None = None
    expert_module: str = ".experts"
    #: names of the tensors of an expert, and of those of all of them in two
    expert_names: tuple[str, str, str] = GATE_UP_DOWN
    together: tuple[str, str] = TOGETHER
    #: name of the expert that all tokens use; None: there is none
    shared: str | None = None
    shared_names: tuple[str, ...] = GATE_UP_DOWN

    def unsupported_reason(self, config: Any) -> str | None:
        activation = self._activation(config)
        if self.sparse_layers(config) and CONFIG_GATES.get(activation) != "silu":
            return f"experts with the activation {activation}"
        # Not super(): a dataclass with slots is another class than the one that its methods close over.
        return LlamaLike.unsupported_reason(self, config)

    def sparse_layers(self, config: Any) -> frozenset[int]:
        if self.experts == "none" or (self.experts == "config" and not expert_count(config)):
            return frozenset()
        layers = frozenset(_layers(config))
        for index in layers:
            _chosen(config, index)
        return layers

    def inner_sizes(self, config: Any) -> list[int]:
        return [*inner_sizes(config), *filter(None, [self._shared_middle(config)])]

    def unread(self, config: Any, name: str) -> bool:
        """Whether a tensor belongs to the layers that predict further tokens, behind the others, or to a
        shared expert of no size."""
        # Of some configs the class has no such field, and files have it.
        count = (getattr(config, "num_nextn_predict_layers", None) or 0) + config.num_hidden_layers
        later = range(config.num_hidden_layers, count)
        if name.startswith((*_FURTHER, *(f"model.layers.{index}." for index in later))):
            return True
        shared = self.shared is not None and f"{self.shared}." in name.replace("_gate.", ".")
        return shared and not self._shared_middle(config)

    def _mlp(self, source: Source, index: int) -> FeedForward:
        if index not in self.sparse_layers(source.config):
            return LlamaLike._mlp(self, source, index)
        prefix = f"model.layers.{index}.{self.module}"
        rule, shared = self._rule(source, prefix, index), self._shared(source, index)
        experts = f"{prefix}{self.expert_module}"
        return source.sparse(rule, experts, shared, names=self.expert_names, together=self.together)

    def _rule(self, source: Source, prefix: str, index: int) -> Rule:
        config, weights = source.config, source.weights
        normalize = own(config, "norm_topk_prob") is not False
        if self.routing == "sigmoid":
            groups = {"num_groups": own(config, "n_group") or 1, "top_groups": own(config, "topk_group") or 1}
            return source.sigmoid_rule(prefix, self.bias, normalize=normalize, **groups)
        count, float32 = expert_count(config), torch.float32
        dtype, balance = None, None
        if self.bias is not None:
            balance = weights.take(f"{prefix}.{self.bias}", (1, count), dtype=float32)[0]
            dtype = float32
        gate = weights.take(f"{prefix}.{self.router}.weight", (count, config.hidden_size), dtype=dtype)
        return SoftmaxRouter(gate, _chosen(config, index), normalize, balance=balance)

    def _shared(self, source: Source, index: int) -> FeedForward | None:
        middle = self._shared_middle(source.config)
        if not middle:
            return None
        prefix = f"model.layers.{index}.{self.shared}"
        # GGUF files have gate and up apart.
        names = self.shared_names
        names = names if f"{prefix}.{names[0]}.weight" in source.weights else GATE_UP_DOWN
        expert = source.gated_mlp(prefix, middle, names=names)
        gate = f"{prefix}_gate.weight"
        if own(source.config, "shared_expert_intermediate_size") is None:
            return expert
        return GatedExpert(expert, source.weights.take(gate, (1, source.config.hidden_size)))

    def _shared_middle(self, config: Any) -> int:
        """Inner dimension of the shared expert; 0: there is none."""
        if self.shared is None or not self.sparse_layers(config):
            return 0
        for name in ("shared_expert_intermediate_size", "shared_intermediate_size"):
            size: int | None = own(config, name)
            if size is not None:
                return size
        names = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
        for name in names:
            if hasattr(type(config), name):
                return (getattr(config, name) or 0) * expert_middle(config)
        middle: int = config.intermediate_size
        return middle


def _layers(config: Any) -> Iterable[int]:
    """The layers with experts. Raises ConfigError."""
    count: int = config.num_hidden_layers
    types = own(config, "mlp_layer_types")
    if types is not None:
        if len(types) < count:
            raise ConfigError(
                f"model: mlp_layer_types of the config has {len(types)} entries for {count} layers"
            )
        return [index for index in range(count) if types[index] == "sparse"]
    if own(config, "moe_layer_interval") is not None:
        step, first, last = (
            config.moe_layer_interval,
            config.moe_layer_start_index,
            config.moe_layer_end_index,
        )
        return _every(step, range(first, min(last + 1, count)))
    if own(config, "decoder_sparse_step") is not None:
        return set(_every(config.decoder_sparse_step, range(count))) - set(config.mlp_only_layers or ())
    return range(own(config, "first_k_dense_replace") or 0, count)


def _every(step: int, layers: Iterable[int]) -> Iterable[int]:
    """Every layer ``step``, counted from the first of the model. Raises ConfigError."""
    if step < 1:
        raise ConfigError(f"model: experts in every {step}th layer")
    return [index for index in layers if (index + 1) % step == 0]


def _chosen(config: Any, index: int) -> int:
    """Number of experts of a token in layer ``index``; Hunyuan states a list. Raises ConfigError."""
    chosen, count = config.num_experts_per_tok, expert_count(config)
    if isinstance(chosen, list):
        chosen = chosen[index] if index < len(chosen) else None
    if type(chosen) is int and 1 <= chosen <= count:
        return chosen
    raise ConfigError(f"model: {shown(chosen)} of {count} experts in layer {index}")
