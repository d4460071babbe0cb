"""The CUDA backend on a stand-in for torch.cuda that copies as late as it may."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from aioinfer import errors
from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.execution import backends
from aioinfer.execution.build import Parts
from aioinfer.execution.launcher import InlineLauncher, ThreadLauncher
from aioinfer.execution.runner import Runner
from aioinfer.execution.torch_device import TorchDevice
from aioinfer.model import loader
from aioinfer.observe.timeline import DeviceLane
from aioinfer.outputs import Result
from aioinfer.params import SamplingParams
from aioinfer.scheduling.step import NO_ROWS, Generating, NewRequestData, Row, Step
from tests.execution.fake_cuda import Cuda, FakeCudaDevice, install
from tests.model.checkpoints import greedy, greedy_each
from tests.model.kernels import kernels_or_skip
from tests.tiers import EMULATED, SLOW_MODEL, nightly, points

TOKENS = 4


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    kernels_or_skip("cpu")
    return install(monkeypatch)


def config(path: Path, **changes: Any) -> EngineConfig:
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_running_requests": 4}
    settings |= {"attention_backend": "triton", "sampling_backend": "triton"}
    settings |= {"page_size": 4, "num_pages": 40, "max_model_len": 64, "max_step_tokens": 16}
    return EngineConfig(model=str(path), **{**settings, **changes})


def engine(settings: EngineConfig, device: TorchDevice) -> Engine:
    launcher = ThreadLauncher if settings.launch_mode == "thread" else InlineLauncher
    return Engine(settings, launcher=lambda _: launcher(device))


@pytest.fixture
def model(checkpoint: Callable[[str], tuple[Path, Any]]) -> tuple[Path, Any]:
    kernels_or_skip("cpu")
    return checkpoint("llama-mqa")


class Counted(FakeCudaDevice):
    """Counts the forwards that are no replays, and the replays since it was opened."""

    eager = 0

    def open(self, progress: Any = None) -> Any:
        info = super().open(progress)
        runner: Any = self._backend.runner  # type: ignore[union-attr]
        model, self.graphs = runner.model, runner.graphs

        def counted(batch: Any, attention: Any) -> torch.Tensor:
            self.eager += 1
            logits: torch.Tensor = model.forward(batch, attention)
            return logits

        runner.model = SimpleNamespace(spec=model.spec, forward=counted)
        return info

    @property
    def mixed_replays(self) -> int:
        # Each has been replayed once before the first step.
        return sum(graph.replays - 1 for shape, graph in self.graphs._forwards.items() if shape.tokens)


PROMPTS = [[5, 6, 7], list(range(40, 60)), [9], list(range(3, 20)), [11, 12]]


async def staggered(
    settings: EngineConfig, requests: list[tuple[list[int], SamplingParams]], device: TorchDevice
) -> list[Result]:
    """Each request begins when the one before has a token."""
    async with engine(settings, device) as running:
        streams = []
        for prompt, params in requests:
            streams.append(running.generate(prompt, params))
            async for _ in streams[-1]:
                break
        return [await stream for stream in streams]


@nightly(EMULATED)
@pytest.mark.parametrize(
    ("window", "mode", "count"), points([(1, "thread", 2)], [(0, "thread", 4), (2, "inline", 4)])
)
async def test_replays_and_late_copies_give_the_tokens_of_transformers(
    cuda: Cuda, model: tuple[Path, Any], window: int, mode: str, count: int
) -> None:
    """Prompts of a chunk and of several arrive beside decodes, and each step is a replay."""
    path, oracle = model
    settings = config(path, overlap_steps=window, launch_mode=mode, chunk_size=7, speculation="off")
    device = Counted(settings)
    wanted = SamplingParams(temperature=0, max_tokens=2 * count, ignore_eos=True)
    found = await staggered(settings, [(prompt, wanted) for prompt in PROMPTS[:count]], device)
    ids = [result.token_ids for result in found]
    assert ids == greedy_each(oracle, PROMPTS[:count], 2 * count, ids)
    assert device.mixed_replays >= 2 * count, "one of the short prompts, three of the others"
    assert device.eager == 0


@nightly(SLOW_MODEL)
async def test_every_kind_of_row_has_the_tokens_it_has_without_graphs(
    monkeypatch: pytest.MonkeyPatch, model: tuple[Path, Any]
) -> None:
    kinds: list[dict[str, Any]] = [
        {"top_k": 20, "top_p": 0.9},
        {"frequency_penalty": 1.5, "repetition_penalty": 1.2, "allowed_token_ids": list(range(60))},
        {"logit_bias": {7: 4.0}, "temperature": 2.0, "min_p": 0.01},
        {"logprobs": 3, "prompt_logprobs": 1},
        {"temperature": 0.0, "min_tokens": 3, "stop_token_ids": list(range(0, 200, 2)), "ignore_eos": False},
    ]
    requests = [
        (prompt, SamplingParams(**{"seed": at, "max_tokens": 6, "ignore_eos": True, **kind}))
        for at, (prompt, kind) in enumerate(zip(PROMPTS, kinds, strict=True))
    ]
    settings = config(model[0], overlap_steps=2, chunk_size=7, speculation="off")

    async def outputs(device: TorchDevice) -> list[Any]:
        # Padding is in the matrix products, and with it the last bits.
        return [
            (result.token_ids, [(each.token_id, round(each.logprob, 3)) for each in result.logprobs or ()])
            for result in await staggered(settings, requests, device)
        ]

    plain = await outputs(TorchDevice(settings))
    install(monkeypatch)
    device = Counted(settings)
    assert await outputs(device) == plain
    assert device.mixed_replays
    assert 0 < device.eager <= 6, "where a prompt is scored"


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
    monkeypatch: pytest.MonkeyPatch, model: tuple[Path, Any], variant: str | None, asked: dict[str, Any]
) -> None:
    """Where a list of candidates may be too short, the one that searches the whole row; or none."""
    settings = config(model[0], max_running_requests=2)
    params = SamplingParams(**{"seed": 3, "max_tokens": TOKENS, "ignore_eos": True, **asked})
    requests = [(PROMPTS[1], params)]
    (plain,) = await staggered(settings, requests, TorchDevice(settings))
    install(monkeypatch)
    device = Counted(settings)
    (result,) = await staggered(settings, requests, device)
    assert result.token_ids == plain.token_ids
    replayed = {kind for (_, kind), graph in device.graphs._steps.items() if graph.replays > 1}
    assert replayed == ({variant} if variant else set())
    assert device.eager == 0


@nightly(SLOW_MODEL)
async def test_drafts_are_verified_by_replays(cuda: Cuda, model: tuple[Path, Any]) -> None:
    path, oracle = model
    batch = [[5, 6, 7, 8] * 4, [11, 12, 13] * 4, [5, 6, 7, 8] * 3]
    settings = config(path, speculation="lookup", adaptive_drafts=False, max_draft_tokens=3)
    device = Counted(settings)
    wanted = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    async with engine(settings, device) as running:
        results = await asyncio.gather(*[running.generate(prompt, wanted) for prompt in batch])
        assert running.stats().drafted_tokens
    assert [result.token_ids for result in results] == [greedy(oracle, prompt, 14) for prompt in batch]
    assert device.eager == 0


@nightly(SLOW_MODEL)
async def test_retraction_and_a_new_tenant_of_the_row_change_nothing(
    cuda: Cuda, model: tuple[Path, Any]
) -> None:
    """Few pages: requests lose theirs in the middle, slots and rows change hands."""
    path, oracle = model
    settings = config(path, num_pages=19, max_running_requests=3, prefix_cache=False)
    batch = [list(range(at, at + 30)) for at in range(4)]
    wanted = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    async with engine(settings, FakeCudaDevice(settings)) as running:
        results = await asyncio.gather(*[running.generate(prompt, wanted) for prompt in batch])
        stats = running.stats()
    assert stats.retractions > 0
    assert 0 < stats.overlap_ratio <= 1
    assert [result.token_ids for result in results] == [greedy(oracle, prompt, 9) for prompt in batch]


@nightly(SLOW_MODEL)
async def test_without_a_number_of_pages_the_pool_is_sized_by_a_trial(
    cuda: Cuda, model: tuple[Path, Any]
) -> None:
    path, oracle = model
    settings = config(path, num_pages=None, decode_graph_rows=2)
    async with engine(settings, FakeCudaDevice(settings)) as running:
        assert cuda.copies > cuda.copies_when_captured, "capturing gives away the memory of the warm-up"
        # Two shapes for trial and three for good, of which two differ in rows: each a forward, and for each
        # number of rows three ways of sampling. All of these are replayed before the first step.
        assert [graph.replays for graph in cuda.recordings] == [0] * 8 + [1] * (3 + 2 * 3)
        result = await running.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=TOKENS))
        assert running.stats().pages_free + running.stats().pages_cached == 4 * 64 // 4
    assert result.token_ids == greedy(oracle, [5, 6, 7], TOKENS)


@nightly(SLOW_MODEL)
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("injected"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=["allocator", "driver", "triton", "cublas"],
)
async def test_a_step_without_memory_is_tried_again_in_smaller_ones(
    cuda: Cuda,
    checkpoint: Callable[[str], tuple[Path, Any]],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    """And what it held is free before torch is asked to let go of what it keeps."""
    path, oracle = checkpoint("llama-mqa")
    settings = config(path, overlap_steps=2)
    device = FakeCudaDevice(settings)
    async with engine(settings, device) as running:
        backend: Any = device._backend
        runner, calls, freed = backend.runner, [], []

        class Short:
            read = runner.read

            def run(self, packed: Any, link: Any) -> Any:
                calls.append(packed)
                if len(calls) == 2:
                    activations = torch.zeros(3)
                    held = weakref.ref(activations)
                    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(held() is None))
                    raise error
                return runner.run(packed, link)

        backend.runner = Short()
        result = await running.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=TOKENS))
        assert running.stats().out_of_memory_retries == 1
        assert freed[0]
    assert result.token_ids == greedy(oracle, [5, 6, 7], TOKENS)


@nightly(SLOW_MODEL)
async def test_an_error_of_the_device_ends_its_own_step_alone(
    cuda: Cuda, checkpoint: Callable[[str], tuple[Path, Any]]
) -> None:
    path, oracle = checkpoint("llama-mqa")
    settings = config(path)
    device = FakeCudaDevice(settings)
    async with engine(settings, device) as running:
        backend: Any = device._backend
        with pytest.MonkeyPatch.context() as broken:
            broken.setattr(backend.runner.graphs._captured, "finish", lambda packed, replay: 1 / 0)
            with pytest.raises(errors.StepFailed):
                await running.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=TOKENS))
        result = await running.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=TOKENS))
    assert result.token_ids == greedy(oracle, [5, 6, 7], TOKENS)


@pytest.fixture
def no_garbage() -> Iterator[None]:
    """What is to be freed is freed without a collection."""
    gc.disable()
    yield
    gc.enable()


@nightly(SLOW_MODEL)
@pytest.mark.parametrize("mode", ["thread", "inline"])
async def test_a_closed_engine_leaves_nothing_on_the_device(
    cuda: Cuda, checkpoint: Callable[[str], tuple[Path, Any]], mode: str, no_garbage: None
) -> None:
    """Also if somebody keeps the error of a step that failed."""
    path, _ = checkpoint("llama-mqa")
    settings = config(path, launch_mode=mode, decode_graph_rows=0)
    device = FakeCudaDevice(settings)
    wanted = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=2)
    async with engine(settings, device) as running:
        await running.generate([5, 6, 7], wanted)
        runner: Any = device._backend.runner  # type: ignore[union-attr]
        tensors = [weakref.ref(runner.model._words), weakref.ref(runner.attention._pool.keys[0])]
        runner.decoding.relay = None
        with pytest.raises(errors.StepFailed) as failed:
            await running.generate([5, 6, 7], wanted)
        del runner
    assert failed.value.__cause__ is not None
    assert [tensor() is None for tensor in tensors] == [True, True]
    assert cuda.emptied


@pytest.mark.parametrize(
    ("mode", "where"), [("thread", "capture"), ("inline", "capture"), ("thread", "step")]
)
async def test_an_engine_that_could_not_start_says_why_and_holds_no_weights(
    cuda: Cuda,
    checkpoint: Callable[[str], tuple[Path, Any]],
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    where: str,
    no_garbage: None,
) -> None:
    """Even while its error is looked at, so that it can be tried again there."""
    path, _ = checkpoint("llama-mqa")
    # What is recorded of graphs keeps the weights here.
    settings = config(path, launch_mode=mode, decode_graph_rows=4 if where == "capture" else 0)
    load, weights = loader.load_model, []

    def loaded(*arguments: Any, **options: Any) -> Any:
        model: Any = load(*arguments, **options)
        weights.append(weakref.ref(model._words))
        return model

    def full(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("injected")

    if where == "capture":
        monkeypatch.setattr(Parts, "graphs", full)
    else:
        monkeypatch.setattr(Runner, "run", full)

    monkeypatch.setattr(loader, "load_model", loaded)
    try:
        await engine(settings, FakeCudaDevice(settings)).start()
    except errors.OutOfMemory as error:
        assert "injected" in str(error)
        assert weights[0]() is None
    else:
        pytest.fail("it started")


AHEAD = 10


def alone(prompt: list[int], count: int) -> list[Step]:
    """Steps of one greedy request, with pages for 32 positions."""
    nobody: Any = None
    admission = NewRequestData(SamplingParams(temperature=0), 1, frozenset(), prompt, [])
    row = Row(nobody, 1, 0, len(prompt), prompt, True, list(range(1, 9)), 0, admission)
    steps = [Step(1, NO_ROWS, (row,), len(prompt))]
    for position in range(len(prompt), len(prompt) + count - 1):
        decodes = Generating([nobody], np.array([1]), np.array([position]))
        steps.append(Step(len(steps) + 1, decodes, (), 1))
    return steps


def launched_ahead(path: Path, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens of one request, each step launched before any result is asked for."""
    device = FakeCudaDevice(config(path, overlap_steps=2))
    device.open()
    flights = [device.launch(device.prepare(step)) for step in alone(prompt, count)]
    tokens = [flight.wait().tokens[0] for flight in flights]
    device.close()
    return tokens


