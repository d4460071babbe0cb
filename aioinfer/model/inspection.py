"""Inspection: a checkpoint's config, and the implementation that computes it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import torch

from aioinfer.checkpoint.files import Checkpoint, Directory, has_mmproj, open_checkpoint
from aioinfer.checkpoint.libraries import importing_transformers
from aioinfer.checkpoint.tensors import Tensors
from aioinfer.errors import ConfigError
from aioinfer.model.architecture import named_architecture, own_fields
from aioinfer.model.blocks import Blocks, choose_blocks
from aioinfer.model.config_check import check_numbers
from aioinfer.model.embedding_checkpoint import Headless, with_head, with_prefix
from aioinfer.model.families.base import Family, expert_shape, head_dim, inner_sizes, latent_sizes
from aioinfer.model.kept_files import KeptConfig, KeptFiles, found_or_made
from aioinfer.model.kernels import AttentionBackend, MoEBackend, check_cache_weights, check_quantization
from aioinfer.model.multimodal import TextPart, text_part
from aioinfer.model.quantization import Quantization
from aioinfer.model.registry import LANGUAGE_MODELS, own_implementation, why_not_own
from aioinfer.model.rope import for_length
from aioinfer.model.spec import Progress
from aioinfer.model.vision.part import VisionPart, vision_part
from aioinfer.model.weights import RandomWeights, Weights

__all__ = [
    *("LoadOptions", "ModelInfo", "Opened", "blaming_the_config", "choose_dtype", "head_dims"),
    *("inspect_model", "kept", "open_model", "read_config"),
]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: Fields that transformers keeps in the config of a model type, whose code does not read them.
_NOT_READ = {"gpt2": ("head_dim", "num_key_value_heads")}

_Arguments = ParamSpec("_Arguments")
_Loaded = TypeVar("_Loaded")


def blaming_the_config(load: Callable[_Arguments, _Loaded]) -> Callable[_Arguments, _Loaded]:
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
    #: device of the weights
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
    #: positions of the longest sequence, which choose the factors of LongRoPE; None: as many as the model has
    #: without its long ones
    max_model_len: int | None = None
    #: how the weights of linear layers are stored
    quantization: Quantization = "auto"
    #: map packed weights from the user's cache, and write them there if they are missing
    cache_weights: bool = False
    #: the largest rank of adapters; 0: the model computes none
    max_lora_rank: int = 64
    #: prefer kernels that give a token the same bits in any batch; whether all of the model has them is its
    #: ``invariant``
    deterministic: bool = False
    #: load the encoder of images of a model that has one
    images: bool = True
    #: the file of the encoder of a model in a GGUF file; True: the one beside it, if there is one
    mmproj: Path | bool = True

    @property
    def stored(self) -> bool:
        """Whether weights are read."""
        return self.load_format != "random"


@dataclass(frozen=True, slots=True)
class Opened:
    """A checkpoint whose config has been read."""

    checkpoint: Checkpoint
    config: Any
    dtype: torch.dtype
    #: its built-in implementation; None: transformers computes it
    family: Family | None
    #: reason why transformers computes it
    fallback_reason: str
    blocks: Blocks | None
    #: its image encoder; None: no images are read
    vision: VisionPart | None
    #: reason why a multimodal model reads none
    blind_reason: str

    @classmethod
    def of(cls, path: Path, options: LoadOptions) -> Opened:
        """Raises ConfigError."""
        mmproj = options.images and options.mmproj
        length, keep = options.max_model_len, options.cache_weights
        checkpoint, config = open_model(path, options.stored, keep=keep, mmproj=mmproj, length=length)
        dtype, family = choose_dtype(config, options.dtype, options.device), _family(config, options)
        reason = "" if family else "asked for" if options.force_transformers else why_not_own(config)
        blocks = _blocks(config, family, options.block_size)
        vision, blind = _vision(checkpoint, options, reason)
        return cls(checkpoint, config, dtype, family, reason, blocks, vision, blind)

    @property
    def architecture(self) -> str:
        name: str = self.config.architectures[0]
        return name

    @property
    def part(self) -> str:
        """The part of the checkpoint that is loaded; empty if it is all of it."""
        if not isinstance(self.checkpoint, TextPart):
            return ""
        family = None if self.vision is None else self.vision.family
        return self.checkpoint.description(*((family.prefixes, family.renames) if family else ()))

    @property
    def texts(self) -> Callable[[Tensors], Tensors] | None:
        """Takes the tensors of the text model from those of a multimodal one; None for other models."""
        return self.checkpoint.texts() if isinstance(self.checkpoint, TextPart) else None

    @property
    def quantised(self) -> str:
        """The method by which the weights of safetensors are quantised; empty if they are not."""
        stated = getattr(self.config, "quantization_config", None)
        return str(stated.get("quant_method")) if isinstance(stated, dict) else ""

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
        files = self.checkpoint.files()
        return Weights(tensors, dtype=self.dtype, device=options.device, progress=progress, files=files)

    def check_fallback(self, options: LoadOptions) -> None:
        """Raise ConfigError for a checkpoint that transformers' code cannot load, or an option that it does
        not have."""
        architecture, reason = self.architecture, self.fallback_reason
        check_quantization(options.quantization, None, architecture)
        if options.cache_weights:
            check_cache_weights(None, "auto", architecture)
        whole = self.checkpoint.whole if isinstance(self.checkpoint, TextPart) else self.checkpoint
        if not isinstance(whole, Directory):
            raise ConfigError(f"model: of {architecture}, GGUF files cannot be loaded ({reason})")


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about a checkpoint that its config determines."""

    opened: Opened
    architecture: str
    #: which part of the checkpoint it is; empty if it is all of it
    part: str
    #: whether a built-in implementation computes it, not transformers'; and why not
    own: bool
    fallback_reason: str
    #: bit widths of the weights that native layers would keep as they are quantised
    stored_bits: list[int]
    #: there are weights of floats of 8 bits that layers by Triton would keep
    stored_float8: bool
    #: and such that experts by Triton would
    expert_float8: bool
    #: sizes of the heads of all layers
    head_dims: frozenset[int]
    #: see :attr:`~aioinfer.model.spec.ModelSpec.latent`
    latent: tuple[int, ...]
    dtype: torch.dtype
    #: inner dimensions of the layers' matrix products
    inner_sizes: list[int]
    #: (hidden size, inner size) of the experts; None without experts, and for a model of transformers
    experts: tuple[int, int] | None
    #: the blocks of a block diffusion model; None for other models
    blocks: Blocks | None
    #: it reads images; and the reason why a multimodal model does not
    images: bool
    blind_reason: str
    #: the positions of an image see each other both ways
    two_way: bool


