"""TorchDevice: a model on the CPU or on CUDA, behind the Device protocol.

Torch is imported when the device is opened, on the launch thread, and not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioinfer.config import EngineConfig
from aioinfer.errors import ConfigError, OutOfMemory
from aioinfer.execution.device import DeviceInfo, DeviceLost, Flight, Progress
from aioinfer.execution.masks import Masks
from aioinfer.execution.packing import Packed, Packer
from aioinfer.observe.timeline import DeviceLane
from aioinfer.scheduling.step import Step

if TYPE_CHECKING:
    import torch

    from aioinfer.execution.streams import Backend
    from aioinfer.model.spec import ModelSpec

__all__ = ["TorchDevice", "pick_device"]

_GIB = 1 << 30


class TorchDevice:
    """Loads a model, sizes its KV pool, and computes steps."""

    #: until opened; a CUDA device then becomes asynchronous
    synchronous = True

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._packer: Packer | None = None
        self._backend: Backend | None = None
        self._masks = Masks(config.grammar_patience)
        self.lane = DeviceLane()
        self._threads_before: int | None = None

    def open(self, progress: Progress | None = None) -> DeviceInfo:
        import torch

        from aioinfer.execution.relay import Relay
        from aioinfer.execution.runner import Runner
        from aioinfer.execution.streams import CpuBackend, CudaBackend
        from aioinfer.model.attention.choice import choose_attention, make_attention
        from aioinfer.model.attention.pool import KVPool
        from aioinfer.model.loader import load_model
        from aioinfer.sampling.sampler import Sampler

        config = self._config
        device = pick_device(config.device)
        if config.threads is not None and device.type == "cpu":
            self._threads_before = torch.get_num_threads()
            torch.set_num_threads(config.threads)
        try:
            model = load_model(
                config.model_path,
                dtype=config.dtype,
                device=device,
                force_transformers=config.transformers_fallback,
                kernels=config.attention,
                progress=progress,
            )
            spec = model.spec
            choice = choose_attention(device, spec.head_dim, spec.dtype, config.attention)
            num_pages, max_model_len = _size_pool(config, spec, device)
            pool = KVPool(
                num_layers=spec.num_layers,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                num_pages=num_pages,
                page_size=config.page_size,
                dtype=spec.dtype,
                device=device,
            )
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise OutOfMemory(f"the model and its KV pages do not fit: {error}") from error
        runner = Runner(
            model,
            make_attention(pool, choice),
            Sampler(config.num_slots, spec.vocab_size, device),
            Relay(config.num_slots, device),
            self._masks,
            self.lane,
        )
        self._backend = CudaBackend(runner, device) if device.type == "cuda" else CpuBackend(runner)
        self.synchronous = device.type == "cpu"
        max_pages = -(-max_model_len // config.page_size)
        self._packer = Packer(config.num_slots, max_pages, config.page_size)
        return DeviceInfo(
            vocab_size=spec.vocab_size,
            max_model_len=max_model_len,
            num_pages=num_pages,
            eos_token_ids=frozenset(spec.eos_token_ids),
            description=_describe(spec, device, num_pages * config.page_size, choice.kernels),
        )

    def prepare(self, step: Step) -> Packed:
        assert self._packer is not None, "not open"
        return self._packer.pack(step)

    def launch(self, prepared: Packed) -> Flight:
        assert self._backend is not None, "not open"
        return self._backend.launch(prepared)

    def check(self) -> None:
        if self._backend is None:
            raise DeviceLost("the device is closed")
        self._backend.check()

    def close(self) -> None:
        self._backend = None
        self._packer = None
        self._masks.close()
        if self._threads_before is not None:
            import torch

            torch.set_num_threads(self._threads_before)
            self._threads_before = None


def pick_device(wanted: str) -> torch.device:
    """What ``auto``, ``cpu`` or ``cuda`` stands for on this machine. Raises ConfigError."""
    import torch

    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda was asked for, and torch sees no CUDA device")
    return torch.device(wanted, torch.cuda.current_device()) if wanted == "cuda" else torch.device(wanted)


def _size_pool(config: EngineConfig, spec: ModelSpec, device: torch.device) -> tuple[int, int]:
    """Pages of the pool and the longest sequence it serves. Raises ConfigError, OutOfMemory."""
    from aioinfer.model.attention.pool import KVPool

    page_bytes = KVPool.bytes_per_page(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        page_size=config.page_size,
        dtype=spec.dtype,
    )
    wanted_len = spec.max_model_len if config.max_model_len is None else config.max_model_len
    if config.max_model_len is not None and config.max_model_len > spec.max_model_len:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}; the model knows {spec.max_model_len} positions"
        )
    num_pages = config.num_pages
    if num_pages is None:
        # Never more than every running request could use at its longest.
        useful = config.max_running_requests * -(-wanted_len // config.page_size)
        num_pages = min(useful, _kv_budget(config, device) // page_bytes)
    if num_pages < 1:
        raise OutOfMemory(f"not one KV page of {page_bytes} bytes fits into the memory budget")
    capacity = num_pages * config.page_size
    if config.max_model_len is not None and config.max_model_len > capacity:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but {num_pages} pages hold {capacity} positions"
        )
    if min(wanted_len, capacity) < 2:
        raise ConfigError("max_model_len and num_pages leave no room for a prompt and an output token")
    return num_pages, min(wanted_len, capacity)


def _kv_budget(config: EngineConfig, device: torch.device) -> int:
    """Bytes for KV: a fixed budget on the CPU, on CUDA what the weights left of the allowed share."""
    import torch

    if device.type == "cpu":
        return int(config.kv_memory_gib * _GIB)
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(free - total * (1 - config.gpu_memory_utilization)))


def _describe(spec: ModelSpec, device: torch.device, capacity: int, kernels: str) -> str:
    dtype = str(spec.dtype).removeprefix("torch.")
    size = spec.num_parameters / 1e6
    model = f"{spec.architecture}, {size:.1f} M parameters, {dtype} on {device.type}"
    return f"{model}, {kernels} attention, {capacity} KV positions"