@nightly(EMULATED)
def test_what_is_copied_late_is_not_overwritten(
    cuda: Cuda, checkpoint: Callable[[str], tuple[Path, Any]]
) -> None:
    path, oracle = checkpoint("llama-mqa")
    answers = {first: greedy(oracle, [first, 6, 7], AHEAD) for first in range(40)}
    first, wanted = next(
        (first, ids)
        for first, ids in answers.items()
        if all(len(set(ids[at : at + 5])) == 5 for at in range(AHEAD - 5))
    )
    assert launched_ahead(path, [first, 6, 7], AHEAD) == wanted


@nightly(EMULATED)
def test_results_are_read_once_and_in_order_whoever_asks_first(
    cuda: Cuda, checkpoint: Callable[[str], tuple[Path, Any]]
) -> None:
    path, _ = checkpoint("llama-mqa")
    device = FakeCudaDevice(config(path, decode_graph_rows=0))
    device.open()
    runner: Any = device._backend.runner  # type: ignore[union-attr]
    read, seen = runner.read, []

    class Reader:
        run = runner.run

        def read(self, packed: Any, *rest: Any) -> Any:
            seen.append(packed.step_id)
            return read(packed, *rest) if packed.step_id != 2 else 1 / 0

    device._backend.runner = Reader()  # type: ignore[union-attr,assignment]
    flights = [device.launch(device.prepare(step)) for step in alone([5, 6, 7], 3)]
    assert flights[2].wait().tokens == flights[2].wait().tokens
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            flights[1].wait()
    assert flights[0].wait().tokens
    assert seen == [1, 2, 3]
    assert [step for what, step, _, _ in device.lane.events if what == "forward"] == [1, 2, 3]
    device.close()


