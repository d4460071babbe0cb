"""Loading: from a model directory to something that computes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from aioinfer.errors import ConfigError
from aioinfer.model.attention.backend import AttentionBackend, choose_attention
from aioinfer.model.blocks import Blocks, choose_blocks
from aioinfer.model.families.base import Family, build_decoder, expert_shape
from aioinfer.model.layers import Quantization, check_quantization, choose_layers, make_layers
from aioinfer.model.moe.backend import MoEBackend
from aioinfer.model.registry import own_implementation
from aioinfer.model.spec import CausalLM, Progress
from aioinfer.model.weights import RandomWeights, Weights, weight_files

__all__ = ["ModelInfo", "inspect_model", "load_model"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    path: Path,
    *,
    dtype: str,
    device: torch.device,
    load_format: Literal["auto", "random"] = "auto",
    force_transformers: bool = False,
    kernels: AttentionBackend = "auto",
    experts: MoEBackend = "auto",
    block_size: int | None = None,
    quantization: Quantization = "none",
    progress: Progress | None = None,
) -> CausalLM:
    """Load a Hugging Face directory: own code for the families it knows, transformers for the rest.

    ``dtype`` is a name, or "auto" for what the checkpoint says; ``kernels`` is what own code asks
    :func:`~aioinfer.model.attention.backend.choose_attention` for, and ``experts`` names the kernels of a
    mixture of experts (:mod:`aioinfer.model.moe.backend`). ``block_size`` is that of a block diffusion
    model, None being what the model says (:mod:`aioinfer.model.blocks`). With ``load_format`` "random" the
    weights are :class:`~aioinfer.model.weights.RandomWeights` and the directory needs no other file than
    config.json. Never runs code from the directory, never touches the network. Raises ConfigError.
    """
    config = _read_config(path)
    chosen = _choose_dtype(config, dtype)
    made_up = RandomWeights(dtype=chosen, device=device) if load_format == "random" else None
    if made_up is None:
        weight_files(path)
    family = _family(config, force_transformers)
    blocks = _blocks(config, family, block_size)
    if family is None:
        check_quantization(None, config.architectures[0], quantization)
        from aioinfer.model.transformers_model import TransformersLM

        return TransformersLM(path, config, chosen, device, progress, made_up)
    attention = choose_attention(device, _head_dim(config), chosen, kernels, progress)
    sizes = _inner_sizes(config)
    check_quantization(choose_layers(attention, sizes), config.architectures[0], quantization)
    weights = made_up or Weights(path, dtype=chosen, device=device, progress=progress)
    return build_decoder(
        path,
        family,
        config,
        weights,
        dtype=chosen,
        device=device,
        kernels=make_layers(attention, device, chosen, sizes, quantization),
        experts=experts,
        blocks=blocks,
    )


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a model directory would become, as far as its config tells."""

    architecture: str
    #: this package's implementation computes it, not transformers'
    own: bool
    head_dim: int
    dtype: torch.dtype
    #: sizes that layers multiply over
    inner_sizes: list[int]
    #: (hidden size, inner size) of the experts; None without any, or if they are transformers'
    experts: tuple[int, int] | None
    #: how a block diffusion model writes; None for others
    blocks: Blocks | None


def inspect_model(
    path: Path,
    *,
    dtype: str,
    load_format: Literal["auto", "random"] = "auto",
    force_transformers: bool = False,
    block_size: int | None = None,
) -> ModelInfo:
    """What :func:`load_model` would make of a directory, without reading weights. Raises ConfigError."""
    config = _read_config(path)
    if load_format == "auto":
        weight_files(path)
    family = _family(config, force_transformers)
    return ModelInfo(
        architecture=config.architectures[0],
        own=family is not None,
        head_dim=_head_dim(config),
        dtype=_choose_dtype(config, dtype),
        inner_sizes=_inner_sizes(config),
        experts=expert_shape(family, config) if family else None,
        blocks=_blocks(config, family, block_size),
    )


def _family(config: Any, force_transformers: bool) -> Family | None:
    """Who computes a model; None is transformers. Raises ConfigError."""
    family = own_implementation(config)
    if not force_transformers:
        return family
    if family is not None and family.blocks is not None:
        raise ConfigError(f"model: transformers has no code of {config.architectures[0]}")
    return None


def _blocks(config: Any, family: Family | None, size: int | None) -> Blocks | None:
    if family is not None and family.blocks is not None:
        return choose_blocks(config, family.blocks, size)
    if size is not None:
        raise ConfigError(f"block_size: {config.architectures[0]} writes token after token, not in blocks")
    return None


def _read_config(path: Path) -> Any:
    from transformers import AutoConfig

    from aioinfer.model.configs import OWN_CONFIGS

    if not path.is_dir():
        raise ConfigError(f"model: there is no directory {path}, and no bundled model of that name")
    if not (path / "config.json").is_file():
        raise ConfigError(f"model: {path} has no config.json")
    try:
        stated = json.loads((path / "config.json").read_text("utf-8"))
        own = OWN_CONFIGS.get(stated.get("model_type"))
        if own is not None:
            config: Any = own.from_dict(stated)
        else:
            # Said outright: left open, transformers asks on the terminal whether to run code from there.
            config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        # Validation of two hundred config classes raises whatever each of them likes.
        raise ConfigError(f"model: the config of {path.name} cannot be used: {error}") from error
    if not config.architectures:
        raise ConfigError(f"model: the config of {path.name} names no architecture")
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError("model: quantised checkpoints are not supported")
    return config


def _head_dim(config: Any) -> int:
    text = config.get_text_config()
    size: int = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return size


def _inner_sizes(config: Any) -> list[int]:
    """Sizes that layers multiply over."""
    names = ("hidden_size", "intermediate_size", "moe_intermediate_size")
    sizes = [getattr(config, name, None) for name in names]
    return [size for size in sizes if size is not None]


def _choose_dtype(config: Any, wanted: str) -> torch.dtype:
    if wanted != "auto":
        if wanted not in _DTYPES:
            raise ConfigError(f"dtype must be auto or one of {', '.join(_DTYPES)}, got {wanted!r}")
        return _DTYPES[wanted]
    stated = config.get_text_config().dtype or config.dtype
    if isinstance(stated, str):
        stated = _DTYPES.get(stated)
    return stated if stated in _DTYPES.values() else torch.float32