@blaming_the_config
def inspect_model(path: Path, options: LoadOptions) -> ModelInfo:
    """Examine a checkpoint as :func:`load_model` would, without reading weights. Raises ConfigError."""
    opened = Opened.of(path, options)
    config, family = opened.config, opened.family
    if family is None:
        opened.check_fallback(replace(options, quantization="auto", cache_weights=False))
    tensors = opened.checkpoint.tensors() if options.stored else None
    roundings = () if tensors is None else map(tensors.rounding, kept(tensors))
    return ModelInfo(
        opened=opened,
        architecture=opened.architecture,
        part=opened.part,
        own=family is not None,
        fallback_reason=opened.fallback_reason,
        stored_bits=sorted({rounding.bits for rounding in roundings if rounding is not None}),
        stored_float8=tensors is not None and _stores_float8(tensors, experts=False),
        expert_float8=tensors is not None and _stores_float8(tensors, experts=True),
        head_dims=head_dims(config, family),
        latent=latent_sizes(config, family) if family else (),
        dtype=opened.dtype,
        inner_sizes=family.inner_sizes(config) if family else inner_sizes(config),
        experts=expert_shape(family, config) if family else None,
        blocks=opened.blocks,
        images=opened.vision is not None,
        blind_reason=opened.blind_reason,
        two_way=opened.vision is not None and opened.vision.two_way,
    )


