"""Models whose weights are rounded when they are loaded: layers, experts, embedding, and what engines say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from aioinfer.cli.doctor import examine
from aioinfer.config import EngineConfig
from aioinfer.errors import ConfigError
from aioinfer.execution.torch_device import TorchDevice
from aioinfer.llm import LLM
from aioinfer.model.inspection import LoadOptions
from aioinfer.model.loader import load_model
from aioinfer.model.native import NativeDecoder
from aioinfer.model.native_linear import NativeLinear
from aioinfer.model.quantization import FLOAT8, Quantization, Rounding
from aioinfer.native.bindings import InvalidArguments, shared_thread_pool
from aioinfer.params import SamplingParams
from tests.model.block_models import block_config, write_checkpoint
from tests.model.mixtures import Mixture, native_experts
from tests.native.support import DTYPES, UNIT, normal, prompt_logits
from tests.tiers import SECONDS, rest, thinned

CPU = torch.device("cpu")
WAYS: list[Quantization] = [way for way in get_args(Quantization) if way not in ("auto", "none", *FLOAT8)]


def test_groups_are_the_largest_that_divide_the_inner_dimension() -> None:
    assert Rounding(8, 128).for_size(1024) == Rounding(8, 128)
    assert Rounding(8, 128).for_size(576) == Rounding(8, 64)
    assert Rounding(4, 64).for_size(1536) == Rounding(4, 64)
    assert Rounding(4, 64).for_size(80) == Rounding(4, 32)
    assert Rounding(8, 0).for_size(80) == Rounding(8, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounding", [Rounding(8, 32), Rounding(4, 32), Rounding(8, 0)])
@pytest.mark.parametrize("tokens", [1, 40])
def test_experts_are_made_of_rounded_layers(tokens: int, rounding: Rounding, dtype: torch.dtype) -> None:
    task = Mixture.make(tokens, num_experts=3, hidden=80, middle=48, dtype=dtype)
    pool = shared_thread_pool(2)
    pairs = list(zip(task.stack.gate_up, task.stack.down, strict=True))
    experts = native_experts(pool, task.stack, rounding)
    of_each = []
    for gate_up, down in pairs:
        gated = NativeLinear(pool, gate_up, None, rounding.for_size(80), gated=True)(task.hidden)
        of_each.append(NativeLinear(pool, down, None, rounding.for_size(48))(gated).double())
    wanted = torch.zeros(tokens, 80, dtype=torch.float64)
    for token, (chosen, weights) in enumerate(zip(task.experts, task.weights.double(), strict=True)):
        for expert, weight in zip(chosen.tolist(), weights, strict=True):
            wanted[token] += of_each[expert][token] * weight
    got = experts(task.hidden, task.weights, task.experts)
    size = torch.stack([each.abs() for each in of_each]).amax(0)
    assert ((got.double() - wanted).abs() <= 1e-6 * size + 1.01 * UNIT[dtype] * wanted.abs()).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounding", [Rounding(8, 32), Rounding(4, 32)])
def test_a_token_has_the_same_bits_among_other_tokens_of_its_experts(
    rounding: Rounding, dtype: torch.dtype
) -> None:
    task = Mixture.make(60, num_experts=5, hidden=64, middle=96, dtype=dtype)
    alone = native_experts(shared_thread_pool(1), task.stack, rounding)
    wanted = torch.cat(
        [alone(task.hidden[t : t + 1], task.weights[t : t + 1], task.experts[t : t + 1]) for t in range(60)]
    )
    for threads in (1, 2, 3, 5):
        experts = native_experts(shared_thread_pool(threads), task.stack, rounding)
        for count in (*range(1, 10), 17, 33, 60):
            got = experts(task.hidden[:count], task.weights[:count], task.experts[:count])
            assert torch.equal(got, wanted[:count]), (threads, count)


def logits(path: Path, quantization: Quantization) -> torch.Tensor:
    """Of all tokens of a prompt."""
    block = 4 if path.name == "llada2" else None
    model = load_model(
        path,
        LoadOptions(
            dtype="float32", device=CPU, kernels="native", quantization=quantization, block_size=block
        ),
    )
    assert isinstance(model, NativeDecoder)
    return prompt_logits(model)


KINDS = ["llama-biases", "qwen3-wide-untied", "qwen3-moe-mixed", "llada2", "gemma3", "gpt-oss", "glm4"]
KINDS += ["gpt2-wide", "olmo3", "lfm2-biases", "lfm2-moe", "qwen3.5"]


@pytest.mark.parametrize("kind", thinned(KINDS, 3))
@pytest.mark.parametrize("way", WAYS)
def test_a_model_of_rounded_weights_is_close_to_the_exact_one(
    way: Quantization, kind: str, tmp_path: Path, checkpoint: Callable[[str], Any]
) -> None:
    """Tied and untied, with biases, with experts, and with a shared one. A token may go to another expert."""
    path = tmp_path / kind
    if kind == "llada2":
        write_checkpoint(path, block_config(moe_intermediate_size=32, intermediate_size=48))
    else:
        path = checkpoint(kind)[0]
    exact = logits(path, "none")
    off = ((logits(path, way) - exact).norm(dim=1) / exact.norm(dim=1)).median()
    assert 0 < off < {"int8": 0.1, "int4": 0.6}[way], off


def test_weights_that_are_not_rounded_have_no_rounded_values() -> None:
    linear = NativeLinear(shared_thread_pool(1), normal(20, 64, seed=0), None)
    with pytest.raises(InvalidArguments, match="not quantised"):
        linear.dequantised()


@rest(SECONDS)
@pytest.mark.parametrize("way", WAYS)
def test_an_engine_with_rounded_weights_answers_correctly(way: Quantization) -> None:
    question = [{"role": "user", "content": "What is 17 + 25?"}]
    with LLM(EngineConfig(device="cpu", quantization=way)) as llm:
        (result,) = llm.generate([question], SamplingParams(temperature=0))
    assert "42" in result.text


def test_rounding_experts_that_are_not_native_is_refused(checkpoint: Callable[[str], Any]) -> None:
    path = str(checkpoint("qwen3-moe-mixed")[0])
    config = EngineConfig(model=path, device="cpu", quantization="int4", moe_backend="loop")
    assert examine(config)[-1].text.startswith("quantization: int4 needs native experts")
    with pytest.raises(ConfigError, match=r"^quantization: int4 needs native experts, these are loop"):
        TorchDevice(config).open()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"attention_backend": "sdpa"}, "asked for"),
        ({"dtype": "float16"}, "no native kernels for float16"),
        ({"transformers_fallback": True}, "transformers' own"),
    ],
)
def test_rounding_without_native_kernels_is_an_error_with_its_reason(
    settings: dict[str, Any], why: str, way: Quantization
) -> None:
    config = replace(EngineConfig(device="cpu", quantization=way), **settings)
    with pytest.raises(ConfigError, match=f"^quantization: .*{why}"):
        TorchDevice(config).open()
