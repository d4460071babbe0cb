"""Pages of real models that one engine has stored and another one finds: the same ids and logprobs."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from aioinfer import LLM, EngineConfig, Result, SamplingParams
from tests.model.harness import require
from tests.model.kernels import kernels_or_skip
from tests.model.test_oracle import KINDS, Checkpoint, config
from tests.tiers import SECONDS, rest

PROMPT = list(range(1, 46))
PARAMS = SamplingParams(temperature=0.9, seed=5, max_tokens=12, ignore_eos=True, logprobs=0)


def bits(result: Result) -> list[tuple[int, bytes]]:
    assert result.logprobs is not None
    return [(each.token_id, struct.pack("d", each.logprob)) for each in result.logprobs]


def values(result: Result) -> list[float]:
    assert result.logprobs is not None
    return [each.logprob for each in result.logprobs]


def ask(settings: EngineConfig) -> tuple[Result, int]:
    with LLM(settings) as llm:
        (result,) = llm.generate([PROMPT], PARAMS)
        return result, llm.stats().loaded_pages


@rest(SECONDS)
@pytest.mark.parametrize(("family", "kernels"), KINDS)
def test_another_engine_goes_on_from_stored_pages(
    checkpoint: Checkpoint, family: str, kernels: Any, tmp_path: Path
) -> None:
    require(kernels)
    path, _ = checkpoint(family)
    given = config(path, attention_backend=kernels, state_snapshot_tokens=1)
    alone, loaded = ask(given)
    assert not loaded
    stored = config(
        path, attention_backend=kernels, state_snapshot_tokens=1, prefix_cache_dir=str(tmp_path / "pages")
    )
    first, loaded = ask(stored)
    assert not loaded
    second, loaded = ask(stored)
    assert loaded == second.usage.cached_tokens // (stored.page_size or 16) > 0
    if kernels == "native":
        assert bits(alone) == bits(first) == bits(second)
    # Torch's bits depend on how a prompt is cut.
    assert alone.token_ids == first.token_ids == second.token_ids
    assert values(second) == pytest.approx(values(alone), abs=1e-4)


@rest(SECONDS)
@pytest.mark.parametrize("model", ["tiny-chat", "tiny-diffusion"])
def test_bundled_models_in_deterministic_mode_give_the_same_bits(model: str, tmp_path: Path) -> None:
    kernels_or_skip("cpu")
    settings = EngineConfig(
        model=model, device="cpu", deterministic=True, threads=1, prefix_cache_dir=str(tmp_path / "pages")
    )
    results = [ask(settings) for _ in range(2)]
    assert results[1][1] > 0
    assert bits(results[0][0]) == bits(results[1][0])


@rest(SECONDS)
def test_pages_of_other_blocks_are_not_found(tmp_path: Path) -> None:
    """What a position attends to ends with its block: the KV of a prompt is another one."""
    kernels_or_skip("cpu")
    results = []
    for size, place in ((16, "shared"), (4, "shared"), (4, "own")):
        settings = EngineConfig(
            model="tiny-diffusion",
            device="cpu",
            deterministic=True,
            threads=1,
            page_size=16,
            block_size=size,
            prefix_cache_dir=str(tmp_path / place),
        )
        results.append(ask(settings))
    assert [loaded for _, loaded in results] == [0, 0, 0]
    assert bits(results[1][0]) == bits(results[2][0])
