"""Rounds of blocks as graphs, on the stand-in for CUDA's: the blocks of the plain reference, nothing sent
while nothing changes, and padding that touches nobody."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aioinfer.config import EngineConfig
from aioinfer.diffusion.registry import usable_algorithms
from aioinfer.errors import ConfigError
from aioinfer.execution.backends import CudaBackend, Direct
from aioinfer.execution.decoding.block_graphs import BlockRows
from aioinfer.execution.decoding.blocks import BlockKind, BlockPacker
from aioinfer.execution.decoding.mirror import KEPT
from aioinfer.execution.device import Flight
from aioinfer.execution.grammar_worker import GrammarWorker
from aioinfer.execution.graph_shapes import GraphShape, GraphShapes
from aioinfer.execution.packing import Packer
from aioinfer.execution.torch_device import TorchDevice
from aioinfer.observe.timeline import DeviceLane
from aioinfer.params import DiffusionParams, SamplingParams
from aioinfer.sampling import filters
from aioinfer.scheduling.step import NewRequestData, Row, Step
from tests.execution.block_driver import Driven
from tests.execution.fake_cuda import FakeCudaDevice, install
from tests.execution.graphed_script import CPU, GraphedScript
from tests.execution.test_block_devices import KINDS, drive
from tests.execution.test_blocks import EVERY, MASK, Injected, World, first_row, row, step
from tests.execution.waits import WATCHING, waits
from tests.model.block_models import Plain, block_config, write_checkpoint
from tests.model.kernels import kernels_or_skip
from tests.tiers import EMULATED, INTERPRETER, SLOW_MODEL, grid, nightly


@pytest.fixture(autouse=True)
def filters_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the CPU ask tensors."""
    search = filters._floors_by_search
    monkeypatch.setattr(filters, "_floors_by_window", lambda *rows: search(*rows, True, True))


class GraphedWorld(World):
    device_type = GraphedScript
    device: GraphedScript


@nightly(EMULATED)
@pytest.mark.parametrize("ahead", grid([1], [0]))
def test_replayed_rounds_bring_the_blocks_of_the_reference(ahead: int) -> None:
    """Batches grow and shrink; rows turn, pair, commit and move; steps with known tokens are in between."""
    kinds, steps, replayed, resumed = set(), 0, 0, 0

    def move(request: Driven) -> None:
        nonlocal resumed
        resumed += request.state is not None
        world.move(request)

    for seed, algorithms in enumerate([EVERY, ["low_confidence"] * 5, ["joint_threshold"] * 5]):
        world = GraphedWorld(seed + 10 * ahead, algorithms, drawn=seed != 1, mean_steps=4.0, edits=8)
        junk = world.device.runner.decoding.table._table[0].clone()
        world.driver.run(4, ahead=ahead, move=move)
        world.check()
        now = world.device.runner.decoding.table._table[0]
        assert torch.equal(now, junk), "padding and second blocks do nothing"
        kinds |= world.driver.kinds
        steps += world.device.steps
        replayed += world.device.forwards_replayed
    assert {(False, 1), (False, 2), (True, 1)} <= {kind[:2] for kind in kinds}
    assert 40 < replayed < steps - 15, "some are no replays"
    assert resumed or ahead, "some went on elsewhere"


def with_temperature(world: World, **sampling: Any) -> None:
    """All requests of a world ask for the same."""
    for request in world.requests:
        diffusion = request.params.diffusion
        request.params = SamplingParams(**{"temperature": 0.0, **sampling}, diffusion=diffusion)


@pytest.mark.parametrize(
    ("kind", "sampling"),
    [
        ("greedy", {"top_k": 3, "top_p": 0.5}),
        ("drawn", {"temperature": 0.7}),
        ("filtered", {"temperature": 0.7, "top_p": 0.9}),
    ],
)
def test_a_round_replays_no_more_than_its_rows_ask_for(kind: str, sampling: dict[str, Any]) -> None:
    """Filters of greedy rows are none. The search of torch's operations is not captured."""
    world = GraphedWorld(3, ["low_confidence"] * 2, sizes=[3])
    with_temperature(world, **sampling)
    world.driver.run(3)
    world.check()
    replayed = {kind: count for kind, count in world.device.steps_replayed.items() if count}
    assert list(replayed) == ([] if kind == "filtered" else [kind])
    assert world.device.forwards_replayed > 2


