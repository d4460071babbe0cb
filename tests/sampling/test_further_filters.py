"""Filters that the kernels do not have: one set of survivors for all kernels, and neighbours keep theirs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from aioinfer import plugins
from aioinfer.params import SamplingParams
from aioinfer.sampling.batch import FilterRows
from aioinfer.sampling.outcomes import BAD_LOGITS
from aioinfer.sampling.sampler import Sampler
from tests.sampling.support import CPU, make_batch, native_thread_pool

VOCAB = 300


def sampler(kernels: Any) -> Sampler:
    if kernels == "native":
        native_thread_pool()
    return Sampler(64, VOCAB, CPU, kernels)


def rows(name: str, values: dict[int, float]) -> FilterRows:
    return FilterRows(name, torch.tensor(list(values)), torch.tensor(list(values.values())))


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_only_survivors_are_drawn_and_neighbours_keep_their_tokens(kernels: str) -> None:
    torch.manual_seed(1)
    logits = torch.randn(64, VOCAB) * 2
    kept = logits.clone()
    batch = make_batch([{"temperature": 1.5, "seed": at, "position": at} for at in range(64)])
    plain = sampler(kernels).sample(logits, batch)
    chosen = dict.fromkeys(range(0, 64, 2), 1.5)
    tokens = sampler(kernels).sample(logits, replace(batch, filters=[rows("top_n_sigma", chosen)]))
    assert torch.equal(logits, kept)
    assert torch.equal(tokens[1::2], plain[1::2])
    floor = logits.amax(1) - 1.5 * logits.std(1, correction=0)
    drawn = logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
    before = logits.gather(1, plain.unsqueeze(1)).squeeze(1)
    assert (drawn[::2] >= floor[::2]).all()
    assert (before[::2] < floor[::2]).any()
    # The noise is a function of seed, position and token: a token that survives is drawn as before.
    same = before[::2] >= floor[::2]
    assert torch.equal(tokens[::2][same], plain[::2][same])


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_bans_come_first_and_broken_rows_stay_broken(kernels: str) -> None:
    logits = torch.zeros(4, VOCAB)
    logits[:, 7], logits[:, 9] = 10.0, 9.0
    logits[2, 3], logits[3] = float("nan"), float("-inf")
    batch = make_batch([{"banned": [7]}, {}, {}, {}])
    tokens = sampler(kernels).sample(
        logits, replace(batch, filters=[rows("top_n_sigma", dict.fromkeys(range(4), 0.01))])
    )
    assert tokens.tolist() == [9, 7, BAD_LOGITS, BAD_LOGITS]


@pytest.mark.parametrize("name", plugins.names(plugins.FILTERS))
def test_each_filter_is_a_neutral_field_of_the_parameters(name: str) -> None:
    assert not SamplingParams().further_filters
    assert SamplingParams(**{name: 0.5}).further_filters == {name: 0.5}
    plugins.load(plugins.FILTERS, name)()


def test_an_engine_samples_survivors_only_and_leaves_company_alone() -> None:
    from aioinfer import LLM, EngineConfig

    loose = SamplingParams(temperature=5.0, seed=3, max_tokens=20, ignore_eos=True)
    tight = replace(loose, top_n_sigma=0.01)
    greedy = replace(loose, temperature=0.0)
    with LLM(EngineConfig(threads=1, dtype="float32")) as llm:
        alone = llm.generate(["Once upon", "Once upon"], [loose, greedy], progress=False)
        mixed = llm.generate(["Once upon"] * 3, [loose, greedy, tight], progress=False)
    assert [each.token_ids for each in mixed[:2]] == [each.token_ids for each in alone]
    # Within a hundredth of a deviation of the largest logit there is nearly always nothing else.
    assert mixed[2].token_ids == mixed[1].token_ids != mixed[0].token_ids
