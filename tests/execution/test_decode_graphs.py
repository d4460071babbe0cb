"""Decode graphs, on the stand-in for CUDA's: the same tokens, nothing sent while nothing changes, and padding
that touches nobody."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.execution.decoding.relay import Relay
from aioinfer.execution.decoding.sampling_metadata import SamplingTable
from aioinfer.execution.decoding.token_graphs import DecodeRows
from aioinfer.execution.decoding.tokens import TokenDecoding, TokenKind, TokenPacker
from aioinfer.execution.grammar_worker import GrammarWorker
from aioinfer.execution.graph_shapes import GraphShape, GraphShapes
from aioinfer.execution.graphs import StepGraphs, graphs_unsupported
from aioinfer.execution.launcher import InlineLauncher, ThreadLauncher
from aioinfer.execution.packed import PackedStep
from aioinfer.execution.packing import Packer
from aioinfer.execution.torch_device import TorchDevice
from aioinfer.model.batch import Batch
from aioinfer.params import SamplingParams
from aioinfer.sampling.batch import WIDE_TOP_K
from aioinfer.sampling.sampler import Sampler
from aioinfer.scheduling.step import Generating, NewRequestData, Step, TableUpdate
from tests.execution.recording import Recording, record
from tests.model.checkpoints import greedy, greedy_each
from tests.model.kernels import kernels_or_skip
from tests.model.test_oracle import prompts
from tests.tiers import EMULATED, SLOW_MODEL, nightly, points

TOKENS = 4


class GraphedDevice(TorchDevice):
    """The CPU device with decode graphs."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.graphs: list[Recording] = []

    def _capture(self, call: Callable[[], None]) -> Recording:  # type: ignore[override]
        self.graphs.append(record(call))
        return self.graphs[-1]


def config(path: Path, **changes: Any) -> EngineConfig:
    return EngineConfig(
        **{
            "model": str(path),
            "dtype": "float32",
            "device": "cpu",
            "attention_backend": "triton",
            "sampling_backend": "triton",
            "num_pages": 40,
            "page_size": 4,
            "max_running_requests": 5,
            "max_model_len": 64,
            "prefill_graph_tokens": 0,
            **changes,
        }
    )


async def ids(
    settings: EngineConfig, requests: list[tuple[list[int], SamplingParams]], device: TorchDevice
) -> list[list[int]]:
    launcher = ThreadLauncher if settings.launch_mode == "thread" else InlineLauncher
    async with Engine(settings, launcher=lambda _: launcher(device)) as engine:
        results = await asyncio.gather(*[engine.generate(*request) for request in requests])
    return [result.token_ids for result in results]


@pytest.fixture
def model(checkpoint: Callable[[str], tuple[Path, Any]]) -> tuple[Path, Any]:
    kernels_or_skip("cpu")
    return checkpoint("llama-mqa")


@nightly(EMULATED)
@pytest.mark.parametrize(("window", "mode"), points([(1, "inline")], [(0, "thread"), (2, "thread")]))
async def test_replayed_steps_give_the_tokens_of_transformers(
    model: tuple[Path, Any], window: int, mode: str
) -> None:
    path, oracle = model
    settings = config(path, overlap_steps=window, launch_mode=mode)
    device = GraphedDevice(settings)
    batch = prompts(3, 5)
    requests = [
        (prompt, SamplingParams(temperature=0, max_tokens=TOKENS + at, ignore_eos=True))
        for at, prompt in enumerate(batch)
    ]
    found = await ids(settings, requests, device)
    assert found == greedy_each(oracle, batch, range(TOKENS, TOKENS + 5), found)
    assert sum(graph.replays for graph in device.graphs) >= TOKENS


