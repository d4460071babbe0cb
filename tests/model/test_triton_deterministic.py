"""Deterministic mode on Triton's kernels: a request's ids and logprobs have the same bits in any company."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aioinfer.cli.doctor import examine
from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.errors import ConfigError
from aioinfer.model.decoder import Decoder
from aioinfer.model.inspection import LoadOptions
from aioinfer.model.loader import load_model
from aioinfer.model.updates.recipe import prepare_update
from aioinfer.params import SamplingParams
from tests.engine.test_deterministic import bits
from tests.model.kernels import DEVICES, interpreted_on, kernels_or_skip, matmul_by_rows
from tests.model.test_oracle import prompts
from tests.model.test_weight_updates import quantise, write
from tests.tiers import SLOW_MODEL, nightly

#: what may change the work of a token: small chunks, steps with rows of all kinds, cached prefixes, few pages
COMPANY: dict[str, Any] = {
    "chunk_size": 5, "max_step_tokens": 12, "num_pages": 7, "max_running_requests": 4, "overlap_steps": 1,
    "new_token_ratio": 0.0, "min_new_token_ratio": 0.0,
}  # fmt: skip


OPTIONS: dict[str, Any] = {"dtype": "float32", "device": torch.device("cpu"), "kernels": "triton"}


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    kernels_or_skip(request.param)
    if interpreted_on(request.param):
        monkeypatch.setattr(np, "matmul", matmul_by_rows)
    name: str = request.param
    return name


@nightly(SLOW_MODEL)
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe", "gemma2"])
async def test_company_changes_no_bit(
    checkpoint: Callable[[str], tuple[Path, Any]], family: str, kv_dtype: str, device: str
) -> None:
    kernels_or_skip(device, compiled=True)
    path, _ = checkpoint(family)
    base: dict[str, Any] = {
        "model": str(path), "dtype": "float32", "page_size": 8, "threads": 1, "deterministic": True,
        "kv_dtype": kv_dtype, "device": device,
        **dict.fromkeys(("attention_backend", "moe_backend", "sampling_backend"), "triton"),
    }  # fmt: skip
    asked = [
        (prompt, SamplingParams(
            temperature=float(at % 2), top_p=0.8, seed=at, max_tokens=6, ignore_eos=True, logprobs=3,
            prompt_logprobs=1 if at == 1 else None,
        ))
        for at, prompt in enumerate(prompts(2, 4))
    ]  # fmt: skip
    async with Engine(
        EngineConfig(**base, num_pages=64, chunk_size=512, overlap_steps=0, prefix_cache=False)
    ) as engine:
        expected = [bits(await engine.generate(*each)) for each in asked]
    async with Engine(EngineConfig(**base, **COMPANY)) as engine:
        got = await asyncio.gather(*(engine.generate(*each) for each in asked))
    assert [bits(result) for result in got] == expected


@pytest.mark.parametrize(
    ("family", "reason"), [("gpt2", "layer norms"), ("olmo3", "norms of all heads as one vector")]
)
async def test_what_adds_in_another_order_is_named(
    checkpoint: Callable[[str], tuple[Path, Any]], family: str, reason: str
) -> None:
    kernels_or_skip("cpu")
    path, _ = checkpoint(family)
    config = EngineConfig(
        model=str(path), dtype="float32", device="cpu", attention_backend="triton", deterministic=True
    )
    with pytest.raises(ConfigError, match=f"^deterministic: .*{reason}"):
        async with Engine(config):
            pass


@pytest.mark.parametrize("quantization", ["fp8", "fp8-dynamic"])
def test_rounded_weights_are_refused(tmp_path: Path, quantization: str) -> None:
    """When a model is loaded, and by ``aioinfer doctor``."""
    kernels_or_skip("cpu")
    write("qwen3-blocks", tmp_path, 1)
    config = EngineConfig(
        model=str(tmp_path), dtype="bfloat16", device="cpu", attention_backend="triton", deterministic=True,
        quantization=quantization,
    )  # fmt: skip
    message = f"deterministic: products of {quantization} add in tiles that fit the batch"
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path, LoadOptions(**OPTIONS, quantization=quantization, deterministic=True))
    assert examine(config)[-1].text == message


def test_stored_floats_of_8_bits_are_widened(tmp_path: Path) -> None:
    """Those of a checkpoint, of which else a kernel would choose tiles by the number of rows."""
    kernels_or_skip("cpu")
    quantise(write("qwen3-blocks", tmp_path, 1), "fp8-channels")
    model = load_model(tmp_path, LoadOptions(**OPTIONS, deterministic=True))
    assert model.invariant
    assert "8 bits" not in model.spec.layer_reason
    assert load_model(tmp_path, LoadOptions(**OPTIONS)).spec.layer_reason.endswith("as they are stored")
    for deterministic, text in ((True, "dequantised"), (False, "kept")):
        config = EngineConfig(
            model=str(tmp_path), device="cpu", attention_backend="triton", deterministic=deterministic
        )
        found = {finding.subject: finding.text for finding in examine(config)}
        assert found["weights"] == f"floats of 8 bits in the checkpoint, {text}"


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_a_model_stays_so_when_its_weights_are_replaced(
    checkpoint: Callable[[str], tuple[Path, Any]], family: str
) -> None:
    """With a head of its own, or the matrix of the embedding."""
    kernels_or_skip("cpu")
    from aioinfer.model.triton_linear import TritonLinear

    path, _ = checkpoint(family)
    model = load_model(path, LoadOptions(**OPTIONS, deterministic=True, max_lora_rank=0))
    prepare_update(model, path, lambda: None).install()
    assert isinstance(model, Decoder)
    assert isinstance(model._head, TritonLinear)
    assert all(isinstance(layer.mixer.out, TritonLinear) for layer in model._trunk.layers)


def test_only_the_deterministic_pay_for_it(checkpoint: Callable[[str], tuple[Path, Any]]) -> None:
    kernels_or_skip("cpu")
    path, _ = checkpoint("qwen3")
    assert load_model(path, LoadOptions(**OPTIONS, deterministic=True)).invariant
    assert not load_model(path, LoadOptions(**OPTIONS)).invariant
    assert not load_model(path, LoadOptions(**{**OPTIONS, "kernels": "sdpa"}, deterministic=True)).invariant