class Moment:
    """An event of the device, at a time on its own clock."""

    def __init__(self, time: float) -> None:
        self.time = time

    def elapsed_time(self, other: Moment) -> float:
        return 1e3 * (other.time - self.time)


@pytest.mark.parametrize("seed", range(10))
def test_the_device_was_busy_for_as_long_as_it_was_whenever_the_host_looked(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock of its own, that runs faster or slower, and a host that may look late."""
    random = np.random.default_rng(seed)
    rate = 1 + float(random.uniform(-1e-4, 1e-4))
    lane = DeviceLane()
    clock, ended, end = backends._Clock(lane), Moment(0.0), 100.0
    monkeypatch.setattr(backends, "now", lambda: look)
    busy = gap = 0.0
    for step in range(1, 2000):
        behind = step > 1 and random.random() < (0.7 if seed % 2 else 1.0)
        launched = end - float(random.uniform(0, 0.005)) if behind else end + float(random.exponential(0.002))
        # The launch thread may lose its turn before the device hears of the step.
        start, before = max(end, launched if behind else launched + float(random.exponential(0.001))), end
        end = start + float(random.uniform(0.001, 0.01))
        began, last, ended = Moment(start * rate), ended, Moment(end * rate)
        look = end + float(random.exponential(0.02 if random.random() < 0.1 else 0.00005))
        clock.step(step, launched, last if behind else began, ended)
        if step > 1:
            busy, gap = busy + end - start, gap + start - before
        _, _, told_start, told_end = lane.events[-1]
        assert launched <= told_start + 1e-9 or told_end == look
        assert told_end <= look
    assert lane.busy == pytest.approx(busy, rel=2e-4)
    assert lane.gap == pytest.approx(gap, rel=1e-2, abs=5e-4 * busy)
