"""TorchDevice: a model on the CPU or on CUDA, as a Device.

Torch is imported when the device is opened, on the launch thread, and not before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aioinfer.checkpoint.adapter import ADAPTER_FILES
from aioinfer.checkpoint.files import checkpoint_at
from aioinfer.checkpoint.identity import digest
from aioinfer.checkpoint.libraries import preload_torch
from aioinfer.checkpoint.locate import locate
from aioinfer.config import SPECULATION, EngineConfig
from aioinfer.errors import ConfigError, OutOfMemory
from aioinfer.execution.cuda_device import callers_device, current, pick_device
from aioinfer.execution.device import DeviceInfo, DeviceLost, Flight, Progress
from aioinfer.execution.draft_checks import check_draft, load_draft_head
from aioinfer.execution.grammar_worker import GrammarWorker
from aioinfer.execution.packed import PackedStep
from aioinfer.execution.packing import Packer
from aioinfer.execution.sizing import by_memory, fewer_requests, stashed_drafts
from aioinfer.execution.torch_threads import TorchThreads
from aioinfer.ledger import LEDGER, Share
from aioinfer.observe.timeline import DeviceLane
from aioinfer.scheduling.step import Step
from aioinfer.system.memory import give_back

if TYPE_CHECKING:
    import torch

    from aioinfer.execution.backends import Backend
    from aioinfer.execution.build import Parts
    from aioinfer.execution.page_memory import PageMemory
    from aioinfer.execution.sizing import PoolSize
    from aioinfer.model.adapters.base import AdapterSlots, PreparedAdapter
    from aioinfer.model.backend import Backend as Choice
    from aioinfer.model.draft_heads.base import DraftHead
    from aioinfer.model.inspection import LoadOptions
    from aioinfer.model.spec import CausalLM, ModelSpec
    from aioinfer.model.updates.recipe import PreparedUpdate

__all__ = ["TorchDevice"]

#: of an adapter, while it is read: the file, its tensors, and what kernels read
_ADAPTER_COPIES = 3


class TorchDevice:
    """Loads a model, sizes its KV pool, and computes steps."""

    #: until opened; a CUDA device then becomes asynchronous
    synchronous = True

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        #: number of the device that "cuda" means: the caller's choice is unknown on the launch thread
        self._index = callers_device()
        self._device: torch.device | None = None
        self._packer: Packer | None = None
        self._model: CausalLM | None = None
        self._backend: Backend | None = None
        self._pages: PageMemory | None = None
        self._grammars = GrammarWorker(config.grammar_patience)
        self.lane = DeviceLane()
        self._adapters: AdapterSlots | None = None
        self._threads = TorchThreads()
        #: of the memory: of weights, and of adapters by their slots
        self._weights: list[Share] = []
        self._held: dict[int, Share] = {}

    def open(self, progress: Progress | None = None) -> DeviceInfo:
        preload_torch()
        self._device = device = pick_device(self._config.device, self._index)
        with current(device):
            return self._open(device, progress)

    def _open(self, device: torch.device, progress: Progress | None) -> DeviceInfo:
        import torch

        from aioinfer.execution.backends import lacks_memory
        from aioinfer.execution.build import Parts, build, fitted, paged
        from aioinfer.execution.decoding import kind
        from aioinfer.model.draft_heads.loading import head_kind
        from aioinfer.model.kernels import check_kv_dtype, choose_attention
        from aioinfer.native.bindings import ThreadsUnavailable
        from aioinfer.sampling.backend import choose_proposing, choose_sampling

        wanted = config = self._config = paged(self._config, device)
        if device.type == "cpu":
            self._threads.take(config)
        try:
            head_given = ""
            if self._drafts:
                with _of_speculation():
                    head_given = head_kind(locate(config.speculation))
                    if not head_given:
                        check_draft(config.model_path, locate(config.speculation))
            model = self._load(device, progress)
            self._model, spec = model, model.spec
            decoding = kind(spec)
            if device.type == "cuda" and not spec.block_size:
                # A row of a diffusion model is a whole block, with the logits of all of its positions.
                wanted = by_memory(config, torch.cuda.mem_get_info(device)[1])
            config = fitted(decoding.fit(wanted), spec, device)
            choice = choose_attention(
                device,
                spec.head_dims,
                spec.dtype,
                config.attention_backend,
                canvas=spec.canvas,
                latent=spec.latent,
            )
            check_kv_dtype(config.kv_dtype, choice)
            choose = choose_proposing if spec.block_size else choose_sampling
            sampling = choose(device, config.sampling_backend)
            if config.deterministic:
                _check_deterministic(model, choice.name)
                if device.type == "cuda" and sampling.name != "triton":
                    raise ConfigError(
                        f"deterministic: sampling is {sampling.name}, and what that adds depends on the batch"
                    )
            head = self._load_head(model, device, head_given)
            draft = None if head is not None else self._load_draft(spec, device, progress)
            parts = Parts(config, decoding, model, choice, device, self._grammars, self.lane, draft, head)
            self._backend, size = build(parts, progress)
        except ThreadsUnavailable as error:
            raise ConfigError(f"threads: {error}") from error
        except Exception as error:
            if not lacks_memory(error):
                raise
            raise OutOfMemory(f"the model and its KV pages do not fit: {error}") from error
        self.lane.parts = lambda: dict(model.seconds)
        self._pages = self._backend.pages
        self.synchronous = device.type == "cpu"
        self._packer = parts.packer(size.max_model_len, self._backend.graphs)
        self._adapters, reason = _adapters(model, self._config)
        info = self._info(parts, size, wanted, sampling, reason)
        drafts_natively = (draft is None or draft.spec.arithmetic) and (head is None or head.native)
        if info.arithmetic and model.encoder is None and drafts_natively:
            self._threads.leave_one()
        return info

    def _info(
        self, parts: Parts, size: PoolSize, wanted: EngineConfig, sampling: Choice, adapter_reason: str
    ) -> DeviceInfo:
        """``wanted``: the config before it was fitted to the memory for recurrent states."""
        import torch

        config, device, draft, head = parts.config, parts.device, parts.draft, parts.head
        spec, attention = parts.model.spec, parts.attention
        return DeviceInfo(
            vocab_size=spec.vocab_size,
            max_model_len=size.max_model_len,
            num_pages=size.num_pages,
            eos_token_ids=frozenset(spec.eos_token_ids),
            description=_describe(spec, device, size.num_pages * config.positions_per_page, attention.name)
            + (" in fp8" if config.kv_dtype == "fp8" else "")
            + ("" if head is None else f", drafts by {head.kind}"),
            page_size=config.positions_per_page,
            page_bytes=0 if self._pages is None else self._pages.page_bytes,
            page_layout="" if self._pages is None else self._pages.layout + self._entries_of(head),
            block_size=spec.block_size,
            mask_token_id=spec.mask_token_id,
            edit_token_ids=spec.edit_token_ids,
            canvas=spec.canvas,
            implementation="transformers" if spec.fallback_reason else "own",
            fallback_reason=spec.fallback_reason,
            rotary_factors=spec.rotary_factors,
            dtype=str(spec.dtype).removeprefix("torch."),
            device=str(device),
            kernels=_kernels(spec, attention, sampling, device),
            arithmetic=spec.arithmetic if attention.name == sampling.name == "native" else "",
            threads=torch.get_num_threads() if device.type == "cpu" else 0,
            kv_bytes=size.num_pages * parts.page_bytes,
            hidden_size=spec.hidden_size if spec.hidden_states and spec.block_size is None else None,
            num_labels=spec.num_labels,
            generates=spec.generates,
            whole_prompts=spec.whole_prompts,
            images=spec.images,
            num_snapshots=size.num_snapshots,
            verifies=not spec.states or stashed_drafts(config, spec) > 0,
            state_bytes=size.state_bytes,
            draft_unit=None if draft is None else draft.spec.unit,
            draft_length=draft.spec.max_model_len if draft else 0 if head is None else head.positions - 1,
            draft_recurrent=draft is not None and bool(draft.spec.states),
            draft_head="" if head is None else head.kind,
            draft_most=None if head is None or head.block is None else head.block - 1,
            max_adapters=0 if self._adapters is None else config.adapter_slots,
            adapter_reason=adapter_reason,
            max_running_requests=fewer_requests(wanted, config),
            settled={
                name: getattr(wanted, name)
                for name in ("max_running_requests", "max_step_tokens", "chunk_size")
                if getattr(self._config, name) != getattr(wanted, name)
            },
            model_positions=spec.max_model_len,
            length_reason=_length_reason(config, spec, size, device),
        )

    @property
    def _drafts(self) -> bool:
        """A model drafts."""
        return self._config.speculation not in SPECULATION

    def _load_draft(
        self, target: ModelSpec, device: torch.device, progress: Progress | None
    ) -> CausalLM | None:
        if not self._drafts:
            return None
        if target.block_size or not target.verifies:
            raise ConfigError(
                f"speculation: nothing can be drafted for {target.architecture}: use off or lookup"
            )
        with _of_speculation():
            draft = self._load(device, progress, locate(self._config.speculation))
        if self._config.positions_per_page % draft.spec.unit:
            name, unit = draft.spec.architecture, draft.spec.unit
            raise ConfigError(
                f"page_size must be a multiple of {unit}, the block of {name}, which drafts; got "
                f"{self._config.positions_per_page}"
            )
        return draft

    def _entries_of(self, head: DraftHead | None) -> str:
        """What tells the entries of a head, which are in pages, from those of others."""
        if head is None:
            return ""
        if not self._drafts:  # a layer of the model's checkpoint, which the model's identity tells
            return f"; {head.kind}"
        name = self._config.speculation
        random = self._config.load_format == "random"
        return f"; {head.kind} {name if random else digest(checkpoint_at(locate(name)).files())}"

    def _load_head(self, model: CausalLM, device: torch.device, kind: str) -> DraftHead | None:
        """See :func:`~aioinfer.execution.draft_checks.load_draft_head`."""
        loading = _Loading(None)
        with _of_speculation():
            options = self._options(device, own=True)
            head = load_draft_head(self._config, options, model, kind, loading.claim)
        loading("weights", 1, 1)
        self._weights.append(loading.share)
        return head

    def _options(self, device: torch.device, *, own: bool) -> LoadOptions:
        """``own``: of the model, not of one that drafts."""
        from aioinfer.model.inspection import LoadOptions

        config = self._config
        return LoadOptions(
            dtype=config.dtype,
            device=device,
            load_format=config.load_format,
            force_transformers=config.transformers_fallback,
            kernels=config.attention_backend,
            experts=config.moe_backend,
            block_size=config.block_size,
            max_model_len=config.max_model_len,
            quantization=config.quantization,
            cache_weights=config.cache_weights,
            # A model that drafts has none.
            max_lora_rank=config.max_lora_rank if config.max_adapters and own else 0,
            deterministic=config.deterministic,
            images=config.images and own,
            mmproj=config.mmproj_file,
        )

    def _load(self, device: torch.device, progress: Progress | None, path: Path | None = None) -> CausalLM:
        """The model at ``path``, by default the config's."""
        from aioinfer.model.loader import load_model

        config = self._config
        on_cpu = device.type == "cpu"
        loading = _Loading(progress)
        model = load_model(
            path or config.model_path,
            self._options(device, own=path is None),
            progress=loading,
            check_size=loading.claim if on_cpu else None,
        )
        give_back()
        loading("weights", 1, 1)
        if not config.cache_weights:  # those that are mapped have a share of their own
            self._weights.append(loading.share)
        return model

    def prepare(self, step: Step) -> PackedStep:
        assert self._packer is not None, "not open"
        return self._packer.pack(step)

    def launch(self, prepared: PackedStep) -> Flight:
        assert self._backend is not None, "not open"
        return self._backend.launch(prepared)

    def prepare_adapter(self, path: Path) -> PreparedAdapter:
        slots = self._adapters
        if slots is None:
            raise ConfigError("adapters: the device is closed, or its model computes none")
        assert self._device is not None, "it has adapters"
        reading = Share("adapters")
        with suppress(OSError):  # reading says it better
            LEDGER.claim(
                reading, _ADAPTER_COPIES * sum((path / name).stat().st_size for name in ADAPTER_FILES)
            )
        try:
            with current(self._device):
                return slots.prepare(path)
        except Exception as error:
            from aioinfer.execution.backends import lacks_memory

            if not lacks_memory(error):
                raise
            raise OutOfMemory(f"there is no memory for the adapter {path.name}") from error
        finally:
            reading.close()

    def install_adapter(self, slot: int, adapter: PreparedAdapter) -> None:
        assert self._adapters is not None, "the model computes no adapters"
        self._adapters.install(slot, adapter)
        self._held[slot] = Share("adapters", adapter.num_bytes, adapter.num_bytes)

    def remove_adapter(self, slot: int) -> None:
        if self._adapters is not None:
            self._adapters.remove(slot)
            self._held.pop(slot, None)

    def prepare_weights(self, given: Any, go_on: Callable[[], None]) -> PreparedUpdate:
        from aioinfer.model.updates.recipe import prepare_update

        if self._model is None or self._device is None:
            raise DeviceLost("the device is closed")
        with current(self._device):
            return prepare_update(self._model, given, go_on)

    def install_weights(self, prepared: PreparedUpdate) -> None:
        assert self._device is not None, "not open"
        with current(self._device):
            prepared.install()
        if self._backend is not None:
            self._backend.synchronize()

    def page_views(self, page: int) -> list[memoryview]:
        assert self._pages is not None, "its pages are on another device"
        return self._pages.page_views(page)

    def state_views(self, cell: int) -> list[memoryview]:
        assert self._pages is not None, "its states are on another device"
        return self._pages.state_views(cell)

    def check(self) -> None:
        if self._backend is None:
            raise DeviceLost("the device is closed")
        self._backend.check()

    def close(self) -> None:
        if self._backend is not None:
            self._backend.close()
        self._backend = self._model = self._pages = None
        self._packer = None
        self._adapters = None
        self._weights.clear()
        self._held.clear()
        self._grammars.close()
        self.lane.parts = dict
        self._threads.give_back()


