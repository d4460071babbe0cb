"""Text encoders: embeddings are those of transformers, and a text is one row, whatever else is computed."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from aioinfer import LLM, EngineConfig, InvalidRequest
from aioinfer.errors import ConfigError
from aioinfer.execution.device import DeviceInfo, Progress, StepOutOfMemory
from aioinfer.scheduling.step import Step
from tests.engine.conftest import MakeEngine
from tests.engine.test_embedding_models import config, with_sentences
from tests.engine.test_pooling import LAST
from tests.tiers import SECONDS, rest
from tests.toys import ToyDevice, ToyTokenizer
from tests.toys.pooling import toy_pooled

VOCAB = 97
KINDS: tuple[Any, ...] = ("mean", "cls", "last")
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
}


def make_encoder(path: Path, **changes: Any) -> Any:
    """Write a random checkpoint; returns transformers' model."""
    model = transformers.BertModel(transformers.BertConfig(**SHAPE, **changes)).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    model.save_pretrained(path)
    return model


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(5)
    return [rng.choices(range(VOCAB), k=rng.choice([1, 7, 20, 64])) for _ in range(count)]


@rest(SECONDS)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"chunk_size": 4, "max_prefill_tokens": 8},
        {"max_step_tokens": 64, "overlap_steps": 0},
        {"attention_backend": "sdpa", "admission": "fifo"},
    ],
    ids=str,
)
def test_embeddings_are_those_of_transformers(tmp_path: Path, settings: dict[str, Any]) -> None:
    model, asked = make_encoder(tmp_path), prompts(12)
    with LLM(config(tmp_path, **settings)) as llm:
        for _ in range(2):
            found = {
                kind: llm.embed(asked, pooling=kind, normalize=False) for kind in ("mean", "cls", "last")
            }
        assert np.allclose(llm.embed(asked[0], normalize=False).vector, found["mean"][0].vector, atol=1e-5)
        assert not any(each.usage.cached_tokens for each in found["last"])
        with pytest.raises(InvalidRequest, match="no head for tokens"):
            llm.generate([1, 2])
        with pytest.raises(InvalidRequest, match="context length is 64"):
            llm.embed([1] * 65)
    for at, ids in enumerate(asked):
        with torch.no_grad():
            states = model(torch.tensor([ids])).last_hidden_state[0].numpy()
        for kind, right in (("mean", states.mean(0)), ("cls", states[0]), ("last", states[-1])):
            assert np.allclose(found[kind][at].vector, right, atol=1e-4), (kind, ids)


def test_its_files_choose_the_first_token(tmp_path: Path) -> None:
    model = make_encoder(tmp_path)
    with_sentences(tmp_path, {"pooling_mode_cls_token": True}, "Normalize")
    with LLM(config(tmp_path)) as llm, torch.no_grad():
        found = llm.embed([4, 5, 6]).vector
        wanted = model(torch.tensor([[4, 5, 6]])).last_hidden_state[0, 0].numpy()
    assert np.allclose(found, wanted / np.linalg.norm(wanted), atol=1e-5)


def test_the_length_is_that_of_the_inputs_it_was_made_for(tmp_path: Path) -> None:
    make_encoder(tmp_path)
    with LLM(config(tmp_path)) as llm:
        assert llm._engine.info.max_model_len == 64
        with pytest.raises(InvalidRequest, match="truncate_prompt_tokens keeps its beginning"):
            llm.embed([1] * 65)
    with_sentences(tmp_path, {"pooling_mode_mean_tokens": True})
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 20}))
    with LLM(config(tmp_path)) as llm:
        assert llm._engine.info.max_model_len == 20
        assert "max_seq_length" in llm._engine.info.length_reason
        with pytest.raises(InvalidRequest, match=r"made for 20 at most.*truncate_prompt_tokens"):
            llm.embed([1] * 21)
        cut = llm.embed([1] * 90, truncate_prompt_tokens=20).vector
        assert np.allclose(cut, llm.embed([1] * 20).vector)


def test_an_encoder_that_was_made_a_decoder_is_none(tmp_path: Path) -> None:
    make_encoder(tmp_path, is_decoder=True)
    with pytest.raises(ConfigError, match="no causal language model"):
        LLM(config(tmp_path))


class WholeToy(ToyDevice):
    """Says that its prompts must not be cut."""

    def open(self, progress: Progress | None = None) -> DeviceInfo:
        return dataclasses.replace(super().open(progress), whole_prompts=True, generates=False)


@pytest.mark.parametrize("admission", ["fifo", "pack"])
@pytest.mark.parametrize("short", [0, 32], ids=["", "short of memory"])
async def test_a_prompt_is_one_row(make_engine: MakeEngine, admission: str, short: int) -> None:
    rng = random.Random(3)
    asked = [rng.choices(range(1, 64), k=rng.randint(1, 40)) for _ in range(40)]

    def watch(step: Step) -> None:
        assert all(row.start == 0 and row.length == len(row.sequence.prompt_ids) for row in step.rows)
        if short and step.num_rows > 1 and step.num_tokens > short:
            # Half of the largest step fits: no request runs out of memory twice in turn.
            raise StepOutOfMemory("too many")

    device = WholeToy(fault=watch)
    settings = {"chunk_size": 8, "max_step_tokens": 64, "admission": admission}
    async with make_engine(device=device, tokenizer=ToyTokenizer, **settings) as engine:
        await engine.pause()
        asking = asyncio.ensure_future(engine.embed(asked, pooling="last", normalize=False))
        while engine.stats().waiting < 8:  # the first step is full
            await asyncio.sleep(0)
        engine.resume()
        found = await asking
        assert engine.stats().cached_tokens == 0
        assert engine.stats().steps < 40 or short
        assert (engine.stats().out_of_memory_retries > 0) == bool(short)
    assert [each.vector.tolist() for each in found] == [toy_pooled(ids, LAST).tolist() for ids in asked]


def test_a_text_is_no_longer_than_a_step(tmp_path: Path) -> None:
    make_encoder(tmp_path)
    with LLM(EngineConfig(model=str(tmp_path), max_step_tokens=20, max_running_requests=4)) as llm:
        assert llm._core.info.max_model_len == 20
        assert len(llm.embed([1] * 20).vector) == 48
