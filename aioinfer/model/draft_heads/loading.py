"""Which draft head a model has, or a directory holds, and loading it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from aioinfer.checkpoint.files import Checkpoint, Directory, checkpoint_at
from aioinfer.checkpoint.tensors import Tensors, stored_bytes
from aioinfer.errors import ConfigError
from aioinfer.model.draft_heads.base import DraftHead, Target
from aioinfer.model.draft_heads.dflash import DFlashHead
from aioinfer.model.draft_heads.eagle3 import Eagle3Head
from aioinfer.model.draft_heads.mtp import MTPHead, mtp_names
from aioinfer.model.families.base import Family, expert_shape
from aioinfer.model.inspection import LoadOptions, Opened, blaming_the_config, read_config
from aioinfer.model.kernels import (
    check_quantization,
    choose_attention,
    choose_experts,
    choose_layers,
    make_layers,
)
from aioinfer.model.layer_kernels import LayerKernels
from aioinfer.model.multimodal import TextPart
from aioinfer.model.quantization import rounding_of
from aioinfer.model.registry import own_implementation
from aioinfer.model.renamed_tensors import RenamedTensors
from aioinfer.model.weights import RandomWeights, Weights

__all__ = ["head_kind", "load_head", "load_mtp", "no_head", "no_mtp"]

#: is told how many bytes are taken next; may raise
Claim: TypeAlias = Callable[[int], None]
_Head = TypeVar("_Head", bound=DraftHead)
#: fields of configs that state MTP layers, and model types that have one without stating it
_FIELDS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
_UNSTATED = ("qwen3_next",)
#: kinds by architecture, and the architecture whose code reads the layers
_KINDS = {
    "LlamaForCausalLMEagle3": ("EAGLE-3", "LlamaForCausalLM"),
    "DFlashDraftModel": ("DFlash", "Qwen3ForCausalLM"),
}


def head_kind(path: Path) -> str:
    """The kind of the draft head in a directory; empty if it is a model. Raises ConfigError."""
    checkpoint = checkpoint_at(path)
    if not isinstance(checkpoint, Directory):
        return ""
    named = checkpoint.config().get("architectures")
    return _KINDS.get(named[0], ("", ""))[0] if isinstance(named, list) and named else ""


def no_mtp(path: Path) -> str:
    """Why the checkpoint at ``path`` has no MTP layer; empty if it may have one. Raises ConfigError."""
    checkpoint = checkpoint_at(path)
    if not isinstance(checkpoint, Directory):
        return "MTP layers of GGUF files are not read"
    stated = checkpoint.config()
    text = stated.get("text_config")
    inner = text if isinstance(text, dict) else stated
    if inner.get("model_type") in _UNSTATED or any(inner.get(name) for name in _FIELDS):
        return ""
    return "the checkpoint has no MTP layer"


def no_head(opened: Opened, on_cpu: bool) -> str:
    """Why nothing drafts from the hidden states of a model; empty if something can."""
    if not on_cpu:
        return "draft heads run on a CPU only"
    if opened.family is None:
        return "transformers computes the model, and keeps its hidden states"
    if opened.blocks is not None or opened.headless is not None:
        return "the model does not write token after token"
    return ""


@blaming_the_config
def load_mtp(target: Target, opened: Opened, options: LoadOptions, claim: Claim) -> MTPHead:
    """The MTP layer of a model's checkpoint; ``claim``: as of :func:`load_head`. Raises ConfigError."""
    family, config = opened.family, opened.config
    assert family is not None, "transformers' code has no heads"
    tensors = _whole(opened.checkpoint)
    names = mtp_names(tensors.names, config.num_hidden_layers)
    if not names:
        raise ConfigError("the checkpoint does not have it, and its config says so")
    weights = _weights(RenamedTensors(tensors, names), opened.checkpoint, target, options, claim)
    head = MTPHead(target, family, config, weights, _kernels(family, config, target, options))
    return _loaded(head, weights)


