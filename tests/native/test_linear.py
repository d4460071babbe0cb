"""Native linear layers against the formula in float64."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from aioinfer.model.native import NativeMLP
from aioinfer.model.native_linear import NativeLinear
from aioinfer.native.bindings import shared_thread_pool
from tests.native.support import DTYPES, UNIT, normal
from tests.tiers import SECONDS, rest

ROWS = [0, *range(1, 41), 100, 300]


def check(got: torch.Tensor, values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Within one rounding of the result and the roundings of a sum in float32."""
    wide = None if bias is None else bias.double()
    wanted = F.linear(values.double(), weight.double(), wide)
    size = F.linear(values.double().abs(), weight.double().abs(), None if wide is None else wide.abs())
    # With errors of random sign a sum of n terms is off by the root of n on average.
    sums = 4 * UNIT[torch.float32] * values.shape[1] ** 0.5 * size
    assert got.dtype == values.dtype
    assert got.shape == wanted.shape
    assert ((got.double() - wanted).abs() <= sums + UNIT[got.dtype] * 1.01 * wanted.abs()).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(24))
def test_random_shapes(seed: int, dtype: torch.dtype) -> None:
    rng = random.Random(seed)
    outputs = rng.choice([1, 7, 8, 15, 16, 17, 31, 32, 33, 63, 65, 97, 161, 300])
    inner = 16 * rng.choice([1, 2, 3, 5, 8, 21, 40])
    weight = normal(outputs, inner, seed=seed, dtype=dtype)
    bias = rng.choice([None, normal(outputs, seed=seed + 1, dtype=dtype)])
    linear = NativeLinear(shared_thread_pool(1 + seed % 3), weight, bias)
    for rows in rng.sample(ROWS, 8):
        values = normal(rows, inner, seed=rows, dtype=dtype)
        check(linear(values), values, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_rows_over_more_panels_than_fit_a_cache(dtype: torch.dtype) -> None:
    """Runs of panels, panel by panel, and many rows over a cache full of panels."""
    weight, bias = normal(650, 1024, seed=0, dtype=dtype), normal(650, seed=1, dtype=dtype)
    linear = NativeLinear(shared_thread_pool(2), weight, bias)
    values = normal(300, 1024, seed=2, dtype=dtype)
    whole = linear(values)
    check(whole, values, weight, bias)
    for rows in ROWS:
        assert torch.equal(linear(values[:rows]), whole[:rows]), rows


@rest(SECONDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(33, 2048), (576, 576), (2000, 64)])
def test_many_rows_have_the_same_bits_however_they_are_divided(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Among more workers than there are runs of panels, the rows are divided, too."""
    weight = normal(*shape, seed=0, dtype=dtype)
    values = normal(1100, shape[1], seed=1, dtype=dtype)
    alone = NativeLinear(shared_thread_pool(1), weight, None)
    whole = torch.cat([alone(part) for part in values.split(9)])
    check(whole, values, weight, None)
    for threads in (1, 2, 5, 16):
        linear = NativeLinear(shared_thread_pool(threads), weight, None)
        for rows in (1100, 1, 15, 127, 400, 801):
            assert torch.equal(linear(values[:rows]), whole[:rows]), (threads, rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("middle", [16, 48, 80])
def test_gates_and_their_values(middle: int, bias: bool, dtype: torch.dtype) -> None:
    weight = normal(2 * middle, 64, seed=middle, dtype=dtype)
    both = normal(2 * middle, seed=1, dtype=dtype) if bias else None
    gated = NativeLinear(shared_thread_pool(2), weight, both, gated=True)
    down = normal(32, middle, seed=2, dtype=dtype) * 0.2
    whole = NativeMLP(gated, NativeLinear(shared_thread_pool(2), down, None))
    for rows in (0, 1, 2, 13, 14, 15, 40):
        values = normal(rows, 64, seed=rows, dtype=dtype) * 0.3
        wide = None if both is None else both.double()
        gate, up = F.linear(values.double(), weight.double(), wide).chunk(2, 1)
        wanted = F.silu(gate) * up
        bound = 1e-5 * (1 + gate.abs() + up.abs()) + 1.01 * UNIT[dtype] * wanted.abs()
        got = gated(values)
        assert ((got.double() - wanted).abs() <= bound).all()
        check(whole(values), got, down, None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_beyond_the_range_of_an_exponential(dtype: torch.dtype) -> None:
    """silu of large negative numbers is 0, of large positive ones the number itself; NaN stays NaN."""
    gates = torch.tensor([-1e4, -120.0, -88.8, -87.0, -1e-3, 0.0, 1e-3, 87.0, 120.0, 1e4, float("nan")])
    values = torch.zeros(len(gates), 16, dtype=dtype)
    values[:, 0], values[:, 1] = gates.to(dtype), 1
    weight = torch.zeros(32, 16, dtype=dtype)
    weight[:16, 0], weight[16:, 1] = 1, 1
    got = NativeLinear(shared_thread_pool(1), weight, None, gated=True)(values)
    wanted = F.silu(gates.to(dtype).double())
    torch.testing.assert_close(
        got[:, 5].double(), wanted, rtol=4e-7 + UNIT[dtype], atol=1e-36, equal_nan=True
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_stay_in_their_rows(dtype: torch.dtype) -> None:
    weight = normal(70, 48, seed=1, dtype=dtype)
    linear = NativeLinear(shared_thread_pool(2), weight, None)
    values = normal(15, 48, seed=2, dtype=dtype)
    wanted = linear(values)
    values[3], values[14, 5] = float("nan"), float("inf")
    got = linear(values)
    kept = [row for row in range(15) if row not in (3, 14)]
    assert torch.equal(got[kept], wanted[kept])
    assert got[3].isnan().all()
    assert not got[14].isfinite().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_are_read_with_their_strides(dtype: torch.dtype) -> None:
    weight = normal(70, 96, seed=1, dtype=dtype)[::2, ::2]
    bias = normal(70, seed=2, dtype=dtype)[::2]
    values = normal(48, 9, seed=3, dtype=dtype).T
    check(NativeLinear(shared_thread_pool(1), weight, bias)(values), values, weight, bias)


def test_results_of_bfloat16_are_rounded_to_even() -> None:
    """Halfway between two numbers, one each way, and NaN."""
    values = torch.zeros(1, 16, dtype=torch.bfloat16)
    values[0, :2] = 1
    weight = torch.zeros(4, 16, dtype=torch.bfloat16)
    # 1 + 2^-8 and 1 + 2^-7 + 2^-8 lie in the middle.
    weight[0, 0], weight[0, 1] = 1, 2**-8
    weight[1, 0], weight[1, 1] = 1 + 2**-7, 2**-8
    weight[2, 0], weight[2, 1] = 1, 2**-8 * 1.5
    weight[3, 0] = float("nan")
    got = NativeLinear(shared_thread_pool(1), weight, None)(values)[0].tolist()
    assert got[:3] == [1.0, 1 + 2**-6, 1 + 2**-7]
    assert got[3] != got[3]
