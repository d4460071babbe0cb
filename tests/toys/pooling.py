"""Hidden states of the toy model: the hashes of its sequences, and what is pooled of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from aioinfer.pooling import Pooling
from aioinfer.scheduling.pooled import Pooled
from aioinfer.testing.fake_device import hashes, mix, pool

__all__ = ["beginning", "hashes", "mix", "pool", "toy_pooled"]


def beginning(weights: int) -> int:
    """The hash of no tokens, by weights."""
    return mix(0, weights) if weights else 0


def toy_pooled(
    prompt_ids: Sequence[int], pooling: Pooling, *, adapter: int = 0, weights: int = 0
) -> npt.NDArray[np.float32]:
    """What any correct engine must pool of a prompt on a :class:`ToyDevice`; see
    :func:`~tests.toys.device.toy_generate`."""
    states = hashes(prompt_ids, beginning(weights) ^ adapter)
    pooled = Pooled(pooling)
    pooled.add(pool(pooling, states if pooling.whole else states[-1:]))
    found = pooled.result(len(prompt_ids))
    assert found is not None
    return found