class _Loading:
    """The ``progress`` of weights that are read or made, and their share of the memory."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self.share = Share("weights")

    def claim(self, size: int) -> None:
        """``size`` bytes more are taken next. Raises OutOfMemory."""
        self.share.taken = self.share.promised  # of random weights, those before were made
        try:
            LEDGER.claim(self.share, size)
        except OutOfMemory as error:
            raise OutOfMemory(f"{error}: a smaller model or dtype, or more memory is needed") from None

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage == "weights":
            self.share.taken = self.share.promised * done // max(1, total)
        if self._progress is not None:
            self._progress(stage, done, total)


def _check_deterministic(model: CausalLM, attention: str) -> None:
    """Raise ConfigError if a token's bits may depend on the batch. ``attention``: the name of its backend."""
    from aioinfer.model.kernels import why_variant

    spec = model.spec
    variance = getattr(model, "variance", "")
    if spec.block_size and attention != "native":
        variance = "the algorithms of diffusion"
    if variance or not model.invariant or attention not in ("native", "triton"):
        raise ConfigError(f"deterministic: {why_variant(spec.architecture, attention, variance)}")


def _adapters(model: CausalLM, config: EngineConfig) -> tuple[AdapterSlots | None, str]:
    """The slots of a model's adapters, or why there are none."""
    if not config.max_adapters:
        return None, "max_adapters is 0"
    if model.spec.block_size:
        return None, "diffusion models have none"
    slots: AdapterSlots | None = getattr(model, "adapters", None)
    if slots is None:
        return None, getattr(model, "adapter_reason", "") or f"{model.spec.architecture} computes none"
    return slots, ""


