"""Routers against the same rules written out token by token: torch's, and those on Triton's kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch

from aioinfer.model.backend import Backend
from aioinfer.model.kernels import make_router
from aioinfer.model.moe.native_experts import NativeRouter
from aioinfer.model.moe.routing import GroupedSigmoidRouter, Router, SoftmaxRouter
from aioinfer.native.bindings import ThreadPool
from tests.model.kernels import DEVICES, interpreted_on, kernels_or_skip
from tests.tiers import grid

HIDDEN = 48
Rule = SoftmaxRouter | GroupedSigmoidRouter


class Follow:
    """Follows rules by one kind of kernels, on one device."""

    def __init__(self, kernels: str) -> None:
        self.kernels, self.triton = kernels, kernels not in ("torch", "native")
        self.device = "cuda" if kernels == "cuda" else "cpu"
        #: the interpreter takes some 30 ms for a token
        self.tokens = 5 if self.triton and interpreted_on(self.device) else 50

    def __call__(self, rule: Rule, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tensors = {
            field.name: getattr(rule, field.name).to(self.device)
            for field in dataclasses.fields(rule)
            if isinstance(getattr(rule, field.name), torch.Tensor)
        }
        rule = dataclasses.replace(rule, **tensors)
        if self.kernels == "native":
            router: Router = NativeRouter(ThreadPool(2), rule, hidden.dtype)
        else:
            router = make_router(rule, Backend("triton" if self.triton else "grouped", "a test"))
        assert isinstance(router, type(rule)) == (self.kernels == "torch")
        with np.errstate(invalid="ignore"):
            weights, experts = router(hidden.to(self.device))
        return weights.cpu(), experts.cpu()


NATIVE = pytest.param("native", marks=pytest.mark.native)


@pytest.fixture(params=["torch", NATIVE, *DEVICES])
def follow(request: pytest.FixtureRequest) -> Follow:
    if request.param not in ("torch", "native"):
        kernels_or_skip(request.param)
    return Follow(request.param)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def routed(follow: Follow, rule: Rule, hidden: torch.Tensor) -> list[dict[int, float]]:
    """Expert -> weight of every token."""
    weights, experts = follow(rule, hidden)
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
def test_softmax(follow: Follow, num_experts: int, top_k: int, normalize: bool) -> None:
    weight, hidden = noise(num_experts, HIDDEN), noise(follow.tokens, HIDDEN, seed=1)
    logits = (hidden.double() @ weight.double().T).tolist()
    expected = [plain_softmax(row, top_k, normalize) for row in logits]
    assert_same(routed(follow, SoftmaxRouter(weight, top_k, normalize), hidden), expected)


@pytest.mark.parametrize("bias", grid([0.3], [None, -2.0]))
@pytest.mark.parametrize(
    ("num_experts", "top_k", "groups", "top_groups", "scale", "normalize"),
    [
        (256, 8, 8, 4, 2.5, True),  # LLaDA2
        (64, 6, 1, 1, 1.0, False),  # no groups
        (12, 4, 1, 1, 1.5, True),
        (16, 3, 16, 4, 1.0, True),  # groups of one expert
        (8, 4, 2, 1, 2.0, False),  # all of a group
    ],
)
def test_grouped_sigmoid(
    follow: Follow,
    num_experts: int,
    top_k: int,
    groups: int,
    top_groups: int,
    scale: float,
    normalize: bool,
    bias: float | None,
) -> None:
    """With a bias so negative that nothing stays above zero, too: a closed group is no better than that."""
    # Small enough that sigmoids stay apart in float32.
    weight, hidden = 0.5 * noise(num_experts, HIDDEN), noise(follow.tokens, HIDDEN, seed=1)
    extra = None if bias is None else bias + 0.2 * noise(num_experts, seed=2)
    rule = GroupedSigmoidRouter(weight, extra, top_k, groups, top_groups, normalize, scale)
    listed = [0.0] * num_experts if extra is None else extra.double().tolist()
    logits = (hidden.double() @ weight.double().T).tolist()
    expected = [plain_grouped(row, listed, top_k, groups, top_groups, scale, normalize) for row in logits]
    assert_same(routed(follow, rule, hidden), expected)


def test_the_bias_chooses_and_does_not_weigh(follow: Follow) -> None:
    weight, hidden = noise(4, HIDDEN), noise(3, HIDDEN, seed=1)
    bias = torch.tensor([0.0, 9.0, 0.0, 0.0])
    weights, experts = follow(GroupedSigmoidRouter(weight, bias, 1, 1, 1, False, 1.0), hidden)
    assert experts.flatten().tolist() == [1, 1, 1]
    torch.testing.assert_close(weights, (hidden @ weight[1:2].T).sigmoid())


RULES = [
    lambda weight: SoftmaxRouter(weight, 3, True),
    lambda weight: GroupedSigmoidRouter(weight.float(), noise(8, seed=2), 3, 4, 2, True, 2.5),
]
both_rules = pytest.mark.parametrize("make", RULES, ids=["softmax", "sigmoid"])


@both_rules
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), float("-inf")])
def test_a_token_that_is_no_number_goes_somewhere_and_harms_no_other(
    follow: Follow, make: Callable[[torch.Tensor], Rule], junk: float
) -> None:
    rule, hidden = make(noise(8, HIDDEN)), noise(6, HIDDEN, seed=1)
    clean = routed(follow, rule, hidden)
    hidden[2] = junk
    hidden[4, 3] = junk
    weights, experts = follow(rule, hidden)
    assert bool(((experts >= 0) & (experts < 8)).all())
    assert all(len(set(row)) == 3 for row in experts.tolist())
    for token in (0, 1, 3, 5):
        assert dict(zip(experts[token].tolist(), weights[token].tolist(), strict=True)) == clean[token]


@both_rules
def test_half_precision_and_no_tokens(follow: Follow, make: Callable[[torch.Tensor], Rule]) -> None:
    """Softmax has weights of the tokens' type, sigmoids and native kernels float32."""
    rule = make(noise(8, HIDDEN).bfloat16())
    hidden = noise(follow.tokens, HIDDEN, seed=1).bfloat16()
    weights, experts = follow(rule, hidden)
    softmax = isinstance(rule, SoftmaxRouter)
    assert weights.dtype == (torch.bfloat16 if softmax and follow.kernels != "native" else torch.float32)
    assert all(len(set(row)) == 3 for row in experts.tolist())
    torch.testing.assert_close(
        weights.sum(-1, dtype=torch.float32),
        torch.full((follow.tokens,), 1.0 if softmax else 2.5),
        rtol=0.01,
        atol=0,
    )
    if softmax:
        # The best, but for logits that are equal once rounded.
        logits = hidden.double() @ rule.weight.double().T
        worst = logits.gather(1, experts).amin(1)
        others = logits.scatter(1, experts, float("-inf")).amax(1)
        assert bool((worst >= others - 0.01 * logits.abs().max()).all())
    assert [tensor.shape for tensor in follow(rule, hidden[:0])] == [(0, 3), (0, 3)]


