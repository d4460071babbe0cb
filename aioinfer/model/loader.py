"""Loading a checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import torch

from aioinfer.checkpoint.files import Checkpoint, Directory, open_checkpoint
from aioinfer.checkpoint.tensors import Tensors, stored_bytes
from aioinfer.errors import ConfigError
from aioinfer.model.backend import Backend
from aioinfer.model.blocks import Blocks, choose_blocks
from aioinfer.model.config_check import check_numbers
from aioinfer.model.embedding_checkpoint import Classifier, Headless, with_head, with_prefix, without_score
from aioinfer.model.families.base import Family, build_decoder, expert_shape, head_dim, inner_sizes
from aioinfer.model.kernels import (
    AttentionBackend,
    MoEBackend,
    check_cache_weights,
    check_float8,
    check_quantization,
    choose_attention,
    choose_experts,
    choose_layers,
    make_layers,
)
from aioinfer.model.multimodal import TextPart, text_part
from aioinfer.model.quantization import FLOAT8, Quantization, rounding_of
from aioinfer.model.registry import LANGUAGE_MODELS, own_implementation, why_not_own
from aioinfer.model.spec import CausalLM, Progress
from aioinfer.model.updates.new_weights import Known
from aioinfer.model.updates.recipe import DecoderRecipe
from aioinfer.model.weights import RandomWeights, Weights
from aioinfer.model.weights_cache import Blobs, WeightsCache

__all__ = ["LoadOptions", "ModelInfo", "inspect_model", "load_model"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


_Arguments = ParamSpec("_Arguments")
_Loaded = TypeVar("_Loaded")

#: why weights that are mapped cannot be replaced
_HEADLESS = "weights: those of a model without the head of a language model are not replaced"
_CACHED = "cache_weights: packed weights are mapped from a file, and other engines have it mapped, too"
#: Fields that transformers keeps in the config of a model type, whose code does not read them.
_NOT_READ = {"gpt2": ("head_dim", "num_key_value_heads")}


def _blaming_the_config(load: Callable[_Arguments, _Loaded]) -> Callable[_Arguments, _Loaded]:
    """Turn the exceptions of a config that makes no sense into a ConfigError."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOptions:
    """Options of loading a checkpoint."""

    #: "float32", "bfloat16", "float16", or "auto" for the checkpoint's
    dtype: str = "auto"
    #: of the weights
    device: torch.device
    #: "random" makes :class:`~aioinfer.model.weights.RandomWeights` from config.json alone
    load_format: Literal["auto", "random"] = "auto"
    #: load by transformers even where a built-in implementation exists
    force_transformers: bool = False
    #: the backends of attention and of experts (:mod:`aioinfer.model.kernels`)
    kernels: AttentionBackend = "auto"
    experts: MoEBackend = "auto"
    #: positions of a block of a diffusion model; None for the model's own
    block_size: int | None = None
    #: how the weights of linear layers are stored
    quantization: Quantization = "auto"
    #: map packed weights from the user's cache, and write them there if they are missing
    cache_weights: bool = False
    #: the largest rank of adapters; 0: the model computes none
    max_lora_rank: int = 64
    #: prefer kernels that give a token the same bits in any batch; whether all of the model has them is its
    #: ``invariant``
    deterministic: bool = False

    @property
    def stored(self) -> bool:
        """Whether weights are read."""
        return self.load_format != "random"


@_blaming_the_config
def load_model(
    path: Path,
    options: LoadOptions,
    progress: Progress | None = None,
    check_size: Callable[[int], None] | None = None,
) -> CausalLM:
    """Load a checkpoint: a built-in implementation for known families, transformers for the rest.

    Never runs code from the directory and never accesses the network.

    Args:
        path: a directory as the hub has it, or a GGUF file.
        progress: called with ("kernels" or "weights", done, total).
        check_size: called before weights are read or made, with the bytes that they take at least; of random
            weights, with those of the next tensor, again and again. Its exceptions are raised here.

    Raises:
        ConfigError: if the directory does not hold a supported model, or an option does not fit it.
    """
    opened = _Opened.of(path, options)
    if opened.family is None:
        return _load_fallback(opened, options, progress, check_size)
    return _Own(opened, opened.family, options, progress, check_size).load()


