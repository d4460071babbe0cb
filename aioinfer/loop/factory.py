"""Functions that make the parts of an engine from its config and its model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aioinfer._version import __version__
from aioinfer.checkpoint.files import Checkpoint, checkpoint_at, has_mmproj
from aioinfer.checkpoint.libraries import import_extensions
from aioinfer.checkpoint.locate import Progress, locate
from aioinfer.checkpoint.sentences import Sentences
from aioinfer.config import SPECULATION, EngineConfig
from aioinfer.config.values import shown
from aioinfer.errors import ConfigError, InvalidRequest
from aioinfer.execution.device import Device, DeviceInfo
from aioinfer.images.limits import ImageLimits
from aioinfer.params import SamplingParams
from aioinfer.scheduling.costs import Costs
from aioinfer.system.memory import give_back
from aioinfer.system.support import check_system

if TYPE_CHECKING:
    from aioinfer.execution.launcher import Launcher
    from aioinfer.text.tokenizer import Tokenizer
    from aioinfer.tiers.store import PageStore

__all__ = [
    "completed",
    "decide",
    "default_params",
    "import_parts",
    "load_tokenizer",
    "located",
    "make_device",
    "make_launcher",
    "page_store",
    "step_costs",
    "with_end_tokens",
]


_GENERATION = "generation_config.json"
#: seconds of a step with prefill beside streams on a CPU
_CPU_STEP = 0.2


def located(config: EngineConfig, progress: Progress | None = None) -> EngineConfig:
    """The config with the directories or files of its models, which are downloaded if that is allowed and
    needed. Blocks. Raises ConfigError, also on a system without support, and what ``progress`` raises."""
    check_system()
    fetch = bool(config.download)
    found: dict[str, Any] = {"model": str(locate(config.model, fetch=fetch, progress=progress))}
    if config.speculation not in SPECULATION:
        try:
            found["speculation"] = str(locate(config.speculation, fetch=fetch, progress=progress))
        except ConfigError as error:
            raise ConfigError(f"speculation: {str(error).removeprefix('model: ')}") from error
    return dataclasses.replace(config, **found)


def import_parts(policy: str | type) -> None:
    """Import what a running engine needs, torch excepted. Blocks: on a worker thread it does not delay the
    loop. Raises ConfigError: ``policy`` is a class that is no policy."""
    import_extensions()
    import aioinfer.execution.launcher
    import aioinfer.execution.torch_device
    import aioinfer.loop.answers
    import aioinfer.loop.core
    import aioinfer.loop.generation
    import aioinfer.model.kept_files
    import aioinfer.text.tool_grammar  # noqa: F401
    from aioinfer.scheduling.policy import policy_class

    policy_class(policy)


def make_device(config: EngineConfig) -> Device:
    """The device that the config asks for, not opened. Imports no torch; opening does."""
    from aioinfer.execution.torch_device import TorchDevice

    return TorchDevice(config)


def make_launcher(config: EngineConfig) -> Launcher:
    """The launcher and device that the config asks for. Imports no torch; opening the device does."""
    from aioinfer.execution.launcher import InlineLauncher, ThreadLauncher

    device = make_device(config)
    return ThreadLauncher(device) if config.launch_mode == "thread" else InlineLauncher(device)


def load_tokenizer(config: EngineConfig) -> Tokenizer | None:
    """The model's tokenizer, or None if it has none. Blocks. Raises ConfigError."""
    from aioinfer.model.kept_files import KeptFiles, found_or_made
    from aioinfer.text.fast_tokenizer import FastTokenizer, lean
    from aioinfer.text.tokenizer import HFTokenizer

    checkpoint = _checkpoint(config)
    tokenizer = None
    if checkpoint is not None:
        kept = KeptFiles(checkpoint.path) if config.cache_weights and not has_mmproj(checkpoint) else None
        tokenizer = HFTokenizer.of(
            checkpoint,
            config.chat_template,
            lambda: found_or_made(
                *(kept, "tokenizer", FastTokenizer.from_record, lambda: lean(checkpoint.tokenizer())),
                lambda made: made.record if made.is_fast else None,
            ),
        )
        if tokenizer is not None and config.images:
            limits = ImageLimits(config.max_images, config.max_image_bytes, config.max_image_pixels)
            tokenizer.read_images(checkpoint, limits)
    give_back()  # of its vocabulary there were copies
    if tokenizer is None and config.chat_template is not None:
        raise ConfigError("chat_template: the model has no tokenizer")
    return tokenizer


def _checkpoint(config: EngineConfig) -> Checkpoint | None:
    """None for a name that only a device knows which stands in for the real one."""
    try:
        return checkpoint_at(config.model_path, config.mmproj_file)
    except ConfigError:
        return None


