"""Tiles and their model: products of single tiles, bit for bit, and the kernels made of them.

The kernels' other tests run on modelled tiles in processes of their own, nightly (``test_builds``).
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from aioinfer.model.native_linear import NativeLinear
from aioinfer.native import build as building
from aioinfer.native.bindings import Kernels, instructions, shared_thread_pool
from aioinfer.native.build import find_compiler
from aioinfer.native.processor import MODELLED, PERMITTED, choose_tiles
from tests.native.support import normal
from tests.tiers import points, rest

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.uint16]
_ROOT = Path(__file__).parents[2]
TINY = np.float32(2.0**-126)

pytestmark = rest("compiles the kernels with a model of tiles")


# -- the arithmetic of a product, in float64 ---------------------------------------------------------------


def flushed(values: Floats) -> Floats:
    """Denormals are 0, with their sign."""
    return np.where(np.abs(values) < TINY, np.copysign(np.float32(0), values), values)


def to_float32(high: npt.NDArray[np.float64], low: npt.NDArray[np.float64]) -> Floats:
    """The exact sum of both, of which ``high`` is the one in float64, rounded once."""
    # To odd: the last bit says whether there is more behind it.
    bits = high.view(np.int64)
    away = np.where((low > 0) == (high > 0), 1, -1)
    inexact = np.isfinite(high) & (low != 0) & (bits % 2 == 0)
    odd = np.where(inexact, bits + away, bits).view(np.float64)
    # Tiny is what would be so with any exponent, after rounding.
    small = np.abs(odd) < 2.0**-100
    tiny = np.abs((np.where(small, odd, 0) * 2.0**100).astype(np.float32)) < np.float32(2.0**-26)
    result = odd.astype(np.float32)
    return np.where(small & tiny, np.copysign(np.float32(0), result), result)


def add(a: Floats, b: Floats) -> Floats:
    return multiply_add(a, np.float32(1), b)


def multiply_add(a: Floats, b: Floats | np.float32, c: Floats) -> Floats:
    """a * b + c, rounded once; denormals are 0. The product of two bfloat16 is exact in float64."""
    product = flushed(a).astype(np.float64) * flushed(np.asarray(b, np.float32)).astype(np.float64)
    wide = flushed(c).astype(np.float64)
    total = product + wide
    part = total - product
    return to_float32(total, (product - (total - part)) + (wide - part))


def widened(bits: Halves) -> Floats:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def accumulated(c: Floats, a: Floats, b: Floats) -> Floats:
    """c [m, n] + a [m, 32] * b [32, n] as a tile computes it."""
    even, odd = np.zeros_like(c), np.zeros_like(c)
    for k in range(0, 32, 2):
        even = multiply_add(a[:, k, None], b[None, k], even)
        odd = multiply_add(a[:, k + 1, None], b[None, k + 1], odd)
    return add(c, add(even, odd))


# -- products of single tiles ------------------------------------------------------------------------------


def implementations() -> list[str]:
    """The model, and the processor's tiles where there are any."""
    return ["model", *(["processor"] if choose_tiles() == PERMITTED else [])]


