"""Logprobs: of prompts a few rows at a time; and by kernels, in a fixed order: lowest ids first among equals,
the same bits in any company."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from aioinfer.sampling import logprobs
from aioinfer.sampling.logprobs import TorchLogprobs, score
from aioinfer.sampling.native_sampler import NativeLogprobs
from tests.model.kernels import DEVICES, kernels_or_skip
from tests.sampling.support import native_thread_pool


@pytest.mark.parametrize("rows", [1, 3, 4, 10])
@pytest.mark.parametrize("top", [0, 2])
def test_in_pieces_they_are_those_of_all_rows(rows: int, top: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "_PIECE", 3)
    seen: list[int] = []

    def make(logits: torch.Tensor, top: int) -> TorchLogprobs:
        assert logits.dtype == torch.float32
        seen.append(len(logits))
        return TorchLogprobs(logits, top)

    given = torch.randn(rows, 20, generator=torch.Generator().manual_seed(rows)).to(torch.bfloat16)
    tokens = torch.arange(rows) % 20
    chosen, top_ids, values = score(make, given, tokens, top)
    whole = TorchLogprobs(given.float(), top)
    assert torch.equal(chosen, whole.of(tokens))
    assert torch.equal(top_ids, whole.top_ids)
    assert torch.equal(values, whole.top)
    assert max(seen) <= 3
    assert sum(seen) == rows


class Kernels(NamedTuple):
    """Those of one kind: where they run, and what makes logprobs of logits."""

    device: str
    make: Any


@pytest.fixture(params=["native", *DEVICES])
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    if request.param == "native":
        yield Kernels("cpu", partial(NativeLogprobs, native_thread_pool()))
        return
    kernels_or_skip(request.param)
    from aioinfer.sampling.triton_logprobs import TritonLogprobs

    with np.errstate(all="ignore"):
        yield Kernels(request.param, TritonLogprobs)


def some_logits(vocab: int, device: str) -> torch.Tensor:
    """Spread and sharp rows, some that cannot be, equal ones, and zeros of both signs."""
    logits = 4 * torch.randn(6, vocab, generator=torch.Generator().manual_seed(vocab))
    logits[1] *= 20
    logits[2, : vocab // 2] = -torch.inf
    logits[3] = 2.5
    logits[4] = logits[4].round()
    logits[4, 0] = -0.0
    return logits.to(device)


@pytest.mark.parametrize(
    ("vocab", "top"), [(1, 0), (1, 5), (5, 300), (33, 5), (1024, 1), (5000, 0), (5000, 20), (5000, 300)]
)
def test_logprobs_are_those_of_torch_and_of_equals_the_lower_id_is_first(
    kernels: Kernels, vocab: int, top: int
) -> None:
    logits = some_logits(vocab, kernels.device)
    found, wanted = kernels.make(logits, top), TorchLogprobs(logits, top)
    tokens = torch.arange(-1, 5, device=kernels.device).clamp(max=vocab - 1)
    assert found.top.shape == found.top_ids.shape == (6, min(top, vocab))
    torch.testing.assert_close(found.of(tokens), wanted.of(tokens), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.top, wanted.top, rtol=1e-5, atol=1e-5)
    order = logits.sort(dim=1, descending=True, stable=True).indices
    assert torch.equal(found.top_ids, order[:, :top])
    assert all(torch.equal(found.of(ids), found.top[:, at]) for at, ids in enumerate(found.top_ids.T))
    assert kernels.make(logits[:0], top).top.shape == (0, min(top, vocab))


def test_a_row_has_the_same_bits_in_any_company(kernels: Kernels) -> None:
    """Rows of an odd length begin at all kinds of addresses."""
    logits = some_logits(4999, kernels.device)
    together, tokens = kernels.make(logits, 4), torch.arange(6, device=kernels.device)
    for row in range(6):
        alone = kernels.make(logits[row : row + 1], 4)
        assert torch.equal(alone.of(tokens[row : row + 1]), together.of(tokens)[row : row + 1])
        assert torch.equal(alone.top[0], together.top[row])
        assert torch.equal(alone.top_ids[0], together.top_ids[row])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_broken_rows_have_no_numbers_and_others_do_not_notice(kernels: Kernels, value: float) -> None:
    logits = torch.zeros(2, 3000, device=kernels.device)
    logits[0, 1500] = value
    if value < 0:
        logits[0] = value
    found = kernels.make(logits, 3)
    assert found.of(torch.zeros(2, dtype=torch.int64, device=kernels.device)).isnan().tolist() == [
        True,
        False,
    ]
    assert found.top[0].isnan().any()
    assert found.top_ids[1].tolist() == [0, 1, 2]