@blaming_the_config
def load_head(target: Target, path: Path, options: LoadOptions, claim: Claim) -> DraftHead:
    """The head in a directory, see :func:`head_kind`; ``claim`` is called with the bytes of its weights
    before they are read. Raises ConfigError."""
    checkpoint = checkpoint_at(path)
    stated, config, spec = checkpoint.config(), read_config(checkpoint), target.spec
    kind, architecture = _KINDS[config.architectures[0]]
    config.architectures = [architecture]
    if config.hidden_size != spec.hidden_size:
        raise ConfigError(f"it has {config.hidden_size} hidden states, and the model {spec.hidden_size}")
    if config.vocab_size != spec.vocab_size:
        raise ConfigError(f"it has {config.vocab_size} tokens, and the model {spec.vocab_size}")
    family = own_implementation(config)
    if family is None:
        raise ConfigError(f"a {kind} head of a {config.model_type} is not supported")
    tensors = _renamed(checkpoint.tensors(), kind) if options.stored else None
    weights = _weights(tensors, checkpoint, target, options, claim)
    kernels = _kernels(family, config, target, options)
    parts = stated, weights, kernels, options.device
    if kind == "EAGLE-3":
        if config.num_hidden_layers != 1:
            raise ConfigError(f"a head of {config.num_hidden_layers} layers is not supported")
        return _loaded(Eagle3Head(target, config, *parts), weights)
    return _loaded(DFlashHead(target, family, config, *parts), weights)


def _whole(checkpoint: Checkpoint) -> Tensors:
    """The tensors of a checkpoint, those of other parts included."""
    return checkpoint.whole.tensors() if isinstance(checkpoint, TextPart) else checkpoint.tensors()


def _renamed(tensors: Tensors, kind: str) -> Tensors:
    """The tensors of a head under the names of its module; some files have them as a model's."""
    renames = (
        {"layers.0.": "midlayer."}
        if kind == "EAGLE-3"
        else {"layers.": "model.layers.", "norm.": "model.norm."}
    )
    stored: dict[str, str] = {}
    for name in tensors.names:
        inner = name.removeprefix("model.")
        at = next((old for old in renames if inner.startswith(old)), None)
        stored[inner if at is None else renames[at] + inner.removeprefix(at)] = name
    return RenamedTensors(tensors, stored)


def _weights(
    tensors: Tensors | None, checkpoint: Checkpoint, target: Target, options: LoadOptions, claim: Claim
) -> Weights:
    """``tensors``: None for random ones."""
    dtype, rounding = target.spec.dtype, rounding_of(options.quantization)
    if tensors is None:
        return RandomWeights(dtype=dtype, device=options.device, check_size=claim)
    matrices = [name for name in tensors.names if rounding is not None and len(tensors.shape(name)) > 1]
    claim(stored_bytes(tensors, dtype.itemsize, {name: rounding for name in matrices if rounding}))
    return Weights(tensors, dtype=dtype, device=options.device, files=checkpoint.files())


def _kernels(family: Family, config: Any, target: Target, options: LoadOptions) -> LayerKernels:
    spec, device = target.spec, options.device
    wanted, latent = options.kernels, spec.latent
    heads = frozenset(kv.head_dim for kv in family.kv_layers(config)) or spec.head_dims
    attention = choose_attention(device, heads | spec.head_dims, spec.dtype, wanted, latent=latent)
    if attention.name != choose_attention(device, spec.head_dims, spec.dtype, wanted, latent=latent).name:
        raise ConfigError(f"the model's attention kernels have no heads of {max(heads)}")
    layers, experts = choose_layers(attention, family.inner_sizes(config)), None
    if (shape := expert_shape(family, config)) is not None:
        experts = choose_experts(device, *shape, spec.dtype, options.experts, native=layers.name == "native")
    check_quantization(options.quantization, layers, config.architectures[0], experts)
    return make_layers(
        layers, experts, device, spec.dtype, options.quantization, invariant=options.deterministic
    )


def _loaded(head: _Head, weights: Weights) -> _Head:
    head.num_parameters = weights.num_parameters
    weights.give_back()
    return head
