"""Loads: who asks when, with how long a prompt, for how much output. Seeded, so that two targets see the
same requests at the same moments."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Load", "LoadRequest", "length_distribution", "make_load"]


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request: when it arrives (seconds from the start), its prompt, and the output it wants."""

    at: float
    prompt: list[int]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Load:
    """Requests in the order of their arrival; ``concurrency`` instead of times when it is closed."""

    requests: list[LoadRequest]
    concurrency: int | None


def length_distribution(text: str) -> Callable[[random.Random], int]:
    """A length from its description.

    ``128`` is fixed, ``uniform:100:1024`` inclusive, ``lognormal:5.0:0.9`` by mu and sigma of the log
    (``lognormal:5.0:0.9:600`` cut off at 600), ``exponential:150`` by its mean. Raises ValueError.
    """
    kind, *values = text.split(":")
    numbers = [float(value) for value in values]
    match kind, numbers:
        case "uniform", [low, high]:
            return lambda rng: rng.randint(int(low), int(high))
        case "lognormal", [mu, sigma]:
            return lambda rng: max(1, round(rng.lognormvariate(mu, sigma)))
        case "lognormal", [mu, sigma, limit]:
            return lambda rng: max(1, min(int(limit), round(rng.lognormvariate(mu, sigma))))
        case "exponential", [mean]:
            return lambda rng: max(1, round(rng.expovariate(1 / mean)))
        case _, []:
            fixed = int(kind)
            return lambda rng: fixed
    raise ValueError(f"not a length distribution: {text!r}")


def make_load(
    *,
    count: int,
    rate: float | None,
    concurrency: int | None,
    burstiness: float,
    prompt_tokens: str,
    output_tokens: str,
    distinct_prompts: int | None,
    vocab: tuple[int, int],
    seed: int,
) -> Load:
    """Arrivals are a Gamma process of ``rate`` per second (``burstiness`` 1 is Poisson, smaller comes in
    bursts), or as fast as ``concurrency`` allows. ``distinct_prompts`` repeats so many prompts in turn;
    by default every prompt is its own."""
    rng = random.Random(seed)
    prompt_length, output_length = length_distribution(prompt_tokens), length_distribution(output_tokens)
    low, high = vocab

    def prompt() -> list[int]:
        return [rng.randint(low, high) for _ in range(prompt_length(rng))]

    pool = [prompt() for _ in range(distinct_prompts)] if distinct_prompts else None
    prompts = itertools.cycle(pool) if pool else iter(prompt, None)
    at = 0.0
    requests = []
    for _ in range(count):
        if rate is not None:
            at += rng.gammavariate(burstiness, 1 / (rate * burstiness))
        requests.append(LoadRequest(at, next(prompts), output_length(rng)))
    return Load(requests, concurrency)
