"""The sampler against exact distributions and against the plainest implementation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from aioinfer.sampling.batch import PenaltyReset, SamplingBatch
from aioinfer.sampling.noise import gumbel, random_bits, uniform
from aioinfer.sampling.sampler import Sampler
from aioinfer.scheduling.step import BAD_LOGITS

CPU = torch.device("cpu")
DEFAULTS: dict[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "top_k": 0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def make_batch(rows: list[dict[str, Any]], **extra: Any) -> SamplingBatch:
    """A batch of rows given by what differs from the defaults (and seed, position, slot)."""

    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([row.get(name, DEFAULTS.get(name, 0)) for row in rows], dtype=dtype)

    floats = {name: column(name, torch.float32) for name in DEFAULTS if name != "top_k"}
    top_k = column("top_k", torch.int64)
    penalty = bool(
        (floats["repetition_penalty"] != 1).any()
        or floats["presence_penalty"].any()
        or floats["frequency_penalty"].any()
    )
    return SamplingBatch(
        slots=torch.tensor([row.get("slot", at + 1) for at, row in enumerate(rows)]),
        positions=column("position", torch.int64),
        seeds=column("seed", torch.int64),
        top_k=top_k,
        **floats,
        all_greedy=not floats["temperature"].any() and not penalty,
        any_top_k=bool(top_k.any()),
        any_top_p=bool((floats["top_p"] < 1).any()),
        any_min_p=bool(floats["min_p"].any()),
        any_penalty=penalty,
        **extra,
    )


def reference(logits: np.ndarray[Any, Any], row: dict[str, Any]) -> int:
    """One row, float32, a full sort, no cleverness."""
    row = {**DEFAULTS, "seed": 0, "position": 0, **row}
    if row["temperature"] == 0:
        return int(logits.argmax())
    scaled = (logits - logits.max()) / np.float32(row["temperature"])
    keep = np.ones(len(scaled), bool)
    if row["top_k"]:
        keep &= scaled >= np.sort(scaled)[::-1][min(row["top_k"], len(scaled)) - 1]
    if row["top_p"] < 1:
        weights = np.where(keep, np.exp(scaled), 0).astype(np.float32)
        order = np.argsort(-scaled, kind="stable")
        before = np.cumsum(weights[order]) - weights[order]
        last = int((before < np.float32(row["top_p"]) * weights.sum()).sum()) - 1
        keep &= scaled >= scaled[order][max(last, 0)]
    if row["min_p"]:
        keep &= scaled >= np.log(np.float32(row["min_p"]))
    noise = gumbel(torch.tensor([row["seed"]]), torch.tensor([row["position"]]), torch.arange(len(scaled)))[
        0
    ].numpy()
    return int(np.where(keep, scaled + noise, -np.inf).argmax())


def random_row(rng: np.random.Generator) -> dict[str, Any]:
    return {
        "temperature": rng.choice([0.0, 0.3, 1.0, 2.5]),
        "top_p": rng.choice([1.0, 0.9, 0.5, 0.01]),
        "top_k": int(rng.choice([0, 1, 5, 40, 100_000])),
        "min_p": rng.choice([0.0, 0.05, 0.9, 1.0]),
        "seed": int(rng.integers(-(2**63), 2**63 - 1)),
        "position": int(rng.integers(0, 5000)),
    }


@pytest.mark.parametrize("vocab", [2, 7, 300, 3000])
def test_every_row_equals_the_plain_implementation(vocab: int) -> None:
    for seed in range(40):
        rng = np.random.default_rng(seed)
        logits = rng.normal(0, rng.choice([0.5, 3, 12]), (6, vocab)).astype(np.float32)
        if rng.random() < 0.3:
            logits[:, rng.integers(0, vocab)] = -np.inf
        rows = [random_row(rng) for _ in range(6)]
        got = Sampler(8, vocab, CPU).sample(torch.from_numpy(logits), make_batch(rows)).tolist()
        assert got == [reference(line, row) for line, row in zip(logits, rows, strict=True)], (seed, rows)


def test_a_row_does_not_depend_on_its_batch() -> None:
    rng = np.random.default_rng(5)
    logits = torch.from_numpy(rng.normal(0, 3, (12, 900)).astype(np.float32))
    rows = [random_row(rng) for _ in range(12)]
    sampler = Sampler(16, 900, CPU)
    together = sampler.sample(logits, make_batch(rows)).tolist()
    alone = [
        int(sampler.sample(logits[at : at + 1], make_batch([{**row, "slot": 3}])))
        for at, row in enumerate(rows)
    ]
    order = rng.permutation(12).tolist()
    shuffled = sampler.sample(logits[order], make_batch([rows[at] for at in order])).tolist()
    assert together == alone
    assert [together[at] for at in order] == shuffled


FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"top_k": 4},
    {"top_p": 0.8},
    {"min_p": 0.2},
    {"top_k": 6, "top_p": 0.9, "min_p": 0.05, "temperature": 1.5},
]


@pytest.mark.parametrize("row", FILTERS)
def test_frequencies_follow_the_exact_distribution(row: dict[str, Any]) -> None:
    """Chi-square over 20,000 draws of one row; the seeds are fixed, so it passes always or never."""
    logits = torch.tensor([[2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -3.0, 1.2]])
    draws = 20_000
    rows = [{**row, "seed": 1234, "position": at, "slot": 1} for at in range(draws)]
    tokens = Sampler(1, 10, CPU).sample(logits.expand(draws, -1), make_batch(rows))
    counts = torch.bincount(tokens, minlength=10).double()
    wanted = exact(logits[0].double(), {**DEFAULTS, **row}) * draws
    assert (counts[wanted == 0] == 0).all()
    kept = wanted > 0
    statistic = float(((counts - wanted)[kept] ** 2 / wanted[kept]).sum())
    degrees = int(kept.sum()) - 1
    # mean + 4 standard deviations of the chi-square distribution
    assert statistic < degrees + 4 * math.sqrt(2 * degrees), (statistic, degrees)


def exact(logits: torch.Tensor, row: dict[str, Any]) -> torch.Tensor:
    """Probabilities after the filters, in float64, by their definitions."""
    scaled = logits / row["temperature"]
    keep = torch.ones_like(scaled, dtype=torch.bool)
    if row["top_k"]:
        keep &= scaled >= scaled.sort(descending=True).values[row["top_k"] - 1]
    if row["top_p"] < 1:
        probabilities = scaled.masked_fill(~keep, -math.inf).softmax(-1)
        ordered, order = probabilities.sort(descending=True)
        nucleus = (ordered.cumsum(-1) - ordered) < row["top_p"]
        keep &= torch.zeros_like(keep).scatter(0, order, nucleus)
    if row["min_p"]:
        probabilities = scaled.softmax(-1)
        keep &= probabilities >= row["min_p"] * probabilities.max()
    return scaled.masked_fill(~keep, -math.inf).softmax(-1)


def test_rows_without_a_finite_maximum_fail_alone() -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    logits[0, 3] = math.nan
    logits[1, 3] = math.inf
    logits[2] = -math.inf
    logits[3, 10:] = -math.inf
    for row in ({"temperature": 0.0}, {}, {"top_p": 0.5}):
        tokens = Sampler(8, 50, CPU).sample(logits.clone(), make_batch([row] * 5)).tolist()
        assert tokens[:3] == [BAD_LOGITS] * 3
        assert 0 <= tokens[3] < 10
        assert 0 <= tokens[4] < 50


def test_banned_ids_are_never_sampled() -> None:
    logits = torch.zeros(64, 4)
    logits[:, 2] = 5.0
    rows = [{"seed": at, "temperature": at % 2} for at in range(64)]
    banned = torch.arange(64)
    batch = make_batch(rows, banned_rows=banned, banned_ids=torch.full((64,), 2))
    assert 2 not in Sampler(64, 4, CPU).sample(logits, batch).tolist()


# -- penalties -----------------------------------------------------------------------------------------


def penalised(
    logits: list[float], prompt: list[int], output: list[int], row: dict[str, float]
) -> list[float]:
    result = []
    for token, logit in enumerate(logits):
        if token in prompt or token in output:
            scale = row.get("repetition_penalty", 1.0)
            logit = logit / scale if logit > 0 else logit * scale
        count = output.count(token)
        logit -= row.get("frequency_penalty", 0.0) * count + row.get("presence_penalty", 0.0) * (count > 0)
        result.append(logit)
    return result


@pytest.mark.parametrize(
    "row",
    [
        {"repetition_penalty": 1.7},
        {"frequency_penalty": 0.9},
        {"presence_penalty": 1.1},
        {"repetition_penalty": 0.8, "frequency_penalty": -0.5, "presence_penalty": 0.4},
    ],
)
def test_penalties_count_what_was_sampled_before_the_host_knows(row: dict[str, float]) -> None:
    """30 greedy tokens, each step counting the one before on the device, equal the formulas."""
    rng = np.random.default_rng(1)
    prompt, output = [1, 2, 3, 3], [4]
    sampler = Sampler(4, 12, CPU)
    resets = [PenaltyReset(2, prompt, list(output))]
    for _ in range(30):
        logits = rng.normal(0, 1.5, 12).astype(np.float32)
        batch = make_batch([{**row, "temperature": 0.0, "slot": 2}], penalty_resets=resets)
        token = int(sampler.sample(torch.from_numpy(logits[None]), batch))
        assert token == int(np.argmax(penalised(logits.tolist(), prompt, output, row)))
        output.append(token)
        resets = []


def test_a_new_tenant_of_a_slot_inherits_no_counts() -> None:
    sampler = Sampler(4, 8, CPU)
    logits = torch.arange(8.0)[None]
    first = {"frequency_penalty": 2.0, "temperature": 0.0, "slot": 1}
    for step in range(5):
        resets = [PenaltyReset(1, [0], [])] if step == 0 else []
        sampler.sample(logits, make_batch([first], penalty_resets=resets))
    neutral = {"temperature": 0.0, "slot": 1}
    beside = {"presence_penalty": 0.5, "temperature": 0.0, "slot": 2}
    batch = make_batch([neutral, beside], penalty_resets=[PenaltyReset(2, [0], [])])
    assert sampler.sample(logits.expand(2, -1), batch).tolist() == [7, 7]
    again = make_batch([first], penalty_resets=[PenaltyReset(1, [0], [])])
    assert sampler.sample(logits, again).tolist() == [7]


# -- noise ---------------------------------------------------------------------------------------------


def test_noise_is_pinned() -> None:
    """These bits are part of the seed law: changing them changes every seeded output."""
    seeds = torch.tensor([0, 1, -1, 2**40])
    bits = random_bits(seeds, torch.tensor([0, 7, 7, 123]), torch.arange(3))
    assert bits.tolist() == GOLDEN


GOLDEN = [
    [2729271915, 3380725799, 1361982165],
    [270866020, 92116323, 35660379],
    [152757871, 731853122, 71014881],
    [3799912850, 3350681356, 2694855662],
]


def test_noise_is_uniform_and_neighbours_are_unrelated() -> None:
    ids = torch.arange(200)
    base = uniform(torch.arange(100), torch.zeros(100, dtype=torch.int64), ids)
    assert float(base.min()) > 0
    assert float(base.max()) < 1
    cells = torch.histc(base, bins=50, min=0, max=1)
    expected = base.numel() / 50
    assert float(((cells - expected) ** 2 / expected).sum()) < 49 + 4 * math.sqrt(98)
    other_seed = uniform(torch.arange(1, 101), torch.zeros(100, dtype=torch.int64), ids)
    other_position = uniform(torch.arange(100), torch.ones(100, dtype=torch.int64), ids)
    for other in (other_seed, other_position, base.roll(1, dims=1)):
        correlation = torch.corrcoef(torch.stack((base.flatten(), other.flatten())))[0, 1]
        assert abs(float(correlation)) < 4 / math.sqrt(base.numel())


def test_seeds_that_differ_in_any_bit_differ() -> None:
    seeds = torch.tensor([0, -1, *(1 << bit for bit in range(63))])
    rows = random_bits(seeds, torch.zeros_like(seeds), torch.arange(8))
    assert len({tuple(row) for row in rows.tolist()}) == len(seeds)
