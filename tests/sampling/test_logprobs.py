"""Logprobs of prompts, a few rows at a time."""

from __future__ import annotations

import pytest
import torch

from aioinfer.sampling import logprobs
from aioinfer.sampling.logprobs import TorchLogprobs, score


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