@nightly(INTERPRETER)
@pytest.mark.parametrize("sampling", [{"temperature": 0.7}, {"temperature": 0.7, "top_p": 0.8, "top_k": 20}])
def test_replayed_kernels_propose_as_the_reference_does(
    monkeypatch: pytest.MonkeyPatch, sampling: dict[str, Any]
) -> None:
    """With every algorithm, alone in its rounds and beside the others; padding and second blocks included."""
    kernels_or_skip("cpu")
    from aioinfer.diffusion import triton_proposal
    from aioinfer.sampling.triton_lines import SampleTuning

    small = SampleTuning(chunk=16, groups=32, listed=4, list_tile=4, wide_tile=16, num_warps=1)
    monkeypatch.setattr(triton_proposal, "_TUNING", small)
    kind = "filtered" if "top_p" in sampling else "drawn"
    for seed, algorithms in enumerate([["joint_threshold"] * 2, ["entropy_bound", "factor"]]):
        world = GraphedWorld(50 + seed, algorithms, sizes=[4], kernels=True, mean_steps=2.0)
        with_temperature(world, **sampling)
        world.driver.run(1)
        world.check()
        assert world.device.steps_replayed[kind]


@nightly(EMULATED)
def test_requests_of_replays_that_fail_start_over() -> None:
    world = GraphedWorld(30, ["joint_threshold"] * 4)
    dice = random.Random(1)

    def fault(_: Any = None) -> None:
        if dice.random() < 0.15:
            raise Injected

    world.device.lm.fault = world.device.late_fault = fault
    world.driver.fails_with = Injected
    world.driver.run(4, ahead=1)
    world.check()
    assert world.driver.failures > 5


@nightly(EMULATED)
@pytest.mark.parametrize("ahead", grid([1], [0]))
def test_records_wait_for_the_host_and_not_in_the_memory_of_graphs(
    monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    """Behind the CUDA backend: graphs overwrite each other, and copies are late."""
    cuda = install(monkeypatch)
    assert KEPT >= CudaBackend.RING, "a step's records are kept until its place in the ring is taken"
    world = GraphedWorld(41, ["joint_threshold", "low_confidence"] * 2, drawn=True, sizes=[2, 6])
    backend = CudaBackend(CPU, DeviceLane())
    backend.runner = world.device.graphed(backend.capture, synchronous=False)
    packer = world.device._packer

    def launch(planned: Step) -> Flight:
        packed = packer.pack(planned)
        world.device.lm.order = packed.work.rows
        return backend.launch(packed)

    world.driver.launch = launch
    world.driver.run(4, ahead=ahead)
    world.check()
    assert sum(recording.replays for recording in cuda.recordings) > 20


# -- real models ---------------------------------------------------------------------------------------


def config(path: Path, **changes: Any) -> EngineConfig:
    settings: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "attention_backend": "triton",
        "block_size": 4,
        "page_size": 4,
        "num_pages": 80,
        "max_running_requests": 2,
        "max_step_tokens": 8,
        "max_model_len": 32,
        **changes,
    }
    return EngineConfig(model=str(path), **settings)


@nightly(SLOW_MODEL)
@pytest.mark.parametrize(("family", "layers"), [("llada2", 1), ("sdar", 2)])
def test_replayed_models_denoise_as_they_are_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, layers: int
) -> None:
    """On pages full of NaN, the null page's among them, and with padding in nearly every step."""
    kernels_or_skip("cpu")
    shape = block_config(family, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=1)
    if family == "llada2":
        shape |= {
            "num_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 0,
        }
    tensors = write_checkpoint(tmp_path, shape)
    cuda = install(monkeypatch)
    monkeypatch.setattr(
        BlockKind, "graph_shapes", lambda self, config: GraphShapes([GraphShape(config.round_rows(2))])
    )
    experts = "triton" if family == "llada2" else "auto"
    device = FakeCudaDevice(config(tmp_path, moe_backend=experts, block_size=2))
    info = device.open()
    runner: Any = device._backend.runner  # type: ignore[union-attr]
    for store in runner.attention._pool.keys + runner.attention._pool.values:
        store.fill_(float("nan"))
    before = sum(recording.replays for recording in cuda.recordings)
    drive(device, info, 1, Plain(shape, tensors, 2), KINDS[:2], size=2, blocks=2)
    assert sum(recording.replays for recording in cuda.recordings) > before + 10
    device.close()


