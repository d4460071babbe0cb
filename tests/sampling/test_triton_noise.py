"""The noise inside kernels: the bits of the torch function, its uniform numbers, and its Gumbel noise."""

from __future__ import annotations

import itertools

import pytest
import torch

from aioinfer.sampling.noise import gumbel, random_bits, uniform

pytest.importorskip("triton", reason="triton is not installed")

import triton
import triton.language as tl

from aioinfer.sampling import triton_noise
from aioinfer.sampling.triton_noise import INTERPRETED
from tests.sampling.test_noise import token_with
from tests.tiers import INTERPRETER, nightly

IDS = 1024
SEEDS = [0, 1, -1, 2**32 - 1, 2**32, -(2**63), 2**63 - 1, 0x9E3779B97F4A7C15 - 2**64, 12345678901234]
KEYS = list(itertools.product(SEEDS, (0, 1, 4095, 2**31, 2**40)))


@triton.jit
def _noise_kernel(seeds, positions, ids, bits, numbers, noise, N: tl.constexpr, WIDEN: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    at = tl.arange(0, N)
    name = tl.load(ids + at)
    low, high = triton_noise.row_key(tl.load(seeds + row), tl.load(positions + row))
    tl.store(bits + row * N + at, triton_noise.random_bits(low, high, name).to(tl.int64))
    tl.store(numbers + row * N + at, triton_noise.uniform(low, high, name))
    tl.store(noise + row * N + at, triton_noise.gumbel(low, high, name, WIDEN))


def by_kernel(keys: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bits, uniform numbers and Gumbel noise, [S, N] each."""
    shape = (len(keys), len(ids))
    bits = torch.empty(shape, dtype=torch.int64, device=keys.device)
    numbers, noise = (torch.empty(shape, device=keys.device) for _ in range(2))
    seeds, positions = keys.T.contiguous()
    _noise_kernel[(len(keys),)](
        seeds, positions, ids.to(torch.int32), bits, numbers, noise, N=len(ids), WIDEN=INTERPRETED
    )
    return bits, numbers, noise


def ids_for(device: str) -> torch.Tensor:
    """The first tokens, tokens of large vocabularies and the largest ids."""
    generator = torch.Generator().manual_seed(0)
    large = torch.randint(0, 2**31, (IDS // 2,), generator=generator)
    large[-2:] = torch.tensor([2**31 - 1, 262_143])
    return torch.cat((torch.arange(IDS // 2), large)).to(device)


@nightly(INTERPRETER)
def test_bits_and_uniform_numbers_are_those_of_torch(device: str) -> None:
    keys, ids = torch.tensor(KEYS, device=device), ids_for(device)
    bits, numbers, _ = by_kernel(keys, ids)
    assert torch.equal(bits, random_bits(*keys.T, ids))
    assert torch.equal(numbers, uniform(*keys.T, ids))


@nightly(INTERPRETER)
def test_gumbel_noise_is_that_of_torch_but_for_the_last_places(device: str) -> None:
    keys, ids = torch.tensor(KEYS, device=device), ids_for(device)
    _, numbers, noise = by_kernel(keys, ids)
    torch.testing.assert_close(noise, gumbel(*keys.T, ids), rtol=2.4e-7, atol=2.4e-7)
    # An ulp of the inner logarithm is up to 2**-23 of it, and moves the outer one by as much.
    exact = -torch.log(-torch.log1p(-numbers.double()))
    torch.testing.assert_close(noise.double(), exact, rtol=2.4e-7, atol=2.4e-7)


@pytest.mark.parametrize("bits", [0, 2**31, 2**31 - 1, 2**32 - 1])
def test_the_ends_of_the_interval_give_the_finite_noise_of_torch(device: str, bits: int) -> None:
    seed = next(seed for seed in range(100) if token_with(bits, seed) < 2**31)
    keys, ids = (
        torch.tensor([[seed, 0]], device=device),
        torch.tensor([token_with(bits, seed)] * 2, device=device),
    )
    found, numbers, noise = by_kernel(keys, ids)
    assert found.tolist() == [[bits, bits]]
    assert torch.equal(numbers, uniform(*keys.T, ids))
    assert noise.isfinite().all()
    torch.testing.assert_close(noise, gumbel(*keys.T, ids), rtol=2.4e-7, atol=2.4e-7)