@pytest.fixture(scope="module", params=implementations())
def tiles(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("tiles") / "tiles.so"
    flags = [*building.FLAGS, "-march=native", f"-I{building.SOURCE}"]
    flags += (MODELLED if request.param == "model" else PERMITTED).flags
    source = str(Path(__file__).with_name("tiles.cpp"))
    subprocess.run([*find_compiler(), *flags, "-shared", source, "-o", str(path)], check=True)
    library = ctypes.CDLL(str(path))
    assert library.kind() == {"processor": 1, "model": 2}[request.param]
    return library


def products(
    tiles: ctypes.CDLL, c: object, a: object, b: object, *, int8: bool = False, ready: bool = True
) -> None:
    """Add the products of ``a`` and ``b`` [count, 1 KB] to ``c``."""
    arrays = [np.ctypeslib.as_ctypes(x.reshape(-1).view(np.uint8)) for x in (c, a, b)]  # type: ignore[attr-defined]
    count = ctypes.c_int64(len(arrays[0]) // 1024)
    tiles.products(*arrays, count, ctypes.c_bool(int8), ctypes.c_bool(ready))


def halves(values: npt.NDArray[np.float64]) -> Halves:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def any_bits(rng: np.random.Generator, *shape: int) -> Halves:
    """Infinity, NaN and denormals, too."""
    return rng.integers(0, 1 << 16, shape, dtype=np.uint16)


def near_underflow(rng: np.random.Generator, *shape: int) -> Halves:
    """Products just above and below the smallest normal number, and denormals."""
    exponent = rng.integers(50, 64, shape) * (rng.random(shape) > 0.05)
    return (any_bits(rng, *shape) & 0x807F) | (exponent << 7).astype(np.uint16)


DRAWS: dict[str, Callable[..., Halves]] = {
    "gaussian": lambda rng, *shape: halves(rng.standard_normal(shape)),
    "exponents": lambda rng, *shape: halves(
        np.ldexp(rng.standard_normal(shape), rng.integers(-30, 31, shape))
    ),
    "any bits": any_bits,
    "near underflow": near_underflow,
}


@pytest.mark.parametrize("kind", DRAWS)
def test_a_product_of_bfloat16_has_the_bits_of_its_description(tiles: ctypes.CDLL, kind: str) -> None:
    rng = np.random.default_rng(len(kind))
    count = 20
    a, b = DRAWS[kind](rng, count, 16, 32), DRAWS[kind](rng, count, 16, 32)
    c = rng.standard_normal((count, 16, 16)).astype(np.float32)
    if kind == "near underflow":
        c *= TINY
    elif kind == "any bits":
        c = rng.integers(0, 1 << 32, c.shape, dtype=np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        # [unit][column][pair] to [inner][column]
        inner = [widened(tile).reshape(16, 16, 2).transpose(0, 2, 1).reshape(32, 16) for tile in b]
        wanted = np.stack([accumulated(*each) for each in zip(c, map(widened, a), inner, strict=True)])
    products(tiles, c, a, b)
    nan = np.isnan(wanted)
    assert np.array_equal(np.isnan(c), nan)
    assert np.array_equal(c.view(np.uint32)[~nan], wanted.view(np.uint32)[~nan])
    assert (~nan).mean() > 0.02
    if kind == "near underflow":
        assert 0.001 < (wanted == 0).mean() < 0.9


@pytest.mark.parametrize("extreme", [False, True])
def test_a_product_of_int8_is_exact_and_wraps_around(tiles: ctypes.CDLL, extreme: bool) -> None:
    rng = np.random.default_rng(3)
    a, b = (rng.integers(-128, 128, (8, 16, 64), dtype=np.int8) for _ in range(2))
    c = rng.integers(-(1 << 31), 1 << 31, (8, 16, 16)).astype(np.int32)
    if extreme:
        a[:], b[:, ::2], c[:, ::2] = -128, -128, 2**31 - 1
    inner = b.reshape(8, 16, 16, 4).transpose(0, 1, 3, 2).reshape(8, 64, 16).astype(np.int64)
    wanted = (c.astype(np.int64) + a.astype(np.int64) @ inner).astype(np.uint32).view(np.int32)
    products(tiles, c, a, b, int8=True)
    assert np.array_equal(c, wanted)


@pytest.mark.parametrize("tiles", ["model"], indirect=True)
def test_tiles_that_are_not_configured_give_nan_in_the_model(tiles: ctypes.CDLL) -> None:
    """On a processor the process would end: the tests on the model find threads that are not ready."""
    a = np.ones((1, 16, 32), np.uint16)
    c = np.zeros((1, 16, 16), np.float32)
    products(tiles, c, a, a, ready=False)
    assert np.isnan(c).all()


# -- kernels on modelled tiles -----------------------------------------------------------------------------


def summed(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """values [m, k] times weight [n, k] by tiles, as float32."""
    a, b = (tensor.float().numpy() for tensor in (values, weight))
    a, b = (np.pad(x, ((0, 0), (0, -x.shape[1] % 32))) for x in (a, b))
    sums = np.zeros((len(a), len(b)), np.float32)
    for k in range(0, a.shape[1], 32):
        sums = accumulated(sums, a[:, k : k + 32], b[:, k : k + 32].T)
    return torch.from_numpy(sums)


def cancelling(rows: int, outputs: int, inner: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations and weights whose products add up to 0: a result is what was rounded off, which another
    order of summation changes in every bit."""
    order = torch.randperm(inner // 2, generator=torch.Generator().manual_seed(inner))
    sizes = 2.0 ** normal(inner // 2, seed=3).mul(4).round()
    values = (normal(rows, inner // 2, seed=1) * sizes).bfloat16()
    weight = normal(outputs, inner // 2, seed=2, dtype=torch.bfloat16)
    return torch.cat((values, values[:, order]), 1), torch.cat((weight, -weight[:, order]), 1)


@pytest.mark.parametrize(
    ("inner", "outputs"), points([(576, 75), (112, 33), (48, 7)], [(2048, 100), (80, 1), (1536, 320)])
)
def test_a_linear_layer_sums_up_as_tiles_do(modelled: Kernels, inner: int, outputs: int) -> None:
    values, weight = cancelling(70, outputs, inner)
    wanted = summed(values, weight).bfloat16()
    assert wanted.count_nonzero() > 0.2 * wanted.numel()
    for threads in (1, 2):
        linear = NativeLinear(shared_thread_pool(threads), weight, None)
        assert linear.packed.pool.kernels is modelled
        for rows in (1, 2, 8, 16, 17, 32, 33, 64, 70):
            assert torch.equal(linear(values[:rows]), wanted[:rows]), (rows, threads)


def test_denormals_are_numbers_again_after_a_call(modelled: Kernels) -> None:
    weight = normal(32, 16, seed=0, dtype=torch.bfloat16)
    NativeLinear(shared_thread_pool(2), weight, None)(weight)
    assert float(torch.tensor(1e-38) * 0.01) > 0


def test_modelled_tiles_say_so(modelled: Kernels) -> None:
    assert instructions() == "modelled tiles (compiled here; AIOINFER_TILES is model)"
