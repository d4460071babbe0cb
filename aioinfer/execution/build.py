"""Build: from a loaded model to a backend that runs steps, with as many KV pages as memory allows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from aioinfer.config import PAGE_SIZE, SPECULATION, EngineConfig
from aioinfer.errors import ConfigError
from aioinfer.execution.backends import Backend, CpuBackend, CudaBackend
from aioinfer.execution.decoding.base import Kind
from aioinfer.execution.decoding.draft_model import DraftModel
from aioinfer.execution.decoding.head_drafter import HeadDrafter, HeadPacker
from aioinfer.execution.decoding.tokens import TokenDecoding, TokenPacker
from aioinfer.execution.grammar_worker import GrammarWorker
from aioinfer.execution.graph_shapes import GraphShapes
from aioinfer.execution.graphs import StepGraphs, graphs_unsupported
from aioinfer.execution.packed import PackedStep
from aioinfer.execution.packing import Packer
from aioinfer.execution.runner import Runner
from aioinfer.execution.sizing import (
    PoolSize,
    check_pool,
    cpu_budget,
    cuda_budget,
    fit_states,
    image_bytes,
    size_pool,
    stashed_drafts,
    step_bytes,
    waiting_bytes,
)
from aioinfer.execution.warmup import measure
from aioinfer.ledger import LEDGER, Share
from aioinfer.model.attention.base import Attention
from aioinfer.model.attention.pool import KVPool, KVShape
from aioinfer.model.backend import Backend as ModelBackend
from aioinfer.model.draft_heads.base import DraftHead
from aioinfer.model.kernels import choose_attention, make_attention
from aioinfer.model.spec import CausalLM, ModelSpec, Progress
from aioinfer.model.state import StatePool
from aioinfer.observe.timeline import DeviceLane
from aioinfer.system.memory import give_back

__all__ = ["CUDA_PAGE_SIZE", "Parts", "build", "fitted", "paged"]

#: positions of a page on CUDA by default: the most keys of a tile of the attention kernels
CUDA_PAGE_SIZE = 64

_NO_GRAPHS = GraphShapes()


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts that a backend is built from."""

    config: EngineConfig
    kind: Kind
    model: CausalLM
    attention: ModelBackend
    device: torch.device
    grammars: GrammarWorker
    lane: DeviceLane
    #: drafts for the model: a model, or a head
    draft: CausalLM | None = None
    head: DraftHead | None = None

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, summed over all that drafts and verifies: they have the same pages."""
        pools = [(self.kv_layers, self.model.spec.dtype)]
        if self.draft is not None:
            pools.append((self.draft.spec.kv_layers, self.draft.spec.dtype))
        page_size = self.config.positions_per_page
        float8 = self.config.kv_dtype == "fp8"
        return sum(KVPool.bytes_per_page(layers, page_size, dtype, float8=float8) for layers, dtype in pools)

    @property
    def kv_layers(self) -> tuple[KVShape, ...]:
        """Keys and values of the model, and behind them those of its head."""
        return self.model.spec.kv_layers + (() if self.head is None else self.head.kv_layers)

    @property
    def draft_state_bytes(self) -> int:
        """Bytes of the recurrent states of the model that drafts: two of each slot."""
        return 0 if self.draft is None else (2 * self.config.num_slots + 1) * self.draft.spec.state_bytes

    def packer(self, max_len: int, graphs: GraphShapes = _NO_GRAPHS) -> Packer:
        """A packer for sequences of up to ``max_len`` positions."""
        config, page_size = self.config, self.config.positions_per_page
        rows, spec = self.kind.rows(config), self.model.spec
        if self.head is not None:
            assert isinstance(rows, TokenPacker)
            rows.head = HeadPacker(config.num_slots, self.head.block, self.head.positions)
        return Packer(
            rows,
            config.num_slots,
            -(-max_len // page_size),
            page_size,
            graphs,
            states=bool(spec.states),
            hidden=spec.hidden_states,
            images=spec.images,
        )

    def runner(self, num_pages: int, num_snapshots: int | None = None) -> Runner:
        """Runs steps over new pools."""
        spec, config = self.model.spec, self.config
        attention = self._attention(self.kv_layers, spec.dtype, self.attention, num_pages)
        decoding = self.kind.decoding(config, self.device, self.grammars)
        if self.draft is not None:
            assert isinstance(decoding, TokenDecoding)
            small = self.draft.spec
            wanted, latent = config.attention_backend, small.latent
            chosen = choose_attention(self.device, small.head_dims, small.dtype, wanted, latent=latent)
            pool = self._attention(small.kv_layers, small.dtype, chosen, num_pages)
            cells = 2 * config.num_slots
            states = StatePool(small.states, cells, self.device) if small.states else None
            decoding.draft_model = DraftModel(self.draft, pool, decoding.sampler, states)
        head = None
        if self.head is not None:
            assert isinstance(decoding, TokenDecoding)
            head = HeadDrafter(self.head, attention, decoding.sampler, config.num_slots)
            decoding.head = head
        states = None
        if spec.states:
            states = StatePool(
                *(spec.states, config.num_slots + (num_snapshots or 0), self.device),
                num_slots=config.num_slots,
                drafts=stashed_drafts(config, spec),
                dtype=spec.dtype,
            )
        return Runner(self.model, attention, decoding, self.lane, states, head)

    def _attention(
        self, layers: Sequence[KVShape], dtype: torch.dtype, backend: ModelBackend, num_pages: int
    ) -> Attention:
        """Attention over a new pool."""
        return make_attention(
            backend,
            layers,
            num_pages=num_pages,
            page_size=self.config.positions_per_page,
            dtype=dtype,
            device=self.device,
            kv_dtype=self.config.kv_dtype,
            invariant=self.config.deterministic,
        )

    def graphs(self, runner: Runner, max_len: int, shapes: GraphShapes) -> StepGraphs:
        """Graphs of these shapes, not captured yet."""
        page_size = self.config.positions_per_page
        captured = runner.decoding.captured(
            *(runner.model, runner.attention),
            shapes=shapes,
            max_pages=-(-max_len // page_size),
            page_size=page_size,
            states=runner.states,
        )
        return StepGraphs(captured, shapes)

    def largest_steps(self, max_len: int) -> Iterator[PackedStep]:
        """Steps to warm up with; see :mod:`aioinfer.execution.warmup`."""
        return map(self.packer(max_len).pack, self.kind.largest_steps(self.config, max_len))

    def graph_shapes(self) -> GraphShapes:
        """Shapes of the graphs to capture; none where that is not possible."""
        kernels, experts = self.attention.name, self.model.spec.expert_kernels
        if graphs_unsupported(self.device, kernels, self.model.capturable, experts) is not None:
            return _NO_GRAPHS
        return self.kind.graph_shapes(self.config)


def paged(config: EngineConfig, device: torch.device) -> EngineConfig:
    """The config with the number of positions per page that it leaves open: on CUDA a tile of keys lies
    within one page then, which attention kernels look up at once."""
    if config.page_size is not None:
        return config
    return replace(config, page_size=CUDA_PAGE_SIZE if device.type == "cuda" else PAGE_SIZE)


def fitted(config: EngineConfig, spec: ModelSpec, device: torch.device) -> EngineConfig:
    """The config as the recurrent states of a loaded model need it, see
    :func:`~aioinfer.execution.sizing.fit_states`; on CUDA without drafts but those of a model. Raises
    OutOfMemory, and ConfigError: an image that is never cut does not fit a step."""
    if spec.images is not None and spec.images.two_way:
        least = spec.images.longest + config.running_requests
        if config.step_tokens < least:
            told = f"{least}, the positions of an image and a token of every running request"
            raise ConfigError(f"max_step_tokens must be at least {told}")
    if not spec.states:
        return config
    if device.type == "cuda":
        if config.speculation in SPECULATION:
            # Such steps are not captured, and take as long as many decodes that are.
            config = replace(config, speculation="off")
        free, total = torch.cuda.mem_get_info(device)
        utilization = config.gpu_memory_utilization
        return fit_states(
            config, spec, cuda_budget(total=total, free=free, wanted=0, utilization=utilization)
        )
    return fit_states(config, spec, cpu_budget(config))


def build(parts: Parts, progress: Progress | None = None) -> tuple[Backend, PoolSize]:
    """A backend that is ready, and the size of its pool. Raises ConfigError, OutOfMemory."""
    config, spec = parts.config, parts.model.spec
    if parts.device.type == "cuda":
        return _build_cuda(parts, progress)
    drafting = parts.draft_state_bytes
    size = size_pool(config, spec, parts.page_bytes, cpu_budget(config) - drafting)
    give_back()
    pool_bytes = (size.num_pages + 1) * parts.page_bytes + size.state_bytes + drafting
    with LEDGER.claims:
        steps = Share("steps", step_bytes(config, spec) + waiting_bytes(config, spec, parts.head))
        check_pool(config, pool_bytes, state_bytes=size.state_bytes + drafting)
        runner = parts.runner(size.num_pages, size.num_snapshots)
    return CpuBackend(runner, steps), size


def _build_cuda(parts: Parts, progress: Progress | None) -> tuple[Backend, PoolSize]:
    config, spec = parts.config, parts.model.spec
    backend = CudaBackend(parts.device, parts.lane)
    shapes = parts.graph_shapes()
    budget = 0 if config.num_pages is not None else _measured_budget(parts, backend, shapes)
    size = size_pool(config, spec, parts.page_bytes, budget - parts.draft_state_bytes)
    backend.runner = runner = parts.runner(size.num_pages, size.num_snapshots)
    runner.warm_up()
    # What was made so far was enqueued elsewhere than on the stream of the steps.
    torch.cuda.synchronize(parts.device)
    if shapes:
        graphs = parts.graphs(runner, size.max_model_len, shapes)
        graphs.capture(backend.capture, progress and partial(progress, "graphs"))
        backend.rehearse(graphs.rehearse)
        runner.graphs = graphs
        backend.graphs = shapes
    # Again with the real pool, and last: torch keeps the memory that steps need, until something is captured.
    for packed in parts.largest_steps(size.max_model_len):
        backend.launch(packed).wait()
    parts.lane.clear()
    return backend, size


def _measured_budget(parts: Parts, backend: CudaBackend, shapes: GraphShapes) -> int:
    """Bytes for KV pages beside everything else, found out with a pool of one page."""
    config, positions = parts.config, parts.model.spec.max_model_len
    max_len = min(config.max_model_len or positions, positions)
    backend.runner = runner = parts.runner(1)
    torch.cuda.synchronize(parts.device)
    wanted = measure(
        backend,
        parts.largest_steps(max_len),
        partial(parts.graphs, runner, max_len),
        shapes,
    )
    backend.runner = None
    del runner
    # The trial's graphs are gone with its frame.
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(parts.device)
    wanted += image_bytes(config, parts.model.spec)
    return cuda_budget(total=total, free=free, wanted=wanted, utilization=config.gpu_memory_utilization)
