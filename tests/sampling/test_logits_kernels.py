"""Penalties, biases, bans and masks as kernels: the bits of the torch operations."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from aioinfer.sampling import logits_processors as by_torch
from aioinfer.sampling.batch import PenaltyReset
from aioinfer.sampling.native_sampler import NativeLogits
from aioinfer.sampling.penalties import Penalties
from tests.model.kernels import DEVICES, kernels_or_skip
from tests.sampling.support import CPU, make_batch, native_thread_pool, random_logits


class Kernels(NamedTuple):
    """A device and its implementation: ``logits_processors`` has the functions of masks, and penalise."""

    device: str
    logits_processors: Any


@pytest.fixture(params=[*DEVICES, pytest.param("native")])
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    """In Triton, interpreted or compiled, or in C++. The interpreter warns of infinity less infinity."""
    if request.param == "native":
        yield Kernels("cpu", NativeLogits(native_thread_pool()))
        return
    kernels_or_skip(request.param)
    from aioinfer.sampling import triton_logits

    with np.errstate(all="ignore"):
        yield Kernels(request.param, triton_logits)


def some_logits(seed: int, rows: int, vocab: int, device: str) -> torch.Tensor:
    """With NaN, infinities and -0.0; rows further apart than they are long."""
    rng = np.random.default_rng(seed)
    wide = torch.full((rows, vocab + 3), math.nan)
    wide[:, :vocab] = torch.from_numpy(np.stack([random_logits(rng, vocab) for _ in range(rows)]))
    wide[:, 1] = torch.tensor([-0.0, math.nan, math.inf, -math.inf, 5.0])[torch.arange(rows) % 5]
    return wide.to(device)[:, :vocab]


def assert_same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """To the bit; but NaN is NaN."""
    got, wanted = got.cpu().clone(), wanted.cpu().clone()
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.nan_to_num(7.0).view(torch.int32), wanted.nan_to_num(7.0).view(torch.int32))


@pytest.mark.parametrize(("vocab", "words"), [(40, 2), (2100, 66), (2100, 40), (4096, 128), (31, 3)])
def test_masks(kernels: Kernels, vocab: int, words: int) -> None:
    """Shorter and longer than the vocabulary; all bits, the sign too; rows without a mask are left alone."""
    device, logits_processors = kernels
    generator = torch.Generator().manual_seed(vocab)
    logits = some_logits(1, 5, vocab, device)
    rows = torch.tensor([4, 0, 2])
    masks = torch.randint(-(2**31), 2**31, (3, words), generator=generator).to(torch.int32)
    masks[1] = -1
    masks[2] = 0
    wanted = logits.cpu().clone()
    by_torch.apply_masks_(wanted, rows, masks)
    logits_processors.apply_masks_(logits, rows.to(device), masks.to(device))
    assert_same(logits, wanted)
    logits_processors.apply_masks_(logits, rows[:0].to(device), masks[:0].to(device))
    assert_same(logits, wanted)


@pytest.mark.parametrize("pairs", [0, 1, 128, 300])
def test_biases_and_bans(kernels: Kernels, pairs: int) -> None:
    device, logits_processors = kernels
    generator = torch.Generator().manual_seed(pairs)
    logits = some_logits(2, 5, 90, device)
    cells = torch.randperm(450, generator=generator)[:pairs]
    rows, ids = cells // 90, cells % 90
    bits = torch.randn(pairs, generator=generator).view(torch.int32).to(torch.int64)
    wanted = logits.cpu().clone()
    by_torch.add_biases_(wanted, rows, ids, bits)
    logits_processors.add_biases_(logits, rows.to(device), ids.to(device), bits.to(device))
    assert_same(logits, wanted)
    # The same ban twice, next to each other and far apart.
    rows, ids = (torch.cat((part, part[:50], part[:1])) for part in (rows, ids))
    by_torch.ban_(wanted, rows, ids)
    logits_processors.ban_(logits, rows.to(device), ids.to(device))
    assert_same(logits, wanted)


@pytest.mark.parametrize("vocab", [90, 2100])
def test_penalties(kernels: Kernels, vocab: int) -> None:
    """Also neutral rows over counts, rows without counts, and counts above a float's exactness."""
    device, logits_processors = kernels
    logits = some_logits(3, 5, vocab, device)
    fused = Penalties(6, vocab, torch.device(device), logits_processors.penalise)
    plain = Penalties(6, vocab, CPU)
    resets = [
        PenaltyReset(slot, [1, 2, 3 * slot], [4, 4, 2, vocab - slot] * (3 * slot)) for slot in (1, 2, 5)
    ]
    rows = [
        {"slot": 5, "repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": -0.3},
        {"slot": 1, "repetition_penalty": 0.6},
        {"slot": 2},
        {"slot": 3, "frequency_penalty": 0.7},
        {"slot": 1, "frequency_penalty": -0.1, "presence_penalty": 0.3},
    ]
    for penalties in (fused, plain):
        penalties.reset(resets)
        penalties._counts[1, 6] = 2**25 + 1
    before = logits.clone()
    got = fused.apply(logits, make_batch(rows, torch.device(device)))
    assert_same(got, plain.apply(logits.cpu(), make_batch(rows)))
    assert_same(logits, before)
    assert not torch.equal(got[0].cpu(), logits[0].cpu())
