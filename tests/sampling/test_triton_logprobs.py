"""Logprobs in a fixed order: torch's values, lowest ids first among equals, the same bits in any company."""

from __future__ import annotations

import pytest
import torch

from tests.model.kernels import DEVICES, kernels_or_skip, normal


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    kernels_or_skip(request.param)
    name: str = request.param
    return name


@pytest.mark.parametrize("vocab", [7, 5000])
def test_values_are_those_of_a_log_softmax(device: str, vocab: int) -> None:
    from aioinfer.sampling.triton_logprobs import TritonLogprobs

    logits = (4 * normal(3, vocab, seed=0)).to(device)
    logits[0, :3] = float("-inf")
    found, expected = TritonLogprobs(logits, 4), logits.double().log_softmax(dim=1)
    top, ids = expected.topk(4, dim=1)
    torch.testing.assert_close(found.top.double(), top, rtol=1e-5, atol=1e-5)
    assert torch.equal(found.top_ids, ids)
    tokens = torch.tensor([vocab - 1, -1, 2], device=device)
    got = found.of(tokens).double()
    torch.testing.assert_close(got, expected[[0, 1, 2], [vocab - 1, 0, 2]], rtol=1e-5, atol=1e-5)
    assert TritonLogprobs(logits, 0).top.shape == (3, 0)
    assert TritonLogprobs(logits[:0], 9).top.shape == (0, min(9, vocab))


def test_equal_tokens_come_in_the_order_of_their_ids(device: str) -> None:
    from aioinfer.sampling.triton_logprobs import TritonLogprobs

    logits = torch.tensor([[0.0, -0.0, 2.0, -1.0, 2.0, 0.0, -1.0, -2.0]], device=device)
    assert TritonLogprobs(logits, 8).top_ids.tolist() == [[2, 4, 0, 1, 5, 3, 6, 7]]


def test_a_row_has_the_same_bits_in_any_company(device: str) -> None:
    """Rows of an odd length begin at all kinds of addresses."""
    from aioinfer.sampling.triton_logprobs import TritonLogprobs

    logits = normal(5, 4999, seed=1).to(torch.bfloat16).float().to(device)
    together = TritonLogprobs(logits, 20)
    tokens = torch.arange(5, device=device)
    for row in range(5):
        alone = TritonLogprobs(logits[row : row + 1], 20)
        assert torch.equal(alone.top[0], together.top[row])
        assert torch.equal(alone.top_ids[0], together.top_ids[row])
        assert torch.equal(alone.of(tokens[row : row + 1])[0], together.of(tokens)[row])
    broken = logits[:2].clone()
    broken[0, 17] = float("nan")
    assert TritonLogprobs(broken, 3).top[0].isnan().all()
    assert torch.equal(TritonLogprobs(broken, 3).top[1], TritonLogprobs(logits, 3).top[1])
