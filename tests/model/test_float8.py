"""Floats of 8 bits: their bits, the products of weights of them, and models that are made of such."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aioinfer.checkpoint.tensors import Float8Matrix, Rounding
from aioinfer.errors import ConfigError
from aioinfer.model.float8 import rounded_matrix
from aioinfer.model.float8_linear import Float8Layers, Float8Linear, ScaledLinear, scaled_unsupported
from aioinfer.model.quantization import rounding_of
from aioinfer.model.weights import StoredMatrix, Weights
from tests.model.kernels import assert_close, normal
from tests.tiers import INTERPRETER, grid

triton = pytest.importorskip("triton", reason="triton is not installed")
tl = triton.language

# Kernels see functions by their names in the module.
from aioinfer.model.triton_float8 import decoded, encoded, float8_native  # noqa: E402

CPU = torch.device("cpu")
E4M3 = torch.float8_e4m3fn


# -- bits ----------------------------------------------------------------------------------------------


@triton.jit
def _decode(raw: tl.tensor, out: tl.tensor, COUNT: tl.constexpr, NATIVE: tl.constexpr) -> None:
    at = tl.arange(0, COUNT)
    like = tl.load(out + at)
    tl.store(out + at, decoded(tl.load(raw + at), like, NATIVE))


@triton.jit
def _encode(x: tl.tensor, out: tl.tensor, COUNT: tl.constexpr) -> None:
    at = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    tl.store(out + at, encoded(tl.load(x + at)))


def all_bytes() -> torch.Tensor:
    """All but the two NaN."""
    raw = torch.arange(256, dtype=torch.uint8)
    return raw[(raw & 0x7F) != 0x7F]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_byte_is_widened_as_torch_widens_it(device: str, dtype: torch.dtype) -> None:
    raw = torch.zeros(256, dtype=torch.uint8)
    raw[:254] = all_bytes()
    out = torch.zeros(256, dtype=dtype, device=device)
    _decode[(1,)](raw.to(device), out, COUNT=256, NATIVE=float8_native(torch.device(device)))
    assert torch.equal(out.cpu()[:254], raw[:254].view(E4M3).to(dtype))


def test_numbers_are_rounded_as_torch_rounds_them(device: str) -> None:
    values = all_bytes().view(E4M3).float()
    ordered = values.sort().values
    middles = (ordered[1:] + ordered[:-1]) / 2
    near = torch.cat([middles * (1 + 2**-20), middles * (1 - 2**-20)])
    random = normal(4096, seed=1) * torch.exp2(normal(4096, seed=2) * 6)
    x = torch.cat([values, middles, near, random, torch.tensor([448.0, 449.0, 464.0, 1e30, float("inf")])])
    x = torch.cat([x, torch.zeros(-len(x) % 256)])
    out = torch.zeros(len(x), dtype=torch.uint8, device=device)
    _encode[(len(x) // 256,)](x.to(device), out, COUNT=256)
    expected = x.clamp(-448, 448).to(E4M3)
    assert torch.equal(out.cpu(), expected.view(torch.uint8))


# -- products ------------------------------------------------------------------------------------------


def product(x: torch.Tensor, matrix: Float8Matrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """In float64."""
    weight = spread(matrix)
    found = x.double() @ weight.T
    return found if bias is None else found + bias.double()


def spread(matrix: Float8Matrix) -> torch.Tensor:
    values, scales, (height, width) = matrix
    rows, inner = values.shape
    wide = scales.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :inner]
    return values.double() * wide.double()


@pytest.mark.parametrize("dtype", grid([torch.bfloat16, torch.float32], [torch.float16], INTERPRETER))
@pytest.mark.parametrize("rows", grid([1, 20], [65, 130], INTERPRETER))
@pytest.mark.parametrize(
    "block", grid([(1, 192), (32, 64)], [(40, 192), (1, 32), (100, 96)], INTERPRETER), ids=str
)
def test_a_product_is_that_of_the_widened_weight(
    device: str, rows: int, block: tuple[int, int], dtype: torch.dtype
) -> None:
    x = normal(rows, 192, seed=rows).to(dtype)
    matrix = rounded_matrix(normal(104, 192, seed=2), block)
    bias = normal(104, seed=3).to(dtype)
    on_device = Float8Matrix(matrix.values.to(device), matrix.scales.to(device), block)
    got = Float8Linear(on_device, bias.to(device))(x.to(device))
    assert got.dtype == dtype
    assert_close(got / 16, product(x, matrix, bias) / 16, dtype)


def test_programs_share_the_inner_dimension_where_there_are_few(device: str) -> None:
    from aioinfer.model.triton_float8 import Float8Tuning, num_sums

    assert num_sums(1, 40, 2048, Float8Tuning.of(1, 2048, 2048, torch.bfloat16)) == 4
    assert num_sums(300, 40, 2048, Float8Tuning.of(300, 2048, 2048, torch.bfloat16)) == 1
    assert num_sums(1, 4096, 4096, Float8Tuning.of(1, 4096, 4096, torch.bfloat16)) == 1
    x = normal(3, 2100, seed=1).bfloat16()
    matrix = rounded_matrix(normal(40, 2100, seed=2), (1, 2100))
    bias = normal(40, seed=3).bfloat16()
    on_device = Float8Matrix(matrix.values.to(device), matrix.scales.to(device), matrix.block)
    for own in (None, bias):
        got = Float8Linear(on_device, None if own is None else own.to(device))(x.to(device))
        assert_close(got / 64, product(x, matrix, own) / 64, torch.bfloat16)


def test_every_number_of_rows_has_one_of_the_compilations_made_ahead() -> None:
    from aioinfer.model.triton_float8 import EVERY_TUNING, Float8Tuning, num_sums

    for outputs, inner, width in ((1024, 3072, 3072), (4096, 4096, 128), (24_576, 4096, 4096)):

        def kind(rows: int, sizes: tuple[int, int, int] = (outputs, inner, width)) -> object:
            tuning = Float8Tuning.of(rows, sizes[1], sizes[2], torch.bfloat16)
            return tuning, num_sums(rows, *sizes[:2], tuning)

        ahead = {kind(rows) for rows in EVERY_TUNING}
        assert {kind(rows) for rows in range(1, 3000)} == ahead


def test_no_rows_give_no_results_and_what_does_not_fit_is_refused(device: str) -> None:
    from aioinfer.model.triton_float8 import float8_linear

    values, scales, block = rounded_matrix(normal(8, 64, seed=2), (1, 64))
    values, scales = values.to(device), scales.to(device)
    assert float8_linear(torch.empty(0, 64, device=device), values, scales, block).shape == (0, 8)
    with pytest.raises(ValueError, match="do not fit"):
        float8_linear(torch.empty(1, 32, device=device), values, scales, block)
    with pytest.raises(ValueError, match="multiples of 32"):
        float8_linear(torch.empty(1, 64, device=device), values, scales.repeat(1, 4), (1, 16))


def test_rows_are_rounded_by_their_own_largest(device: str) -> None:
    from aioinfer.model.triton_float8 import round_rows

    x = normal(5, 5000, seed=1).bfloat16() * torch.tensor([1, 1e-3, 100, 0, 1]).bfloat16()[:, None]
    x[4, 4500] = float("nan")
    rounded, scales = round_rows(x.to(device))
    rounded, scales = rounded.cpu(), scales.cpu()
    expected = x[:3].float().abs().amax(1, keepdim=True) / 448
    assert torch.equal(scales[:3], expected)
    assert torch.equal(rounded[:3].view(torch.uint8), (x[:3].float() / expected).to(E4M3).view(torch.uint8))
    assert scales[3] == 1
    assert not rounded[3].float().any()
    assert scales[4].isnan(), "a row that is broken stays so"


def test_a_weight_is_rounded_by_blocks() -> None:
    weight = normal(70, 100, seed=1)
    weight[:32, 64:96] = 0
    matrix = rounded_matrix(weight, (32, 64))
    assert (matrix.values.shape, matrix.scales.shape, matrix.block) == ((70, 100), (3, 2), (32, 64))
    error = (spread(matrix) - weight).abs()
    # Half of the last place of three bits, or of the smallest numbers.
    scales = matrix.scales.repeat_interleave(32, 0)[:70].repeat_interleave(64, 1)[:, :100]
    assert bool((error <= torch.maximum(weight.abs() / 16, scales * 2**-10) * 1.0001).all())
    assert torch.equal(matrix.scales[0, 0] * 448, weight[:32, :64].abs().max())
    twice = rounded_matrix(spread(matrix).float(), (32, 64))
    torch.testing.assert_close(spread(twice), spread(matrix), rtol=1e-6, atol=0)


def test_activations_are_rounded_for_a_scaled_product(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def reference(rows: torch.Tensor, columns: torch.Tensor, **named: Any) -> torch.Tensor:
        found = (rows.float() * named["scale_a"]) @ (columns.float() * named["scale_b"])
        return (found if named["bias"] is None else found + named["bias"]).to(named["out_dtype"])

    if device == "cpu":  # which torch may not multiply on
        monkeypatch.setattr(torch, "_scaled_mm", reference)
    x = normal(5, 64, seed=1).bfloat16()
    matrix = rounded_matrix(normal(48, 64, seed=2), (1, 64))
    on_device = Float8Matrix(matrix.values.to(device), matrix.scales.to(device), matrix.block)
    bias = normal(48, seed=3).bfloat16()
    got = ScaledLinear(on_device, bias.to(device))(x.to(device))
    rounded = spread(rounded_matrix(x.float(), (1, 64)))
    assert_close(got / 8, product(rounded, matrix, bias) / 8, torch.bfloat16)
    assert ScaledLinear(on_device, None)(x[:0].to(device)).shape == (0, 48)


def test_a_scaled_product_needs_its_sizes_types_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(rows: int, inner: int, block: tuple[int, int] | None = None) -> bool:
        return ScaledLinear.unsupported(rounded_matrix(torch.ones(rows, inner), block or (1, inner)))

    assert not unsupported(32, 48)
    assert unsupported(33, 48)
    assert unsupported(32, 40)
    assert unsupported(32, 48, (2, 48))
    assert (
        scaled_unsupported(CPU, torch.float16) == "the results of torch._scaled_mm are bfloat16, not float16"
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    assert scaled_unsupported(torch.device("cuda"), torch.bfloat16) == (
        "the device is older than compute capability 8.9"
    )

    def refuse(*arguments: Any, **named: Any) -> None:
        raise RuntimeError("not here\nnor there")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    assert scaled_unsupported(CPU, torch.bfloat16) == "torch says: not here"


# -- checkpoints ---------------------------------------------------------------------------------------


class Stored:
    """Tensors of floats of 8 bits, some of them in blocks."""

    def __init__(self, matrices: dict[str, Float8Matrix | torch.Tensor]) -> None:
        self._matrices = {f"{name}.weight": matrix for name, matrix in matrices.items()}
        self.names = self._matrices.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.read(name).shape)

    def read(self, name: str) -> torch.Tensor:
        found = self._matrices[name]
        return spread(found).float() if isinstance(found, Float8Matrix) else found

    def rounding(self, name: str) -> Rounding | None:
        return None

    def quantised(self, name: str) -> Any:
        raise AssertionError

    def float8(self, name: str) -> Float8Matrix | None:
        found = self._matrices[name]
        return found if isinstance(found, Float8Matrix) else None


def joined(
    blocks: list[tuple[int, tuple[int, int]]], order: torch.Tensor | None = None
) -> tuple[Float8Matrix | None, torch.Tensor]:
    """Matrices of (rows, block) stored as they are, and the same in float32, joined by a StoredMatrix."""
    parts = {
        str(at): rounded_matrix(normal(rows, 64, seed=at), block) for at, (rows, block) in enumerate(blocks)
    }
    weights = Weights(Stored({**parts}), dtype=torch.float32, device=CPU)
    stored = StoredMatrix(weights, [*parts], [rows for rows, _ in blocks], 64, order=order)
    return stored.float8(), stored.load()


@pytest.mark.parametrize(
    ("blocks", "block"),
    [
        ([(24, (8, 32))], (8, 32)),
        ([(24, (8, 32)), (16, (8, 32)), (13, (8, 32))], (8, 32)),
        ([(20, (8, 32)), (16, (8, 32))], (4, 32)),
        ([(24, (1, 64)), (16, (16, 64))], (1, 64)),
        ([(24, (24, 64)), (16, (16, 64))], (8, 64)),
    ],
    ids=str,
)
def test_matrices_with_scales_are_joined_without_loss(
    blocks: list[tuple[int, tuple[int, int]]], block: tuple[int, int]
) -> None:
    matrix, expected = joined(blocks)
    assert matrix is not None
    assert matrix.block == block
    assert torch.equal(spread(matrix).float(), expected)


def test_what_is_not_all_of_one_kind_is_not_joined() -> None:
    assert joined([(24, (8, 32)), (16, (8, 64))])[0] is None
    mixed = {"a": rounded_matrix(torch.ones(4, 64), (1, 64)), "b": torch.ones(4, 64)}
    weights = Weights(Stored({**mixed}), dtype=torch.float32, device=CPU)
    assert StoredMatrix(weights, ["a", "b"], [4, 4], 64).float8() is None
    assert StoredMatrix(weights, ["b"], [4], 64).float8() is None
    assert StoredMatrix(weights, ["a"], [4], 64).float8() is not None


def test_layers_are_kept_rounded_or_left_as_they_are() -> None:
    rows, blocks = (
        rounded_matrix(normal(16, 64, seed=1), (1, 64)),
        rounded_matrix(normal(16, 64, seed=1), (8, 32)),
    )
    narrow = rounded_matrix(normal(16, 64, seed=1), (8, 16))
    stored = Stored({"rows": rows, "blocks": blocks, "narrow": narrow, "plain": normal(16, 64, seed=2)})

    def kinds(quantization: Any) -> list[tuple[str, Any] | None]:
        weights = Weights(stored, dtype=torch.bfloat16, device=CPU)
        layers = Float8Layers(quantization, CPU)
        made = [
            layers.linear(StoredMatrix(weights, [name], [16], 64))
            for name in ("rows", "blocks", "narrow", "plain")
        ]
        return [None if each is None else (type(each).__name__, each.matrix.block) for each in made]

    plain, scaled = "Float8Linear", "ScaledLinear"
    assert kinds("auto") == [(plain, (1, 64)), (plain, (8, 32)), None, None]
    assert kinds("fp8") == [(plain, (1, 64)), (plain, (8, 32)), (plain, (1, 64)), (plain, (1, 64))]
    assert kinds("fp8-dynamic") == [(scaled, (1, 64))] * 4
    assert rounding_of("fp8") is None
    broken = Float8Matrix(torch.full((4, 64), float("nan")).to(E4M3), torch.ones(4, 1), (1, 64))
    weights = Weights(Stored({"at": broken}), dtype=torch.bfloat16, device=CPU)
    with pytest.raises(ConfigError, match="model: at has NaN"):
        Float8Layers("auto", CPU).linear(StoredMatrix(weights, ["at"], [4], 64))
