"""The experts' kernels against the formula, interpreted on the CPU or compiled on CUDA."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from aioinfer.model.moe.routing import SoftmaxRouter
from aioinfer.model.moe.sparse import SparseMLP
from tests.model.kernels import assert_close, interpreted_on, kernels_or_skip
from tests.model.mixtures import Mixture
from tests.tiers import INTERPRETER, grid, nightly, points

SMALL = {"block_n": 32, "block_k": 16, "num_stages": 2}


def compute(task: Mixture, **changes: Any) -> torch.Tensor:
    from aioinfer.model.moe.triton_experts import ExpertTuning, TritonExperts

    experts = TritonExperts(task.stack, tuning=ExpertTuning(**{**SMALL, **changes}))
    return experts(task.hidden, task.weights, task.experts)


@pytest.mark.parametrize("dtype", grid([torch.bfloat16], [torch.float32, torch.float16], INTERPRETER))
@pytest.mark.parametrize(("tokens", "num_experts"), [(3, 16), (40, 1)])
def test_types_with_the_tuning_that_a_model_gets(
    device: str, tokens: int, num_experts: int, dtype: torch.dtype
) -> None:
    from aioinfer.model.moe.triton_experts import ExpertTuning, TritonExperts

    top_k = min(4, num_experts)
    task = Mixture.make(
        tokens, top_k=top_k, num_experts=num_experts, hidden=72, middle=40, dtype=dtype, device=device
    )
    large = ExpertTuning.of(dtype, tokens * top_k, num_experts) != ExpertTuning.of(dtype, 1, num_experts)
    assert large == (tokens == 40 and dtype.itemsize == 2)
    got = TritonExperts(task.stack)(task.hidden, task.weights, task.experts)
    assert got.dtype == dtype
    assert_close(got, task.expected(), dtype)


@pytest.mark.parametrize(
    ("tokens", "top_k", "num_experts", "hidden", "middle"),
    points(
        [(5, 2, 5, 50, 17), (1, 8, 8, 32, 16), (17, 1, 1, 32, 16)],
        [
            *((5, 2, 5, *sizes) for sizes in ((16, 16), (16, 7), (33, 16), (5, 3))),
            *((*numbers, 32, 16) for numbers in ((1, 1, 1), (16, 1, 1), (35, 3, 3), (2, 3, 40))),
        ],
        INTERPRETER,
    ),
)
def test_sizes_and_numbers(
    device: str, tokens: int, top_k: int, num_experts: int, hidden: int, middle: int
) -> None:
    """Less than a tile, more than one, and no multiple of one; full blocks, blocks with one pair, all experts
    and hardly any."""
    sizes = {"top_k": top_k, "num_experts": num_experts, "hidden": hidden, "middle": middle}
    task = Mixture.make(tokens, **sizes, device=device)
    assert_close(compute(task), task.expected(), torch.float32)


@nightly(INTERPRETER)
@pytest.mark.parametrize("dtype", grid([torch.bfloat16], [torch.float32], INTERPRETER))
def test_a_token_has_the_same_bits_in_any_company(device: str, dtype: torch.dtype) -> None:
    """Among other tokens, in steps of other sizes; compiled also alone and at any place of its block. The
    interpreter multiplies by numpy, to whose sums the place of a row in the matrix matters."""
    task = Mixture.make(37, num_experts=4, dtype=dtype, device=device)
    together = compute(task)
    for kept in (20, 1):
        changed = Mixture(task.hidden.clone(), task.weights, task.experts, task.stack)
        changed.hidden[kept:] += 1
        assert torch.equal(compute(changed)[:kept], together[:kept])
        assert torch.equal(compute(task.of(*range(kept))), together[:kept])
    order = random.Random(0).sample(range(37), 37)
    cases = [(order, compute(task.of(*order)))]
    cases += [([token], compute(task.of(token))) for token in (0, 17, 36)]
    for tokens, got in cases:
        if not interpreted_on(device):
            assert torch.equal(got, together[tokens])
        else:
            assert_close(got, together[tokens].double().cpu(), dtype)


def test_large_gates(device: str) -> None:
    """silu goes to its argument and to zero; it does not overflow on the way."""
    task = Mixture.make(4, device=device)
    task.stack.gate_up[:, :16] *= 1e4
    assert task.expected().abs().max() > 1000
    torch.testing.assert_close(compute(task).double().cpu(), task.expected(), rtol=1e-4, atol=1e-2)


@nightly(INTERPRETER)
@pytest.mark.parametrize("block_m", grid([16], [32], INTERPRETER))
def test_blocks_hold_every_pair_once_and_in_order(device: str, block_m: int) -> None:
    from aioinfer.model.moe.triton_experts import align, num_blocks

    rng = random.Random(block_m)
    for case in range(8):
        num_experts = rng.choice([1, 2, 7, 40])
        pairs = rng.choice([1, 15, 16, 17, 100, 1030] if case else [2100])
        used = rng.randint(1, num_experts)
        ids = [rng.choice([rng.randrange(used), used - 1]) for _ in range(pairs)]
        # Nobody's: these get no block.
        nobody = rng.choice([-1, num_experts])
        for pair in rng.sample(range(pairs), min(pairs, rng.choice([1, 40]))):
            ids[pair] = nobody
        block_expert, block_pairs = align(torch.tensor(ids, device=device), num_experts, block_m)
        assert len(block_expert) == num_blocks(pairs, num_experts, block_m)
        found: dict[int, list[int]] = {expert: [] for expert in range(num_experts)}
        for expert, members in zip(block_expert.tolist(), block_pairs.tolist(), strict=True):
            if expert < 0:
                assert expert == -1
                continue
            real = [pair for pair in members if pair != pairs]
            assert members == real + [pairs] * (block_m - len(real))
            # Only the last block of an expert has room left.
            assert real
            assert len(found[expert]) % block_m == 0
            found[expert] += real
        assert found == {
            expert: [pair for pair in range(pairs) if ids[pair] == expert] for expert in range(num_experts)
        }


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_a_captured_layer_follows_what_changes_on_the_device(tokens: int) -> None:
    """Experts that other tokens choose, and junk in the rows that a captured size has too many."""
    kernels_or_skip("cuda")
    from aioinfer.model.backend import Backend
    from aioinfer.model.kernels import make_experts, make_router

    backend = Backend("triton", "a test")
    task = Mixture.make(tokens, num_experts=8, dtype=torch.bfloat16, device="cuda")
    gate = torch.randn(8, 32, generator=torch.Generator().manual_seed(9)).to("cuda", torch.bfloat16)
    layer = SparseMLP(make_router(SoftmaxRouter(gate, 2, True), backend), make_experts(task.stack, backend))
    hidden = task.hidden.clone()
    # Compiled before it is captured.
    layer(hidden)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = layer(hidden)
    for seed in range(3):
        new = Mixture.make(tokens, dtype=torch.bfloat16, device="cuda", seed=seed).hidden
        new[1 + seed :] = float("nan")
        hidden.copy_(new)
        graph.replay()
        eager = layer(new[: 1 + seed])
        # A token's bits do not depend on its company.
        assert torch.equal(out[: 1 + seed], eager)
        assert bool(out[1 + seed :].isnan().all())


def test_what_does_not_fit_is_refused(device: str) -> None:
    from aioinfer.model.moe.experts import ExpertWeights
    from aioinfer.model.moe.triton_experts import ExpertTuning

    task = Mixture.make(3, device=device)
    good = task.stack
    task.stack = ExpertWeights(good.gate_up, good.down[:, :16])
    with pytest.raises(ValueError, match="do not fit"):
        compute(task)
    task.stack = ExpertWeights(good.gate_up.mT.contiguous().mT, good.down)
    with pytest.raises(ValueError, match="contiguous"):
        compute(task)
    task.stack = good
    task.weights = task.weights[:2]
    with pytest.raises(ValueError, match="3 tokens"):
        compute(task)
    for wrong in ({"block_m": 8}, {"block_n": 48}, {"block_k": 8}):
        with pytest.raises(ValueError, match="tiles"):
            ExpertTuning(**wrong)
