"""A prompt that the model cannot compute is an error, whatever is asked of it, and harms no other one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.errors import StepFailed
from aioinfer.model.kernels import AttentionBackend
from aioinfer.params import SamplingParams
from aioinfer.pooling import Pooling
from tests.engine.simulation import settle
from tests.model.block_models import block_config, write_checkpoint
from tests.model.checkpoints import FAMILIES, RECURRENT, make_model
from tests.model.harness import attention_for, build_batch, load, row_states, state_pool

#: the token whose vector is infinite, as an overflow makes it
POISON = 7
GOOD = [8, 9, 10, 11] * 5
SHORT = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
#: what is asked of the prompt, and of which nothing is sampled
UNSAMPLED: dict[str, dict[str, Any]] = {
    "nothing": {"params": SamplingParams(max_tokens=0)},
    "scores": {"params": SamplingParams(max_tokens=0, prompt_logprobs=1)},
    "choices": {"pooling": Pooling("choices", token_ids=(3, 4))},
    "mean": {"pooling": Pooling("mean")},
}


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A checkpoint of a family in which one token's vector is infinite, and the head is not the vectors."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = path = tmp_path_factory.mktemp(name)
            if name == "sdar":
                write_checkpoint(path, block_config("sdar", tie_word_embeddings=False))
            else:
                prefix, changes = {**FAMILIES, **RECURRENT}[name]
                make_model(prefix, {**changes, "tie_word_embeddings": False}, path, seed=1)
            poison(path, "embed_tokens")
        return made[name]

    torch.set_num_threads(1)
    return get


def poison(path: Path, tensor: str) -> None:
    tensors = load_file(path / "model.safetensors")
    (name,) = [name for name in tensors if tensor in name]
    tensors[name][POISON] = torch.inf
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def engine_of(path: Path, **changes: Any) -> Engine:
    settings = {"num_pages": 128, "page_size": 4, "share_prefix_tokens": 8, "chunk_size": 32, **changes}
    return Engine(EngineConfig(model=str(path), threads=1, state_snapshot_tokens=4, **settings))


@pytest.mark.parametrize("asked", UNSAMPLED)
@pytest.mark.parametrize("behind", [0, 1, 40], ids=str)
async def test_a_prompt_of_which_nothing_is_sampled_fails_as_others_do(
    poisoned: Callable[[str], Path], asked: str, behind: int
) -> None:
    async with engine_of(poisoned("qwen3")) as engine:
        with pytest.raises(StepFailed, match="no finite"):
            await engine.generate([*GOOD, POISON, *[9] * behind], **UNSAMPLED[asked])
        await settle(engine)
        assert (await engine.generate(GOOD, SHORT)).usage.completion_tokens == 5


async def nothing_later(ids: Any, logits: Any) -> None:
    """A logits processor."""


def hiding(ids: Any, logits: Any) -> None:
    logits[:] = 0.0


@pytest.mark.parametrize("processor", [nothing_later, hiding, lambda ids, logits: [5]])
async def test_no_logits_processor_is_asked_about_it(poisoned: Callable[[str], Path], processor: Any) -> None:
    async with engine_of(poisoned("qwen3")) as engine:
        with pytest.raises(StepFailed, match="no finite"):
            await engine.generate([*GOOD, POISON, 9], replace(SHORT, logits_processors=[processor]))
        await settle(engine)


@pytest.mark.parametrize("length", [24, 90], ids=str)
@pytest.mark.parametrize("output", [0, 5], ids=str)
@pytest.mark.parametrize(
    ("family", "backend"), [("qwen3", "native"), ("qwen3", "sdpa"), ("lfm2", "native"), ("qwen3.5", "native")]
)
async def test_who_shares_its_beginning_gets_what_it_gets_alone(
    poisoned: Callable[[str], Path], family: str, backend: str, output: int, length: int
) -> None:
    bad = [*GOOD, POISON, *[9] * (length - len(GOOD))]
    async with engine_of(poisoned(family), attention_backend=backend) as engine:
        innocent = [*GOOD, 12, 13]
        alone = (await engine.generate(innocent, SHORT)).token_ids
        engine.flush_cache()
        guilty = asyncio.ensure_future(engine.generate(bad, SamplingParams(max_tokens=output)))
        found = await asyncio.gather(guilty, engine.generate(innocent, SHORT), return_exceptions=True)
        assert isinstance(found[0], StepFailed)
        assert not isinstance(found[1], BaseException)
        assert found[1].token_ids == alone
        assert (await engine.generate(innocent, SHORT)).token_ids == alone
        with pytest.raises(StepFailed):
            await engine.generate(bad, SHORT)
        await settle(engine)


@pytest.mark.parametrize("backend", ["native", "sdpa"])
@pytest.mark.parametrize("family", ["qwen3", "mistral-window", "gpt-oss", "gemma2"])
async def test_a_draft_that_cannot_be_computed_is_refused_as_others_are(
    poisoned: Callable[[str], Path], family: str, backend: str
) -> None:
    """The tokens before it, which the same step computes, are those that there are without drafts."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
    async with engine_of(poisoned(family), attention_backend=backend, adaptive_drafts=False) as engine:
        alone = await engine.generate([*GOOD, 12, 13], replace(params, speculate=False))
        ids = alone.token_ids
        assert POISON not in ids
        drafts = [[POISON], [*ids[:4], POISON], [*ids[:3], POISON, *ids[4:]], [*ids[:6], POISON, POISON]]
        before = engine.stats().drafted_tokens
        for prediction in drafts:
            found = await engine.generate([*GOOD, 12, 13], replace(params, prediction=prediction))
            assert found.token_ids == ids, prediction
        assert engine.stats().drafted_tokens - before >= sum(map(len, drafts)) - 4
        await settle(engine)


