"""Loading a checkpoint."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import torch

from aioinfer.checkpoint.files import Checkpoint, Directory, open_checkpoint
from aioinfer.checkpoint.tensors import Tensors, stored_bytes
from aioinfer.errors import ConfigError
from aioinfer.model.attention.backend import AttentionBackend, choose_attention
from aioinfer.model.backend import Backend
from aioinfer.model.blocks import Blocks, choose_blocks
from aioinfer.model.config_check import check_numbers
from aioinfer.model.families.base import Family, build_decoder, expert_shape, head_dim, inner_sizes
from aioinfer.model.headless import Classifier, Headless, with_head, with_prefix, without_score
from aioinfer.model.layers import (
    LayerKernels,
    check_cache_weights,
    check_float8,
    check_quantization,
    choose_layers,
    make_layers,
)
from aioinfer.model.moe.backend import MoEBackend
from aioinfer.model.quantization import FLOAT8, Quantization, rounding_of
from aioinfer.model.registry import LANGUAGE_MODELS, own_implementation, why_not_own
from aioinfer.model.spec import CausalLM, Progress
from aioinfer.model.updates.new_weights import Known
from aioinfer.model.updates.recipe import DecoderRecipe
from aioinfer.model.updates.rewriting import Recording
from aioinfer.model.weights import RandomWeights, Weights
from aioinfer.model.weights_cache import Blobs, WeightsCache
from aioinfer.model.wrappers import TextPart, text_part

__all__ = ["ModelInfo", "inspect_model", "load_model"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


_Arguments = ParamSpec("_Arguments")
_Loaded = TypeVar("_Loaded")

#: why weights that are mapped cannot be replaced
_HEADLESS = "weights: those of a model without the head of a language model are not replaced"
_CACHED = "cache_weights: packed weights are mapped from a file, and other engines have it mapped, too"
#: Fields that transformers keeps in the config of a model type, whose code does not read them.
_NOT_READ = {"gpt2": ("head_dim", "num_key_value_heads")}


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
                f"model: the config describes no model: {type(error).__name__}: {error}"
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
    quantization: Quantization = "auto",
    cache_weights: bool = False,
    max_lora_rank: int = 64,
    deterministic: bool = False,
    progress: Progress | None = None,
    check_size: Callable[[int], None] | None = None,
) -> CausalLM:
    """Load a checkpoint: a built-in implementation for known families, transformers for the rest.

    Never runs code from the directory and never accesses the network.

    Args:
        path: a directory as the hub has it, or a GGUF file.
        dtype: "float32", "bfloat16", "float16", or "auto" for the checkpoint's.
        device: the device of the weights.
        load_format: "random" makes :class:`~aioinfer.model.weights.RandomWeights` from config.json alone.
        force_transformers: load by transformers even where a built-in implementation exists.
        kernels: the attention backend (:mod:`aioinfer.model.attention.backend`).
        experts: the backend of a mixture of experts (:mod:`aioinfer.model.moe.backend`).
        block_size: positions of a block of a diffusion model; None for the model's own.
        quantization: how the weights of linear layers are stored.
        cache_weights: map packed weights from the user's cache, and write them there if they are missing.
        max_lora_rank: of adapters of the model; 0: it computes none.
        deterministic: prefer kernels that give a token the same bits in any batch; whether all of the model
            has them is its ``invariant``.
        progress: called with ("kernels" or "weights", done, total).
        check_size: called before weights are read or made, with the bytes that they take at least; of random
            weights, with those of the next tensor, again and again. What it raises is raised here.

    Raises:
        ConfigError: if the directory does not hold a supported model, or an option does not fit it.
    """
    stored = load_format != "random"
    checkpoint, config = _open(path, stored)
    chosen = _choose_dtype(config, dtype, device)
    family = _family(config, force_transformers)
    blocks = _blocks(config, family, block_size)
    if family is None:
        reason = "asked for" if force_transformers else why_not_own(config)
        _check_fallback(checkpoint, config, reason, quantization, cache_weights=cache_weights, stored=stored)
    tensors = with_prefix(checkpoint.tensors()) if stored else None
    headless = checkpoint if isinstance(checkpoint, Headless) else None
    random_weights = None if stored else RandomWeights(dtype=chosen, device=device, check_size=check_size)
    if family is None:
        if tensors is not None and check_size is not None:
            check_size(stored_bytes(tensors, chosen.itemsize))
        from aioinfer.model.transformers_encoder import TransformersEncoder, is_encoder
        from aioinfer.model.transformers_model import TransformersLM
        from aioinfer.model.updates.transformers_recipe import TransformersRecipe

        if is_encoder(config):
            encoder = TransformersEncoder(checkpoint.path, config, chosen, device, progress, random_weights)
            encoder.spec = dataclasses.replace(encoder.spec, fallback_reason=reason)
            return encoder
        part = checkpoint if isinstance(checkpoint, TextPart) and stored else None
        texts = tensors if isinstance(checkpoint, (TextPart, Headless)) else None
        if texts is not None and headless is not None:
            texts = without_score(texts)
        fallback = TransformersLM(
            checkpoint.path, config, chosen, device, progress, random_weights, texts, max_lora_rank
        )
        if headless is None:
            opened = partial(_open, stored=True)
            own = None if part is None else part.texts()
            fallback.updates = TransformersRecipe(config, chosen, opened, own)
        fallback.spec = dataclasses.replace(fallback.spec, fallback_reason=reason, part=_part(checkpoint))
        if headless is not None:
            weights = random_weights if tensors is None else Weights(tensors, dtype=chosen, device=device)
            assert weights is not None
            _without_head(fallback, headless, headless.classifier(config, weights))
        return fallback
    attention = choose_attention(device, _head_dims(config, family), chosen, kernels, progress)
    sizes = family.inner_sizes(config)
    layers = choose_layers(attention, sizes)
    check_quantization(quantization, layers, config.architectures[0])
    check_float8(quantization, device, chosen, invariant=deterministic)
    if tensors is not None and check_size is not None:
        kept = _kept(tensors) if quantization == "auto" and layers.name == "native" else frozenset()
        # What is converted is copied.
        as_stored = device.type == "cpu" and chosen == _choose_dtype(config, "auto", device)
        tables = [name for name in family.tables(config) if as_stored and tensors.rounding(name) is None]
        small = frozenset() if deterministic else _small(tensors, quantization, layers)
        check_size(stored_bytes(tensors, chosen.itemsize, rounding_of(quantization), kept, tables, small))

    built = partial(_built, family, config, dtype=chosen, device=device, experts=experts, blocks=blocks)

    def build(blobs: Blobs | None) -> CausalLM:
        weights: Weights | None = random_weights
        if tensors is not None:
            weights = Weights(tensors, dtype=chosen, device=device, progress=progress)
        assert weights is not None
        classifier = None if headless is None else headless.classifier(config, weights)
        made = make_layers(
            attention, device, chosen, sizes, quantization, blobs, max_lora_rank, invariant=deterministic
        )
        recording = Recording(made)
        decoder = built(checkpoint, weights, recording)
        decoder.updates = DecoderRecipe(
            config=config,
            known=Known(weights.names, tied=recording.tied),
            made=recording.made,
            kernels=made,
            build=partial(built, _Nothing()),
            open=partial(_open, stored=True),
            part=checkpoint.texts() if isinstance(checkpoint, TextPart) else None,
            dtype=chosen,
            device=device,
            refusal=_HEADLESS if headless is not None else "" if blobs is None else _CACHED,
        )
        reason = layers.reason
        if made.kept_bits:
            reason += f"; weights of {' and '.join(map(str, sorted(made.kept_bits)))} bits as they are stored"
        name = "torch" if layers.name == "sdpa" else layers.name
        decoder.spec = dataclasses.replace(
            decoder.spec, layer_kernels=name, layer_reason=reason, part=_part(checkpoint)
        )
        if headless is not None:
            _without_head(decoder, headless, classifier)
        return decoder

    if not cache_weights:
        return build(None)
    check_cache_weights(layers, load_format, config.architectures[0])
    model, done, mapped = _load_cached(checkpoint, build, progress, str(chosen), quantization, experts)
    reason = f"{model.spec.layer_reason}; {done}"
    model.spec = dataclasses.replace(model.spec, layer_reason=reason, mapped_bytes=mapped)
    return model


def _built(
    family: Family,
    config: Any,
    checkpoint: Checkpoint,
    weights: Weights,
    kernels: LayerKernels,
    **facts: Any,
) -> CausalLM:
    return build_decoder(checkpoint, family, config, weights, kernels=kernels, **facts)


class _Nothing:
    """In place of a checkpoint, when its model is there already."""

    path = Path()

    def config(self) -> dict[str, Any]:
        return {}

    generation_config = config

    def tokenizer(self) -> None:
        """There is none."""

    def tensors(self) -> Tensors:
        raise AssertionError("they are given")

    def files(self) -> list[Path]:
        return []


def _without_head(model: CausalLM, headless: Headless, classifier: Classifier | None) -> None:
    """The model is that of a checkpoint without the head of a language model."""
    model.classifier = classifier
    model.spec = dataclasses.replace(
        model.spec,
        architecture=headless.architecture,
        generates=False,
        num_labels=0 if classifier is None else classifier.num_labels,
    )


def _check_fallback(
    checkpoint: Checkpoint,
    config: Any,
    reason: str,
    quantization: Quantization,
    *,
    cache_weights: bool,
    stored: bool,
) -> None:
    """Raise ConfigError for what transformers' code cannot load or do here. ``stored``: weights are read."""
    architecture = config.architectures[0]
    check_quantization(quantization, None, architecture)
    if cache_weights:
        check_cache_weights(None, "auto", architecture)
    if not isinstance(checkpoint, Directory):
        raise ConfigError(f"model: of {architecture}, GGUF files cannot be loaded ({reason})")
    if stored and getattr(config, "quantization_config", None) is not None:
        raise ConfigError(f"model: of {architecture}, quantised checkpoints cannot be loaded ({reason})")