def default_params(config: EngineConfig, info: DeviceInfo) -> SamplingParams:
    """The sampling parameters that the model's ``generation_config.json`` recommends and the engine supports
    for it, and those of the config. Blocks. Raises ConfigError."""
    from aioinfer.loop.generation import default_diffusion, generation  # imports numpy

    checkpoint = _checkpoint(config)
    recommended = {} if checkpoint is None else checkpoint.generation_config()
    kind = {"edits": info.edit_token_ids is not None, "canvas": info.canvas}
    diffusion = default_diffusion(config, info.block_size, **kind, recommended=recommended)
    sampled = recommended.get("do_sample")
    if sampled is not None and not isinstance(sampled, bool):
        raise ConfigError(f"model: do_sample in {_GENERATION} must be true or false, got {shown(sampled)}")
    try:
        known = generation(info.block_size, **kind).recommended
        values = {name: recommended[name] for name in known if recommended.get(name) is not None}
        if sampled is False:
            values["temperature"] = 0.0
        return SamplingParams(diffusion=diffusion, **values)
    except (ValueError, TypeError, InvalidRequest) as error:
        raise ConfigError(f"model: {_GENERATION}: {error}") from error


def sentences(config: EngineConfig) -> Sentences:
    """Recommendations of the model's files for embeddings. Blocks. Raises ConfigError."""
    checkpoint = _checkpoint(config)
    return Sentences() if checkpoint is None else Sentences.of(checkpoint.path)


def step_costs(config: EngineConfig) -> Costs | None:
    """What steps take, if that was calibrated. Blocks. Raises ConfigError."""
    return None if config.costs is None else Costs.read(Path(config.costs))


def page_store(config: EngineConfig, info: DeviceInfo) -> PageStore | None:
    """The store in the directory that the config names. Blocks: its files are listed. Raises ConfigError."""
    if config.prefix_cache_dir is None:
        return None
    from aioinfer.tiers.directory import DirectoryStore

    if not info.page_bytes:
        raise ConfigError("prefix_cache_dir: KV pages in the memory of a GPU cannot be stored yet")
    return DirectoryStore(config.prefix_cache_dir, int(config.prefix_cache_disk_gib * 2**30))


def with_end_tokens(info: DeviceInfo, tokenizer: Tokenizer | None) -> DeviceInfo:
    """``info`` with the end tokens of the tokenizer added to those of the model's config."""
    if tokenizer is None:
        return info
    return dataclasses.replace(info, eos_token_ids=info.eos_token_ids | tokenizer.eos_token_ids)


def fingerprint(config: EngineConfig) -> str:
    """A text that tells the model of a config from others. Blocks."""
    from aioinfer.checkpoint.identity import digest

    checkpoint = _checkpoint(config)
    if config.load_format == "random" or checkpoint is None:
        return f"name-{config.model_name}"
    try:
        return f"files-{digest(checkpoint.files())}"
    except ConfigError:
        return f"name-{config.model_name}"  # a device that stands in for the real one has opened without them


def completed(
    info: DeviceInfo, tokenizer: Tokenizer | None, config: EngineConfig, fingerprint: str = ""
) -> DeviceInfo:
    """``info`` with the end tokens of the tokenizer, and with what the engine decided; ``config`` leaves
    nothing open: see :func:`decide`."""
    info = with_end_tokens(info, tokenizer)
    return dataclasses.replace(
        info,
        page_size=config.positions_per_page if info.page_size is None else info.page_size,
        overlap_steps=config.overlap_steps,
        deterministic=config.deterministic,
        model=config.model_name,
        fingerprint=fingerprint,
        numerics=_numerics(info, config),
    )


def _numerics(info: DeviceInfo, config: EngineConfig) -> str:
    """Sizes of pages, steps and queues, and the number of threads, are no part of it; nor are instructions
    where it is known which others have the same bits."""
    known = {part: name.partition(" (")[0] for part, name in sorted(info.kernels.items())}
    if info.arithmetic:
        known["instructions"] = info.arithmetic
    if info.rotary_factors:
        known["rotary factors"] = info.rotary_factors
    kernels = [f"{part} {name}" for part, name in known.items()]
    device = info.device.partition(":")[0]
    parts = [__version__, info.implementation, info.dtype, config.quantization, device, *kernels]
    return ", ".join(filter(None, parts))


def decide(
    config: EngineConfig, block_size: int | None, *, asynchronous: bool, info: DeviceInfo | None = None
) -> EngineConfig:
    """The config with the values filled in that depend on model and device.

    ``block_size`` is that of a diffusion model, None for others; an ``asynchronous`` device computes while
    Python does something else. ``info``: of the device, once it is open.
    """
    from aioinfer.loop.generation import generation  # imports numpy

    if info is not None:
        config = info.settle(config)
    settings: dict[str, Any] = {
        "overlap_steps": 1,
        "max_prefill_tokens": None,
        "itl_target": _CPU_STEP if info is not None and info.device == "cpu" else 0.0,
        "max_running_requests": config.running_requests,
        "max_step_tokens": config.step_tokens,
        "chunk_size": config.chunk_tokens,
    }
    if not asynchronous:
        settings |= generation(block_size).synchronous_settings
    left_open = {name: value for name, value in settings.items() if getattr(config, name) is None}
    config = dataclasses.replace(config, **left_open)
    if config.max_rounds is None:
        config = dataclasses.replace(config, max_rounds=1 if config.overlap_steps else 4)
    return config