@dataclass(frozen=True, slots=True)
class _Opened:
    """A checkpoint whose config has been read."""

    checkpoint: Checkpoint
    config: Any
    dtype: torch.dtype
    #: its built-in implementation; None: transformers computes it
    family: Family | None
    #: why transformers does
    fallback_reason: str
    blocks: Blocks | None

    @classmethod
    def of(cls, path: Path, options: LoadOptions) -> _Opened:
        """Raises ConfigError."""
        checkpoint, config = _open(path, options.stored)
        dtype, family = _choose_dtype(config, options.dtype, options.device), _family(config, options)
        reason = "" if family else "asked for" if options.force_transformers else why_not_own(config)
        blocks = _blocks(config, family, options.block_size)
        return cls(checkpoint, config, dtype, family, reason, blocks)

    @property
    def architecture(self) -> str:
        name: str = self.config.architectures[0]
        return name

    @property
    def part(self) -> str:
        """The part of the checkpoint that is loaded; empty if it is all of it."""
        return self.checkpoint.description if isinstance(self.checkpoint, TextPart) else ""

    @property
    def texts(self) -> Callable[[Tensors], Tensors] | None:
        """Takes the tensors of the text model from those of a multimodal one; None for other models."""
        return self.checkpoint.texts() if isinstance(self.checkpoint, TextPart) else None

    @property
    def headless(self) -> Headless | None:
        return self.checkpoint if isinstance(self.checkpoint, Headless) else None

    def weights(
        self, options: LoadOptions, progress: Progress | None, check_size: Callable[[int], None] | None
    ) -> Weights:
        """Its weights, or random ones."""
        if not options.stored:
            return RandomWeights(dtype=self.dtype, device=options.device, check_size=check_size)
        tensors = with_prefix(self.checkpoint.tensors())
        return Weights(tensors, dtype=self.dtype, device=options.device, progress=progress)

    def check_fallback(self, options: LoadOptions) -> None:
        """Raise ConfigError for a checkpoint that transformers' code cannot load, or an option that it does
        not have."""
        architecture, reason = self.architecture, self.fallback_reason
        check_quantization(options.quantization, None, architecture)
        if options.cache_weights:
            check_cache_weights(None, "auto", architecture)
        if not isinstance(self.checkpoint, Directory):
            raise ConfigError(f"model: of {architecture}, GGUF files cannot be loaded ({reason})")
        if options.stored and getattr(self.config, "quantization_config", None) is not None:
            raise ConfigError(f"model: of {architecture}, quantised checkpoints cannot be loaded ({reason})")


def _load_fallback(
    opened: _Opened,
    options: LoadOptions,
    progress: Progress | None,
    check_size: Callable[[int], None] | None,
) -> CausalLM:
    """A model of transformers' code. Raises ConfigError."""
    from aioinfer.model.transformers_encoder import TransformersEncoder, is_encoder
    from aioinfer.model.transformers_model import TransformersLM
    from aioinfer.model.updates.transformers_recipe import TransformersRecipe

    opened.check_fallback(options)
    checkpoint, config, headless = opened.checkpoint, opened.config, opened.headless
    tensors = with_prefix(checkpoint.tensors()) if options.stored else None
    if tensors is not None and check_size is not None:
        check_size(stored_bytes(tensors, opened.dtype.itemsize))
    weights = opened.weights(options, None, check_size)
    random_weights = weights if isinstance(weights, RandomWeights) else None
    common = checkpoint.path, config, opened.dtype, options.device, progress, random_weights
    if is_encoder(config):
        encoder = TransformersEncoder(*common)
        encoder.spec = replace(encoder.spec, fallback_reason=opened.fallback_reason)
        return encoder
    texts = tensors if isinstance(checkpoint, (TextPart, Headless)) else None
    if texts is not None and headless is not None:
        texts = without_score(texts)
    model = TransformersLM(*common, texts, options.max_lora_rank)
    if headless is None:
        part = opened.texts if options.stored else None
        model.updates = TransformersRecipe(config, opened.dtype, partial(_open, stored=True), part)
    model.spec = replace(model.spec, fallback_reason=opened.fallback_reason, part=opened.part)
    if headless is not None:
        _without_head(model, headless, headless.classifier(config, weights))
    return model