def _kept(tensors: Tensors) -> frozenset[str]:
    """Names of the weights that native layers keep as they are quantised; experts are dequantised."""
    experts = ".experts", ".shared_expert"
    return frozenset(
        name
        for name in tensors.names
        if not any(part in name for part in experts) and tensors.rounding(name) is not None
    )


def _stores_float8(tensors: Tensors, *, experts: bool) -> bool:
    """Whether an expert, or a layer that is none, is stored in floats of 8 bits."""
    names = (name for name in tensors.names if (".experts." in name) == experts)
    return any(tensors.float8(name) is not None for name in names)


def _small(tensors: Tensors, quantization: Quantization, layers: Backend) -> frozenset[str]:
    """Names of the matrices that are floats of 8 bits, or become such."""
    if layers.name != "triton" or quantization not in ("auto", *FLOAT8):
        return frozenset()
    if quantization == "auto":
        return frozenset(name for name in tensors.names if tensors.float8(name) is not None)
    return frozenset(name for name in tensors.names if len(tensors.shape(name)) > 1)


def _load_cached(
    checkpoint: Checkpoint,
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
    cache = WeightsCache(directory, checkpoint.path, checkpoint.files(), *facts)
    return cache.load(shared_thread_pool(torch.get_num_threads()), build, progress)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about a checkpoint that its config determines."""

    architecture: str
    #: which part of the checkpoint it is; empty if it is all of it
    part: str
    #: whether a built-in implementation computes it, not transformers'; and why not
    own: bool
    fallback_reason: str
    #: of the weights that native layers would keep as they are quantised in the checkpoint
    stored_bits: list[int]
    #: there are weights of floats of 8 bits that layers by Triton would keep
    stored_float8: bool
    #: and such that experts by Triton would
    expert_float8: bool
    #: of all layers
    head_dims: frozenset[int]
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
    device: torch.device,
    load_format: Literal["auto", "random"] = "auto",
    force_transformers: bool = False,
    block_size: int | None = None,
) -> ModelInfo:
    """Examine a checkpoint as :func:`load_model` would, without reading weights. Raises ConfigError."""
    stored = load_format != "random"
    checkpoint, config = _open(path, stored)
    family = _family(config, force_transformers)
    reason = "" if family else "asked for" if force_transformers else why_not_own(config)
    if family is None:
        _check_fallback(checkpoint, config, reason, "auto", cache_weights=False, stored=stored)
    tensors = checkpoint.tensors() if stored else None
    roundings = () if tensors is None else map(tensors.rounding, _kept(tensors))
    return ModelInfo(
        architecture=config.architectures[0],
        part=_part(checkpoint),
        own=family is not None,
        fallback_reason=reason,
        stored_bits=sorted({rounding.bits for rounding in roundings if rounding is not None}),
        stored_float8=tensors is not None and _stores_float8(tensors, experts=False),
        expert_float8=tensors is not None and _stores_float8(tensors, experts=True),
        head_dims=_head_dims(config, family),
        dtype=_choose_dtype(config, dtype, device),
        inner_sizes=family.inner_sizes(config) if family else inner_sizes(config),
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
    if family is not None and family.recurrent(config):
        raise ConfigError(
            f"model: transformers' code of {config.architectures[0]} keeps its recurrent state to itself, "
            "and cannot run here; the built-in code can, without transformers_fallback"
        )
    return None


def _blocks(config: Any, family: Family | None, size: int | None) -> Blocks | None:
    if family is not None and family.blocks is not None:
        return choose_blocks(config, family.blocks, size)
    if size is not None:
        raise ConfigError(f"block_size: {config.architectures[0]} writes token after token, not in blocks")
    return None


def _open(path: Path, stored: bool) -> tuple[Checkpoint, Any]:
    """A checkpoint and its config; of a wrapper, those of its text model. Raises ConfigError."""
    checkpoint = open_checkpoint(path)
    inner, config = text_part(checkpoint, _read_config(checkpoint), stored=stored)
    return with_head(inner, config, LANGUAGE_MODELS)


def _part(checkpoint: Checkpoint) -> str:
    return checkpoint.description if isinstance(checkpoint, TextPart) else ""


def _read_config(checkpoint: Checkpoint) -> Any:
    from transformers import AutoConfig

    from aioinfer.model.configs import OWN_CONFIGS

    stated, name = checkpoint.config(), checkpoint.path.name
    check_numbers(stated)
    try:
        own = OWN_CONFIGS.get(str(stated.get("model_type")))
        if own is not None:
            config: Any = own.from_dict(stated)
        elif isinstance(checkpoint, Directory):
            # Without an explicit value transformers asks on the terminal whether to run the directory's code.
            config = AutoConfig.from_pretrained(
                checkpoint.path, local_files_only=True, trust_remote_code=False
            )
        else:
            config = AutoConfig.for_model(**stated)
    except Exception as error:
        # Each of the many config classes raises its own types of errors.
        raise ConfigError(f"model: the config of {name} cannot be used: {error}") from error
    for field in _NOT_READ.get(config.model_type, ()):
        setattr(config, field, None)
    named = config.architectures
    if not isinstance(named, list) or not named or not isinstance(named[0], str):
        raise ConfigError(f"model: the config of {name} names no architecture")
    return config


def _head_dims(config: Any, family: Family | None) -> frozenset[int]:
    """Sizes of the heads of all layers."""
    if family is not None:
        return frozenset(kv.head_dim for kv in family.kv_layers(config))
    text = config.get_text_config()
    if not getattr(text, "is_heterogeneous", False):
        return frozenset([head_dim(text)])
    return frozenset(head_dim(text.per_layer_config[index]) for index in range(text.num_hidden_layers))


def _choose_dtype(config: Any, wanted: str, device: torch.device) -> torch.dtype:
    if wanted != "auto":
        if wanted not in _DTYPES:
            raise ConfigError(f"dtype must be auto or one of {', '.join(_DTYPES)}, got {wanted!r}")
        return _DTYPES[wanted]
    stated = config.get_text_config().dtype or config.dtype
    if isinstance(stated, str):
        stated = _DTYPES.get(stated)
    quantised = getattr(config, "quantization_config", None) is not None
    if quantised and stated is torch.float16 and device.type == "cpu":
        # What is quantised says float16 as a rule; native kernels, which keep it so, have none of it.
        return torch.bfloat16
    return stated if stated in _DTYPES.values() else torch.float32