def kept(tensors: Tensors) -> frozenset[str]:
    """Names of the weights that native layers keep as they are quantised."""
    return frozenset(name for name in tensors.names if tensors.rounding(name) is not None)


def _stores_float8(tensors: Tensors, *, experts: bool) -> bool:
    names = (name for name in tensors.names if (".experts." in name) == experts)
    return any(tensors.float8(name) is not None for name in names)


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


def _vision(
    checkpoint: Checkpoint, options: LoadOptions, fallback_reason: str
) -> tuple[VisionPart | None, str]:
    """The image encoder that is loaded, or None and the reason why a multimodal model has none."""
    if not isinstance(checkpoint, TextPart):
        return None, ""
    if fallback_reason:
        return None, "the text model is computed by transformers"
    if not options.images:
        return None, "images is False"
    vision, reason = vision_part(checkpoint, stored=options.stored)
    if vision is None and isinstance(options.mmproj, Path):
        raise ConfigError(f"mmproj: {options.mmproj.name} is of no use: {reason}")
    return vision, reason


def _blocks(config: Any, family: Family | None, size: int | None) -> Blocks | None:
    if family is not None and family.blocks is not None:
        return choose_blocks(config, family.blocks, size)
    if size is not None:
        raise ConfigError(f"block_size: {config.architectures[0]} writes token after token, not in blocks")
    return None


def open_model(
    path: Path, stored: bool, *, keep: bool = False, mmproj: Path | bool = False, length: int | None = None
) -> tuple[Checkpoint, Any]:
    """A checkpoint and its config; of a wrapper, those of its text model. Raises ConfigError.

    Args:
        stored: its weights are to be read.
        keep: what was read is kept for later starts.
        mmproj: see :class:`~aioinfer.checkpoint.files.GGUFCheckpoint`.
        length: see :func:`~aioinfer.model.rope.for_length`.
    """
    checkpoint = open_checkpoint(path, mmproj)
    # What is kept belongs to one path.
    kept = KeptFiles(path) if keep and not has_mmproj(checkpoint) else None
    config = found_or_made(kept, "config", KeptConfig, lambda: read_config(checkpoint), KeptConfig.record_of)
    inner, config = text_part(checkpoint, config, stored=stored)
    return with_head(inner, for_length(config, length), LANGUAGE_MODELS)


def read_config(checkpoint: Checkpoint) -> Any:
    """The config of a checkpoint as transformers has it. Raises ConfigError."""
    with importing_transformers():
        from transformers import AutoConfig

        from aioinfer.model.configs import OWN_CONFIGS

    stated, name = checkpoint.config(), checkpoint.path.name
    check_numbers(stated, own_fields)
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
        said = " ".join(str(error).split())
        raise ConfigError(f"model: the config of {name} cannot be used: {said}") from error
    if isinstance(checkpoint, Directory) and (quantisation := checkpoint.quantisation()) is not None:
        config.quantization_config = quantisation
    for field in _NOT_READ.get(config.model_type, ()):
        setattr(config, field, None)
    config.architectures = [named_architecture(config, name)]
    return config


def head_dims(config: Any, family: Family | None) -> frozenset[int]:
    """Sizes of the heads of all layers."""
    if family is not None:
        return frozenset(kv.head_dim for kv in family.kv_layers(config))
    text = config.get_text_config()
    if not getattr(text, "is_heterogeneous", False):
        return frozenset([head_dim(text)])
    return frozenset(head_dim(text.per_layer_config[index]) for index in range(text.num_hidden_layers))


def choose_dtype(config: Any, wanted: str, device: torch.device) -> torch.dtype:
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
