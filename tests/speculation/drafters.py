"""Drafters for tests: they know the hash of the toy device, and use it or not."""

from __future__ import annotations

import random
from collections.abc import Sequence

from aioinfer.params import SamplingParams
from aioinfer.speculation.drafter import DraftRequest
from tests.toys.pooling import mix

__all__ = ["KINDS", "Guesser", "name_of"]

#: what a guesser proposes; "mixed" is any of the others, by turns
KINDS = ("right", "wrong", "partly", "random", "stale", "none", "invalid", "long", "mixed")


def name_of(params: SamplingParams) -> str:
    """A name for a request by which a guesser knows its seed."""
    return str(0 if params.greedy else params.seed or 0)


class Guesser:
    """Proposes the tokens of a toy device, or others, for requests that are called as :func:`name_of` says.
    It is right where nothing but temperature and seed matters for a token."""

    def __init__(self, kind: str, rng: random.Random, vocab_size: int = 64) -> None:
        self.kind = kind
        self._rng = rng
        self._vocab_size = vocab_size

    def propose(self, request: DraftRequest, most: int) -> Sequence[int]:
        rng, vocab_size = self._rng, self._vocab_size
        kind = rng.choice(KINDS[:-1]) if self.kind == "mixed" else self.kind
        if kind == "none":
            return []
        if kind == "invalid":
            return [rng.choice([-1, vocab_size, 10**9])] * most
        tokens = request.tokens.tolist()
        if kind == "stale":
            tokens = tokens[: max(1, len(tokens) - 2)]
        state = 0
        for token in tokens:
            state = mix(state, token)
        drafts = []
        for _ in range(most + 7 * (kind == "long")):
            token = mix(state, int(request.name or 0)) % vocab_size
            if kind == "wrong":
                token = (token + 1) % vocab_size
            elif kind == "random" or (kind == "partly" and rng.random() < 0.2):
                token = rng.randrange(vocab_size)
            drafts.append(token)
            state = mix(state, token)
        return drafts
