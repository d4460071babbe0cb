"""Loading a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from aioinfer.checkpoint.files import Checkpoint
from aioinfer.checkpoint.tensors import Tensors, stored_bytes
from aioinfer.errors import ConfigError
from aioinfer.model.embedding_checkpoint import Classifier, Headless, with_prefix, without_score
from aioinfer.model.families.base import Family, build_decoder, expert_shape, latent_sizes
from aioinfer.model.inspection import (
    LoadOptions,
    Opened,
    blaming_the_config,
    head_dims,
    open_model,
)
from aioinfer.model.kernels import (
    check_cache_weights,
    check_float8,
    check_quantization,
    choose_attention,
    choose_experts,
    choose_layers,
    make_layers,
    one_way,
)
from aioinfer.model.multimodal import TextPart
from aioinfer.model.sizes import weight_bytes
from aioinfer.model.spec import CausalLM, Progress
from aioinfer.model.updates.new_weights import Known
from aioinfer.model.updates.recipe import DecoderRecipe
from aioinfer.model.updates.vision_recipe import VisionRecipe
from aioinfer.model.vision.part import VisionPart
from aioinfer.model.weights import RandomWeights
from aioinfer.model.weights_cache import Blobs, WeightsCache

__all__ = ["load_model"]

#: reasons why weights cannot be replaced
_HEADLESS = "weights: those of a model without the head of a language model are not replaced"
_CACHED = "cache_weights: packed weights are mapped from a file, and other engines have it mapped, too"


@blaming_the_config
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
    opened = Opened.of(path, options)
    if opened.family is None:
        return _load_fallback(opened, options, progress, check_size)
    return _Own(opened, opened.family, options, progress, check_size).load()


def _load_fallback(
    opened: Opened,
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
    reason, quantised = opened.fallback_reason, opened.quantised if options.stored else ""
    if tensors is not None:
        size = stored_bytes(tensors, opened.dtype.itemsize)
        if check_size is not None:
            check_size(size)
        if quantised:
            reason += f"; weights by {quantised} are dequantised, {size / 2**30:.2f} GiB"
    weights = opened.weights(options, None, check_size)
    random_weights = weights if isinstance(weights, RandomWeights) else None
    common = checkpoint.path, config, opened.dtype, options.device, progress, random_weights
    if is_encoder(config):
        if quantised:
            raise ConfigError(f"model: of {opened.architecture}, quantised checkpoints cannot be loaded")
        encoder = TransformersEncoder(*common)
        encoder.spec = replace(encoder.spec, fallback_reason=reason)
        return encoder
    texts = tensors if quantised or isinstance(checkpoint, (TextPart, Headless)) else None
    if texts is not None and headless is not None:
        texts = without_score(texts)
    model = TransformersLM(*common, texts, options.max_lora_rank)
    if headless is None:
        part = opened.texts if options.stored else None
        model.updates = TransformersRecipe(config, opened.dtype, _opening(options), part)
    model.spec = replace(model.spec, fallback_reason=reason, part=opened.part)
    if headless is not None:
        _without_head(model, headless, headless.classifier(config, weights))
    return model


class _Own:
    """Loads a model of a built-in family."""

    def __init__(
        self,
        opened: Opened,
        family: Family,
        options: LoadOptions,
        progress: Progress | None,
        check_size: Callable[[int], None] | None,
    ) -> None:
        self.opened, self.family, self.options = opened, family, options
        self.progress, self.check_size = progress, check_size
        config, dtype, device = opened.config, opened.dtype, options.device
        canvas = opened.blocks is not None and opened.blocks.canvas
        heads = head_dims(config, family)
        latent = latent_sizes(config, family)
        self.attention = choose_attention(
            device, heads, dtype, options.kernels, progress, canvas=canvas, latent=latent
        )
        if opened.vision is not None and opened.vision.two_way and (reason := one_way(self.attention)):
            self.opened = replace(opened, vision=None, blind_reason=reason)
        self.layers = choose_layers(self.attention, family.inner_sizes(config))
        shape, native = expert_shape(family, config), self.layers.name == "native"
        self.experts = (
            choose_experts(device, *shape, dtype, options.experts, native=native) if shape else None
        )
        check_quantization(options.quantization, self.layers, opened.architecture, self.experts)
        check_float8(options.quantization, device, dtype, invariant=options.deterministic)

    def load(self) -> CausalLM:
        options, opened = self.options, self.opened
        if options.stored and self.check_size is not None:
            self.check_size(weight_bytes(opened, options, self.layers))
        if not options.cache_weights:
            return self._build(None)
        check_cache_weights(self.layers, options.load_format, opened.architecture)
        facts = str(opened.dtype), options.quantization, options.experts, opened.vision is not None
        model, done = _load_cached(opened.checkpoint, self._build, self.progress, *facts)
        reason = f"{model.spec.layer_reason}; {done}"
        model.spec = replace(model.spec, layer_reason=reason)
        return model

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
        weights.close(_reopening(opened.checkpoint, options))
        vision = None
        if opened.vision is not None:
            vision = self._add_encoder(decoder, opened.vision, len(weights.names), blobs)
        decoder.updates = DecoderRecipe(
            config=config,
            known=Known(weights.names, kernels.tied),
            kernels=kernels,
            build=partial(build_decoder, {}, self.family, config, **facts),
            open=_opening(options),
            part=opened.texts,
            dtype=opened.dtype,
            device=options.device,
            vision=vision,
            refusal=_HEADLESS if headless is not None else "" if blobs is None else _CACHED,
        )
        reason = self.layers.reason
        if kernels.kept_bits:
            bits = " and ".join(map(str, sorted(kernels.kept_bits)))
            reason += f"; weights of {bits} bits as they are stored"
        elif opened.quantised and options.stored and options.quantization in ("auto", "none"):
            reason += f"; weights by {opened.quantised} are dequantised"
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

    def _add_encoder(
        self, model: CausalLM, vision: VisionPart, before: int, blobs: Blobs | None
    ) -> VisionRecipe:
        """Give a model its image encoder; returns how that gets other weights. ``before``: number of the
        tensors of its text model."""
        dtype, device, told = self.opened.dtype, self.options.device, self.progress
        progress = None
        if told is not None:
            progress = lambda what, done, total: told(what, before + done, before + total)  # noqa: E731
        weights = vision.weights(dtype, device, progress, self.check_size)
        kernels = vision.kernels(self.layers, dtype, blobs)
        model.encoder = encoder = vision.build(weights, kernels)
        count = model.spec.num_parameters + weights.num_parameters
        model.spec = replace(model.spec, images=encoder.support, num_parameters=count)
        return VisionRecipe(vision, weights.names, kernels, dtype, device)


def _opening(options: LoadOptions) -> Callable[[Path], tuple[Checkpoint, Any]]:
    """Opens checkpoints whose weights are to replace those of a model."""
    return partial(open_model, stored=True, length=options.max_model_len)


def _reopening(checkpoint: Checkpoint, options: LoadOptions) -> Callable[[], Tensors]:
    """Opens the tensors of a model that is loaded anew. Raises ConfigError if its files have changed."""
    path, before = checkpoint.path, _stamps(checkpoint) if options.stored else set()

    def reopen() -> Tensors:
        found, _ = _opening(options)(path)
        if not _stamps(found) <= before:  # that of an image encoder is not opened
            raise ConfigError("adapter: the files of the model have changed since it was loaded")
        return with_prefix(found.tensors())

    return reopen


def _stamps(checkpoint: Checkpoint) -> set[tuple[Path, int, int]]:
    """Sizes and times of the files, which tell them from others."""
    stats = ((file, file.stat()) for file in checkpoint.files())
    return {(file, stat.st_size, stat.st_mtime_ns) for file, stat in stats}


def _without_head(model: CausalLM, headless: Headless, classifier: Classifier | None) -> None:
    """The model is that of a checkpoint without the head of a language model."""
    model.classifier = classifier
    model.spec = replace(
        model.spec,
        architecture=headless.architecture,
        generates=False,
        num_labels=0 if classifier is None else classifier.num_labels,
    )


def _load_cached(
    checkpoint: Checkpoint,
    build: Callable[[Blobs | None], CausalLM],
    progress: Progress | None,
    *facts: object,
) -> tuple[CausalLM, str]:
    """Load a model over weights mapped from the cache. Raises ConfigError."""
    from aioinfer.native.bindings import shared_thread_pool
    from aioinfer.native.build import BuildFailed, cache_directory

    try:
        directory = cache_directory()
    except BuildFailed as error:
        raise ConfigError(f"cache_weights: {error}") from error
    cache = WeightsCache(directory, checkpoint.path, checkpoint.files(), *facts)
    return cache.load(shared_thread_pool(torch.get_num_threads()), build, progress)
