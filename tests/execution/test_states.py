"""Cells of recurrent state from the plan to the model: sections, pools, graphs, and the memory they take."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.errors import ConfigError, OutOfMemory
from aioinfer.execution.build import fitted
from aioinfer.execution.decoding.blocks import BlockKind
from aioinfer.execution.decoding.tokens import TokenPacker
from aioinfer.execution.device import Progress
from aioinfer.execution.launcher import InlineLauncher
from aioinfer.execution.packing import Packer
from aioinfer.execution.sizing import PoolSize, fewer_requests, fit_states, size_pool, stashed_drafts
from aioinfer.execution.torch_device import TorchDevice
from aioinfer.model.attention.pool import KVShape
from aioinfer.model.batch import Batch
from aioinfer.model.spec import ModelSpec
from aioinfer.model.state import StateShape
from aioinfer.params import SamplingParams
from aioinfer.scheduling.step import Generating, NewRequestData, Step
from aioinfer.speculation.drafter import DraftRequest
from tests.execution.fake_cuda import FakeCudaDevice, install
from tests.model.kernels import kernels_or_skip
from tests.scheduling.desk import Desk
from tests.tiers import SECONDS, points, rest

VOCAB, ODD = 61, 1_000_003
SPEC = ModelSpec(
    architecture="Running",
    num_layers=1,
    kv_layers=(KVShape(1, 8),),
    hidden_size=8,
    vocab_size=VOCAB,
    max_model_len=256,
    dtype=torch.float32,
    eos_token_ids=frozenset(),
    num_parameters=0,
    states=(StateShape((2,), torch.int64), StateShape((), torch.float32)),
)


def move(state: int, token: int) -> int:
    return (state * 31 + token + 7) % ODD


class Running:
    """A "model" whose state is a number that every token moves on, and which likes one token by it."""

    capturable = True
    encoder = None
    invariant = True
    seconds: Mapping[str, float] = MappingProxyType({})
    spec = SPEC

    def forward(self, batch: Batch, attention: Any) -> torch.Tensor:
        states = batch.states
        assert states is not None
        numbers, counts = states.pool.tensors
        live = (states.read > 0).to(torch.int64)
        rows, starts = numbers[states.read] * live[:, None], counts[states.read] * live
        ids = states.extend(0, batch.input_ids[:, None].float(), batch)[:, 0].long()
        decodes, lengths = states.lengths(batch)
        lengths = [*[(1, 1)] * decodes, *lengths]
        wanted, left = [], rows.clone()
        for row, (count, kept) in enumerate(lengths):
            for position in range(count):
                rows[row, 0] = (rows[row, 0] * 31 + ids[len(wanted)] + 7) % ODD
                wanted.append(rows[row, 0] % VOCAB)
                if position + 1 == kept:
                    left[row] = rows[row]
        numbers.index_copy_(0, states.write, left)
        counts.index_copy_(0, states.write, starts + torch.tensor([kept for _, kept in lengths]))
        if batch.hidden_rows is not None:
            batch.hidden = torch.zeros(len(batch.hidden_rows), 1)
        likes = torch.nn.functional.one_hot(torch.stack(wanted), VOCAB).float()
        return states.own(likes, batch)[batch.logits_rows]


def generated(prompt: list[int], count: int) -> list[int]:
    state = 0
    for token in prompt:
        state = move(state, token)
    found: list[int] = []
    while len(found) < count:
        found.append(state % VOCAB)
        state = move(state, found[-1])
    return found


class StatefulDevice(TorchDevice):
    def _load(self, device: torch.device, progress: Progress | None) -> Any:
        return Running()


class GraphedDevice(StatefulDevice, FakeCudaDevice):
    """Of which decode steps are captured and replayed."""


class Verifying(Running):
    """The same, which can take in drafts later."""

    spec = replace(SPEC, states=tuple(each._replace(inputs=1) for each in SPEC.states))


class VerifyingDevice(TorchDevice):
    def _load(self, device: torch.device, progress: Progress | None) -> Any:
        return Verifying()


class GraphedVerifyingDevice(VerifyingDevice, FakeCudaDevice):
    """Of which decode steps are captured and replayed."""


class Sometimes:
    """Is right about some of the next tokens."""

    def __init__(self) -> None:
        self._rng = random.Random(3)

    def propose(self, request: DraftRequest, most: int) -> list[int]:
        found = generated(request.tokens.tolist(), most)
        right = self._rng.randrange(most + 1)
        return [*found[:right], *((token + 1) % VOCAB for token in found[right:])]


@rest(SECONDS)
@pytest.mark.parametrize("graphed", [False, True])
async def test_a_stateful_model_verifies_drafts(monkeypatch: pytest.MonkeyPatch, graphed: bool) -> None:
    """Steps behind those with drafts that were right are not replayed; all that follow are."""
    if graphed:
        kernels_or_skip("cpu")
        cuda = install(monkeypatch)
    settings = EngineConfig(
        model="running",
        speculation="lookup",
        device="cpu",
        attention_backend="sdpa",
        sampling_backend="triton" if graphed else "torch",
        page_size=4,
        num_pages=40,
        max_running_requests=4,
        max_draft_tokens=3,
        adaptive_drafts=False,
    )
    wanted = SamplingParams(temperature=0, max_tokens=30)
    prompts = [list(range(1, 3 + at)) for at in range(6)]
    device = (GraphedVerifyingDevice if graphed else VerifyingDevice)(settings)
    engine = Engine(
        settings,
        launcher=lambda _: InlineLauncher(device),
        tokenizer=lambda _: None,
        drafter=Sometimes(),
    )
    async with engine:
        results = await asyncio.gather(*[engine.generate(prompt, wanted) for prompt in prompts])
        assert [result.token_ids for result in results] == [generated(each, 30) for each in prompts]
        stats, info = engine.stats(), engine.info
    assert stats.accepted_tokens > 40
    assert stats.rejected_tokens > 40
    assert info.state_bytes == (settings.num_slots + 5) * 20 + (settings.num_slots + 1) * 3 * 2 * 4
    if graphed:
        assert any(graph.replays for graph in cuda.recordings)


@rest(SECONDS)
@pytest.mark.parametrize(
    ("changes", "graphed"),
    points(
        [({}, False), ({"state_snapshots": 1}, False), ({"prefix_cache": False}, False), ({}, True)],
        [({"chunk_size": 5}, False), ({"state_snapshots": 1, "overlap_steps": 2}, True)],
    ),
)
async def test_a_stateful_model_gives_its_tokens(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], graphed: bool
) -> None:
    if graphed:
        kernels_or_skip("cpu")
        cuda = install(monkeypatch)
    settings = EngineConfig(
        model="running",
        speculation="lookup",
        device="cpu",
        attention_backend="sdpa",
        sampling_backend="triton" if graphed else "torch",
        page_size=4,
        num_pages=40,
        max_running_requests=4,
        state_snapshot_tokens=1,
        **changes,
    )
    rng, common = random.Random(5), list(range(1, 19))
    prompts = [[*common[: rng.choice([0, 9, 18])], *rng.choices(range(VOCAB), k=at + 1)] for at in range(9)]
    wanted = SamplingParams(temperature=0, max_tokens=12)
    device = (GraphedDevice if graphed else StatefulDevice)(settings)
    engine = Engine(settings, launcher=lambda _: InlineLauncher(device), tokenizer=lambda _: None)
    async with engine:
        for _ in range(2):
            results = await asyncio.gather(*[engine.generate(prompt, wanted) for prompt in prompts])
            assert [result.token_ids for result in results] == [generated(each, 12) for each in prompts]
        stats, info = engine.stats(), engine.info
    if graphed:
        assert sum(graph.replays for graph in cuda.recordings) > 12 + len(cuda.recordings)
    snapshots = 0 if "prefix_cache" in changes else changes.get("state_snapshots", 4)
    assert info.num_snapshots == snapshots
    assert info.state_bytes == (settings.num_slots + snapshots + 1) * 20
    assert (stats.snapshot_hits > 0) == (snapshots > 0)


# -- sections --------------------------------------------------------------------------------------------


def test_only_steps_with_chunks_say_which_cells() -> None:
    desk = Desk(snapshots=4)
    packers = [Packer(TokenPacker(12), 12, 64, 4, states=states) for states in (True, False)]
    sections = []
    request, other = desk.submit(11), desk.submit(3)
    for _ in range(3):
        desk.plan()
        sections.append([packer.pack(desk.flights[-1]).sections for packer in packers])
    (first, plain), (mixed, _), (decodes, plain_decodes) = sections
    slots, kept = [request.kv.slot, other.kv.slot], desk.memory.slots.total + 1
    assert (first["state_read"].tolist(), first["state_write"].tolist()) == ([0, 0], [kept, slots[1]])
    assert mixed["slots"].tolist() == slots[::-1]
    assert (mixed["state_read"].tolist(), mixed["state_write"].tolist()) == ([slots[1], kept], slots[::-1])
    assert decodes.ints.tolist() == plain_decodes.ints.tolist()
    assert "state_read" not in plain._names
    assert len(first.ints) == len(plain.ints) + 4


def test_steps_with_drafts_say_what_states_include_and_what_is_replayed() -> None:
    absent: Any = None
    slots, starts = np.asarray([3, 1, 2]), np.asarray([7, 5, 9])
    for drafts, replays in (([[4, 5]], [0, 2, 1]), ([], [0, 0, 3]), ([[4], [5, 6, 7]], None)):
        lengths = np.asarray([1] * (3 - len(drafts)) + [1 + len(each) for each in drafts])
        generating = Generating([absent] * 3, slots, starts, lengths if drafts else None, drafts=drafts)
        if replays is not None:
            generating.replays = np.asarray(replays)
        packer = Packer(TokenPacker(4), 4, 8, 4, states=True)
        new = NewRequestData(SamplingParams(), 0, frozenset(), (), ())
        generating.new_requests = dict.fromkeys(range(1, 4), new)
        packed = packer.pack(Step(1, generating, (), int(lengths.sum())))
        assert packed.replays is not None
        assert packed.kept is not None
        assert packed.kept.tolist() == [1, 1, 1]
        assert np.diff(packed.replays).tolist() == (replays or [0, 0, 0])
        assert "state_read" not in packed.sections._names


# -- memory ----------------------------------------------------------------------------------------------

CELL = 1000
BIG = replace(SPEC, states=(StateShape((CELL,), torch.uint8),), max_model_len=1000)


def sized(budget: int, **settings: Any) -> PoolSize:
    config = EngineConfig(**{"page_size": 10, "max_running_requests": 4, "overlap_steps": 1, **settings})
    return size_pool(config, BIG, 1000, budget)


@pytest.mark.parametrize(
    ("budget", "settings", "expected"),
    [
        (10**9, {}, PoolSize(400, 1000, 16, 25_000)),
        (49_000, {}, PoolSize(30, 300, 10, 19_000)),
        (49_000, {"state_snapshots": 0}, PoolSize(40, 400, 0, 9_000)),
        (49_000, {"state_snapshots": 30}, PoolSize(10, 100, 30, 39_000)),
        (49_000, {"prefix_cache": False}, PoolSize(40, 400, 0, 9_000)),
        (11_000, {}, PoolSize(2, 20, 0, 9_000)),
        (0, {"num_pages": 7}, PoolSize(7, 70, 4, 13_000)),
        (0, {"num_pages": 7, "state_snapshots": 50}, PoolSize(7, 70, 50, 59_000)),
    ],
)
def test_states_come_off_the_budget_of_the_pages(
    budget: int, settings: dict[str, Any], expected: PoolSize
) -> None:
    assert sized(budget, **settings) == expected


def test_what_drafts_bring_to_states_comes_off_the_budget_of_the_pages() -> None:
    """Of each slot and the null cell, but not of snapshots."""
    spec = replace(BIG, states=(StateShape((CELL,), torch.uint8, 25),))
    config = EngineConfig(page_size=10, max_running_requests=4, overlap_steps=1, max_draft_tokens=4)
    assert stashed_drafts(config, spec) == 4
    assert size_pool(config, spec, 1000, 10**9).state_bytes == 9 * (CELL + 4 * 25 * 4) + 16 * CELL
    assert fit_states(config, spec, 2 * 9 * 1400) is config
    assert fit_states(config, spec, 2 * 9 * 1400 - 1).max_running_requests == 3
    off = replace(config, speculation="off")
    assert size_pool(off, spec, 1000, 10**9).state_bytes == 25 * CELL
    assert stashed_drafts(config, BIG) == 0


def test_states_that_do_not_fit_name_the_setting() -> None:
    with pytest.raises(OutOfMemory, match=r"max_running_requests is 4: .* 8 slots"):
        sized(8_999)
    with pytest.raises(OutOfMemory, match="state_snapshots is 30"):
        sized(30_000, state_snapshots=30)
    with pytest.raises(OutOfMemory, match="not one KV page"):
        sized(9_500)


def test_as_many_requests_run_as_half_of_the_memory_has_states_for() -> None:
    """A state is 20 bytes, the null cell's included."""
    config = EngineConfig(max_running_requests=10, overlap_steps=1)
    assert fit_states(config, SPEC, 2 * 21 * 20) is config
    fitted = fit_states(config, SPEC, 2 * 20 * 20)
    assert (fitted.max_running_requests, fewer_requests(config, fitted)) == (9, 9)
    assert fewer_requests(config, config) is None
    assert fit_states(config, SPEC, 2 * 3 * 20).max_running_requests == 1
    with pytest.raises(OutOfMemory, match="recurrent state of one request"):
        fit_states(config, SPEC, 2 * 3 * 20 - 1)
    large = replace(SPEC, states=(StateShape((1 << 20,), torch.uint8),))
    with pytest.raises(OutOfMemory, match=r"take 3\.0 MiB, .* has 2\.5 MiB"):
        fit_states(config, large, 5 << 20)
    fixed = replace(config, num_pages=1)
    assert fit_states(fixed, SPEC, 0) is fixed
    stateless = replace(SPEC, states=())
    assert fit_states(config, stateless, 0) is config


