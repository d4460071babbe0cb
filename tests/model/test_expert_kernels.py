"""All kernels of experts against the formula, those of Triton interpreted on the CPU or compiled on CUDA."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from aioinfer.model.moe.experts import GroupedExperts, LoopExperts
from tests.model.kernels import kernels_or_skip
from tests.model.mixtures import Mixture, by_native, float8_experts

KERNELS = pytest.mark.parametrize(
    ("kernel", "device"),
    [
        ("loop", "cpu"),
        ("grouped", "cpu"),
        pytest.param("native", "cpu", marks=pytest.mark.native),
        *(
            pytest.param(kernel, device, marks=[pytest.mark.gpu] if device == "cuda" else [])
            for kernel in ("triton", "float8")
            for device in ("cpu", "cuda")
        ),
    ],
)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def made(kernel: str, device: str, task: Mixture) -> Any:
    if kernel in ("triton", "float8"):
        kernels_or_skip(device)
    if kernel == "float8":
        _, hidden, middle = task.stack.down.shape
        return float8_experts(task, ((1, hidden), (1, middle)))
    if kernel == "native":
        return by_native(task)
    if kernel == "triton":
        from aioinfer.model.moe.triton_experts import ExpertTuning, TritonExperts

        return TritonExperts(task.stack, tuning=ExpertTuning(block_n=32, block_k=16, num_stages=2))
    return (LoopExperts if kernel == "loop" else GroupedExperts)(task.stack)


def test_sizes_that_torch_does_not_take_are_looped_over() -> None:
    task = Mixture.make(5, hidden=18, middle=7)
    task.check(compute("loop", "cpu", task))


def compute(kernel: str, device: str, task: Mixture) -> torch.Tensor:
    result: torch.Tensor = made(kernel, device, task)(task.hidden, task.weights, task.experts)
    return result


@KERNELS
@DTYPES
@pytest.mark.parametrize(
    ("tokens", "top_k", "num_experts", "hidden", "middle"),
    [(1, 4, 9, 48, 16), (7, 5, 5, 32, 48), (40, 3, 4, 80, 32)],
)
def test_results_are_those_of_the_formula(
    kernel: str,
    device: str,
    dtype: torch.dtype,
    tokens: int,
    top_k: int,
    num_experts: int,
    hidden: int,
    middle: int,
) -> None:
    sizes = {"top_k": top_k, "num_experts": num_experts, "hidden": hidden, "middle": middle}
    task = Mixture.make(tokens, dtype=dtype, device=device, **sizes)
    got = compute(kernel, device, task)
    assert got.dtype == dtype
    task.check(got)


@KERNELS
@DTYPES
@pytest.mark.parametrize("gate", ["clamped_silu", "gelu_tanh"])
def test_gates_and_biases(kernel: str, device: str, dtype: torch.dtype, gate: Any) -> None:
    task = Mixture.make(9, top_k=3, num_experts=4, dtype=dtype, device=device, clamped=gate != "gelu_tanh")
    task.stack = replace(task.stack, gate=gate)
    task.check(compute(kernel, device, task))


@KERNELS
def test_experts_without_tokens_are_not_touched(kernel: str, device: str) -> None:
    task = Mixture.make(9, num_experts=6, used=3, device=device)
    assert task.stack.down.isnan().any()
    task.check(compute(kernel, device, task))


@KERNELS
def test_junk_in_a_token_stays_in_it(kernel: str, device: str) -> None:
    """As padding has it, the first and the last token of blocks among them."""
    task = Mixture.make(20, num_experts=3, device=device)
    clean = compute(kernel, device, task)
    junk = [0, 7, 18, 19]
    task.hidden[0] = float("nan")
    task.hidden[7, 0] = float("inf")
    task.weights[18:] = float("nan")
    with np.errstate(invalid="ignore"):
        got = compute(kernel, device, task)
    rest = [token for token in range(20) if token not in junk]
    assert not got[junk].isfinite().all(1).any()
    assert torch.equal(got[rest], clean[rest])


@KERNELS
def test_strided_tokens_and_no_tokens(kernel: str, device: str) -> None:
    task = Mixture.make(6, device=device)
    task.hidden = torch.cat((task.hidden, task.hidden), 1)[:, 32:]
    task.experts = task.experts.T.contiguous().T
    task.weights = task.weights.T.contiguous().T
    task.check(compute(kernel, device, task))
    assert compute(kernel, device, Mixture.make(0, device=device)).shape == (0, 32)
