"""Loading a model directory."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import torch

from aioinfer.errors import ConfigError
from aioinfer.model.attention.backend import AttentionBackend, choose_attention
from aioinfer.model.blocks import Blocks, choose_blocks
from aioinfer.model.config_check import check_numbers
from aioinfer.model.families.base import Family, build_decoder, expert_shape
from aioinfer.model.layers import check_cache_weights, check_quantization, choose_layers, make_layers
from aioinfer.model.moe.backend import MoEBackend
from aioinfer.model.quantization import Quantization, rounding_of
from aioinfer.model.registry import own_implementation, why_not_own
from aioinfer.model.spec import CausalLM, Progress, read_json_object
from aioinfer.model.weights import RandomWeights, Weights, checkpoint_bytes, weight_files
from aioinfer.model.weights_cache import Blobs, WeightsCache
from aioinfer.settings import shown

__all__ = ["ModelInfo", "inspect_model", "load_model"]

#: names of models on Hugging Face's hub, with an owner
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


_Arguments = ParamSpec("_Arguments")
_Loaded = TypeVar("_Loaded")


def _blaming_the_config(load: Callable[_Arguments, _Loaded]) -> Callable[_Arguments, _Loaded]:
    """Turn what a config that makes no sense can raise anywhere into a ConfigError."""

    @functools.wraps(load)
    def wrapped(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Loaded:
        try:
            return load(*args, **kwargs)
        except ConfigError:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ConfigError(
                f"model: config.json describes no model: {type(error).__name__}: {error}"
            ) from error

    return wrapped


@_blaming_the_config
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
    cache_weights: bool = False,
    progress: Progress | None = None,
    check_size: Callable[[int], None] | None = None,
) -> CausalLM:
    """Load a Hugging Face directory: a built-in implementation for known families, transformers for the rest.

    Never runs code from the directory and never accesses the network.

    Args:
        path: the directory.
        dtype: "float32", "bfloat16", "float16", or "auto" for the checkpoint's.
        device: the device of the weights.
        load_format: "random" makes :class:`~aioinfer.model.weights.RandomWeights` from config.json alone.
        force_transformers: load by transformers even where a built-in implementation exists.
        kernels: the attention backend (:mod:`aioinfer.model.attention.backend`).
        experts: the backend of a mixture of experts (:mod:`aioinfer.model.moe.backend`).
        block_size: positions of a block of a diffusion model; None for the model's own.
        quantization: how the weights of linear layers are stored.
        cache_weights: map packed weights from the user's cache, and write them there if they are missing.
        progress: called with ("kernels" or "weights", done, total).
        check_size: called before weights are read or made, with the bytes that they take at least; of random
            weights, with those of the next tensor, again and again. What it raises is raised here.

    Raises:
        ConfigError: if the directory does not hold a supported model, or an option does not fit it.
    """
    config = _read_config(path)
    chosen = _choose_dtype(config, dtype)
    random_weights = None
    if load_format == "random":
        random_weights = RandomWeights(dtype=chosen, device=device, check_size=check_size)
    elif check_size is not None:
        check_size(checkpoint_bytes(path, chosen, rounding_of(quantization)))
    else:
        weight_files(path)
    family = _family(config, force_transformers)
    blocks = _blocks(config, family, block_size)
    if family is None:
        check_quantization(quantization, None, config.architectures[0])
        if cache_weights:
            check_cache_weights(None, load_format, config.architectures[0])
        from aioinfer.model.transformers_model import TransformersLM

        fallback = TransformersLM(path, config, chosen, device, progress, random_weights)
        reason = "asked for" if force_transformers else why_not_own(config)
        fallback.spec = dataclasses.replace(fallback.spec, fallback_reason=reason)
        return fallback
    attention = choose_attention(device, _head_dim(config), chosen, kernels, progress)
    sizes = _inner_sizes(config)
    layers = choose_layers(attention, sizes)
    check_quantization(quantization, layers, config.architectures[0])

    def build(blobs: Blobs | None) -> CausalLM:
        return build_decoder(
            path,
            family,
            config,
            random_weights or Weights(path, dtype=chosen, device=device, progress=progress),
            dtype=chosen,
            device=device,
            kernels=make_layers(attention, device, chosen, sizes, quantization, blobs),
            experts=experts,
            blocks=blocks,
        )

    reason, mapped = layers.reason, 0
    if cache_weights:
        check_cache_weights(layers, load_format, config.architectures[0])
        model, done, mapped = _load_cached(path, build, progress, str(chosen), quantization, experts)
        reason = f"{reason}; {done}"
    else:
        model = build(None)
    name = "torch" if layers.name == "sdpa" else layers.name
    model.spec = dataclasses.replace(model.spec, layer_kernels=name, layer_reason=reason, mapped_bytes=mapped)
    return model


def _load_cached(
    path: Path,
    build: Callable[[Blobs | None], CausalLM],
    progress: Progress | None,
    *facts: object,
) -> tuple[CausalLM, str, int]:
    """See :meth:`~aioinfer.model.weights_cache.WeightsCache.load`. Raises ConfigError."""
    from aioinfer.native.bindings import shared_thread_pool
    from aioinfer.native.build import BuildFailed, cache_directory

    try:
        directory = cache_directory()
    except BuildFailed as error:
        raise ConfigError(f"cache_weights: {error}") from error
    cache = WeightsCache(directory, path, [path / "config.json", *weight_files(path)], *facts)
    return cache.load(shared_thread_pool(torch.get_num_threads()), build, progress)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about a model directory that its config determines."""

    architecture: str
    #: whether a built-in implementation computes it, not transformers'; and why not
    own: bool
    fallback_reason: str
    head_dim: int
    dtype: torch.dtype
    #: inner dimensions of the layers' matrix products
    inner_sizes: list[int]
    #: (hidden size, inner size) of the experts; None without experts, and for a model of transformers
    experts: tuple[int, int] | None
    #: the blocks of a block diffusion model; None for other models
    blocks: Blocks | None