def _kernels(spec: ModelSpec, attention: Choice, sampling: Choice, device: torch.device) -> dict[str, str]:
    """Backend and reason for each part of the model, and the target that kernels are compiled for."""
    chosen = {"attention": (attention.name, attention.reason)}
    if spec.layer_kernels:
        chosen["layers"] = (spec.layer_kernels, spec.layer_reason)
    if spec.expert_kernels:
        chosen["experts"] = (spec.expert_kernels, spec.expert_reason)
    if spec.images is not None:
        import torch

        # Its bits are a part of those of every token behind an image.
        version = f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}"
        chosen["images"] = (version, "what no native kernel computes")
    chosen["sampling"] = (sampling.name, sampling.reason)
    kernels = {part: f"{name} ({reason})" for part, (name, reason) in chosen.items()}
    if any(name == "native" for name, _ in chosen.values()):
        from aioinfer.native.bindings import instructions

        kernels["instructions"] = instructions()
    if device.type == "cuda":
        import torch

        # Kernels are compiled for it, and their tiles chosen by it.
        major, minor = torch.cuda.get_device_capability(device)
        kernels["instructions"] = f"compute capability {major}.{minor}"
    return kernels


def _length_reason(config: EngineConfig, spec: ModelSpec, size: PoolSize, device: torch.device) -> str:
    """Why sequences may be shorter than the model's positions; empty if they may not."""
    wanted = spec.max_model_len if config.max_model_len is None else config.max_model_len
    if size.max_model_len < wanted - wanted % spec.grain:
        knob = "gpu_memory_utilization" if device.type == "cuda" else "kv_memory_gib"
        if config.num_pages is not None:
            knob = "num_pages"
        return f"the KV pool holds no more, {knob} sets its size; the model knows {spec.max_model_len}"
    if size.max_model_len < spec.max_model_len:
        return f"the model knows {spec.max_model_len}"
    more = "with its short rotary factors; a larger max_model_len takes the long ones for all sequences"
    return more if spec.rotary_factors == "short" else ""


def _describe(spec: ModelSpec, device: torch.device, capacity: int, kernels: str) -> str:
    dtype = str(spec.dtype).removeprefix("torch.")
    size = spec.num_parameters / 1e6
    part = f" ({spec.part})" if spec.part else ""
    model = f"{spec.architecture}{part}, {size:.1f} M parameters, {dtype} on {device.type}"
    experts = f", {spec.expert_kernels} experts" if spec.expert_kernels else ""
    return f"{model}, {kernels} attention{experts}, {capacity} KV positions"


@contextmanager
def _of_speculation() -> Iterator[None]:
    """Errors of a draft model name the setting that it comes from."""
    try:
        yield
    except ConfigError as error:
        message = str(error).removeprefix("model: ").removeprefix("speculation: ")
        raise ConfigError(f"speculation: {message}") from error
