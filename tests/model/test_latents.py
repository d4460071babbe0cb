"""Latents: what their pages take, and what does not go with them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aioinfer import LLM, Engine, EngineConfig, SamplingParams
from aioinfer.errors import ConfigError
from aioinfer.model.attention.pool import KVPool, KVShape
from aioinfer.model.families.deepseek import DeepSeek
from aioinfer.model.kernels import choose_attention, make_attention
from aioinfer.native.bindings import native_unsupported
from tests.model.adapters import factors, write_adapter
from tests.model.checkpoints import VOCAB, make_checkpoint
from tests.model.harness import load, require
from tests.model.test_oracle import config
from tests.tiers import SECONDS, rest

CPU = torch.device("cpu")
BF16, F32 = torch.bfloat16, torch.float32
#: by model: layers, rank, rotated elements, and bytes of a position in bfloat16, as published
PUBLISHED = {
    "DeepSeek-V2-Lite": (27, 512, 64, 31_104),
    "DeepSeek-V3": (61, 512, 64, 70_272),
    "GLM-4.7-Flash": (47, 512, 64, 54_144),
    "MiniCPM3-4B": (62, 256, 32, 35_712),
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_a_position_takes_one_latent_and_one_rotated_key_in_each_layer(model: str) -> None:
    layers, rank, rotated, published = PUBLISHED[model]
    config = SimpleNamespace(num_hidden_layers=layers, kv_lora_rank=rank, qk_rope_head_dim=rotated)
    shapes = DeepSeek().kv_layers(config)
    assert KVPool.bytes_per_page(shapes, 1, BF16) == published
    assert KVPool.bytes_per_page(shapes, 16, BF16) == 16 * published


@pytest.mark.parametrize("kernels", ["sdpa", "native"])
def test_a_pool_stores_latents_once(kernels: Any) -> None:
    require(kernels)
    shapes = [KVShape(1, 80, 64), KVShape(2, 16)]
    backend = choose_attention(CPU, [80, 16], BF16, kernels)
    attention: Any = make_attention(backend, shapes, num_pages=3, page_size=16, dtype=BF16, device=CPU)
    tensors = attention.page_tensors
    assert sum(tensor.nbytes for tensor in tensors) == 4 * 16 * 2 * (80 + 2 * 2 * 16)
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)


@rest(SECONDS)
def test_what_does_not_go_with_latents_is_refused_by_name(tmp_path: Path) -> None:
    make_checkpoint("deepseek-v3", tmp_path)
    with pytest.raises(ConfigError, match="there is no kernel over latents"):
        load(tmp_path, kernels="triton")
    with pytest.raises(ConfigError, match="kv_dtype: fp8 needs attention by Triton"):
        LLM(EngineConfig(model=str(tmp_path), device="cpu", kv_dtype="fp8")).close()
    with pytest.raises(ConfigError, match="values of another size than keys"):
        load(tmp_path, force_transformers=True)
    if native_unsupported() is None:
        with pytest.raises(ConfigError, match="moe_backend: native attention over latents needs native"):
            load(tmp_path, kernels="native", experts="loop")
    name = "model.layers.0.self_attn.kv_b_proj"
    adapter = write_adapter(tmp_path / "adapter", factors({name: (256, 64)}, {name: 4}, seed=1, dtype=F32))
    model = load(tmp_path, kernels="sdpa", max_lora_rank=4)
    with pytest.raises(ConfigError, match="kv_b_proj cannot be adapted: heads are not expanded"):
        model.adapters.prepare(adapter)


@rest(SECONDS)
@pytest.mark.parametrize("kernels", ["native", "sdpa"])
@pytest.mark.parametrize("family", ["deepseek-v3", "minicpm3"])
async def test_logprobs_of_several_answers_are_those_of_transformers(
    tmp_path: Path, family: str, kernels: Any
) -> None:
    require(kernels)
    oracle = make_checkpoint(family, tmp_path)
    prompt = [(7 * at) % VOCAB for at in range(40)]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=8, logprobs=0, ignore_eos=True)
    settings = config(tmp_path, attention_backend=kernels, chunk_size=16)
    async with Engine(settings) as engine:
        answers = await asyncio.gather(*engine.choices(prompt, params, n=3))
    assert len({tuple(answer.token_ids) for answer in answers}) > 1
    for answer in answers:
        with torch.no_grad():
            logits = oracle(torch.tensor([[*prompt, *answer.token_ids]]), use_cache=False).logits[0]
        expected = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        assert answer.logprobs is not None
        for entry, row in zip(answer.logprobs, expected, strict=True):
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-3)