@_blaming_the_config
def inspect_model(
    path: Path,
    *,
    dtype: str,
    load_format: Literal["auto", "random"] = "auto",
    force_transformers: bool = False,
    block_size: int | None = None,
) -> ModelInfo:
    """Examine a directory as :func:`load_model` would, without reading weights. Raises ConfigError."""
    config = _read_config(path)
    if load_format == "auto":
        weight_files(path)
    family = _family(config, force_transformers)
    return ModelInfo(
        architecture=config.architectures[0],
        own=family is not None,
        fallback_reason="" if family else "asked for" if force_transformers else why_not_own(config),
        head_dim=_head_dim(config),
        dtype=_choose_dtype(config, dtype),
        inner_sizes=_inner_sizes(config),
        experts=expert_shape(family, config) if family else None,
        blocks=_blocks(config, family, block_size),
    )


def _family(config: Any, force_transformers: bool) -> Family | None:
    """The built-in implementation of a model; None for transformers. Raises ConfigError."""
    family = own_implementation(config)
    if not force_transformers:
        return family
    if family is not None and family.blocks is not None:
        raise ConfigError(f"model: transformers has no implementation of {config.architectures[0]}")
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

    _check_directory(path)
    stated = read_json_object(path / "config.json")
    check_numbers(stated)
    try:
        own = OWN_CONFIGS.get(str(stated.get("model_type")))
        if own is not None:
            config: Any = own.from_dict(stated)
        else:
            # Without an explicit value transformers asks on the terminal whether to run the directory's code.
            config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        # Each of the many config classes raises its own types of errors.
        raise ConfigError(f"model: the config of {path.name} cannot be used: {error}") from error
    named = config.architectures
    if not isinstance(named, list) or not named or not isinstance(named[0], str):
        raise ConfigError(f"model: the config of {path.name} names no architecture")
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError("model: quantised checkpoints are not supported")
    return config


def _check_directory(path: Path) -> None:
    """Raise ConfigError, with what the path is instead, unless it is a directory with a config.json."""
    try:
        found = path.is_dir()
        names = {entry.name for entry in path.iterdir()} if found else set()
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: {shown(str(path))} cannot be read: {error}") from error
    if found and "config.json" in names:
        return
    if path.suffix == ".gguf" or any(name.endswith(".gguf") for name in names):
        raise ConfigError(f"model: {path} is a GGUF model, which is not supported; safetensors are")
    if "adapter_config.json" in names:
        raise ConfigError(f"model: {path} is a LoRA adapter, which is not supported; merge it into its base")
    if found:
        raise ConfigError(f"model: {path} has no config.json")
    if path.exists():
        raise ConfigError(f"model: {path} is a file; a directory with config.json and safetensors is needed")
    hint = ""
    if _HUB_ID.fullmatch(str(path)):
        hint = f". Nothing is downloaded: 'hf download {path} --local-dir DIR' fetches a model of that name"
    raise ConfigError(f"model: there is no directory {path}, and no bundled model of that name{hint}")


def _head_dim(config: Any) -> int:
    text = config.get_text_config()
    size: int = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return size


def _inner_sizes(config: Any) -> list[int]:
    """Inner dimensions of the layers' matrix products."""
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
