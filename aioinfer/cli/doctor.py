"""Doctor: reports on this machine, and on what a configuration would run on it and why. Loads no weights."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from aioinfer._version import __version__
from aioinfer.cli.terminal import Progress
from aioinfer.config import EngineConfig
from aioinfer.errors import AioInferError, ConfigError
from aioinfer.ledger import LEDGER

if TYPE_CHECKING:
    import torch

    from aioinfer.model.backend import Backend
    from aioinfer.model.inspection import LoadOptions, ModelInfo

__all__ = ["Finding", "examine"]

#: tokens whose KV is told
_TOKENS = 1000
_PACKAGES = ("torch", "transformers", "tokenizers", "triton", "llguidance", "aiohttp", "uvloop")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. ``fatal``: an engine with this configuration cannot start."""

    subject: str
    text: str
    fatal: bool = False


def examine(config: EngineConfig) -> list[Finding]:
    """The report, line by line. Errors of the configuration are findings, not exceptions."""
    findings = [
        Finding("aioinfer", f"{__version__}, Python {platform.python_version()}, {platform.platform()}"),
        Finding("packages", ", ".join(map(_package, _PACKAGES))),
        Finding("cpu", _cpu()),
        Finding("memory", _memory()),
        *_gpus(),
    ]
    try:
        findings += _plan(config)
    except AioInferError as error:
        findings.append(Finding("problem", str(error), fatal=True))
    return findings


