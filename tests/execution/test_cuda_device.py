"""Which CUDA device an engine computes on: the one that was asked for, or its caller's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from aioinfer.config import EngineConfig
from aioinfer.errors import ConfigError
from aioinfer.execution import build as execution_build
from aioinfer.execution import torch_device
from aioinfer.execution.cuda_device import callers_device, pick_device
from aioinfer.execution.torch_device import TorchDevice
from aioinfer.model import kernels
from aioinfer.model.backend import Backend
from aioinfer.model.inspection import LoadOptions
from aioinfer.model.loader import load_model
from tests.model.kernels import kernels_or_skip


class Cuda:
    """What is asked of torch.cuda, with three devices; the current one is a thread's own."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._own = threading.local()
        self.initialized = True
        for name, value in {
            "is_available": lambda: True,
            "device_count": lambda: 3,
            "current_device": self.get,
            "is_initialized": lambda: self.initialized,
        }.items():
            patch.setattr(torch.cuda, name, value)

    def get(self) -> int:
        return int(getattr(self._own, "index", 0))

    def set(self, index: int) -> None:
        self._own.index = index


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


@pytest.mark.parametrize(
    ("wanted", "index", "device"),
    [
        ("cuda:1", 2, "cuda:1"),
        ("cuda:0", 2, "cuda:0"),
        ("cuda", 2, "cuda:2"),
        ("cuda", None, "cuda:1"),
        ("auto", 2, "cuda:2"),
        ("cpu", 2, "cpu"),
    ],
)
def test_a_device_is_the_one_with_its_number_or_the_callers(
    cuda: Cuda, wanted: str, index: int | None, device: str
) -> None:
    cuda.set(1)
    assert pick_device(wanted, index) == torch.device(device)


def test_a_device_that_is_not_there_is_refused_with_those_that_are(cuda: Cuda) -> None:
    with pytest.raises(ConfigError, match="cuda:3 was asked for, and torch sees 3 CUDA devices"):
        pick_device("cuda:3")


def test_without_cuda_the_device_that_was_asked_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="cuda:1 was asked for, and torch sees no CUDA device"):
        pick_device("cuda:1")
    assert pick_device("auto") == torch.device("cpu")


@pytest.mark.parametrize("wanted", ["gpu", "cuda:", "cuda:-1", "cuda:01", "cuda:x", "mps", "", "CUDA"])
def test_other_names_of_devices_are_refused(wanted: str) -> None:
    with pytest.raises(ConfigError, match="device must be auto, cpu, cuda or cuda:N"):
        EngineConfig(device=wanted)


def test_what_cuda_is_was_chosen_where_the_engine_was_made(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that opens the device has chosen none."""
    found: list[torch.device] = []

    def picked(wanted: str, index: int | None = None) -> torch.device:
        found.append(pick_device(wanted, index))
        raise ConfigError("enough")

    monkeypatch.setattr(torch_device, "pick_device", picked)
    cuda.set(2)
    device = TorchDevice(EngineConfig(device="cuda"))

    def opened() -> None:
        assert cuda.get() == 0
        with pytest.raises(ConfigError, match="enough"):
            device.open()

    thread = threading.Thread(target=opened)
    thread.start()
    thread.join()
    assert found == [torch.device("cuda:2")]


def test_a_thread_that_has_not_come_to_cuda_has_chosen_nothing(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never() -> Any:
        raise AssertionError("asking would make a context")

    cuda.initialized = False
    monkeypatch.setattr(torch.cuda, "current_device", never)
    assert callers_device() == 0


def test_sampling_that_depends_on_the_batch_is_refused_before_anything_is_built(
    cuda: Cuda, checkpoint: Callable[[str], tuple[Path, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Building measures and captures for a minute."""
    kernels_or_skip("cpu")
    path, _ = checkpoint("qwen3")
    options: dict[str, Any] = {"dtype": "float32", "kernels": "triton", "deterministic": True}
    model = load_model(path, LoadOptions(device=torch.device("cpu"), **options))
    built: list[object] = []

    def built_backend(*parts: object) -> None:
        built.append(parts)
        raise ConfigError("built")

    config = EngineConfig(model=str(path), device="cuda", deterministic=True, sampling_backend="torch")
    monkeypatch.setattr(TorchDevice, "_load", lambda *_: model)
    monkeypatch.setattr(torch_device, "current", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 34, 1 << 34))
    monkeypatch.setattr(kernels, "choose_attention", lambda *_, **__: Backend("triton", "a test"))
    monkeypatch.setattr(execution_build, "build", built_backend)
    with pytest.raises(ConfigError, match=r"^deterministic: sampling is torch"):
        TorchDevice(config).open()
    assert not built
