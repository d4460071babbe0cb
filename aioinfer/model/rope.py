"""Rotary position embedding (Su et al., 2021) in the variants of the Llama-like families."""

from __future__ import annotations

import copy
import hashlib
import math
from dataclasses import dataclass
from typing import Any

import torch

from aioinfer.checkpoint.libraries import importing_transformers
from aioinfer.errors import ConfigError, shown
from aioinfer.ledger import LEDGER

__all__ = ["Rope", "Rotary", "factors", "for_length", "layer_type", "longest", "rotate", "supported"]

#: model types whose configs state the length that linear scaling makes
_SCALED = ("gemma3", "gemma4")
_LONGEST = 2**26
#: positions whose factors are computed at a time, in float32: few, which stay in a core's cache
_AT_A_TIME = 2**11
_KINDS = ("alpha", "default", "linear", "llama3", "longrope", "proportional", "yarn")


def supported(config: Any, head_dim: int, *, partial: bool = False) -> bool:
    """Whether :class:`Rope` supports the config's variant, that is, whether a table by position suffices, one
    for all layers or one for each type of layers.

    Dynamic NTK depends on the length of the sequence; of LongRoPE, :func:`for_length` chooses the factors.
    ``partial``: the family allows configs that rotate only a part of each head.
    """
    types = set(config.layer_types) if _by_type(config) else {None}
    if not all(_parameters(config, layer_type) for layer_type in types if layer_type is not None):
        return False
    return all(_supported(config, _parameters(config, layer_type), head_dim, partial) for layer_type in types)


def _supported(config: Any, parameters: dict[str, Any], head_dim: int, partial: bool) -> bool:
    rotated = _rotary_dim(parameters, head_dim)
    return (
        _kind(config, parameters) in _KINDS
        and (rotated == head_dim or partial)
        and 2 <= rotated <= head_dim
        and rotated % 2 == 0
    )


def longest(config: Any) -> int:
    """The longest sequence in positions that the config's tables are for.

    YaRN (arXiv 2309.00071) and linear scaling make a length longer by their factor; cards have one add the
    scaling to a config, and nothing else. A LongRoPE model with its short factors is limited to its original
    length, see :func:`for_length`; dynamic NTK, which changes frequencies with each length, to that of the
    config. Raises ConfigError for one that no memory holds."""
    stated: int = config.max_position_embeddings
    length = float(stated)
    for parameters in _each(config):
        kind, original = (
            parameters.get("rope_type"),
            parameters.get("original_max_position_embeddings", stated),
        )
        if kind == "longrope":
            _check_factors(config, parameters)
            if _short(parameters):
                length = min(length, original)
        elif kind == "yarn" or (kind == "linear" and not config.model_type.startswith(_SCALED)):
            length = max(length, original * (parameters.get("factor") or 1.0))
    if length > _LONGEST:
        raise ConfigError(f"model: rotary positions are scaled to {length:g} positions")
    return int(length)


def for_length(config: Any, length: int | None) -> Any:
    """The config for sequences of up to ``length`` positions, None for as many as the model likes to have.

    A LongRoPE model (arXiv 2402.13753) has short factors of its frequencies for sequences up to its original
    length, and long ones for the whole of longer sequences. A token's keys must not depend on what follows
    it, so all sequences have the same: the long factors if ``length`` is above the original one, as in vLLM
    and llama.cpp. transformers, which looks at each sequence, agrees with them on those that are longer.
    """
    text = config.get_text_config()
    if length is None or not any(
        _short(each) and length > each.get("original_max_position_embeddings", length) for each in _each(text)
    ):
        return config
    config = copy.deepcopy(config)
    for each in _each(config.get_text_config()):
        for name in ("factor", "mscale"):
            if f"long_{name}" in each:
                each[f"short_{name}"] = each[f"long_{name}"]
    return config


def factors(config: Any) -> str:
    """Which factors of LongRoPE all sequences have: "short" or "long"; empty if there is no choice."""
    kinds = [_short(each) for each in _each(config) if each.get("rope_type") == "longrope"]
    return "" if not kinds else "short" if any(kinds) else "long"


def _each(config: Any) -> list[dict[str, Any]]:
    """The parameters of all rotations of a config."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [each for each in (rope, *rope.values()) if isinstance(each, dict)]


def _short(parameters: dict[str, Any]) -> bool:
    """Whether a rotation is LongRoPE's with factors that are not the long ones."""
    pairs = (("short_factor", "long_factor"), ("short_mscale", "long_mscale"))
    return parameters.get("rope_type") == "longrope" and any(
        parameters.get(short) != parameters.get(long) for short, long in pairs
    )


def _check_factors(config: Any, parameters: dict[str, Any]) -> None:
    """Raise ConfigError, by the name of the list, unless there is a factor for each frequency."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    count = _rotary_dim(parameters, size) // 2
    for name in ("short_factor", "long_factor"):
        given = parameters.get(name)
        factors = given if isinstance(given, list) else []
        numbers = all(type(each) in (int, float) and 0 < each < math.inf for each in factors)
        if not (numbers and len(factors) == count):
            raise ConfigError(
                f"model: {name} of longrope must be a list of {count} positive numbers, got {shown(given)}"
            )


def layer_type(config: Any, index: int) -> str | None:
    """The type of layer ``index``, which selects its table; None if all layers have the same."""
    return config.layer_types[index] if _by_type(config) else None


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary factors of the tokens of a step, [T, 1, rotary_dim] each, in the model's dtype.

    The first ``rotary_dim`` dimensions of a head are rotated, dimension d with d + rotary_dim / 2; the others
    are not changed.
    """

    cos: torch.Tensor
    #: includes the sign of rotate-half: the first half is negated
    sin: torch.Tensor