def test_groups_that_are_no_powers_of_two_are_left_to_torch() -> None:
    triton = Backend("triton", "a test")
    kernels_or_skip("cuda" if torch.cuda.is_available() else "cpu")
    for experts, groups in ((12, 4), (12, 3)):
        rule = GroupedSigmoidRouter(noise(experts, HIDDEN), None, 2, groups, 2, True, 1.0)
        assert make_router(rule, triton) is rule
    for top_groups in (3, 2):
        rule = GroupedSigmoidRouter(noise(24, HIDDEN), None, 2, 3, top_groups, True, 1.0)
        assert (make_router(rule, triton) is rule) == (top_groups == 2)
    rule = GroupedSigmoidRouter(noise(24, HIDDEN), None, 2, 1, 1, True, 1.0, capacity=4, block=8)
    assert make_router(rule, triton) is rule


def test_blocks_share_experts_and_do_not_see_each_other() -> None:
    weight, hidden = 0.2 * noise(12, HIDDEN), noise(16, HIDDEN, seed=1)
    rule = GroupedSigmoidRouter(weight, 0.1 * noise(12, seed=2), 3, 1, 1, True, 1.0, capacity=4, block=8)
    chosen = rule(hidden)[1].view(2, -1)
    assert [len(set(block)) for block in chosen.tolist()] == [4, 4]
    assert set(chosen[0].tolist()) != set(chosen[1].tolist())
    assert torch.equal(rule(hidden.view(2, 8, -1).flip(0).flatten(0, 1))[1].view(2, -1).flip(0), chosen)
    everything = dataclasses.replace(rule, capacity=12)
    assert torch.equal(everything(hidden)[1], dataclasses.replace(rule, capacity=0)(hidden)[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("follow", ["torch", NATIVE], indirect=True)
def test_groups_of_a_softmax_are_chosen_by_their_best_expert(follow: Follow, dtype: torch.dtype) -> None:
    """DeepSeek-V2: nothing is rounded, whatever the type of the tokens."""
    weight, hidden = noise(12, HIDDEN), noise(follow.tokens, HIDDEN, seed=1).to(dtype)
    rule = GroupedSigmoidRouter(weight, None, 3, 4, 2, False, 16.0, softmax=True)
    weights, experts = follow(rule, hidden)
    scores = (hidden.double() @ weight.double().T).softmax(-1)
    for row, got, chosen in zip(scores, weights, experts, strict=True):
        groups = row.view(4, 3).amax(-1).topk(2).indices
        among = [int(group) * 3 + at for group in groups for at in range(3)]
        best = sorted(among, key=lambda expert: -float(row[expert]))[:3]
        assert sorted(chosen.tolist()) == sorted(best)
        torch.testing.assert_close(got.double(), 16 * row[chosen], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("follow", [NATIVE, *DEVICES], indirect=True)
@both_rules
def test_a_token_has_the_same_bits_in_any_company(
    follow: Follow, make: Callable[[torch.Tensor], Rule]
) -> None:
    """By our kernels, for torch promises nothing. In the interpreter at the same place of a tile; see
    test_triton_experts."""
    rule, hidden = make(noise(8, 112)), noise(20, 112, seed=1)
    together = follow(rule, hidden)
    some = [16, 17] if follow.triton and interpreted_on(follow.device) else [19]
    for got, wanted in zip(follow(rule, hidden[some]), together, strict=True):
        assert torch.equal(got, wanted[some])


@pytest.mark.parametrize(("top_k", "groups", "top_groups"), [(2, 3, 1), (5, 2, 1), (2, 2, 3), (2, 2, 0)])
def test_groups_that_do_not_fit_are_refused(top_k: int, groups: int, top_groups: int) -> None:
    with pytest.raises(ValueError, match="of 8 experts"):
        GroupedSigmoidRouter(noise(8, HIDDEN), None, top_k, groups, top_groups, True, 1.0)
