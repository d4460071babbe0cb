"""The rule by which the backends of attention, experts and sampling are chosen, and what it chooses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aioinfer.errors import ConfigError
from aioinfer.model import kernels, triton_support
from aioinfer.model.attention.pool import KVShape
from aioinfer.model.attention.sdpa import SDPAAttention
from aioinfer.model.backend import Backend, UnsupportedReason, choose_backend
from aioinfer.model.kernels import choose_attention, choose_experts, make_attention, make_operations
from aioinfer.model.operations.torch_operations import TorchOperations

CPU = torch.device("cpu")


def test_the_first_backend_that_can_run_is_chosen_and_the_reason_names_the_others() -> None:
    asked: list[str] = []

    def candidate(name: str, reason: str | None) -> UnsupportedReason:
        def unsupported_reason() -> str | None:
            asked.append(name)
            return reason

        return unsupported_reason

    candidates = {
        "fast": candidate("fast", "there is no compiler"),
        "good": candidate("good", "sizes are odd"),
        "plain": candidate("plain", None),
        "other": candidate("other", None),
    }
    chosen = choose_backend("some_backend", "auto", candidates, ("fast", "good", "plain", "other"), CPU)
    assert chosen == Backend("plain", "there is no compiler, and sizes are odd")
    assert asked == ["fast", "good", "plain"]
    assert choose_backend("some_backend", "auto", candidates, ("other",), CPU).reason == "the device is a cpu"
    assert choose_backend("some_backend", "plain", candidates, (), CPU) == Backend("plain", "asked for")


def test_a_named_backend_that_cannot_run_is_an_error_that_names_the_option() -> None:
    candidates: dict[str, UnsupportedReason] = {"fast": lambda: "there is no compiler", "plain": lambda: None}
    with pytest.raises(ConfigError, match=r"^some_backend: fast was asked for, and there is no compiler$"):
        choose_backend("some_backend", "fast", candidates, ("fast", "plain"), CPU)
    with pytest.raises(ConfigError, match=r"^some_backend: no backend can run: there is no compiler$"):
        choose_backend("some_backend", "auto", candidates, ("fast",), CPU)


# -- what is chosen ------------------------------------------------------------------------------------

F32, BF16, CUDA = torch.float32, torch.bfloat16, torch.device("cuda")
NOT_NATIVE = "the layers are not native"


@pytest.mark.parametrize(
    ("sizes", "dtype", "options", "name", "reason"),
    [
        ((48, 24), F32, {}, "grouped", NOT_NATIVE),
        ((48, 24), BF16, {}, "grouped", NOT_NATIVE),
        ((48, 22), F32, {}, "loop", f"{NOT_NATIVE}, and sizes 48 and 22 are no multiples of 4"),
        ((48, 24), F32, {"wanted": "loop"}, "loop", "asked for"),
        ((48, 24), F32, {"wanted": "grouped"}, "grouped", "asked for"),
        ((48, 32), F32, {"native": True}, "native", "the device is a cpu"),
        ((48, 32), F32, {"native": True, "wanted": "native"}, "native", "asked for"),
        ((48, 32), F32, {"native": True, "wanted": "loop"}, "loop", "asked for"),
    ],
)
def test_experts_on_a_cpu(
    sizes: tuple[int, int], dtype: torch.dtype, options: dict[str, Any], name: str, reason: str
) -> None:
    assert choose_experts(CPU, *sizes, dtype, **options) == Backend(name, reason)


def test_experts_that_were_asked_for_and_cannot_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> torch.Tensor:
        raise RuntimeError("not here\nlong story")

    monkeypatch.setattr(kernels, "grouped_mm", refuse)
    asked: list[tuple[Any, int, torch.dtype, str]] = [
        ("native", 32, F32, f"^moe_backend: native was asked for, and {NOT_NATIVE}"),
        ("grouped", 22, F32, "no multiples"),
        ("grouped", 24, F32, "grouped was asked for, and torch says: not here"),
        ("triton", 24, torch.float64, "triton was asked for, and there are no kernels for float64"),
    ]
    for wanted, middle, dtype, message in asked:
        with pytest.raises(ConfigError, match=message):
            choose_experts(CPU, 48, middle, dtype, wanted)
    assert choose_experts(CPU, 48, 24, F32) == Backend("loop", f"{NOT_NATIVE}, and torch says: not here")


def test_cuda_has_triton_unless_something_is_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(triton_support, "interpreted", lambda: False)
    monkeypatch.setattr(triton_support, "build_unsupported", lambda: None)
    monkeypatch.setattr(kernels, "_grouped_unsupported", lambda *args: None)

    def chosen(**changes: Any) -> tuple[Backend, Backend]:
        given = {"head_dims": {64}, "dtype": BF16, **changes}
        return choose_attention(CUDA, **given), choose_experts(CUDA, 48, 24, given["dtype"])

    def instead(reason: str) -> tuple[Backend, Backend]:
        return Backend("sdpa", reason), Backend("grouped", reason)

    assert chosen(head_dims={128}) == (Backend("triton", "the device is CUDA"),) * 2
    assert choose_attention(CUDA, {128}, BF16, "sdpa") == Backend("sdpa", "asked for")
    assert chosen(head_dims={257})[0] == Backend("sdpa", "heads of size 257 are larger than 256")
    assert chosen(dtype=torch.float64) == instead("there are no kernels for float64")
    with pytest.raises(
        ConfigError, match=r"^attention_backend: triton was asked for, and TRITON_INTERPRET is not set"
    ):
        choose_attention(CPU, {64}, BF16, "triton")
    monkeypatch.setattr(triton_support, "build_unsupported", lambda: "there is no C compiler")
    assert chosen() == instead("there is no C compiler")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert chosen() == instead("the device is older than compute capability 8.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(triton_support, "interpreted", lambda: True)
    assert chosen() == instead("TRITON_INTERPRET is set")
    monkeypatch.setattr(triton_support.importlib.util, "find_spec", lambda _: None)
    assert chosen() == instead("triton is not installed")
    with pytest.raises(ConfigError, match="not installed"):
        choose_attention(CUDA, {64}, torch.float16, "triton")


def test_a_cpu_has_torchs_own_kernels_for_the_asking() -> None:
    backend = choose_attention(CPU, {64}, F32, "sdpa")
    assert backend == Backend("sdpa", "asked for")
    made = make_attention(backend, [KVShape(1, 16)], num_pages=1, page_size=8, dtype=F32, device=CPU)
    assert isinstance(made, SDPAAttention)
    assert isinstance(make_operations(backend), TorchOperations)
