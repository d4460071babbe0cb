"""Hidden states of the toy model: the hashes of its sequences, and what is pooled of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aioinfer.pooling import Pooling
from aioinfer.scheduling.pooled import Pooled

__all__ = ["beginning", "hashes", "mix", "pool", "toy_pooled"]

_MASK = (1 << 63) - 1


def mix(state: int, value: int) -> int:
    """One step of a 63-bit multiplicative hash (the constant is 2**64 / golden ratio)."""
    state = (state ^ value) * 0x9E3779B97F4A7C15 & _MASK
    return state ^ (state >> 29)


def beginning(weights: int) -> int:
    """The hash of no tokens, by weights."""
    return mix(0, weights) if weights else 0


def _hidden(state: int) -> npt.NDArray[np.float32]:
    """Of a position behind which the sequence has this hash: its bits, which float32 holds."""
    return np.asarray([state >> shift & 0x1FFFFF for shift in (0, 21, 42)], np.float32)


def hashes(ids: Sequence[int], state: int = 0) -> list[int]:
    """Of a sequence up to each of its tokens; ``state``: of none of them."""
    found = []
    for token in ids:
        state = mix(state, token)
        found.append(state)
    return found


def toy_pooled(
    prompt_ids: Sequence[int], pooling: Pooling, *, adapter: int = 0, weights: int = 0
) -> npt.NDArray[np.float32]:
    """What any correct engine must pool of a prompt on a :class:`ToyDevice`; see
    :func:`~aioinfer.testing.toy.toy_generate`."""
    states = hashes(prompt_ids, beginning(weights) ^ adapter)
    pooled = Pooled(pooling)
    pooled.add(pool(pooling, states if pooling.whole else states[-1:]))
    found = pooled.result(len(prompt_ids))
    assert found is not None
    return found


def pool(pooling: Pooling, states: Sequence[int]) -> npt.NDArray[Any]:
    """What a device gives of the positions behind which the sequence has these hashes."""
    if pooling.kind == "choices":
        return np.asarray([mix(states[-1], token) & 0xFFFF for token in pooling.token_ids], np.float32)
    hidden = np.stack([_hidden(state) for state in states])
    if pooling.kind == "tokens":
        return hidden
    found: npt.NDArray[Any] = hidden.sum(0, dtype=np.float64) if pooling.kind == "mean" else hidden[-1]
    return found
