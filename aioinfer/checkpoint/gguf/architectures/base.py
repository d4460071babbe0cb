"""Architecture: how a GGUF file of one architecture stores a model; and what several of them share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from aioinfer.checkpoint.gguf.file import GGUFFile
from aioinfer.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = [
    *("DEFAULT_BASE", "FOUR_NORMS", "FULL", "LESS_ONE", "NEIGHBOURS", "NUMBER", "POST_NORMS", "SLIDING"),
    *("Architecture", "Common", "Order", "Values"),
    *("biases", "partial_rotation", "per_layer", "soft_cap", "two_rotations", "windows"),
]

#: from a config and a number of rows: int64 [rows], row i of transformers is the stored row ``order[i]``.
#: Raises ValueError if rows of that number cannot be in such an order.
Order = Callable[[Mapping[str, Any], int], npt.NDArray[np.int64]]
#: a small tensor of transformers from the stored one
Values = Callable[["torch.Tensor"], "torch.Tensor"]

#: of rotations in files that state none
DEFAULT_BASE = 10_000.0
NUMBER = (int, float)
FULL, SLIDING = "full_attention", "sliding_attention"
#: names of norms behind the parts of a layer, and of those on both sides
POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
FOUR_NORMS = {**POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"}


@dataclass(frozen=True, slots=True)
class Common:
    """Metadata that the configs of all architectures are made of."""

    file: GGUFFile
    prefix: str
    layers: int
    hidden: int
    heads: int
    head_dim: int
    #: positions of the longest sequence
    context: int
    #: see :func:`~aioinfer.checkpoint.gguf.config.rope_of`
    rope: dict[str, Any]

    def value(self, name: str, kind: type[Any] | tuple[type[Any], ...], default: Any = None) -> Any:
        """See :meth:`~aioinfer.checkpoint.gguf.file.GGUFFile.value`; without the prefix."""
        return self.file.value(f"{self.prefix}.{name}", kind, default)

    def has(self, name: str) -> bool:
        """Whether the metadata have a name, without the prefix."""
        return f"{self.prefix}.{name}" in self.file.metadata

    def any(self, *ends: str) -> bool:
        """Whether a tensor has a name that ends so."""
        return any(name.endswith(ends) for name in self.file.tensors)

    @property
    def attention_bias(self) -> bool:
        return self.any(".attn_q.bias", ".attn_qkv.bias")


@dataclass(frozen=True, slots=True)
class Architecture:
    """The differences between architectures."""

    model_type: str
    name: str
    #: further entries of the config
    more: Callable[[Common], dict[str, Any]]
    #: names of tensors of a layer, and of others, that transformers calls otherwise than elsewhere: without
    #: ".weight" and ".bias", or whole, as "attn_sinks.weight"
    names: Mapping[str, str] = field(default_factory=dict)
    #: what transformers calls the layers
    layers: str = "model.layers"
    #: and those that predict further tokens; empty: as the others
    further: str = ""
    #: ends of transformers' names of matrices that it has transposed
    transposed: tuple[str, ...] = ()
    #: name of the epsilon of norms in the metadata
    epsilon: str = "layer_norm_rms_epsilon"
    #: ends of transformers' names of tensors whose rows are stored in another order, and of matrices whose
    #: columns are; of several the first applies
    rows: Mapping[str, Order] = field(default_factory=dict)
    columns: Mapping[str, Order] = field(default_factory=dict)
    #: ends of those of small tensors that are stored as other numbers, or in another shape
    values: Mapping[str, Values] = field(default_factory=dict)
    #: whether a part of each head may be rotated: then its size does not follow from that part's
    partial_rotary: bool = False
    #: whether heads share latents: the size that is stated is that of the part that rotates
    latent: bool = False
    #: texts of control tokens that end a turn, beside those that do so everywhere
    ends: frozenset[str] = frozenset()


def _neighbours(heads: str) -> Order:
    """Rows of heads in which neighbours rotate together, transformers' order being that of two halves."""
    return lambda config, rows: np.arange(rows).reshape(config[heads], -1, 2).swapaxes(1, 2).ravel()


#: of queries and keys, weights and biases
NEIGHBOURS: Mapping[str, Order] = {
    f"{part}_proj.{kind}": _neighbours(heads)
    for part, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads"))
    for kind in ("weight", "bias")
}


def less_one(tensor: torch.Tensor) -> torch.Tensor:
    # In float32 for every type: adding 1 again must give the same factor.
    return tensor.float() - 1


#: weights of norms are factors, transformers' being those less one
LESS_ONE: Mapping[str, Values] = {"norm.weight": less_one}


def per_layer(common: Common, name: str, default: int | None = None) -> list[int]:
    """A number of each layer, which may be stated once for all of them. Raises ConfigError."""
    stated = common.value(name, (int, list), default)
    if isinstance(stated, int):
        return [stated] * common.layers
    if len(stated) < common.layers or not all(isinstance(each, int) for each in stated):
        raise ConfigError(
            f"model: {common.prefix}.{name} has {len(stated)} values for {common.layers} layers"
        )
    return list(stated[: common.layers])


def biases(common: Common) -> dict[str, Any]:
    return {
        "attention_bias": common.attention_bias,
        "mlp_bias": "blk.0.ffn_gate.bias" in common.file.tensors,
    }


def partial_rotation(common: Common) -> dict[str, Any]:
    """The rotation with the part of a head that rotates; transformers' default is not all of it."""
    return {"partial_rotary_factor": 1.0, **common.rope}


def soft_cap(common: Common, name: str, default: float) -> float | None:
    """A soft cap; 0 is none."""
    return float(common.value(name, NUMBER, default)) or None


def windows(common: Common, *, default: int, period: int) -> dict[str, Any]:
    """The attention window, and which layers have it: all but every ``period``-th, unless the file states
    another period, or says it of each layer. A window of 0 is none."""
    window = common.value("attention.sliding_window", int, default)
    pattern = common.value("attention.sliding_window_pattern", (int, list), period)
    if window < 0 or (isinstance(pattern, int) and pattern < 0):
        raise ConfigError(f"model: {common.prefix}.attention.sliding_window of the GGUF file is negative")
    if isinstance(pattern, int):
        sliding = [pattern == 0 or (layer + 1) % pattern != 0 for layer in range(common.layers)]
    elif len(pattern) == common.layers and all(isinstance(each, int) for each in pattern):
        sliding = [bool(each) for each in pattern]
    else:
        raise ConfigError(
            f"model: {common.prefix}.attention.sliding_window_pattern has {len(pattern)} values for "
            f"{common.layers} layers"
        )
    types = [SLIDING if window and each else FULL for each in sliding]
    return {"sliding_window": window or None, "layer_types": types}


def two_rotations(common: Common, base: float) -> dict[str, Any]:
    """Layers with a window rotate without scaling, by a base of their own. ``base``: of files that do not
    state that."""
    own = float(common.value("rope.freq_base_swa", NUMBER, base))
    return {FULL: common.rope, SLIDING: {"rope_type": "default", "rope_theta": own}}
