"""The operations between matrix products in Triton against torch: same rounding, no word with neighbours."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from aioinfer.model.backend import Backend
from aioinfer.model.gates import Gate, activated
from aioinfer.model.kernels import make_operations
from aioinfer.model.norm import Norm
from aioinfer.model.operations.base import Operations
from aioinfer.model.operations.torch_operations import TorchOperations
from aioinfer.model.rope import Rotary
from tests.model.kernels import integers, normal
from tests.tiers import INTERPRETER, nightly

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PLAIN = TorchOperations()
#: those that Triton has
GATES: list[Gate] = ["silu", "gelu_tanh"]


@pytest.fixture
def fast(device: str) -> Operations:
    return make_operations(Backend("triton", "for the test"))


def assert_last_bits(got: torch.Tensor, expected: torch.Tensor, share: float, single: float = 6e-7) -> None:
    """Half types: one unit in the last place, twice over, and of no more than a ``share`` of the elements.
    float32: a relative error of ``single``."""
    eps = single if got.dtype == torch.float32 else 2 * torch.finfo(got.dtype).eps
    got = got.cpu()
    torch.testing.assert_close(got, expected, rtol=eps, atol=4 * torch.finfo(got.dtype).tiny)
    if got.dtype != torch.float32:
        assert (got != expected).sum() <= max(1, share * got.numel())


#: numpy, on which the interpreter computes, warns of infinities
INFINITE = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 5, 48, 1000, 2048, 5120, 8192])
def test_a_norm_has_torchs_bits_where_the_sum_of_squares_has(
    fast: Operations, device: str, size: int, dtype: torch.dtype
) -> None:
    hidden, delta = (integers(3, size, seed=seed).to(dtype) for seed in (0, 1))
    exact = 1 + 0.3 * normal(size, seed=2)
    # A weight in float32: the normed value is rounded behind it only.
    for added, weight in itertools.product((None, delta), (exact.to(dtype), exact)):
        expected = PLAIN.add_norm(hidden, added, Norm(weight, 1e-6))
        on_device = None if added is None else added.to(device)
        got = fast.add_norm(hidden.to(device), on_device, Norm(weight.to(device), 1e-6))
        for ours, theirs in zip(got, expected, strict=True):
            assert torch.equal(ours.cpu(), theirs)


@nightly(INTERPRETER)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_norm_is_left_to_torch(fast: Operations, device: str, dtype: torch.dtype) -> None:
    hidden, delta, weight, bias = (
        normal(*shape, seed=40).to(dtype).to(device) for shape in ((3, 48), (3, 48), (48,), (48,))
    )
    norm = Norm(weight, 1e-5, bias)
    expected = PLAIN.add_norm(hidden, delta, norm)
    found = fast.add_norm(hidden, delta, norm)
    assert all(map(torch.equal, found, expected))


@INFINITE
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [33, 4096])
def test_a_norm_of_anything_differs_in_last_bits_only(
    fast: Operations, device: str, size: int, dtype: torch.dtype
) -> None:
    hidden, delta = (normal(5, size, seed=seed).to(dtype) for seed in (3, 4))
    # Rows of all sizes, of zeros, of what no square can hold.
    hidden *= torch.tensor([1e-3, 1.0, 30.0, 0.0, 0.0], dtype=dtype)[:, None]
    delta[3] = 0
    delta[4, 0] = math.inf
    weight = normal(size, seed=5).to(dtype)
    total, normed = PLAIN.add_norm(hidden, delta, Norm(weight, 1e-5))
    got = fast.add_norm(hidden.to(device), delta.to(device), Norm(weight.to(device), 1e-5))
    assert torch.equal(got[0].cpu(), total)
    assert_last_bits(got[1][:4], normed[:4], 1e-3)
    assert torch.equal(got[1][4].cpu().isnan(), normed[4].isnan())


def test_a_row_is_normed_alike_in_any_batch_and_layout(fast: Operations, device: str) -> None:
    rows, weight = normal(4, 100, seed=6).to(device), normal(100, seed=7).to(device)
    rows[2] = math.nan
    total, normed = fast.add_norm(rows, rows, Norm(weight, 1e-6))
    for at in (0, 1, 3):
        alone = fast.add_norm(rows[at : at + 1], rows[at : at + 1], Norm(weight, 1e-6))
        assert torch.equal(total[at], alone[0][0])
        assert torch.equal(normed[at], alone[1][0])
    assert normed[2].isnan().all()
    strided = torch.stack((rows, rows), dim=-1)[..., 0]
    again = fast.add_norm(strided, strided, Norm(weight, 1e-6))[1]
    torch.testing.assert_close(again, normed, rtol=0, atol=0, equal_nan=True)
    for added in (None, rows[:0]):
        assert fast.add_norm(rows[:0], added, Norm(weight, 1e-6))[1].shape == (0, 100)


def test_the_residual_is_left_as_it_was(fast: Operations, device: str) -> None:
    """A graph's inputs are kept from step to step."""
    hidden, delta, weight = (normal(*shape, seed=8).to(device) for shape in ((2, 64), (2, 64), (64,)))
    before = hidden.clone(), delta.clone()
    total, _ = fast.add_norm(hidden, delta, Norm(weight, 1e-6))
    assert torch.equal(total, hidden + delta)
    assert torch.equal(hidden, before[0])
    assert torch.equal(delta, before[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("rows", "size"), [(0, 8), (1, 1), (3, 80), (2, 1024), (2, 1500)])
def test_gating_differs_in_last_bits_only(
    fast: Operations, device: str, rows: int, size: int, gate: Gate, dtype: torch.dtype
) -> None:
    gate_up = (3 * normal(rows, 2 * size, seed=9)).to(dtype)
    got = fast.gate_mul(gate_up.to(device), gate)
    assert got.shape == (rows, size)
    # In float64: the tangent of float32 cancels where a GELU is nearly 0.
    gates, up = gate_up.chunk(2, dim=-1)
    expected = activated(gate, gates.double()).to(dtype) * up
    expected, got = (tensor.where(expected.abs() > 1e-6, 0) for tensor in (expected, got.cpu()))
    # The hardware's exponential, of base 2, is off by a part of 2^-24 of its argument, here up to 12 or, of a
    # GELU, more.
    assert_last_bits(got, expected, 5e-3, single=3e-6 if gate == "silu" else 3e-5)


@INFINITE
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_at_the_ends_of_the_range(fast: Operations, device: str, dtype: torch.dtype) -> None:
    gates = torch.tensor([0.0, -0.0, 60.0, -60.0, 1e4, -1e4, math.inf, -math.inf, math.nan], dtype=dtype)
    gate_up = torch.cat((gates, torch.full_like(gates, 2.0)))[None]
    expected = PLAIN.gate_mul(gate_up, "silu")
    got = fast.gate_mul(gate_up.to(device), "silu").cpu()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-24, equal_nan=True)


