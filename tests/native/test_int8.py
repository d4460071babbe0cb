"""Weights that are rounded to 8 bits: results are those of the formula with the rounded weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from aioinfer.config import EngineConfig
from aioinfer.errors import ConfigError
from aioinfer.execution.torch_device import TorchDevice
from aioinfer.llm import LLM
from aioinfer.model.moe.experts import ExpertWeights
from aioinfer.model.moe.native_experts import NativeExperts
from aioinfer.model.native import NativeLinear
from aioinfer.native.bindings import shared_thread_pool
from aioinfer.params import SamplingParams
from tests.model.kernels import assert_close
from tests.model.mixtures import Mixture
from tests.native.support import DTYPES, UNIT, normal
from tests.native.test_linear import check


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """[.., outputs, inner] as multiples of a factor of each output, the largest 127 times; float32."""
    weight = weight.float()
    factor = weight.abs().amax(-1, keepdim=True) / 127
    return (weight / factor.where(factor > 0, torch.ones(()))).round() * factor


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inner"), [(1, 16), (17, 48), (33, 336), (300, 80), (650, 1024)])
def test_products_are_those_of_rounded_weights(outputs: int, inner: int, dtype: torch.dtype) -> None:
    weight, bias = normal(outputs, inner, seed=0, dtype=dtype), normal(outputs, seed=1, dtype=dtype)
    weight *= torch.logspace(-9, 9, outputs)[:, None].to(dtype)
    weight[outputs // 2] = 0
    for own in (None, bias):
        linear = NativeLinear(shared_thread_pool(2), weight, own, "int8")
        for rows in (0, 1, 2, 13, 14, 15, 40):
            values = normal(rows, inner, seed=rows, dtype=dtype)
            check(linear(values), values, rounded(weight), own)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
def test_a_row_has_the_same_bits_everywhere(gated: bool, dtype: torch.dtype) -> None:
    """One block of rows reads the bytes, for several they are expanded."""
    weight, values = normal(160, 208, seed=0, dtype=dtype), normal(60, 208, seed=2, dtype=dtype)
    alone = NativeLinear(shared_thread_pool(1), weight, None, "int8", gated=gated)
    wanted = torch.cat([alone(row[None]) for row in values])
    for threads in (1, 3):
        linear = NativeLinear(shared_thread_pool(threads), weight, None, "int8", gated=gated)
        for rows in range(1, 61):
            assert torch.equal(linear(values[:rows]), wanted[:rows]), (rows, threads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_and_their_values_have_factors_of_their_own(dtype: torch.dtype) -> None:
    weight, values = normal(96, 64, seed=0, dtype=dtype) * 0.3, normal(20, 64, seed=1, dtype=dtype)
    weight[48:] *= 20
    gate, up = (values.double() @ rounded(weight).double().T).chunk(2, 1)
    got = NativeLinear(shared_thread_pool(2), weight, None, "int8", gated=True)(values)
    wanted = F.silu(gate) * up
    bound = 1e-5 * (1 + gate.abs() + up.abs()) + 1.01 * UNIT[dtype] * wanted.abs()
    assert ((got - wanted).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 40])
def test_experts_are_those_of_rounded_weights(tokens: int, dtype: torch.dtype) -> None:
    task = Mixture.make(tokens, num_experts=3, hidden=80, middle=48, dtype=dtype)
    gate_up, down = task.stack.gate_up, task.stack.down
    pairs = zip(gate_up, down, strict=True)
    experts = NativeExperts(shared_thread_pool(2), dtype, (3, 80, 48), pairs, int8=True)
    wanted = replace(task, stack=ExpertWeights(rounded(gate_up), rounded(down))).expected()
    assert_close(experts(task.hidden, task.weights, task.experts), wanted, dtype)


def test_an_engine_with_int8_weights_answers_correctly() -> None:
    question = [{"role": "user", "content": "What is 17 + 25?"}]
    with LLM(EngineConfig(device="cpu", quantization="int8")) as llm:
        (result,) = llm.generate([question], SamplingParams(temperature=0))
    assert "42" in result.text


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"attention_backend": "sdpa"}, "asked for"),
        ({"dtype": "float16"}, "no native kernels for float16"),
        ({"transformers_fallback": True}, "transformers' own"),
    ],
)
def test_int8_without_native_kernels_is_an_error_with_its_reason(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=f"^quantization: .*{why}"):
        TorchDevice(EngineConfig(device="cpu", quantization="int8", **settings)).open()
