"""Batches of sampling rows, the plainest sampler there is, and chi-square."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from aioinfer.native.bindings import ThreadPool, shared_thread_pool
from aioinfer.sampling.batch import SamplingBatch
from aioinfer.sampling.noise import gumbel
from aioinfer.sampling.outcomes import BAD_LOGITS
from tests.compiled import require_native

CPU = torch.device("cpu")
Floats = npt.NDArray[np.float32]

DEFAULTS: dict[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "top_k": 0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def native_thread_pool(threads: int = 2) -> ThreadPool:
    """A team for kernels in C++, where they can be compiled."""
    require_native()
    return shared_thread_pool(threads)


def make_batch(rows: list[dict[str, Any]], device: torch.device = CPU, **extra: Any) -> SamplingBatch:
    """A batch of rows given by what differs from the defaults (and seed, position, slot, banned ids)."""

    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([row.get(name, DEFAULTS.get(name, 0)) for row in rows], dtype=dtype)

    floats = {name: column(name, torch.float32) for name in DEFAULTS if name != "top_k"}
    top_k = column("top_k", torch.int64)
    penalty = bool(
        (floats["repetition_penalty"] != 1).any()
        or floats["presence_penalty"].any()
        or floats["frequency_penalty"].any()
    )
    banned = [(at, token) for at, row in enumerate(rows) for token in row.get("banned", ())]
    if banned:
        extra["banned_rows"] = torch.tensor([at for at, _ in banned], device=device)
        extra["banned_ids"] = torch.tensor([token for _, token in banned], device=device)
    return SamplingBatch(
        slots=torch.tensor([row.get("slot", at + 1) for at, row in enumerate(rows)], device=device),
        positions=column("position", torch.int64).to(device),
        seeds=column("seed", torch.int64).to(device),
        top_k=top_k.to(device),
        temperature=floats["temperature"].to(device),
        top_p=floats["top_p"].to(device),
        min_p=floats["min_p"].to(device),
        repetition_penalty=floats["repetition_penalty"].to(device),
        presence_penalty=floats["presence_penalty"].to(device),
        frequency_penalty=floats["frequency_penalty"].to(device),
        all_greedy=not floats["temperature"].any(),
        any_top_k=bool(top_k.any()),
        any_top_p=bool((floats["top_p"] < 1).any()),
        any_min_p=bool(floats["min_p"].any()),
        any_penalty=penalty,
        **extra,
    )


def random_row(rng: np.random.Generator) -> dict[str, Any]:
    return {
        "temperature": rng.choice([0.0, 1e-38, 0.3, 1.0, 2.5, 100.0]),
        "top_p": rng.choice([1.0, 1.0, 0.9, 0.5, 0.999, 1e-6]),
        "top_k": int(rng.choice([0, 0, 1, 5, 40, 800, 100_000])),
        "min_p": rng.choice([0.0, 0.0, 0.05, 0.9, 1.0]),
        "seed": int(rng.integers(-(2**63), 2**63 - 1)),
        "position": int(rng.integers(0, 5000)),
    }


def random_logits(rng: np.random.Generator, vocab: int) -> Floats:
    """One row [V]: spread, ties, tokens that cannot be sampled, values near the end of float32."""
    logits = rng.normal(0, rng.choice([0.0, 0.5, 3, 12]), vocab).astype(np.float32)
    if rng.random() < 0.3:
        logits = np.round(logits)
    if rng.random() < 0.3:
        logits[rng.integers(0, vocab, 1 + vocab // 3)] = -np.inf
    if rng.random() < 0.1:
        logits = np.clip(logits, -30, 30) * np.float32(1e37)
    if rng.random() < 0.1:
        logits[rng.integers(0, vocab)] = rng.choice([np.nan, np.inf, -np.inf])
    return logits


def penalise(logits: Floats, prompt: list[int], output: list[int], row: dict[str, Any]) -> Floats:
    """The formulas, token by token."""
    row = {**DEFAULTS, **row}
    repetition, presence, frequency = (
        np.float32(row[f"{name}_penalty"]) for name in ("repetition", "presence", "frequency")
    )
    result = logits.copy()
    for token in {*prompt, *output}:
        logit = result[token]
        count = output.count(token)
        with np.errstate(over="ignore"):
            logit = logit / repetition if logit > 0 else logit * repetition
            result[token] = logit - frequency * np.float32(count) - presence * np.float32(count > 0)
    return result


def reference(logits: Floats, row: dict[str, Any]) -> int:
    """One row after penalties: float32, the whole noise, a full sort, exact fractions."""
    row = {**DEFAULTS, "seed": 0, "position": 0, "banned": (), **row}
    if np.isnan(logits).any() or np.isposinf(logits).any():
        return BAD_LOGITS
    logits = logits.copy()
    logits[list(row["banned"])] = -np.inf
    if logits.max() == -np.inf:
        return BAD_LOGITS
    if row["temperature"] == 0:
        return int(logits.argmax())
    with np.errstate(over="ignore"):
        scaled = (logits - logits.max()) / max(np.float32(row["temperature"]), np.float32(1e-37))
    keep = scaled >= reference_floor(scaled, row)
    seed, position = torch.tensor([row["seed"]]), torch.tensor([row["position"]])
    noise = gumbel(seed, position, torch.arange(len(scaled)))[0].numpy()
    return int(np.where(keep, scaled + noise, -np.inf).argmax())


def reference_floor(scaled: Floats, row: dict[str, Any]) -> np.float32:
    """The smallest scaled logit that survives top-k, top-p and min-p."""
    row = {**DEFAULTS, **row}
    ordered = np.sort(scaled)[::-1]
    floor = np.float32(-np.inf)
    if 0 < row["top_k"] < len(scaled):
        floor = ordered[row["top_k"] - 1]
    if row["top_p"] < 1:
        unit = 2 ** (62 - (len(scaled) - 1).bit_length())
        weights = [int(weight * unit) for weight in torch.from_numpy(ordered.copy()).exp().double().tolist()]
        cumulative = np.cumsum(np.array(weights, dtype=object))
        mass = cumulative[int((ordered >= floor).sum()) - 1]
        wanted = math.ceil(Fraction(float(np.float32(row["top_p"]))) * mass)
        floor = max(floor, ordered[int((cumulative < wanted).sum())])
    if row["min_p"]:
        floor = max(floor, np.float32(torch.tensor(row["min_p"], dtype=torch.float32).log().item()))
    return floor


def chi_square(counts: torch.Tensor, wanted: torch.Tensor) -> float:
    """Pearson's statistic in standard deviations above what chance gives (Wilson and Hilferty, 1931);
    infinite where something came that cannot."""
    counts, wanted = counts.double().flatten(), wanted.double().flatten()
    possible = wanted > 0
    if counts[~possible].any():
        return math.inf
    degrees = int(possible.sum()) - 1
    if degrees == 0:
        return 0.0
    statistic = float(((counts - wanted)[possible] ** 2 / wanted[possible]).sum())
    spread = 2 / (9 * degrees)
    return (math.cbrt(statistic / degrees) - (1 - spread)) / math.sqrt(spread)


LINE = np.random.default_rng(5).normal(0, 2, 100).astype(np.float32)
#: filters, what one that is a little off, or forgotten, amounts to, and a seed at which that draws otherwise
FILTERS: list[tuple[dict[str, Any], dict[str, Any], int]] = [
    ({"min_p": 0.1}, {"min_p": 0.15}, 3),
    ({"top_k": 5}, {"top_k": 4}, 14),
    ({"top_k": 99, "temperature": 1e30}, {"top_k": 0}, 117),
    ({"top_k": 100, "temperature": 1e30}, {"top_k": 99}, 117),
    ({"top_p": 0.6}, {"top_p": 0.57}, 25),
    ({"top_p": 0.9999999}, {"top_p": 0.999}, 2643),
    ({"top_k": 20, "top_p": 0.8}, {"top_k": 0}, 7),
    ({"top_k": 20, "min_p": 0.1}, {"min_p": 0.0}, 0),
    ({"top_p": 0.99, "min_p": 0.3}, {"min_p": 0.0}, 0),
]


def telling_rows() -> list[dict[str, Any]]:
    """The filters with seeds at which the almost right one would draw another token."""
    rows = [{**row, "seed": seed} for row, _, seed in FILTERS]
    for row, (_, change, _) in zip(rows, FILTERS, strict=True):
        assert reference(LINE, row) != reference(LINE, {**row, **change})
    return rows


#: rows [100] of all kinds
EDGES: dict[str, list[float]] = {
    "one token": [-math.inf] * 70 + [3.0] + [-math.inf] * 29,
    "nothing": [-math.inf] * 100,
    "nan": [0.0] * 50 + [math.nan] + [1.0] * 49,
    "inf": [0.0] * 99 + [math.inf],
    "nan beside inf": [math.nan] + [0.0] * 60 + [math.inf] + [0.0] * 38,
    "two tokens": [-math.inf, 5.0] + [-math.inf] * 97 + [5.0],
    "all alike": [-2.5] * 100,
    "near the end": [3e38] * 3 + [-3e38] * 97,
    "denormal": [1e-44, -1e-44, 1e-40, 0.0, -0.0] * 20,
    "alike but for the coldest": [3e-37] + [0.0] * 99,
    "ties at the threshold": [4.0] * 2 + [3.0] * 5 + [1.0] * 93,
}
#: parameters to try them with
MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 1e-38, "top_p": 0.5},
    {"top_k": 3, "top_p": 0.9, "min_p": 0.01},
]
