"""Quantised linear layers: bit for bit what the stated arithmetic gives, in numpy."""

from __future__ import annotations

import ctypes
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from aioinfer.checkpoint.tensors import QuantisedMatrix
from aioinfer.model.native_linear import NativeLinear
from aioinfer.model.quantization import Rounding
from aioinfer.model.weights_cache import MappedMemory
from aioinfer.native.bindings import InvalidArguments, shared_thread_pool
from tests.native.quantised_reference import Quantised, fused, multiply
from tests.native.support import DTYPES, UNIT, normal
from tests.tiers import grid

Bits = Literal[4, 6, 8, 0]
ROWS = [*range(1, 10), 17, 27, 28, 33, 70]
GROUPS = [0, 32, 64, 128]
#: those of llama.cpp's IQ4, the largest among them
TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 127)
#: in place of bits: 4 with a table
LOOKED_UP: Literal[0] = 0
#: all bits with their groups
KINDS = [(bits, group) for bits in (4, 6, 8, LOOKED_UP) for group in (*GROUPS, *([16] if bits != 4 else []))]


def rounding_of(bits: Bits, group: int) -> Rounding:
    return Rounding(4, group, TABLE) if bits == LOOKED_UP else Rounding(bits, group)


def draw(
    rng: np.random.Generator, bits: Bits, group: int, shape: tuple[int, int], offsets: bool
) -> Quantised:
    """Any numbers, the extreme ones among them."""
    outputs, inner = shape
    groups = -(-inner // group) if group else 1
    values = rng.integers(-128, 128, shape) if bits == 8 else rng.integers(0, 2 ** (bits or 4), shape)
    values[rng.integers(outputs)] = -128 if bits == 8 else 2 ** (bits or 4) - 1
    if bits == LOOKED_UP:
        values = np.array(TABLE)[values]
    scales = rng.standard_normal((outputs, groups)).astype(np.float32)
    if not offsets:
        return Quantised(values - rounding_of(bits, group).zero, scales, None, group)
    return Quantised(values, scales, rng.standard_normal((outputs, groups)).astype(np.float32), group)


def packed(
    weight: Quantised,
    bias: NDArray[np.float32] | None,
    bits: Bits,
    *,
    threads: int = 2,
    dtype: torch.dtype = torch.float32,
) -> NativeLinear:
    rounding = rounding_of(bits, weight.group)
    stored = weight.values + (rounding.zero if weight.offsets is None else 0)
    if rounding.table:
        stored = np.searchsorted(TABLE, stored)
    return NativeLinear.given(
        shared_thread_pool(threads),
        QuantisedMatrix(
            torch.from_numpy(stored.astype(np.int8 if bits == 8 else np.uint8)),
            torch.from_numpy(weight.scales),
            None if weight.offsets is None else torch.from_numpy(weight.offsets),
            rounding,
        ),
        None if bias is None else torch.from_numpy(bias),
        dtype=dtype,
    )


def mapped(linear: NativeLinear, weight: Quantised, bias: NDArray[np.float32] | None) -> NativeLinear:
    """The same layer with a copy of its memory, behind which the address sanitizer lets nothing be read."""
    place, size = linear.packed.memory
    copy = torch.frombuffer((ctypes.c_char * size).from_address(place), dtype=torch.uint8).clone()
    assert linear.kept is not None
    return NativeLinear.mapped(
        linear.packed.pool,
        MappedMemory(copy.data_ptr(), size, copy, linear.packed.factors),
        None if bias is None else torch.from_numpy(bias),
        weight.values.shape,
        linear.kept,
        dtype=linear.dtype,
        kept=True,
    )


def assert_bits(got: torch.Tensor, wanted: NDArray[np.float32]) -> None:
    """Equal in every bit; any NaN is NaN."""
    mine = got.numpy()
    same = (mine.view(np.int32) == wanted.view(np.int32)) | (np.isnan(mine) & np.isnan(wanted))
    assert same.all(), f"{(~same).sum()} of {same.size} differ"


@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize(("bits", "group"), KINDS)
@pytest.mark.parametrize("shape", grid([(33, 70), (70, 333)], [(1, 1), (64, 64), (129, 1000), (300, 2049)]))
def test_results_have_the_bits_of_the_stated_arithmetic(
    shape: tuple[int, int], bits: Bits, group: int, offsets: bool
) -> None:
    """Also with more threads than panels."""
    rng = np.random.default_rng([*shape, bits, group, offsets])
    weight, bias = draw(rng, bits, group, shape, offsets), rng.standard_normal(shape[0]).astype(np.float32)
    values = rng.standard_normal((max(ROWS), shape[1])).astype(np.float32)
    for own in (None, bias):
        wanted = multiply(values, weight, own)
        for threads in (1, 2, 3, 5):
            linear = packed(weight, own, bits, threads=threads)
            assert_bits(linear.dequantised(), weight.dequantised())
            other = mapped(linear, weight, own)
            for rows in ROWS:
                assert_bits(other(torch.from_numpy(values[:rows])), wanted[:rows])


@pytest.mark.parametrize("bits", [4, 6, 8, LOOKED_UP])
@pytest.mark.parametrize("group", [0, 64])
def test_results_of_bfloat16_are_rounded_once(group: int, bits: Bits) -> None:
    rng = np.random.default_rng(3)
    weight = draw(rng, bits, group, (70, 200), offsets=True)
    linear = packed(weight, None, bits, dtype=torch.bfloat16)
    values = torch.from_numpy(rng.standard_normal((17, 200)).astype(np.float32)).bfloat16()
    wanted = multiply(values.float().numpy(), weight, None)
    assert torch.equal(linear(values), torch.from_numpy(wanted).bfloat16())


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("value", ["least", "nearly least", "zero", "most"])
def test_the_largest_numbers_do_not_saturate(value: str, sign: int, bits: Bits) -> None:
    half = 2 ** (bits - 1)
    number = {"least": -half, "nearly least": 1 - half, "zero": 0, "most": half - 1}[value]
    weight = Quantised(np.full((40, 1024), number), np.ones((40, 1), np.float32), None, 0)
    linear, values = packed(weight, None, bits), torch.full((37, 1024), 3.0 * sign)
    wanted = fused(np.float32([1024 * 127 * number * sign]) * np.float32(3 / 127), np.ones(1), np.zeros(1))
    for rows in (5, 37):
        assert (linear(values[:rows]) == wanted.item()).all()


@pytest.mark.parametrize("rows", [2, 28])
def test_the_longest_group_does_not_overflow(rows: int) -> None:
    inner = 1 << 17
    for number, bits in ((-128, 8), (127, 8), (-32, 6), (31, 6), (-8, 4), (-127, LOOKED_UP)):
        weight = Quantised(np.full((1, inner), number), np.ones((1, 1), np.float32), None, 0)
        for sign in (-1, 1):
            got = packed(weight, None, bits)(torch.full((rows, inner), 127.0 * sign))  # type: ignore[arg-type]
            assert got.tolist() == [[float(inner * 127 * sign * number)]] * rows


@pytest.mark.parametrize(("bits", "group"), KINDS)
def test_rows_of_any_size_are_rounded_as_stated(group: int, bits: Bits) -> None:
    """Zeros, numbers too small to have a factor, the smallest that have one, and large ones."""
    rng = np.random.default_rng(5)
    weight = draw(rng, bits, group, (40, 200), offsets=True)
    values = rng.standard_normal((9, 200)).astype(np.float32)
    values *= np.array([0, 1e-45, 1e-38, 1e-31, 1e-30, 1e-29, 1e-10, 1e20, 1e32], np.float32)[:, None]
    values[1, :3] = [1e-30, -1e-30, 1e-40]
    got = packed(weight, None, bits)(torch.from_numpy(values))
    assert_bits(got, multiply(values, weight, None))
    assert got.isfinite().all()
    assert (got[0] == 0).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [0, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_with_infinity_or_nan_has_only_nan_and_others_do_not_notice(
    dtype: torch.dtype, group: int, bits: Bits
) -> None:
    linear = NativeLinear(
        shared_thread_pool(2), normal(70, 200, seed=1, dtype=dtype), None, Rounding(bits, group)
    )
    values = normal(15, 200, seed=2, dtype=dtype)
    wanted = linear(values)
    values[3], values[7, 199], values[14, 5] = float("nan"), float("nan"), float("-inf")
    got = linear(values)
    kept = [row for row in range(15) if row not in (3, 7, 14)]
    assert torch.equal(got[kept], wanted[kept])
    assert got[[3, 7, 14]].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_many_rows_over_more_panels_than_fit_a_cache(bits: Bits, dtype: torch.dtype) -> None:
    """Tasks are runs of panels times runs of rows."""
    weight, values = normal(650, 1100, seed=0, dtype=dtype), normal(300, 1100, seed=2, dtype=dtype)
    linear = NativeLinear(shared_thread_pool(2), weight, None, Rounding(bits, 64))
    whole = linear(values)
    for rows in (0, 1, 4, 31, 32, 33, 127, 129, 300):
        assert torch.equal(linear(values[:rows]), whole[:rows]), rows
    dequantised = linear.dequantised().double()
    exact = values.double() @ dequantised.T
    # Activations are off by half a step each: a thirtieth of the root of their squares, four times.
    most = values.double().abs().amax(1, keepdim=True) / 254 / 3**0.5 * dequantised.norm(dim=1)
    assert ((whole - exact).abs() <= 6 * most + 1.01 * UNIT[dtype] * exact.abs()).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("middle", [16, 48, 80])
def test_gates_and_their_values(middle: int, bits: Bits, dtype: torch.dtype) -> None:
    weight, bias = normal(2 * middle, 100, seed=0, dtype=dtype) * 0.3, normal(2 * middle, seed=1, dtype=dtype)
    weight[middle:] *= 20
    pool = shared_thread_pool(2)
    gated = NativeLinear(pool, weight, bias, Rounding(bits, 32), gated=True)
    # In float32, so that the gates themselves are not rounded.
    plain = NativeLinear(pool, weight.float(), bias.float(), Rounding(bits, 32))
    assert torch.equal(gated.dequantised(), plain.dequantised())
    for rows in (0, 1, 13, 40):
        values = normal(rows, 100, seed=rows, dtype=dtype)
        gate, up = plain(values.float()).double().chunk(2, 1)
        wanted = F.silu(gate) * up
        bound = 1e-6 * (up.abs() + wanted.abs()) + 1.01 * UNIT[dtype] * wanted.abs()
        assert ((gated(values) - wanted).abs() <= bound).all()


# -- own rounding --------------------------------------------------------------------------------------


def by_group(weight: torch.Tensor, group: int) -> torch.Tensor:
    """[outputs, groups, group]; the last one is filled with its first number."""
    outputs, inner = weight.shape
    size = group or inner
    first = weight[:, inner // size * size :][:, :1]
    return torch.cat((weight, first.expand(outputs, -inner % size)), 1).view(outputs, -1, size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", GROUPS)
def test_weights_of_8_bits_are_off_by_half_a_step(group: int, dtype: torch.dtype) -> None:
    weight = normal(60, 200, seed=1, dtype=dtype)
    weight *= torch.logspace(-9, 9, 60)[:, None].to(dtype)
    weight[30] = 0
    linear = NativeLinear(shared_thread_pool(2), weight, None, Rounding(8, group))
    wide = weight.double()
    steps = by_group(wide, group).abs().amax(-1, keepdim=True) / 127
    # The scale of a group has 8 bits itself.
    off = (by_group(linear.dequantised().double(), group) - by_group(wide, group)).abs()
    assert (off <= steps * (0.501 if group == 0 else 0.76)).all()
    assert (linear.dequantised()[30] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", GROUPS)
def test_weights_of_4_bits_are_better_than_the_range_alone_makes_them(group: int, dtype: torch.dtype) -> None:
    weight = normal(60, 200, seed=1, dtype=dtype) + 0.3
    weight *= torch.logspace(-9, 9, 60)[:, None].to(dtype)
    weight[30], weight[31] = 0, 1
    linear = NativeLinear(shared_thread_pool(2), weight, None, Rounding(4, group))
    wide, groups = weight.double(), by_group(weight.double(), group)
    least, most = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = (most - least) / 15
    plain = (((groups - least) / step.where(step > 0, 1.0)).round() * step + least).flatten(1)[:, :200]
    error, other = ((each.double() - wide).square().sum(1) for each in (linear.dequantised(), plain))
    kept = [row for row in range(60) if row not in (30, 31)]
    # Scales and offsets have 8 bits, which may cost a little.
    assert (error[kept] <= 1.02 * other[kept]).all()
    assert error[kept].sqrt().div(other[kept].sqrt()).mean() < 0.97
    assert torch.equal(linear.dequantised()[30:32], weight[30:32].float())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [0, 32])
def test_weights_that_are_not_finite_make_their_outputs_nan(group: int, bits: Bits) -> None:
    weight = normal(40, 100, seed=1)
    weight[7, 99], weight[8, 0], weight[9, 40] = float("nan"), float("inf"), float("-inf")
    linear = NativeLinear(shared_thread_pool(1), weight, None, Rounding(bits, group))
    got = linear(normal(3, 100, seed=2))
    assert got[:, 7:10].isnan().all()
    assert got[:, :7].isfinite().all()
    assert got[:, 10:].isfinite().all()


def test_small_differences_of_large_weights_and_the_largest_weights_are_numbers() -> None:
    weight = torch.full((3, 64), 1.0)
    weight[0, ::2] += 1e-6
    weight[1, ::2], weight[1, 1::2] = 1e-38, -1e-38
    weight[2, ::2], weight[2, 1::2] = 1.6e38, -1.6e38
    for bits in (4, 8):
        got = NativeLinear(shared_thread_pool(1), weight, None, Rounding(bits, 64)).dequantised()  # type: ignore[arg-type]
        assert torch.allclose(got, weight, rtol=2**-7, atol=1e-30)


# -- numbers of other formats --------------------------------------------------------------------------


def factors(rng: np.random.Generator, how: str, shape: tuple[int, int]) -> NDArray[np.float32]:
    """Scales or offsets, both signs among them, that can be stored that way."""
    drawn = rng.standard_normal(shape).astype(np.float32)
    if how == "bfloat16":
        return (drawn.view(np.uint32) & 0xFFFF0000).view(np.float32)
    if how == "float16":
        least = np.copysign(np.maximum(np.abs(drawn), np.float32(2.0**-14)), drawn)
        return least.astype(np.float16).astype(np.float32)
    if how == "float32":
        return drawn
    if how == "powers":
        return np.ldexp(np.float32(1), rng.integers(-120, 10, shape)).astype(np.float32) * (drawn > -2)
    # Those of llama.cpp's K-quants: steps of 256 numbers are floats of 16 bits, denormal ones among them.
    rows = shape[0]
    steps = rng.standard_normal((rows, 1)).astype(np.float16)
    steps[0] *= np.float16(1e-4)
    if how == "signed steps":
        numbers = rng.integers(-128, 128, shape)
        numbers[:, 0] = rng.choice([-128, 127], rows)
    else:
        numbers = rng.integers(0, 64, shape)
        numbers[1], numbers[2, 1:] = 0, 0
    made: NDArray[np.float32] = steps.astype(np.float32) * numbers.astype(np.float32)
    if how == "one is no step":
        made[40, 5] = made[40, 5] * np.float32(1 + 2.0**-20) + np.float32(2.0**-20)
    return made


#: how they are stored, in which groups, and bytes for 16 outputs of a group without offsets and with them
STORED = [
    ("bfloat16", 32, 3, 32, 64),
    ("bfloat16", 32, 8, 32, 64),
    ("powers", 32, 8, 16, 32),
    ("powers", 16, 3, 16, 32),
    ("float16", 32, 8, 32, 64),
    ("steps", 32, 8, 24, 48),
    ("steps", 64, 8, 32, 64),
    ("steps", 128, 4, 48, 96),
    ("signed steps", 32, 8, 24, 48),
    ("signed steps", 16, 16, 20, 40),
    ("float32", 32, 8, 64, 128),
    ("one is no step", 32, 8, 64, 128),
]


@pytest.mark.parametrize(
    ("bits", "how", "group", "groups", "plain", "both"),
    [(bits, *each) for bits in (4, 6, 8, LOOKED_UP) for each in STORED if (bits, each[1]) in KINDS],
)
@pytest.mark.parametrize("offsets", [False, True])
def test_factors_are_stored_as_short_as_they_can_be_without_loss(
    bits: Bits, how: str, group: int, groups: int, plain: int, both: int, offsets: bool
) -> None:
    """The last group is not whole. A factor that is 0 may get another sign, which changes no product."""
    rng = np.random.default_rng([bits, groups, offsets])
    shape = (70, group * groups - 5)
    drawn = draw(rng, bits, group, shape, offsets)
    scales = factors(rng, how, drawn.scales.shape)
    weight = Quantised(drawn.values, scales, factors(rng, how, scales.shape) if offsets else None, group)
    values = rng.standard_normal((max(ROWS), shape[1])).astype(np.float32)
    wanted = multiply(values, weight, None)
    for threads in (1, 2, 3, 5):
        linear = packed(weight, None, bits, threads=threads)
        assert_bits(linear.dequantised() + 0, weight.dequantised() + 0)
        for each in (linear, mapped(linear, weight, None)):
            for rows in ROWS:
                assert_bits(each(torch.from_numpy(values[:rows])), wanted[:rows])
    size = 16 * group * (bits or 4) // 8 + (both if offsets else plain)
    assert linear.packed.memory[1] == 6 * groups * size


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-40, -1e-45, 2e-38, 3e38, np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_a_factor_of_any_size_among_steps_is_as_stated(bits: Bits, offsets: bool, value: float) -> None:
    rng = np.random.default_rng([bits, offsets])
    weight = draw(rng, bits, 32, (40, 512), offsets)
    for each in (weight.scales, weight.offsets):
        if each is not None:
            each[:] = np.concatenate([factors(rng, "steps", (40, 8)) for _ in range(2)], 1)
            each[7, 3], each[8, 8:] = value, value
    linear = packed(weight, None, bits)
    values = rng.standard_normal((9, 512)).astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        assert_bits(linear.dequantised() + 0, weight.dequantised() + 0)
        wanted = multiply(values, weight, None)
    for rows in (1, 2, 9):
        assert_bits(linear(torch.from_numpy(values[:rows])), wanted[:rows])


# -- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"bits": 5}, "4, 6 or 8 bits"),
        ({"bits": 6}, "rounded to 4 or 8 bits"),
        ({"group": 48}, "multiple of 32"),
        ({"group": 16}, "multiple of 32"),
        ({"group": 40, "bits": 8}, "multiple of 16"),
        ({"group": -32}, "multiple of 16"),
        ({"group": 1 << 18}, "too long"),
        ({"gated": True}, "gated"),
    ],
)
def test_shapes_without_kernels_are_refused(changes: dict[str, Any], why: str) -> None:
    options = {"bits": 4, "group": 32, "gated": False, **changes}
    weight, rounding = normal(34, 64, seed=0), Rounding(options["bits"], options["group"])
    with pytest.raises(InvalidArguments, match=why):
        NativeLinear(shared_thread_pool(1), weight, None, rounding, gated=options["gated"])


@pytest.mark.parametrize(("group", "inner"), [(0, 1024), (32, 224), (48, 768), (256, 1024)])
def test_steps_without_blocks_of_several_groups_are_refused(group: int, inner: int) -> None:
    """A division by zero would end the process."""
    steps = 4
    memory = MappedMemory(torch.zeros(1).data_ptr(), 1 << 20, None, steps)
    with pytest.raises(InvalidArguments, match="steps"):
        NativeLinear.mapped(
            shared_thread_pool(1),
            memory,
            None,
            (64, inner),
            Rounding(8, group),
            dtype=torch.float32,
            kept=True,
        )


@pytest.mark.parametrize(
    ("rounding", "why"),
    [
        (Rounding(6, 32, TABLE), "have 4 bits"),
        (Rounding(4, 32, (*TABLE[:15], -128)), "-128"),
        (Rounding(4, 8, TABLE), "multiple of 16"),
    ],
)
def test_tables_without_kernels_are_refused(rounding: Rounding, why: str) -> None:
    matrix = QuantisedMatrix(
        torch.zeros(3, 64, dtype=torch.uint8), torch.ones(3, 64 // rounding.group), None, rounding
    )
    with pytest.raises(InvalidArguments, match=why):
        NativeLinear.given(shared_thread_pool(1), matrix, None, dtype=torch.float32)


def test_numbers_beyond_their_bits_and_rows_too_long_for_one_group_are_refused() -> None:
    values, scales = torch.zeros(3, 64, dtype=torch.uint8), torch.ones(3, 2)
    make = NativeLinear.given
    pool = shared_thread_pool(2)
    for rounding in (Rounding(4, 32), Rounding(6, 32)):
        values[2, 63] = 2**rounding.bits
        with pytest.raises(InvalidArguments, match="more bits than stated"):
            make(pool, QuantisedMatrix(values, scales, None, rounding), None, dtype=torch.float32)
    with pytest.raises(ValueError, match="kernel needs"):
        make(pool, QuantisedMatrix(values, scales, None, Rounding(8, 32)), None, dtype=torch.float32)
    with pytest.raises(InvalidArguments, match="too long"):
        NativeLinear(pool, torch.ones(1, (1 << 17) + 1), None, Rounding(8, 0))


def test_factors_of_another_shape_and_gates_without_values_are_refused() -> None:
    pool, values, scales = shared_thread_pool(1), torch.zeros(33, 64, dtype=torch.uint8), torch.ones(33, 2)

    def given(scales: torch.Tensor, offsets: torch.Tensor | None, *, gated: bool = False) -> NativeLinear:
        matrix = QuantisedMatrix(values, scales, offsets, Rounding(4, 32))
        return NativeLinear.given(pool, matrix, None, dtype=torch.float32, gated=gated)

    for factors in ((scales.T, None), (scales, scales[:, :1]), (scales[:32], None)):
        with pytest.raises(ValueError, match="scales and offsets"):
            given(*factors)
    with pytest.raises(ValueError, match="even"):
        given(scales, None, gated=True)
    with pytest.raises(ValueError, match="even"):
        NativeLinear(pool, scales, None, gated=True)
    wide = torch.ones(33, 4)[:, ::2]
    assert given(wide, wide)(torch.ones(1, 64)).isfinite().all()


def test_values_of_another_size_are_refused() -> None:
    linear = NativeLinear(shared_thread_pool(1), normal(20, 64, seed=0), None, Rounding(4, 32))
    values, out = normal(3, 64, seed=1), torch.empty(3, 20)
    with pytest.raises(InvalidArguments, match="negative"):
        linear.packed.apply(values.data_ptr(), -1, out.data_ptr())
    linear.packed.inner = 32
    with pytest.raises(InvalidArguments, match="not that of the weights"):
        linear.packed.apply(values.data_ptr(), 3, out.data_ptr())