class HeavyDevice(TorchDevice):
    def _load(self, device: torch.device, progress: Progress | None) -> Any:
        model = Running()
        model.spec = replace(SPEC, states=(StateShape((512,), torch.int64), SPEC.states[1]))
        return model


async def test_an_engine_runs_as_many_requests_as_it_has_states_for() -> None:
    """A state is 4100 bytes, and a request has two slots: half of 64 KiB has those of three requests."""
    settings = EngineConfig(
        model="running",
        speculation="lookup",
        device="cpu",
        page_size=4,
        kv_memory_gib=2**-14,
        max_running_requests=10,
    )
    device = HeavyDevice(settings)
    engine = Engine(settings, launcher=lambda _: InlineLauncher(device), tokenizer=lambda _: None)
    async with engine:
        assert (engine.info.max_running_requests, engine.info.num_snapshots) == (3, 2)
        assert "max_running_requests 3 (half of what kv_memory_gib gives" in engine.info.decisions
        most = 0
        streams = [
            engine.generate([at, 1, 2], SamplingParams(temperature=0, max_tokens=9)) for at in range(8)
        ]
        while not all(stream.done for stream in streams):
            most = max(most, engine.stats().running)
            await asyncio.sleep(0)
        assert most == 3
        for at, stream in enumerate(streams):
            assert (await stream).token_ids == generated([at, 1, 2], 9)


def test_a_diffusion_model_with_state_is_refused() -> None:
    spec = replace(SPEC, block_size=4, mask_token_id=3)
    with pytest.raises(ConfigError, match="recurrent state"):
        BlockKind(spec).fit(EngineConfig(model="running"))


@pytest.mark.parametrize(
    ("asked", "found"), [("lookup", "off"), ("auto", "off"), ("off", "off"), ("a-model", "a-model")]
)
def test_on_cuda_the_drafts_of_a_model_alone_are_verified(
    asked: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 30, 1 << 31))
    config = EngineConfig(speculation=asked)
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert fitted(config, Verifying.spec, cuda).speculation == found
    assert fitted(config, Verifying.spec, cpu).speculation == asked
    assert fitted(config, replace(SPEC, states=()), cuda).speculation == asked