@nightly(SLOW_MODEL)
def test_the_pool_leaves_room_for_what_a_trial_capture_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels_or_skip("cpu")
    write_checkpoint(tmp_path, block_config("sdar", num_hidden_layers=1, num_attention_heads=2))
    cuda = install(monkeypatch)
    settings = config(tmp_path, num_pages=None, max_model_len=8, block_size=2, decode_graph_rows=2)
    info = FakeCudaDevice(settings).open()
    assert info.num_pages == 2 * 8 // 4
    # With a temperature, too, for the rows are few, but not with filters, for there are no kernels.
    each = 1 + 2 * len(usable_algorithms(None))
    assert len(cuda.recordings) == 4 * each, "two sizes for trial, and again to stay"


# -- what is sent --------------------------------------------------------------------------------------

PAGES, ROWS, SIZE = 6, 6, 4


def block_packer(num_slots: int) -> Packer:
    return Packer(BlockPacker(num_slots, SIZE, MASK), num_slots, PAGES, SIZE)


def needed_rounds(*planned: Row) -> int:
    """Blocks that a graph has room for which computes a step of these rows; 0: none does."""
    need = BlockPacker(3, SIZE, MASK).graph_need(step(1, *planned))
    return 0 if need is None else need.rows


def fail() -> None:
    raise Injected


class Transfer(Direct):
    """Counts."""

    sent = 0

    def send(self, array: Any) -> torch.Tensor:
        self.sent += 1
        return super().send(array.copy())


def test_rounds_that_go_on_send_nothing_and_changes_send_once() -> None:
    world = GraphedWorld(0, ["low_confidence"] * 3, mean_steps=8.0, variation=0.0)
    size, runner, link = world.size, world.device.runner, Transfer(CPU)
    for request in world.requests:
        request.prompt = list(range(size))
        request.params = SamplingParams(temperature=0.0, diffusion=DiffusionParams(threshold=0.9))
    number = 0

    def sent(*rows: Row) -> int:
        nonlocal number
        number += 1
        packed = world.device._packer.pack(step(number, *rows))
        world.device.lm.order, before = packed.work.rows, link.sent
        runner.run(packed, link)
        return link.sent - before

    sent(*(first_row(request, size) for request in world.requests))
    rounds = [row(request, size, size) for request in world.requests]
    assert sent(*rounds) == 1
    assert [sent(*rounds) for _ in range(2)] == [0, 0]
    assert sent(rounds[0], rounds[2]) == 1, "a row left"
    assert sent(rounds[0], rounds[2]) == 0
    assert sent(rounds[0], row(world.requests[2], size, 2 * size, blocks=2)) == 1, "a row has another block"
    assert sent(rounds[0], rounds[2]) == 1, "and has it no more"
    assert sent(*rounds) == 1
    world.device.lm.fault = fail
    with pytest.raises(Injected):
        sent(*rounds)
    world.device.lm.fault = None
    assert sent(*rounds) == 1, "after a failure nothing is known"
    assert world.device.forwards_replayed == 10


