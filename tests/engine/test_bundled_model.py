"""The bundled model really does its tasks, through the engine."""

from __future__ import annotations

import asyncio

import pytest

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from examples.training.tasks import TASKS, held_out
from tests.tiers import SECONDS, grid, rest

BUNDLED = EngineConfig().model_path


@rest(SECONDS)
@pytest.mark.parametrize("dtype", grid(["bfloat16"], ["float32"]))
async def test_held_out_questions_are_answered(dtype: str) -> None:
    """50 per task; at least 95 % exactly right, and every answer ends by itself."""
    async with Engine(EngineConfig(dtype=dtype)) as engine:
        for task in [*TASKS, "second_turn"]:
            items = held_out(task, 50, seed=99)
            streams = [engine.generate(item.messages) for item in items]
            results = await asyncio.gather(*streams)
            right = sum(item.check(result.text) for item, result in zip(items, results, strict=True))
            assert right >= 48, (task, right)
            assert {result.finish_reason for result in results} == {"stop"}


@rest(SECONDS)
def test_the_files_are_ordinary_and_small() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    size = (BUNDLED / "model.safetensors").stat().st_size
    assert size <= 12_000_000
    model = AutoModelForCausalLM.from_pretrained(BUNDLED)
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    assert 2_000_000 <= sum(parameter.numel() for parameter in model.parameters()) <= 6_000_000
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello!"}], add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.decode(ids) == "<|user|>Hello!<|end|><|assistant|>"


@rest(SECONDS)
@pytest.mark.native
async def test_the_engine_says_where_a_forward_spends_its_time() -> None:
    async with Engine(EngineConfig(attention_backend="native")) as engine:
        before = engine.stats().forward_seconds
        await engine.generate("What is 1 + 1?")
        after = engine.stats().forward_seconds
    assert set(after) == {"linear", "attention", "rest"}
    assert all(after[part] > before[part] for part in after)
    async with Engine(EngineConfig(attention_backend="sdpa")) as engine:
        assert engine.stats().forward_seconds == {}