@nightly(SLOW_MODEL)
async def test_every_kind_of_row_has_the_tokens_it_has_without_graphs(model: tuple[Path, Any]) -> None:
    path, _ = model
    kinds: list[dict[str, Any]] = [
        {"top_k": 20, "top_p": 0.9},
        {"temperature": 2.0, "min_p": 0.01},
        {"frequency_penalty": 1.5, "repetition_penalty": 1.2},
        {"logprobs": 3},
        {"logit_bias": {7: 4.0}, "allowed_token_ids": list(range(60))},
        {"temperature": 0.0, "min_tokens": 3, "stop_token_ids": list(range(0, 200, 2))},
    ]
    requests = [
        (prompt, SamplingParams(**{"seed": at, "max_tokens": TOKENS, "ignore_eos": True, **kind}))
        for at, (prompt, kind) in enumerate(zip(prompts(7, len(kinds)), kinds, strict=True))
    ]
    settings = config(path, overlap_steps=1)
    plain = await ids(settings, requests, TorchDevice(settings))
    assert await ids(settings, requests, GraphedDevice(settings)) == plain


@nightly(EMULATED)
@pytest.mark.parametrize(
    ("variant", "asked"),
    points(
        [("wide", {"top_p": 0.99})],
        [("greedy", {"temperature": 0.0, "top_p": 0.9}), ("drawn", {"top_k": 20}), (None, {"top_k": 2000})],
        SLOW_MODEL,
    ),
)
async def test_a_step_replays_the_variant_that_its_rows_ask_for(
    model: tuple[Path, Any], variant: str | None, asked: dict[str, Any]
) -> None:
    """Where a list of candidates may be too short, the one that searches the whole row; or none."""
    settings = config(model[0], overlap_steps=1, max_running_requests=2)
    requests = [
        (prompts(5, 1)[0], SamplingParams(**{"seed": 3, "max_tokens": TOKENS, "ignore_eos": True, **asked}))
    ]
    plain = await ids(settings, requests, TorchDevice(settings))
    device = GraphedDevice(settings)
    async with Engine(settings, launcher=lambda _: ThreadLauncher(device)) as engine:
        result = await engine.generate(*requests[0])
        runner: Any = device._backend._runner  # type: ignore[union-attr]
        replayed = {kind for (_, kind), graph in runner.graphs._steps.items() if graph.replays}
        forwards = sum(graph.replays for graph in runner.graphs._forwards.values())
    assert [result.token_ids] == plain
    assert replayed == ({variant} if variant else set())
    assert forwards >= TOKENS - 1


@pytest.mark.parametrize(
    ("asked", "wide"),
    [
        ({"temperature": 0.0, "top_p": 0.5}, (False, False)),
        ({"top_p": 0.5}, (True, False)),
        ({"top_p": 0.5, "top_k": 20}, (False, False)),
        ({"min_p": 0.5}, (False, False)),
        ({"top_k": WIDE_TOP_K}, (False, False)),
        ({"top_k": WIDE_TOP_K + 1, "top_p": 0.5}, (False, True)),
    ],
)
def test_the_host_knows_which_rows_may_keep_more_than_a_list_holds(
    asked: dict[str, Any], wide: tuple[bool, bool]
) -> None:
    """Also if other rows do not."""
    table = SamplingTable(3)
    for slot, params in enumerate(({"temperature": 0.0}, asked, {"top_k": 1}), 1):
        table.admit(slot, NewRequestData(SamplingParams(**params), slot, frozenset(), [1, 2], ()))
    found = table.metadata(np.array([1, 2, 3]))
    assert (found.wide_nucleus, found.wide_top_k) == wide
    found = table.metadata(np.array([1, 3]))
    assert (found.wide_nucleus, found.wide_top_k) == (False, False)


@nightly(SLOW_MODEL)
async def test_retraction_and_a_new_tenant_of_the_row_change_nothing(model: tuple[Path, Any]) -> None:
    """Few pages: requests lose theirs in the middle, slots and rows change hands."""
    path, oracle = model
    settings = config(path, overlap_steps=1, num_pages=19, max_running_requests=3, prefix_cache=False)
    batch = [list(range(at, at + 30)) for at in range(4)]
    wanted = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    async with Engine(settings, launcher=lambda _: ThreadLauncher(GraphedDevice(settings))) as engine:
        results = await asyncio.gather(*[engine.generate(prompt, wanted) for prompt in batch])
        assert engine.stats().retractions > 0
    assert [result.token_ids for result in results] == [greedy(oracle, prompt, 9) for prompt in batch]


