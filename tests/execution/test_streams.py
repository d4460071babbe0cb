"""The CUDA backend on a stand-in for torch.cuda that copies as late as it may."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from aioinfer import errors
from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.execution import backends
from aioinfer.execution.build import Parts
from aioinfer.execution.decoding import token_graphs
from aioinfer.execution.launcher import InlineLauncher, ThreadLauncher
from aioinfer.execution.runner import Runner
from aioinfer.execution.torch_device import TorchDevice
from aioinfer.model import loader
from aioinfer.observe.timeline import DeviceLane
from aioinfer.params import SamplingParams
from aioinfer.scheduling.step import NO_ROWS, Generating, NewRequestData, Row, Step
from tests.execution.fake_cuda import Cuda, Event, FakeCudaDevice, Stream, install
from tests.execution.recording import Recording
from tests.model.checkpoints import greedy, greedy_each
from tests.model.kernels import kernels_or_skip
from tests.model.test_oracle import prompts
from tests.tiers import EMULATED, SLOW_MODEL, nightly, points

TOKENS = 4


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    kernels_or_skip("cpu")
    return install(monkeypatch)


def config(path: Path, **changes: Any) -> EngineConfig:
    settings = {
        "attention_backend": "triton",
        "sampling_backend": "triton",
        "page_size": 4,
        "num_pages": 40,
        **changes,
    }
    return EngineConfig(
        model=str(path),
        dtype="float32",
        device="cpu",
        max_running_requests=4,
        **{"max_model_len": 64, "max_step_tokens": 16, **settings},
    )


def engine(settings: EngineConfig, device: TorchDevice) -> Engine:
    launcher = ThreadLauncher if settings.launch_mode == "thread" else InlineLauncher
    return Engine(settings, launcher=lambda _: launcher(device))


@nightly(EMULATED)
@pytest.mark.parametrize(("window", "mode"), points([(1, "thread")], [(0, "thread"), (2, "inline")]))
async def test_late_copies_give_the_tokens_of_transformers(
    cuda: Cuda, checkpoint: Callable[[str], tuple[Path, Any]], window: int, mode: str
) -> None:
    path, oracle = checkpoint("llama-mqa")
    settings = config(path, overlap_steps=window, launch_mode=mode)
    batch = prompts(3, 3)
    async with engine(settings, FakeCudaDevice(settings)) as running:
        results = await asyncio.gather(
            *[
                running.generate(prompt, SamplingParams(temperature=0, max_tokens=TOKENS + at))
                for at, prompt in enumerate(batch)
            ]
        )
        stats = running.stats()
    found = [result.token_ids for result in results]
    assert found == greedy_each(oracle, batch, range(TOKENS, TOKENS + 3), found)
    assert sum(graph.replays for graph in cuda.recordings) >= TOKENS
    assert 0 < stats.overlap_ratio <= 1


@nightly(SLOW_MODEL)
async def test_without_a_number_of_pages_the_pool_is_sized_by_a_trial(
    cuda: Cuda, checkpoint: Callable[[str], tuple[Path, Any]]
) -> None:
    path, oracle = checkpoint("llama-mqa")
    settings = config(path, num_pages=None, decode_graph_rows=2)
    async with engine(settings, FakeCudaDevice(settings)) as running:
        assert cuda.copies > cuda.copies_when_captured, "capturing gives away the memory of the warm-up"
        result = await running.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=TOKENS))
        assert running.stats().pages_free + running.stats().pages_cached == 4 * 64 // 4
    assert result.token_ids == greedy(oracle, [5, 6, 7], TOKENS)
    # Two shapes for trial and three for good, of which two differ in rows: each a forward, and for each
    # number of rows three ways of sampling.
    assert len(cuda.recordings) == 2 * 4 + 3 + 2 * 3


@nightly(EMULATED)
def test_every_graph_has_been_replayed_before_the_first_step(
    cuda: Cuda, checkpoint: Callable[[str], tuple[Path, Any]]
) -> None:
    path, _ = checkpoint("llama-mqa")
    device = FakeCudaDevice(config(path, decode_graph_rows=2))
    device.open()
    assert [graph.replays for graph in cuda.recordings] == [1] * 9
    device.close()


@nightly(SLOW_MODEL)
async def test_every_feature_passes_the_backend(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Callable[[str], tuple[Path, Any]]
) -> None:
    kernels_or_skip("cpu")
    path, _ = checkpoint("llama-mqa")
    kinds: list[dict[str, Any]] = [
        {"logprobs": 2, "prompt_logprobs": 1},
        {"frequency_penalty": 1.5, "logit_bias": {7: 4.0}, "allowed_token_ids": list(range(60))},
        {"temperature": 0.0, "min_tokens": 3, "stop_token_ids": list(range(0, 200, 2))},
    ]
    requests = [
        (prompt, SamplingParams(**{"seed": at, "max_tokens": TOKENS, **kind}))
        for at, (prompt, kind) in enumerate(zip(prompts(7, 3), kinds, strict=True))
    ]
    settings = config(path, overlap_steps=2)

    async def outputs(device: TorchDevice) -> list[Any]:
        async with engine(settings, device) as running:
            results = await asyncio.gather(*[running.generate(*request) for request in requests])
        # Padding is in the matrix products, and with it the last bits.
        return [
            (result.token_ids, [(each.token_id, round(each.logprob, 3)) for each in result.logprobs or ()])
            for result in results
        ]

    plain = await outputs(TorchDevice(settings))
    install(monkeypatch)
    assert await outputs(FakeCudaDevice(settings)) == plain


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
            broken.setattr(backend.runner.graphs.captured, "finish", lambda packed, replay: 1 / 0)
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


class Calls(TorchDispatchMode):
    """What a launch calls that lets go of the interpreter lock: operations of torch, replays, and whatever
    enqueues, waits for or records events."""

    def __init__(self, cuda: Cuda, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.names: list[str] = []
        self._counting = False
        for owner, name in ((Recording, "replay"), (Event, "record"), (Event, "synchronize"),
                            (Stream, "wait_event"), (backends, "_copy"), (backends, "_send")):  # fmt: skip
            patch.setattr(owner, name, self._counted(name, getattr(owner, name)))

    def _counted(self, name: str, call: Any) -> Any:
        def counted(*arguments: Any) -> Any:
            # What the stand-in does to do it is not counted.
            if self._counting:
                self.names.append(name)
            before, self._counting = self._counting, False
            try:
                return call(*arguments)
            finally:
                self._counting = before

        return counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if self._counting and name != "detach":  # which is part of another
            self.names.append(name)
        return func(*args, **(kwargs or {}))

    def of(self, launch: Callable[[], Any]) -> list[str]:
        self.names.clear()
        self._counting = True
        try:
            with self:
                launch()
        finally:
            self._counting = False
        return list(self.names)


@nightly(SLOW_MODEL)
def test_launching_a_decode_step_takes_few_calls(
    cuda: Cuda, checkpoint: Callable[[str], tuple[Path, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(cuda, monkeypatch)
    path, _ = checkpoint("llama-mqa")
    # A prompt that is a replay leaves nothing to be sent for its first decode.
    settings = config(path, page_size=32, max_model_len=256, decode_graph_rows=1, prefill_graph_tokens=0)
    device = FakeCudaDevice(settings)
    device.open()
    flights: list[Any] = []

    def launch(step: Step) -> list[str]:
        prepared = device.prepare(step)
        return calls.of(lambda: flights.append(device.launch(prepared)))

    prefill, first, *decodes = alone([5, 6, 7], 2 + 3 * token_graphs.KEPT)
    launch(prefill)
    changed = launch(first)
    sent = ["slice", "view", "_send", "chunk", "index_copy_", "replay"]
    assert changed[: 1 + len(sent)] == ["record", *sent]
    unchanged = ["replay", "replay", "record", "wait_event", "_copy", "record"]
    while decodes:
        # Views of the host's and the device's memory are made once for each place.
        for step in decodes[: token_graphs.KEPT]:
            found = launch(step)
            flights[-2].wait()
        del decodes[: token_graphs.KEPT]
        assert found == ["record", *unchanged], "the device may be at rest, and its clock starts anew"
        if decodes:
            with pytest.MonkeyPatch.context() as busy:
                busy.setattr(Event, "query", lambda event: False)
                assert launch(decodes.pop(0)) == unchanged
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
