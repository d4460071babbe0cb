"""The noise: its exact bits, their quality, and that nothing but the key matters."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from aioinfer.sampling.noise import gumbel, random_bits, uniform
from tests.sampling.support import chi_square

#: Standard deviations. All inputs are fixed, so a test passes always or never.
SHARP = 4.0


def mix64(h: int) -> int:
    h = (h ^ h >> 33) * 0xFF51AFD7ED558CCD % 2**64
    h = (h ^ h >> 33) * 0xC4CEB9FE1A85EC53 % 2**64
    return h ^ h >> 33


def written_down(seed: int, position: int, token: int) -> int:
    """The function of the module's text, on Python's integers."""
    golden = 0x9E3779B97F4A7C15
    key = mix64((mix64((seed + golden) % 2**64) + position * golden) % 2**64)
    x = (key + token) % 2**32
    x = ((x ^ x >> 17) * 0xED5AD4BB + (key >> 32)) % 2**32
    x = (x ^ x >> 11) * 0xAC4C1B51 % 2**32
    x = (x ^ x >> 15) * 0x31848BAB % 2**32
    return x ^ x >> 14


def test_noise_is_pinned() -> None:
    """These bits are part of the seed law: changing them changes every seeded output."""
    seeds = torch.tensor([0, 1, -1, 2**40])
    positions = torch.tensor([0, 7, 7, 123])
    assert random_bits(seeds, positions, torch.arange(3)).tolist() == [
        [2729271915, 3380725799, 1361982165],
        [270866020, 92116323, 35660379],
        [152757871, 731853122, 71014881],
        [3799912850, 3350681356, 2694855662],
    ]
    torch.testing.assert_close(
        gumbel(seeds, positions, torch.tensor([0])).flatten(),
        torch.tensor([1.152118443, 2.003772162, 2.606529688, -0.383481423]),
    )


def test_bits_are_those_of_the_text() -> None:
    seeds = [0, 1, -1, 2**32 - 1, 2**32, -(2**63), 2**63 - 1, 0x9E3779B97F4A7C15 - 2**64]
    ids = [0, 1, 2, 895, 65_535, 151_935, 2**31 - 1]
    for seed, position in itertools.product(seeds, (0, 1, 4095, 2**31)):
        bits = random_bits(torch.tensor([seed]), torch.tensor([position]), torch.tensor(ids))
        assert bits[0].tolist() == [written_down(seed, position, token) for token in ids], (seed, position)


FAMILIES = {
    "neighbouring seeds": (torch.arange(500), torch.zeros(500, dtype=torch.int64)),
    "negative seeds": (-torch.arange(500), torch.full((500,), 3)),
    "high words": (torch.arange(500) << 32, torch.zeros(500, dtype=torch.int64)),
    "neighbouring positions": (torch.full((500,), 42), torch.arange(500)),
    "both": (torch.arange(500), torch.arange(500)),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_byte_and_every_pair_of_neighbours_is_uniform(family: str) -> None:
    seeds, positions = FAMILIES[family]
    bits = random_bits(seeds, positions, torch.arange(2048))
    for shift in (0, 8, 16, 23, 24):
        cells = torch.bincount((bits >> shift & 255).flatten(), minlength=256)
        assert abs(chi_square(cells, torch.full((256,), bits.numel() / 256))) < SHARP, shift
    # The top of the 31 bits that make the uniform number, of a cell and of one near it, jointly.
    top = bits >> 26 & 31
    pairs = {
        **{f"tokens {lag} apart": (top[:, :-lag], top[:, lag:]) for lag in (1, 2, 3, 64, 1024)},
        **{f"rows {lag} apart": (top[:-lag], top[lag:]) for lag in (1, 2, 16, 256)},
        "rising": (top[:-1, :-1], top[1:, 1:]),
        "falling": (top[:-1, 1:], top[1:, :-1]),
        "low and high bits": (bits & 31, top),
    }
    for name, (one, other) in pairs.items():
        cells = torch.bincount((one * 32 + other).flatten(), minlength=1024)
        assert abs(chi_square(cells, torch.full((1024,), one.numel() / 1024))) < SHARP, name


def test_no_two_rows_are_alike() -> None:
    """Seeds that differ in one bit only, any bit, high word or sign; and positions."""
    seeds = [0, -1, *(1 << bit for bit in range(63)), *(-2 - (1 << bit) for bit in range(63))]
    seeds += [5 + (high << 32) for high in range(1, 200)]
    keys = [(seed, 0) for seed in sorted(set(seeds))] + [(0, position) for position in range(1, 300)]
    rows = random_bits(*torch.tensor(keys).unbind(1), torch.arange(64))  # type: ignore[call-arg]
    assert len({tuple(row) for row in rows.tolist()}) == len(keys)
    # Nor does a row show up shifted by some tokens in another.
    assert len(set(rows.flatten().tolist())) > rows.numel() - 20


def test_a_cell_depends_on_its_key_only() -> None:
    """Row order, row count, token order, subsets, ids per row: the same float32 to the last bit."""
    seeds = torch.tensor([5, -5, 2**50, 77, 77])
    positions = torch.tensor([0, 9, 9, 9, 10])
    whole = gumbel(seeds, positions, torch.arange(1003))
    for row in range(5):
        assert torch.equal(
            gumbel(seeds[row : row + 1], positions[row : row + 1], torch.arange(1003))[0], whole[row]
        )
    generator = torch.Generator().manual_seed(0)
    for size in (1, 2, 7, 8, 31, 500):
        ids = torch.randint(0, 1003, (5, size), generator=generator)
        order = torch.randperm(5, generator=generator)
        got = gumbel(seeds[order], positions[order], ids[order])
        assert torch.equal(got, whole.gather(1, ids)[order])


def token_with(bits: int, seed: int) -> int:
    """The token whose bits at position 0 are these: the rounds of the text, backwards."""

    def unshift(y: int, shift: int) -> int:
        x = y
        for _ in range(32 // shift):
            x = y ^ x >> shift
        return x

    key = mix64(mix64((seed + 0x9E3779B97F4A7C15) % 2**64))
    x = unshift(bits, 14) * pow(0x31848BAB, -1, 2**32) % 2**32
    x = unshift(x, 15) * pow(0xAC4C1B51, -1, 2**32) % 2**32
    x = (unshift(x, 11) - (key >> 32)) * pow(0xED5AD4BB, -1, 2**32) % 2**32
    return (unshift(x, 17) - key) % 2**32


@pytest.mark.parametrize(
    ("bits", "u", "noise"),
    [
        (0, 2.0**-32, 32 * math.log(2)),
        (2**31, 2.0**-32, 32 * math.log(2)),
        (1, 1.5 * 2.0**-31, -math.log(1.5 * 2.0**-31)),
        (2**31 - 1, 1 - 2.0**-24, -math.log(24 * math.log(2))),
        (2**32 - 1, 1 - 2.0**-24, -math.log(24 * math.log(2))),
        (2**30, 0.5, -math.log(math.log(2))),
    ],
)
def test_the_ends_of_the_interval_are_open_and_the_noise_finite(bits: int, u: float, noise: float) -> None:
    seed = next(seed for seed in range(100) if token_with(bits, seed) < 2**31)
    token = torch.tensor([token_with(bits, seed)])
    key = torch.tensor([seed]), torch.tensor([0])
    assert int(random_bits(*key, token)) == bits
    assert float(uniform(*key, token)) == u
    assert float(gumbel(*key, token)) == pytest.approx(noise, rel=3e-7)


def test_gumbel_has_the_gumbel_distribution() -> None:
    noise = gumbel(torch.arange(1000), torch.full((1000,), 8), torch.arange(1000)).double().flatten()
    exact = -torch.log(
        -torch.log1p(-uniform(torch.arange(1000), torch.full((1000,), 8), torch.arange(1000)).double())
    )
    assert float((noise - exact.flatten()).abs().max()) < 4e-6
    # Bins of equal probability by the inverse of exp(-exp(-x)), and the upper tail on its own.
    edges = torch.tensor([-math.log(-math.log(at / 64)) for at in range(1, 64)], dtype=torch.float64)
    cells = torch.bincount(torch.bucketize(noise, edges), minlength=64)
    assert abs(chi_square(cells, torch.full((64,), len(noise) / 64))) < SHARP
    for level in (5.0, 7.0, 9.0, 11.0):
        expected = -math.expm1(-math.exp(-level)) * len(noise)
        assert abs(int((noise > level).sum()) - expected) < SHARP * math.sqrt(expected) + 1, level