@pytest.mark.parametrize("seed", range(20))
def test_after_any_history_the_device_holds_what_the_step_says(seed: int) -> None:
    rng, send = random.Random(seed), Transfer(CPU).send
    packer, rows = block_packer(9), BlockRows(ROWS, PAGES, SIZE, CPU)
    params = SamplingParams(temperature=0.0)
    nobody: Any = SimpleNamespace(key=1)
    for number in range(40):
        planned, total = [], 0
        for slot in rng.sample(range(1, 9), rng.randint(1, ROWS)):
            blocks = rng.choice([1, 1, 2])
            if (total := total + blocks) > ROWS:
                break
            start = SIZE * rng.randint(0, PAGES - blocks)
            admission = NewRequestData(params, 1, frozenset(), [1] * (start + 1), ())
            pages = [rng.randint(1, 90) for _ in range(PAGES)]
            planned.append(
                row(
                    nobody,
                    start,
                    SIZE * blocks,
                    slot=slot,
                    new_pages=pages,
                    new_request=admission,
                    blocks=blocks,
                )
            )
        packed = packer.pack(step(number, *planned))
        rounds = needed_rounds(*planned)
        assert rounds == sum(each.blocks for each in planned)
        if rng.random() < 0.1:
            rows.forget()
            for held in (rows.slots, rows.ends, rows.to_second, rows.table):
                held.random_(0, 5)
        rows.update(packed, send)
        slots, ends, to_second = rows.slots.tolist(), rows.ends.tolist(), rows.to_second.tolist()
        count = len(planned)
        assert slots == [each.slot for each in planned] + [0] * (ROWS - count), seed
        used = set(range(count))
        for at, each in enumerate(planned):
            assert ends[at] == each.start + SIZE, seed
            mine = [at]
            if each.blocks == 2:
                mine.append(at + to_second[at])
                assert ends[mine[1]] == each.start + 2 * SIZE, seed
            else:
                assert not to_second[at], seed
            used |= set(mine)
            for held in mine:
                needed = ends[held] // SIZE
                assert rows.table[held, :needed].tolist() == list(each.new_pages)[:needed], seed
        assert len(used) == rounds, seed
        assert all(not ends[at] and not to_second[at] for at in range(ROWS) if at not in used), seed


@pytest.mark.parametrize("most", [0, 1, 5, 8, 9, 13, 64, 100])
def test_sizes_reach_the_most_and_waste_at_most_a_quarter(most: int) -> None:
    spec: Any = SimpleNamespace(block_size=SIZE, mask_token_id=MASK)
    config = EngineConfig(max_running_requests=100, decode_graph_rows=most)
    sizes = sorted(rows for rows, *_ in BlockKind(spec).graph_shapes(config))
    assert sizes == sorted(set(sizes))
    assert max(sizes, default=0) == most
    for rows in range(1, most + 1):
        assert min(size for size in sizes if size >= rows) <= 1.25 * rows


@pytest.mark.parametrize(
    ("rows", "rounds"), [(((4, 4, 1),), 1), (((4, 8, 2), (0, 4, 1)), 3), (((0, 8, 1), (4, 4, 1)), 0)]
)
def test_steps_with_known_tokens_are_no_rounds(rows: tuple[tuple[int, int, int], ...], rounds: int) -> None:
    nobody: Any = SimpleNamespace(key=1)
    planned = [
        row(nobody, start, length, slot=slot, ids=[1] * (length - blocks * SIZE), blocks=blocks)
        for slot, (start, length, blocks) in enumerate(rows, 1)
    ]
    assert needed_rounds(*planned) == rounds


# -- on a GPU ------------------------------------------------------------------------------------------


@pytest.mark.gpu
@WATCHING
@pytest.mark.parametrize("kinds", [KINDS, KINDS[:1] * 4, KINDS[1:2] * 4])
@pytest.mark.parametrize("family", ["llada2", "sdar", "sdar_moe"])
def test_on_cuda_replayed_models_denoise_as_they_are_described(
    tmp_path: Path, family: str, kinds: list[dict[str, Any]]
) -> None:
    """And launching them does not wait for the device, once everything is compiled."""
    shape = block_config(family, num_hidden_layers=2)
    tensors = write_checkpoint(tmp_path, shape)
    settings = {
        "device": "cuda",
        "attention_backend": "auto",
        "max_running_requests": 8,
        "max_step_tokens": 64,
    }
    device = TorchDevice(config(tmp_path, decode_graph_rows=8, **settings))
    info = device.open()
    runner: Any = device._backend.runner  # type: ignore[union-attr]
    assert runner.graphs is not None
    launch_step = device.launch
    for allowed in (True, False):

        def watched(prepared: Any, allowed: bool = allowed) -> Flight:
            with waits(allowed):
                return launch_step(prepared)

        device.launch = watched  # type: ignore[method-assign]
        drive(device, info, 1, Plain(shape, tensors, 4), kinds, size=4)
    device.close()


def test_more_than_one_round_a_step_is_refused_where_it_does_nothing() -> None:
    spec: Any = SimpleNamespace(block_size=SIZE, mask_token_id=MASK)
    with pytest.raises(ConfigError, match="max_rounds is 4; on cuda"):
        BlockKind(spec).decoding(EngineConfig(max_rounds=4), torch.device("cuda"), GrammarWorker())
