"""Routers against the same rules written out token by token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from aioinfer.model.moe.routing import GroupedSigmoidRouter, Router, SoftmaxRouter

HIDDEN = 24


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def routed(router: Router, hidden: torch.Tensor) -> list[dict[int, float]]:
    """Expert -> weight of every token."""
    weights, experts = router(hidden)
    assert weights.shape == experts.shape
    assert experts.dtype == torch.int64
    return [dict(zip(e, w, strict=True)) for e, w in zip(experts.tolist(), weights.tolist(), strict=True)]


def plain_softmax(logits: list[float], top_k: int, normalize: bool) -> dict[int, float]:
    shares = torch.tensor(logits, dtype=torch.float64).softmax(0).tolist()
    chosen = sorted(range(len(shares)), key=lambda expert: -shares[expert])[:top_k]
    total = sum(shares[expert] for expert in chosen) if normalize else 1.0
    return {expert: shares[expert] / total for expert in chosen}


def plain_grouped(
    logits: list[float], bias: list[float], top_k: int, groups: int, top_groups: int, scale: float, norm: bool
) -> dict[int, float]:
    scores = torch.tensor(logits, dtype=torch.float64).sigmoid().tolist()
    wanted = [score + extra for score, extra in zip(scores, bias, strict=True)]
    size = len(scores) // groups
    members = [range(group * size, group * size + size) for group in range(groups)]
    goodness = [sum(sorted((wanted[e] for e in group), reverse=True)[:2]) for group in members]
    open_groups = sorted(range(groups), key=lambda group: -goodness[group])[:top_groups]
    candidates = [expert for group in open_groups for expert in members[group]]
    chosen = sorted(candidates, key=lambda expert: -wanted[expert])[:top_k]
    total = sum(scores[expert] for expert in chosen) + 1e-20 if norm else 1.0
    return {expert: scores[expert] / total * scale for expert in chosen}


def assert_same(got: list[dict[int, float]], expected: list[dict[int, float]]) -> None:
    for token, wanted in zip(got, expected, strict=True):
        assert token.keys() == wanted.keys()
        assert token == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (128, 8), (5, 5), (3, 1)])
def test_softmax(num_experts: int, top_k: int, normalize: bool) -> None:
    weight, hidden = noise(num_experts, HIDDEN), noise(50, HIDDEN, seed=1)
    logits = (hidden.double() @ weight.double().T).tolist()
    expected = [plain_softmax(row, top_k, normalize) for row in logits]
    assert_same(routed(SoftmaxRouter(weight, top_k, normalize), hidden), expected)


@pytest.mark.parametrize("bias", [None, 0.3, -2.0])
@pytest.mark.parametrize(
    ("num_experts", "top_k", "groups", "top_groups", "scale", "normalize"),
    [
        (256, 8, 8, 4, 2.5, True),  # LLaDA2
        (64, 6, 1, 1, 1.0, False),  # no groups
        (12, 4, 4, 2, 1.5, True),
        (12, 3, 12, 4, 1.0, True),  # groups of one expert
        (8, 4, 2, 1, 2.0, False),  # all of a group
    ],
)
def test_grouped_sigmoid(
    num_experts: int,
    top_k: int,
    groups: int,
    top_groups: int,
    scale: float,
    normalize: bool,
    bias: float | None,
) -> None:
    """With a bias so negative that nothing stays above zero, too: a closed group is no better than that."""
    weight, hidden = noise(num_experts, HIDDEN), noise(50, HIDDEN, seed=1)
    extra = None if bias is None else bias + 0.2 * noise(num_experts, seed=2)
    router = GroupedSigmoidRouter(weight, extra, top_k, groups, top_groups, normalize, scale)
    listed = [0.0] * num_experts if extra is None else extra.double().tolist()
    logits = (hidden.double() @ weight.double().T).tolist()
    expected = [plain_grouped(row, listed, top_k, groups, top_groups, scale, normalize) for row in logits]
    assert_same(routed(router, hidden), expected)


def test_the_bias_chooses_and_does_not_weigh() -> None:
    weight, hidden = noise(4, HIDDEN), noise(3, HIDDEN, seed=1)
    bias = torch.tensor([0.0, 9.0, 0.0, 0.0])
    weights, experts = GroupedSigmoidRouter(weight, bias, 1, 1, 1, False, 1.0)(hidden)
    assert experts.flatten().tolist() == [1, 1, 1]
    torch.testing.assert_close(weights, (hidden @ weight[1:2].T).sigmoid())


ROUTERS = [
    lambda weight: SoftmaxRouter(weight, 3, True),
    lambda weight: GroupedSigmoidRouter(weight.float(), noise(8, seed=2), 3, 4, 2, True, 2.5),
]


@pytest.mark.parametrize("make", ROUTERS, ids=["softmax", "sigmoid"])
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), float("-inf")])
def test_a_token_that_is_no_number_goes_somewhere_and_harms_no_other(
    make: Callable[[torch.Tensor], Router], junk: float
) -> None:
    router, hidden = make(noise(8, HIDDEN)), noise(6, HIDDEN, seed=1)
    clean = routed(router, hidden)
    hidden[2] = junk
    hidden[4, 3] = junk
    weights, experts = router(hidden)
    assert bool(((experts >= 0) & (experts < 8)).all())
    for token in (0, 1, 3, 5):
        assert dict(zip(experts[token].tolist(), weights[token].tolist(), strict=True)) == clean[token]


@pytest.mark.parametrize("make", ROUTERS, ids=["softmax", "sigmoid"])
def test_half_precision_and_no_tokens(make: Callable[[torch.Tensor], Router]) -> None:
    router = make(noise(8, HIDDEN).bfloat16())
    weights, experts = router(noise(4, HIDDEN, seed=1).bfloat16())
    assert all(len(set(row)) == 3 for row in experts.tolist())
    assert bool((weights > 0).all())
    assert [tensor.shape for tensor in router(torch.empty(0, HIDDEN).bfloat16())] == [(0, 3), (0, 3)]


@pytest.mark.parametrize(("top_k", "groups", "top_groups"), [(2, 3, 1), (5, 2, 1), (2, 2, 3), (2, 2, 0)])
def test_groups_that_do_not_fit_are_refused(top_k: int, groups: int, top_groups: int) -> None:
    with pytest.raises(ValueError, match="of 8 experts"):
        GroupedSigmoidRouter(noise(8, HIDDEN), None, top_k, groups, top_groups, True, 1.0)
