"""Policies: which replica a request goes to. All decide on what the dispatcher itself has sent and got back,
so that no count is ever late; of equal replicas, each has its turn.

==================  ========================================================================================
``round_robin``     the next one
``total_requests``  the fewest requests
``total_tokens``    the fewest tokens, of prompts and possible outputs
``prefix``          the least to compute before the first token: prompts that wait there, and what is not in
                    its prefix cache of this one; a running request counts as 32 tokens. What many requests
                    share costs each of them little, so that a hot prefix is soon on all replicas
``p2c``             of two random ones, that with fewer tokens
``hash``            always the same for a routing key, or for the beginning of a prompt, unless it has a
                    quarter more requests than the others
==================  ========================================================================================

The first three are those of SGLang's data-parallel controller; the cost of ``prefix`` is that of Dynamo's
router, with exact terms, and with shares of what is computed for several. ``hash`` is rendezvous hashing
(Thaler and Ravishankar, 1998) with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2018).
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

from aioinfer.errors import ConfigError, shown
from aioinfer.parallel.record import Record
from aioinfer.parallel.replica import Replica

__all__ = ["POLICIES", "Candidate", "RoutingPolicy", "routing_policy"]

#: tokens of prefill that a running request is worth
_RUNNING = 32
#: of ``hash``: how much more than the mean a replica may have, as a factor and in requests
_BOUND, _SLACK = 1.25, 4
#: tokens at the beginning of a prompt that tell prompts apart
_BEGINNING = 64


class Candidate(NamedTuple):
    """A replica with room for a request."""

    replica: Replica
    #: tokens that it would have to compute before the first token, if the policy looks at prefixes
    uncached: int
    #: its share of these: what several open requests have in common is divided among them, wherever they are;
    #: less what it shares with others that wait there
    share: float


class RoutingPolicy(ABC):
    """Base class. :meth:`choose` runs once per request and must take microseconds."""

    #: candidates say what is cached
    looks_at_prefixes = False

    def __init__(self, seed: int | None = None) -> None:
        """``seed``: of what is drawn; None: a new one each time, so that dispatchers do not choose alike."""
        self._random = random.Random(seed)
        self._turn = 0

    @abstractmethod
    def choose(self, record: Record, candidates: Sequence[Candidate]) -> Replica:
        """One of the candidates, of which there is at least one."""

    def least(self, candidates: Sequence[Candidate], load: Callable[[Candidate], Any]) -> Replica:
        """The one with the least load; equal ones in turn."""
        start = self._turn % len(candidates)
        turned = [*candidates[start:], *candidates[:start]]
        chosen = min(turned, key=load)
        self._turn = candidates.index(chosen) + 1
        return chosen.replica


class Least(RoutingPolicy):
    """The replica with the least load of some kind."""

    def __init__(self, seed: int | None, load: Callable[[Candidate], Any], *, prefixes: bool = False) -> None:
        """``prefixes``: the load depends on what is cached."""
        super().__init__(seed)
        self._load = load
        self.looks_at_prefixes = prefixes

    def choose(self, record: Record, candidates: Sequence[Candidate]) -> Replica:
        return self.least(candidates, self._load)


class PowerOfTwo(RoutingPolicy):
    """The one with fewer tokens, of two random ones."""

    def choose(self, record: Record, candidates: Sequence[Candidate]) -> Replica:
        two = self._random.sample(candidates, 2) if len(candidates) > 2 else candidates
        return self.least(two, _tokens)


class Hash(RoutingPolicy):
    """The same replica for the same key, in bounds."""

    def choose(self, record: Record, candidates: Sequence[Candidate]) -> Replica:
        key = record.request.routing_key
        data = repr(record.output.prompt_ids[:_BEGINNING]) if key is None else key
        salted = blake2b(f"{record.namespace}\0{data}".encode(errors="replace"), digest_size=8).digest()

        def place(candidate: Candidate) -> bytes:
            return blake2b(candidate.replica.name.encode(), digest_size=8, key=salted).digest()

        total = sum(candidate.replica.load.requests for candidate in candidates) + 1
        most = _BOUND * total / len(candidates) + _SLACK
        free = [each for each in candidates if each.replica.load.requests < most]
        return max(free, key=place).replica


def _tokens(candidate: Candidate) -> tuple[int, int]:
    load = candidate.replica.load
    return load.tokens, load.requests


def _cost(candidate: Candidate) -> float:
    load = candidate.replica.load
    return load.backlog + candidate.share + _RUNNING * load.requests


#: by the names that a caller gives
POLICIES: Mapping[str, Callable[[int | None], RoutingPolicy]] = {
    "round_robin": partial(Least, load=lambda candidate: 0),
    "total_requests": partial(Least, load=lambda candidate: candidate.replica.load.requests),
    "total_tokens": partial(Least, load=_tokens),
    "prefix": partial(Least, load=_cost, prefixes=True),
    "p2c": PowerOfTwo,
    "hash": Hash,
}


def routing_policy(policy: str | RoutingPolicy, seed: int | None) -> RoutingPolicy:
    """The policy of a name, or what a caller made. Raises ConfigError."""
    if isinstance(policy, RoutingPolicy):
        return policy
    if not isinstance(policy, str) or policy not in POLICIES:
        raise ConfigError(f"policy must be one of {', '.join(POLICIES)}, got {shown(policy)}")
    return POLICIES[policy](seed)