def _package(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return f"no {name}"


def _cpu() -> str:
    import torch

    from aioinfer.system.cores import cpu_quota, default_threads
    from aioinfer.system.memory import machine_memory

    threads = default_threads(torch.get_num_threads(), cpu_quota())
    capability = torch.backends.cpu.get_cpu_capability()
    text = f"{os.cpu_count()} cores, one thread each on {threads} of them, {capability}"
    memory = machine_memory()
    return text if memory is None else f"{text}; {memory / 2**30:.1f} GiB of memory"


def _memory() -> str:
    """What is left, and what a server has bounds for."""
    import aioinfer.execution.sizing
    import aioinfer.server.status  # noqa: F401  with the shares of a server

    left = LEDGER.left()
    text = "the system does not say what is left" if left is None else LEDGER.said(left)
    bounds = [
        f"{name} {entry.bound / 2**20:.0f} MiB"
        for name, entry in LEDGER.entries().items()
        if entry.bound is not None
    ]
    return f"{text}; at most for {', '.join(bounds)}" if bounds else text


def _gpus() -> list[Finding]:
    import torch

    if not torch.cuda.is_available():
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        return [Finding("gpu", f"none visible to torch (built {built})")]
    found = []
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        text = f"{device.name}, compute capability {device.major}.{device.minor}, "
        found.append(Finding(f"gpu {index}", f"{text}{device.total_memory / 2**30:.1f} GiB"))
    return found


def _plan(config: EngineConfig) -> list[Finding]:
    """Findings on what an engine would run. Raises ConfigError."""
    from aioinfer.execution.cuda_device import pick_device
    from aioinfer.model.inspection import LoadOptions, inspect_model
    from aioinfer.model.kernels import check_kv_dtype, choose_attention, choose_experts, choose_layers
    from aioinfer.sampling.backend import choose_proposing, choose_sampling

    device = pick_device(config.device)
    options = LoadOptions(
        dtype=config.dtype,
        device=device,
        load_format=config.load_format,
        force_transformers=config.transformers_fallback,
        block_size=config.block_size,
        max_model_len=config.max_model_len,
        quantization=config.quantization,
        deterministic=config.deterministic,
        images=config.images,
        mmproj=config.mmproj_file,
    )
    model = inspect_model(config.model_path, options)
    attention = choose_attention(
        device,
        model.head_dims,
        model.dtype,
        config.attention_backend,
        Progress(),
        canvas=model.blocks is not None and model.blocks.canvas,
        latent=model.latent,
    )
    check_kv_dtype(config.kv_dtype, attention)
    layers = choose_layers(attention, model.inner_sizes)
    operations = "transformers' own"
    if model.own:
        operations = f"{'torch' if layers.name == 'sdpa' else layers.name}: {layers.reason}"
    choose = choose_sampling if model.blocks is None else choose_proposing
    sampling = choose(device, config.sampling_backend)
    experts: list[Finding] = []
    backend: Backend | None = None
    if model.experts is not None:
        native = layers.name == "native"
        backend = choose_experts(device, *model.experts, model.dtype, config.moe_backend, native=native)
        experts = [Finding("experts", f"{backend.name}: {backend.reason}")]
    _check_promises(config, model, device, attention.name, layers, backend)
    instructions: list[Finding] = []
    if "native" in (attention.name, layers.name, backend and backend.name, sampling.name):
        from aioinfer.native import bindings

        instructions = [Finding("instructions", bindings.instructions())]
    from aioinfer.loop import factory

    size = None if model.blocks is None else model.blocks.size
    window = factory.decide(config, size, asynchronous=device.type != "cpu").overlap_steps
    return [
        _model(config, model),
        *_weights(config, model, options, layers, backend),
        *_needed(config, model, options, layers),
        *_diffusion(config, model),
        *_images(model, attention),
        Finding("device", f"{device} ({'asked for' if config.device != 'auto' else 'auto'})"),
        Finding("attention", f"{attention.name}: {attention.reason}"),
        Finding("operations", operations),
        *experts,
        Finding("sampling", f"{sampling.name}: {sampling.reason}"),
        *instructions,
        Finding("decode graphs", _captured(config, model, device, attention.name, backend)),
        Finding("launching", f"{config.launch_mode}, overlap_steps {window}"),
        *_speculation(config, model, device),
    ]


def _speculation(config: EngineConfig, model: ModelInfo, device: torch.device) -> list[Finding]:
    """What drafts tokens, and which draft head the checkpoint has. Raises ConfigError."""
    from aioinfer.checkpoint.locate import locate
    from aioinfer.model.draft_heads.loading import head_kind, no_head, no_mtp

    chosen = config.speculation
    if model.blocks is not None or chosen in ("off", "lookup"):
        return [] if model.blocks is not None else [Finding("speculation", f"{chosen} (asked for)")]
    reason = no_head(model.opened, device.type == "cpu")
    if chosen == "auto":
        reason = no_mtp(config.model_path) or reason
        told = (
            f"lookup ({reason})" if reason else "the MTP layer of the checkpoint and lookup, where they pay"
        )
        return [Finding("speculation", told)]
    kind = head_kind(locate(chosen))
    if kind and reason:
        raise ConfigError(f"speculation: no {kind} head can draft: {reason}")
    return [Finding("speculation", f"{kind or 'a model'}: {chosen}")]


def _model(config: EngineConfig, model: ModelInfo) -> Finding:
    part = f" ({model.part})" if model.part else ""
    code = "this package's own code"
    if not model.own:
        code = f"transformers' code over paged attention ({model.fallback_reason})"
    code += ", with random weights" if config.load_format == "random" else ""
    dtype = str(model.dtype).removeprefix("torch.")
    return Finding("model", f"{config.model_name}: {model.architecture}{part}, {dtype}, by {code}")


def _diffusion(config: EngineConfig, model: ModelInfo) -> list[Finding]:
    if model.blocks is None:
        return []
    text = f"block size {model.blocks.size}, mask token {model.blocks.mask_token_id}"
    if model.blocks.canvas:
        text = f"canvases of {model.blocks.size}"
    return [Finding("diffusion", f"{text}, {config.diffusion_mode}")]


def _images(model: ModelInfo, attention: Backend) -> list[Finding]:
    from aioinfer.model.kernels import one_way

    if reason := model.blind_reason or (one_way(attention) if model.two_way else ""):
        return [Finding("images", f"are not read: {reason}")]
    return [Finding("images", "are read by its own encoder")] if model.images else []


def _weights(
    config: EngineConfig, model: ModelInfo, options: LoadOptions, layers: Backend, experts: Backend | None
) -> list[Finding]:
    """Findings on weights that are quantised in the checkpoint."""
    from aioinfer.model.sizes import weight_bytes

    found: list[tuple[str, bool]] = []
    if not model.own and model.opened.quantised and options.stored:
        takes = f"{weight_bytes(model.opened, options, layers) / 2**20:.0f} MiB"
        return [Finding("weights", f"by {model.opened.quantised} in the checkpoint, dequantised, {takes}")]
    if model.stored_bits:
        bits = " and ".join(map(str, model.stored_bits))
        found.append((f"{bits} bits", layers.name == "native" and config.quantization == "auto"))
    kept = layers.name == "triton" and config.quantization != "none" and not config.deterministic
    if model.stored_float8:
        found.append(("floats of 8 bits", kept))
    if model.expert_float8:
        by_triton = experts is not None and experts.name == "triton"
        found.append(("experts of floats of 8 bits", kept and by_triton))
    return [
        Finding("weights", f"{what} in the checkpoint, {'kept' if kept else 'dequantised'}")
        for what, kept in found
    ]


def _needed(config: EngineConfig, model: ModelInfo, options: LoadOptions, layers: Backend) -> list[Finding]:
    """The memory that the model will take; nothing of one whose weights or pages are not known."""
    from aioinfer.model.attention.pool import KVPool
    from aioinfer.model.sizes import weight_bytes
    from aioinfer.system.memory import process_memory

    family, weights = model.opened.family, "random weights"
    if family is None:
        return []
    if options.stored:
        weights = f"weights {weight_bytes(model.opened, options, layers) / 2**20:.0f} MiB"
    pages = family.kv_layers(model.opened.config)
    float8 = config.kv_dtype == "fp8"
    tokens = KVPool.bytes_per_page(pages, _TOKENS, model.dtype, float8=float8) / 2**20
    text = f"{weights}, KV {tokens:.1f} MiB for {_TOKENS:,} tokens"
    now = process_memory()
    if now is not None:
        text += f"; Python with its libraries takes {now / 2**20:.0f} MiB of this process"
    return [Finding("it takes", text)]


def _captured(
    config: EngineConfig, model: ModelInfo, device: torch.device, attention: str, experts: Backend | None
) -> str:
    """The decodes that are captured, or the reason why none are."""
    import torch

    from aioinfer.execution.graphs import graphs_unsupported
    from aioinfer.execution.sizing import by_memory

    unsupported = graphs_unsupported(device, attention, model.own, None if experts is None else experts.name)
    if config.decode_graph_rows == 0:
        unsupported = "asked for"
    if unsupported:
        return f"none: {unsupported}"
    if model.blocks is not None:
        return f"up to {config.round_rows(model.blocks.size)} blocks"
    if device.type == "cuda":
        config = by_memory(config, torch.cuda.mem_get_info(device)[1])
    return f"up to {config.graph_rows} rows"


def _check_promises(
    config: EngineConfig,
    model: ModelInfo,
    device: torch.device,
    attention: str,
    layers: Backend,
    experts: Backend | None,
) -> None:
    """Raise ConfigError for what the chosen kernels cannot do."""
    from aioinfer.model.kernels import check_cache_weights, check_float8, check_quantization, why_variant

    own_layers = layers if model.own else None
    check_quantization(config.quantization, own_layers, model.architecture, experts)
    check_float8(config.quantization, device, model.dtype, invariant=config.deterministic)
    if config.cache_weights:
        check_cache_weights(own_layers, config.load_format, model.architecture)
    if not config.deterministic:
        return
    kernels = {each.name for each in (layers, experts) if each is not None}
    # Of Triton's, more is known when the model is loaded.
    if not model.own or kernels not in ({"native"}, {"triton"}):
        raise ConfigError(f"deterministic: {why_variant(model.architecture, attention)}")