@pytest.mark.parametrize("kernels", ["native", "sdpa"])
@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss", "gemma2", "lfm2", "qwen3.5"])
def test_no_layer_takes_it_to_the_positions_before(
    poisoned: Callable[[str], Path], family: str, kernels: AttentionBackend
) -> None:
    model = load(poisoned(family), kernels=kernels)
    found = []
    for token in (8, POISON):
        ids = [*GOOD, 12, token, *[9] * 10]
        states = row_states(state_pool(model.spec, 1), [(0, 1)])
        rows = range(len(ids))
        batch = build_batch([(ids, 0, [1, 2, 3])], 16, num_decodes=0, logits_rows=rows, states=states)
        found.append(model.forward(batch, attention_for(model.spec, 5, 16, kernels)))
    # torch's products for an expert have other bits with other rows.
    torch.testing.assert_close(found[1][:21], found[0][:21], rtol=0, atol=1e-3)
    assert not found[1][21:].isfinite().all(1).any()


async def test_so_does_a_prompt_of_a_diffusion_model(poisoned: Callable[[str], Path]) -> None:
    async with engine_of(poisoned("sdar"), page_size=None, chunk_size=8) as engine:
        innocent = [*GOOD, 12, 13]
        alone = (await engine.generate(innocent, SHORT)).token_ids
        engine.flush_cache()
        bad = asyncio.ensure_future(engine.generate([*GOOD, POISON, *[9] * 30], SHORT))
        assert (await engine.generate(innocent, SHORT)).token_ids == alone
        with pytest.raises(StepFailed, match="no finite"):
            await bad
        assert engine.stats().decode_tokens < 60, "its prompt was computed to the end"


async def test_scores_of_a_head_that_overflows_are_an_error(tmp_path: Path) -> None:
    """All hidden states are finite then."""
    make_model("Qwen3", {"head_dim": 16, "tie_word_embeddings": False}, tmp_path, seed=1)
    poison(tmp_path, "lm_head")
    async with engine_of(tmp_path) as engine:
        with pytest.raises(StepFailed, match="no finite"):
            await engine.generate(GOOD, SamplingParams(max_tokens=0, prompt_logprobs=0))
        assert (await engine.generate(GOOD, SamplingParams(max_tokens=0))).usage.prompt_tokens == len(GOOD)
