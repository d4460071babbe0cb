"""Which code samples where, and the reason given."""

from __future__ import annotations

import pytest
import torch

from aioinfer.errors import ConfigError
from aioinfer.model import triton_support
from aioinfer.model.backend import Backend
from aioinfer.native import bindings
from aioinfer.sampling.backend import choose_sampling as choose
from aioinfer.sampling.sampler import Sampler
from tests.sampling.support import native_thread_pool

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_a_cpu_samples_natively_where_there_is_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    native_thread_pool()
    assert choose(CPU) == Backend("native", "the device is a cpu")
    assert choose(CPU, "native") == Backend("native", "asked for")
    assert Sampler(2, 10, CPU).backend.name == "native"
    with pytest.raises(ConfigError, match="native was asked for, and the device is no CPU"):
        choose(CUDA, "native")
    monkeypatch.setattr(bindings, "native_unsupported", lambda: "there is no compiler")
    assert choose(CPU) == Backend("torch", "there is no compiler")
    assert Sampler(2, 10, CPU).backend.name == "torch"
    with pytest.raises(ConfigError, match="native was asked for, and there is no compiler"):
        choose(CPU, "native")


def test_torch_samples_where_nothing_else_does() -> None:
    assert choose(CUDA, "torch") == Backend("torch", "asked for")
    assert choose(torch.device("meta")) == Backend("torch", "the device is a meta")
    assert Sampler(2, 10, CPU, "torch").backend.name == "torch"


def test_cuda_has_triton_unless_something_is_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(triton_support, "interpreted", lambda: False)
    monkeypatch.setattr(triton_support, "build_unsupported", lambda: None)
    assert choose(CUDA) == Backend("triton", "the device is CUDA")
    with pytest.raises(
        ConfigError, match=r"^sampling_backend: triton was asked for, and TRITON_INTERPRET is not set"
    ):
        choose(CPU, "triton")
    monkeypatch.setattr(triton_support, "interpreted", lambda: True)
    assert choose(CUDA) == Backend("torch", "TRITON_INTERPRET is set")
    assert choose(CPU, "triton") == Backend("triton", "asked for")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert choose(CUDA) == Backend("torch", "the device is older than compute capability 8.0")


def test_without_triton_everything_samples_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_support.importlib.util, "find_spec", lambda _: None)
    assert choose(CUDA) == Backend("torch", "triton is not installed")
    with pytest.raises(ConfigError, match="not installed"):
        choose(CUDA, "triton")
