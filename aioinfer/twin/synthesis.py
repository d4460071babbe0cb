"""Synthesis: seeded loads from a few numbers. Lengths are given in a small language, as those of
``python -m bench serve``: see :func:`length_distribution`."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from aioinfer.errors import ConfigError
from aioinfer.twin.load import CONTENTS, Session, Turn

__all__ = ["WORKLOADS", "Workload", "length_distribution", "synthesize"]


def length_distribution(text: str) -> Callable[[random.Random], int]:
    """A length from its description.

    ``128`` is fixed, ``uniform:100:1024`` inclusive, ``lognormal:5.0:0.9`` by mu and sigma of the log
    (``lognormal:5.0:0.9:600`` cut off at 600), ``exponential:40`` and ``geometric:4`` by their means; the
    last three are 1 or more. Raises ValueError.
    """
    kind, *values = text.split(":")
    try:
        numbers = [float(value) for value in values or [kind]]
    except ValueError:
        numbers = [math.nan]
    if all(map(math.isfinite, numbers)):
        match kind, numbers:
            case "uniform", [low, high] if 0 <= int(low) <= int(high):
                return lambda rng: rng.randint(int(low), int(high))
            case "lognormal", [mu, sigma, *limit] if mu < 20 and 0 <= sigma < 5 and len(limit) < 2:
                most = int(limit[0]) if limit else 1 << 30
                return lambda rng: max(1, min(most, round(rng.lognormvariate(mu, sigma))))
            case "exponential", [mean] if mean > 0:
                return lambda rng: max(1, round(rng.expovariate(1 / mean)))
            case "geometric", [mean] if mean >= 1:
                more = math.log1p(-1 / mean) if mean > 1 else -math.inf
                return lambda rng: 1 + int(math.log(1 - rng.random()) / more)
            case _, [fixed] if not values and fixed >= 0:
                return lambda rng: int(fixed)
    raise ValueError(f"not a length distribution: {text!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What :func:`synthesize` makes sessions of. Fields that are text describe lengths, see
    :func:`length_distribution`. Raises ConfigError."""

    #: sessions that begin per second; ``inf``: all at once
    rate: float = 1.0
    #: coefficient of variation of the times between beginnings, which are of a gamma distribution: 1 is a
    #: Poisson process, 0 a clock
    burstiness: float = 1.0
    #: what each turn has behind the conversation so far, and its answer; at least 1 token each
    prompt_tokens: str = "256"
    output_tokens: str = "128"
    #: requests of a session
    turns: str = "1"
    #: milliseconds from an answer to the next turn
    think_ms: str = "0"
    #: number of different prompts of which each session begins with one, and their lengths
    system_prompts: int = 1
    system_tokens: str = "0"
    #: a session ends with the turn before the one whose prompt and answer have more tokens
    context_tokens: int = CONTENTS
    #: the load ends after as many requests (turns), or seconds, whichever comes first
    requests: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "output_tokens", "turns", "think_ms", "system_tokens"):
            try:
                length_distribution(getattr(self, name))
            except ValueError as error:
                raise ConfigError(f"{name}: {error}") from None
        for name in ("rate", "system_prompts", "context_tokens", "requests", "seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name}: {value} is out of range")
        if not 0 <= self.burstiness <= 100:
            raise ConfigError(f"burstiness: {self.burstiness} is out of range")
        if self.requests is None and (self.seconds is None or math.inf in (self.seconds, self.rate)):
            raise ConfigError("requests: needed unless seconds and a finite rate end the load")


def synthesize(spec: Workload, seed: int) -> Iterator[Session]:
    """Sessions, made one by one; the first begins at 0. Equal arguments give equal sessions, on any machine.
    Arrivals are drawn apart from the rest: another ``rate`` gives the same sessions at other times."""
    # Seeds in text go through SHA-512, not through hash(), which differs between processes.
    arrivals, rng = random.Random(f"{seed} arrivals"), random.Random(f"{seed} sessions")
    turns, think, system = map(length_distribution, (spec.turns, spec.think_ms, spec.system_tokens))
    prompt, output = map(length_distribution, (spec.prompt_tokens, spec.output_tokens))
    systems = [(content, system(rng)) for content in range(1, spec.system_prompts + 1)]
    fresh = iter(range(spec.system_prompts + 1, CONTENTS))
    shape = spec.burstiness**-2 if spec.burstiness else None
    left, end, at = spec.requests or CONTENTS, spec.seconds or math.inf, 0.0
    for number in itertools.count():
        if left <= 0 or at >= end:
            return
        first = rng.choice(systems)
        used, pause, pieces = first[1], 0.0, (first,) if first[1] else ()
        made: list[Turn] = []
        for _ in range(turns(rng) or 1):
            asked, answer = prompt(rng) or 1, output(rng) or 1
            used += asked + answer
            if made and used > spec.context_tokens:
                break
            made.append(Turn(pause, (*pieces, (next(fresh), asked)), answer))
            pause, pieces = think(rng) / 1e3, ()
        yield Session(at, tuple(made[:left]), str(number))
        left -= len(made)
        at += (arrivals.gammavariate(shape, 1 / shape) if shape else 1.0) / spec.rate


# fmt: off
#: Loads to begin with. "Ours" are choices without a source.
#:
#: - ``chat``: mean lengths of ShareGPT (161 and 338 tokens: Kwon et al., arXiv 2309.06180, figure 11), two
#:   turns on average (LMSYS-Chat-1M, arXiv 2309.11998), burstiness of the Azure conversation trace of 2023.
#:   Ours: sigmas, the system prompt, think times (median 20 s).
#: - ``agentic``: calls per session (30.9), tokens per prompt (67.8 k) and output (527) on average as of
#:   GitHub Copilot's coding agents in June 2026 (from the sums on the data set's card; arXiv 2608.00101). New
#:   tokens per call spread as in TraceLab (arXiv 2606.30560: median 0.8 k, 90 % 3.7 k, of which the answer
#:   before is subtracted). Ours: instructions, tool times (median 2 s), the longest context, the rate.
#: - ``batch``, ``reasoning``: ours; the latter's outputs have a mean of 4.9 k tokens, 4 % are above 16 k.
WORKLOADS: dict[str, Workload] = {
    "chat": Workload(
        rate=2.0, burstiness=1.1, prompt_tokens="lognormal:4.36:1.2:8192",
        output_tokens="lognormal:5.32:1.0:4096", turns="geometric:2", think_ms="lognormal:9.9:1.0:600000",
        system_tokens="400", system_prompts=4, context_tokens=32768, requests=1000,
    ),
    "agentic": Workload(
        rate=0.1, prompt_tokens="lognormal:6.3:1.2:40000", output_tokens="lognormal:5.77:1.0:8192",
        turns="geometric:32", think_ms="lognormal:7.6:1.5:600000",
        system_tokens="uniform:18000:24000", system_prompts=4, context_tokens=200_000, requests=1000,
    ),
    "batch": Workload(
        rate=math.inf, prompt_tokens="lognormal:6.2:0.8:8192", output_tokens="lognormal:5.0:0.8:2048",
        system_tokens="500", requests=1000,
    ),
    "reasoning": Workload(
        rate=0.5, prompt_tokens="lognormal:5.5:1.0:8192", output_tokens="lognormal:8.1:0.9:32768",
        system_tokens="200", requests=500,
    ),
}
# fmt: on