class Rope:
    """Cosines and sines by position, computed once, of angles in float32.

    With M-RoPE (Qwen2-VL, arXiv 2409.12191) a token has three positions, of time, height and width, and each
    pair of dimensions is rotated by one of them. In a text they are the same, so it is the plain rotation.
    """

    __slots__ = ("_axes", "_dimensions", "digest", "table")

    def __init__(
        self,
        config: Any,
        head_dim: int,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        layer_type: str | None = None,
    ) -> None:
        """``layer_type``: that of the layers that are rotated by it; see :func:`layer_type`."""
        inv_freq, scaling = _frequencies(config, head_dim, layer_type)
        #: of the frequencies: torch's functions may give others on another processor
        self.digest = hashlib.sha256(f"{inv_freq.tolist()} {scaling}".encode()).hexdigest()[:8]
        size = 2 * len(inv_freq)
        _check_memory(2 * max_positions * size * dtype.itemsize, max_positions)
        table = [torch.empty(max_positions, 1, size, dtype=dtype) for _ in range(2)]
        for begin in range(0, max_positions, _AT_A_TIME):
            part = slice(begin, min(begin + _AT_A_TIME, max_positions))
            angles = torch.arange(part.start, part.stop, dtype=torch.float32)[:, None] * inv_freq
            # In double precision: rounded, they are the same whichever library computes them, here or on ARM.
            angles = angles.double()
            cos, sin = angles.cos().mul_(scaling), angles.sin().mul_(scaling)
            for whole, halves in zip(table, ((cos, cos), (-sin, sin)), strict=True):
                torch.cat(halves, dim=-1, out=whole[part, 0])
        #: cosines and sines of all positions, [positions, 1, rotary_dim] each; see :class:`Rotary`
        self.table = tuple(each.to(device) for each in table)
        #: [rotary_dim] which of the three positions of M-RoPE rotates a dimension; None without
        self._axes = _axes(config, len(inv_freq), device)
        self._dimensions = torch.arange(size, device=device)

    def at(self, positions: torch.Tensor, three: torch.Tensor | None = None) -> Rotary:
        """The factors of tokens at positions [T] int64; ``three``: at positions of M-RoPE, [3, T] int64."""
        cos, sin = self.table
        if three is None:
            return Rotary(cos[positions], sin[positions])
        assert self._axes is not None, "a model without M-RoPE has one position for each token"
        at, dimensions = three[self._axes].T.contiguous()[:, None], self._dimensions
        return Rotary(cos[at, 0, dimensions], sin[at, 0, dimensions])


def _axes(config: Any, count: int, device: torch.device) -> torch.Tensor | None:
    """Of ``count`` frequencies with interleaved sections (Qwen3-VL): height and width have every third one,
    from the second or third on, as many as their sections say; time has the others."""
    sections = getattr(config, "mrope_section", None)
    if sections is None:
        return None
    numbers = isinstance(sections, list) and all(type(each) is int and each >= 0 for each in sections)
    if not (numbers and len(sections) == 3 and sum(sections) == count):
        raise ConfigError(
            f"model: mrope_section must be three numbers that add up to {count}, got {shown(sections)}"
        )
    axes = torch.zeros(count, dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return torch.cat((axes, axes)).to(device)


def _check_memory(size: int, positions: int) -> None:
    """Raise ConfigError if there is no room for tables of ``size`` bytes."""
    if (left := LEDGER.short(size)) is not None:
        takes = f"rotary factors of {positions} positions take {size / 2**30:.2f} GiB"
        raise ConfigError(f"model: max_position_embeddings: {takes}, and {LEDGER.said(left)}")


def rotate(heads: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Rotate the first ``rotary_dim`` dimensions of heads [T, heads, head_dim]; returns a new tensor."""
    size = rotary.cos.shape[-1]
    if size < heads.shape[-1]:
        return torch.cat((rotate(heads[..., :size], rotary), heads[..., size:]), dim=-1)
    return heads * rotary.cos + heads.roll(size // 2, dims=-1) * rotary.sin


def _frequencies(config: Any, head_dim: int, layer_type: str | None) -> tuple[torch.Tensor, float]:
    parameters = _parameters(config, layer_type)
    kind = _kind(config, parameters)
    if kind in ("default", "alpha"):
        rotary_dim, theta = _rotary_dim(parameters, head_dim), parameters["rope_theta"]
        if kind == "alpha":
            theta *= parameters["alpha"] ** (head_dim / (head_dim - 2))
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
        # The power in double precision, as in the table: torch's own in float32 differs between processors.
        powers = (theta ** exponents.double()).float()
        return 1.0 / powers, 1.0
    with importing_transformers():
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), layer_type=layer_type)
    return inv_freq.float(), float(scaling)


def _kind(config: Any, parameters: dict[str, Any]) -> str:
    """The kind of rotation: what Hunyuan calls dynamic has a base that does not depend on the length."""
    kind: str = parameters.get("rope_type", "default")
    fixed = kind == "dynamic" and config.model_type.startswith("hunyuan_v1") and parameters.get("alpha")
    return "alpha" if fixed else kind


def _by_type(config: Any) -> bool:
    """Whether the config has a rotation for each type of layers."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return any(isinstance(parameters.get(kind), dict) for kind in getattr(config, "layer_types", None) or ())


def _parameters(config: Any, layer_type: str | None) -> dict[str, Any]:
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    return parameters if layer_type is None else parameters.get(layer_type) or {}


def _rotary_dim(parameters: dict[str, Any], head_dim: int) -> int:
    factor = parameters.get("partial_rotary_factor")
    # A proportional rotation is one of all dimensions, most of them by nothing.
    if factor is None or parameters.get("rope_type") == "proportional":
        return head_dim
    return int(head_dim * factor)