class _Own:
    """Loads a model of a built-in family."""

    def __init__(
        self,
        opened: _Opened,
        family: Family,
        options: LoadOptions,
        progress: Progress | None,
        check_size: Callable[[int], None] | None,
    ) -> None:
        self.opened, self.family, self.options = opened, family, options
        self.progress, self.check_size = progress, check_size
        config, dtype, device = opened.config, opened.dtype, options.device
        self.attention = choose_attention(
            device, _head_dims(config, family), dtype, options.kernels, progress
        )
        self.layers = choose_layers(self.attention, family.inner_sizes(config))
        shape, native = expert_shape(family, config), self.layers.name == "native"
        self.experts = (
            choose_experts(device, *shape, dtype, options.experts, native=native) if shape else None
        )
        check_quantization(options.quantization, self.layers, opened.architecture, self.experts)
        check_float8(options.quantization, device, dtype, invariant=options.deterministic)

    def load(self) -> CausalLM:
        """The model. Raises ConfigError."""
        options, opened = self.options, self.opened
        if options.stored and self.check_size is not None:
            self.check_size(self._bytes(with_prefix(opened.checkpoint.tensors())))
        if not options.cache_weights:
            return self._build(None)
        check_cache_weights(self.layers, options.load_format, opened.architecture)
        facts = str(opened.dtype), options.quantization, options.experts
        model, done, mapped = _load_cached(opened.checkpoint, self._build, self.progress, *facts)
        reason = f"{model.spec.layer_reason}; {done}"
        model.spec = replace(model.spec, layer_reason=reason, mapped_bytes=mapped)
        return model

    def _bytes(self, tensors: Tensors) -> int:
        """The bytes that weights take at least."""
        options, config, dtype = self.options, self.opened.config, self.opened.dtype
        quantization, on_cpu = options.quantization, options.device.type == "cpu"
        kept = _kept(tensors) if quantization == "auto" and self.layers.name == "native" else frozenset()
        # Tables that are converted are copied.
        as_stored = on_cpu and dtype == _choose_dtype(config, "auto", options.device)
        tables = [name for name in self.family.tables(config) if as_stored and tensors.rounding(name) is None]
        small = frozenset() if options.deterministic else _small(tensors, quantization, self.layers)
        return stored_bytes(tensors, dtype.itemsize, rounding_of(quantization), kept, tables, small)

    def _build(self, blobs: Blobs | None) -> CausalLM:
        options, opened, config = self.options, self.opened, self.opened.config
        weights = opened.weights(options, self.progress, self.check_size)
        headless = opened.headless
        classifier = None if headless is None else headless.classifier(config, weights)
        kernels = make_layers(
            self.layers,
            self.experts,
            options.device,
            opened.dtype,
            options.quantization,
            blobs,
            options.max_lora_rank,
            invariant=options.deterministic,
        )
        facts: dict[str, Any] = {"dtype": opened.dtype, "device": options.device, "blocks": opened.blocks}
        stated = opened.checkpoint.generation_config()
        decoder = build_decoder(stated, self.family, config, weights, kernels, **facts)
        decoder.updates = DecoderRecipe(
            config=config,
            known=Known(weights.names, tied=kernels.tied),
            kernels=kernels,
            build=partial(build_decoder, {}, self.family, config, **facts),
            open=partial(_open, stored=True),
            part=opened.texts,
            dtype=opened.dtype,
            device=options.device,
            refusal=_HEADLESS if headless is not None else "" if blobs is None else _CACHED,
        )
        reason = self.layers.reason
        if kernels.kept_bits:
            bits = " and ".join(map(str, sorted(kernels.kept_bits)))
            reason += f"; weights of {bits} bits as they are stored"
        decoder.spec = replace(
            decoder.spec,
            layer_kernels="torch" if self.layers.name == "sdpa" else self.layers.name,
            layer_reason=reason,
            expert_kernels=self.experts.name if self.experts else None,
            expert_reason=self.experts.reason if self.experts else "",
            part=opened.part,
        )
        if headless is not None:
            _without_head(decoder, headless, classifier)
        return decoder


def _without_head(model: CausalLM, headless: Headless, classifier: Classifier | None) -> None:
    """The model is that of a checkpoint without the head of a language model."""
    model.classifier = classifier
    model.spec = replace(
        model.spec,
        architecture=headless.architecture,
        generates=False,
        num_labels=0 if classifier is None else classifier.num_labels,
    )


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
    """Load a model over weights mapped from the cache. Raises ConfigError."""
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
def inspect_model(path: Path, options: LoadOptions) -> ModelInfo:
    """Examine a checkpoint as :func:`load_model` would, without reading weights. Raises ConfigError."""
    opened = _Opened.of(path, options)
    config, family = opened.config, opened.family
    if family is None:
        opened.check_fallback(replace(options, quantization="auto", cache_weights=False))
    tensors = opened.checkpoint.tensors() if options.stored else None
    roundings = () if tensors is None else map(tensors.rounding, _kept(tensors))
    return ModelInfo(
        architecture=opened.architecture,
        part=opened.part,
        own=family is not None,
        fallback_reason=opened.fallback_reason,
        stored_bits=sorted({rounding.bits for rounding in roundings if rounding is not None}),
        stored_float8=tensors is not None and _stores_float8(tensors, experts=False),
        expert_float8=tensors is not None and _stores_float8(tensors, experts=True),
        head_dims=_head_dims(config, family),
        dtype=opened.dtype,
        inner_sizes=family.inner_sizes(config) if family else inner_sizes(config),
        experts=expert_shape(family, config) if family else None,
        blocks=opened.blocks,
    )


def _family(config: Any, options: LoadOptions) -> Family | None:
    """The built-in implementation of a model; None for transformers. Raises ConfigError."""
    family = own_implementation(config)
    if not options.force_transformers:
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