# -- what is sent --------------------------------------------------------------------------------------

PAGES, PAGE, ROWS = 6, 4, 5


class Sender:
    def __init__(self) -> None:
        self.sent = 0

    def __call__(self, array: Any) -> torch.Tensor:
        self.sent += 1
        return torch.from_numpy(array.copy())


def admitted(slots: int) -> Packer:
    packer = Packer(TokenPacker(slots), slots, PAGES, PAGE, GraphShapes([GraphShape(ROWS)]))
    for slot in range(1, slots + 1):
        params = SamplingParams(temperature=slot / 8, top_p=1 / slot, top_k=slot, min_p=0.0)
        packer._rows.admit({slot: NewRequestData(params, 1000 + slot, frozenset(), [1], [])})
    return packer


def decode(packer: Packer, rows: dict[int, int], tables: list[TableUpdate]) -> PackedStep:
    """A step of these slots at these positions."""
    nobody: list[Any] = [None] * len(rows)
    slots, starts = (np.array([*each], np.int64) for each in (rows.keys(), rows.values()))
    return packer.pack(Step(1, Generating(nobody, slots, starts, tables=tables), (), len(rows)))


def test_rows_that_go_on_send_nothing_and_changes_send_once() -> None:
    packer, rows, send = admitted(4), DecodeRows(ROWS, PAGES, torch.device("cpu")), Sender()
    assert rows.update(decode(packer, {3: 0, 1: 0}, [(3, 0, [7]), (1, 0, [9])]), send)
    for position in range(1, PAGE):
        rows.moved_on()
        assert not rows.update(decode(packer, {3: position, 1: position}, []), send)
    assert send.sent == 1
    rows.moved_on()
    assert rows.update(decode(packer, {3: PAGE, 1: PAGE}, [(3, 1, [8]), (1, 1, [2])]), send)
    rows.moved_on()
    assert rows.update(decode(packer, {1: PAGE + 1}, []), send), "a row left"
    assert send.sent == 3
    rows.forget()
    assert rows.update(decode(packer, {1: PAGE + 1}, []), send), "after a failure nothing is known"


def test_after_a_failure_a_seed_is_sent_whatever_it_is() -> None:
    """Every integer may be one."""
    packer, rows, send = admitted(2), DecodeRows(ROWS, PAGES, torch.device("cpu")), Sender()
    for seed, slot in ((-1, 1), (-(2**63), 2)):
        packer._rows.admit({slot: NewRequestData(SamplingParams(), seed, frozenset(), [1], [])})
    rows.update(decode(packer, {2: 0, 1: 0}, [(2, 0, [7]), (1, 0, [9])]), send)
    rows.forget()
    rows.seeds.fill_(5)
    rows.update(decode(packer, {1: 1, 2: 1}, []), send)
    assert rows.seeds[:2].tolist() == [-1, -(2**63)]


class Model:
    """Keeps the batch of the forward that is captured, and likes the token behind each row's own."""

    capturable = True
    invariant = True
    seconds: Mapping[str, float] = MappingProxyType({})
    spec: Any = SimpleNamespace(vocab_size=64)

    def forward(self, batch: Batch, attention: Any) -> torch.Tensor:
        self.batch = batch
        return torch.nn.functional.one_hot(batch.input_ids + 1, 64).float()