def test_captured_operations_follow_their_inputs(fast: Operations, device: str) -> None:
    """Between capture and replay everything but shapes and addresses changes. Interpreted: the same calls."""
    from aioinfer.model.attention.triton_heads import rotate_and_store

    first, second = ([t.to(device) for t in inputs(seed)] for seed in (20, 30))
    keys, values = (torch.zeros(3, 16, 1, 8, device=device) for _ in range(2))

    def call(hidden: torch.Tensor, qkv: torch.Tensor, cos: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        weight = torch.ones(hidden.shape[1], device=device)
        normed = fast.add_norm(hidden, hidden, Norm(weight, 1e-6))[1]
        gated = fast.gate_mul(normed, "silu")
        return torch.cat((gated, rotate_and_store(qkv, None, Rotary(cos, cos), keys, values, slots)[:, 0]), 1)

    expected = call(*second).clone()
    stored = keys.clone()
    assert not torch.equal(call(*first), expected)
    graph = None
    if device == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = call(*first)
    keys.zero_()
    for static, new in zip(first, second, strict=True):
        static.copy_(new)
    if graph is None:
        out = call(*first)
    else:
        graph.replay()
    assert torch.equal(out, expected)
    assert torch.equal(keys, stored)


def inputs(seed: int) -> list[torch.Tensor]:
    """Residual, projection of 2 + 1 + 1 heads, factors and cells of two tokens."""
    hidden, qkv, cos = (normal(2, *shape, seed=seed + at) for at, shape in enumerate([(64,), (4, 8), (1, 8)]))
    return [hidden, qkv, cos, torch.tensor([seed, seed + 1])]