@nightly(EMULATED)
@torch.inference_mode()
def test_a_replay_moves_its_rows_on_and_padding_stays_where_it_is() -> None:
    kernels_or_skip("cpu")
    cpu, model = torch.device("cpu"), Model()
    relay, packer, send = Relay(4, cpu), admitted(4), Sender()
    attention: Any = None
    decoding = TokenDecoding(Sampler(4, 64, cpu, "triton"), relay, GrammarWorker())
    shapes = GraphShapes([GraphShape(ROWS)])
    captured = decoding.captured(model, attention, shapes=shapes, max_pages=PAGES, page_size=PAGE)
    graphs = StepGraphs(captured, shapes)
    graphs.capture(record)
    graphs.rehearse()
    relay.scatter(torch.tensor([2]), torch.tensor([10]))
    packer._rows.admit({2: NewRequestData(SamplingParams(temperature=0), 1, frozenset(), [1], [])})
    for position in range(PAGES * PAGE):
        pages = [(2, position // PAGE, [50 + position // PAGE])] if position % PAGE == 0 else []
        step = decode(packer, {2: position}, pages)
        assert step.shape == GraphShape(ROWS)
        graphs.forward(step, step.shape, send)
        assert graphs.logits(step).shape == (1, 64)
        output = graphs.finish(step)
        assert output is not None
        assert output.tensors[0].tolist() == [11 + position]
        batch = model.batch
        assert batch.input_ids.tolist()[0] == 10 + position
        padding = [0] * (ROWS - 1)
        assert batch.positions.tolist() == [position, *padding]
        assert batch.kv_len.tolist() == [position + 1, *padding]
        assert batch.slot_mapping.tolist() == [(50 + position // PAGE) * PAGE + position % PAGE, *padding]
    assert send.sent == PAGES


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("seed", range(10))
def test_after_any_history_the_device_holds_what_the_step_says(seed: int, ahead: int) -> None:
    """However many steps later the host is, whose rows have other tenants and pages by then."""
    random = np.random.default_rng(seed)
    packer, rows = admitted(8), DecodeRows(ROWS, PAGES, torch.device("cpu"))
    send, packed = Sender(), deque[tuple[PackedStep, dict[int, int], list[list[int]]]]()
    for _ in range(80):
        count = int(random.integers(1, ROWS + 1))
        chosen = (1 + random.permutation(8)[:count]).tolist()
        positions = {slot: int(random.integers(0, PAGES * PAGE)) for slot in chosen}
        if random.random() < 0.3:
            packer._tables.update([chosen[-1]], [])
        first = int(random.integers(0, PAGES))
        tables: list[TableUpdate] = [
            (slot, first, random.integers(1, 90, PAGES - first).tolist()) for slot in chosen[:2]
        ]
        step = decode(packer, positions, tables)
        packed.append((step, positions, packer._tables._tables[chosen].tolist()))
        if len(packed) <= ahead:
            continue
        step, positions, pages = packed.popleft()
        chosen, count = [*positions], len(positions)
        if random.random() < 0.1:
            rows.forget()
            for held in (rows.slots, rows.starts, rows.table):
                held.random_(0, 5)
        rows.update(step, send)
        assert rows.slots.tolist() == chosen + [0] * (ROWS - count), seed
        assert rows.starts[:count].tolist() == list(positions.values()), seed
        assert rows.seeds[:count].tolist() == [1000 + slot for slot in chosen], seed
        assert rows.top_k[:count].tolist() == chosen, seed
        assert rows.temperature[:count].tolist() == [slot / 8 for slot in chosen], seed
        assert rows.table[:count].tolist() == pages, seed
        rows.moved_on()
        rows.starts += rows.slots > 0


# -- choices -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [0, 1, 2, 3, 5, 8, 9, 64, 100])
def test_sizes_reach_the_most_and_waste_at_most_seven_rows(most: int) -> None:
    spec: Any = SimpleNamespace(states=(), generates=True)
    config = EngineConfig(max_running_requests=100, decode_graph_rows=most)
    sizes = sorted(rows for rows, tokens, _ in TokenKind(spec).graph_shapes(config) if not tokens)
    assert sizes == sorted(set(sizes))
    assert max(sizes, default=0) == most
    for rows in range(1, most + 1):
        assert min(size for size in sizes if size >= rows) - rows <= 7


def test_graphs_need_cuda_kernels_that_ask_the_host_nothing_and_a_model_of_our_own() -> None:
    cuda: Any = SimpleNamespace(type="cuda")
    assert graphs_unsupported(cuda, "triton", True) is None
    assert graphs_unsupported(cuda, "triton", True, "triton") is None
    assert "cpu" in (graphs_unsupported(torch.device("cpu"), "triton", True) or "")
    assert "sdpa" in (graphs_unsupported(cuda, "sdpa", True) or "")
    assert "experts" in (graphs_unsupported(cuda, "triton", True, "grouped") or "")
    assert "transformers" in (graphs_unsupported(cuda, "triton", False) or "")
