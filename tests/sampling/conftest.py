"""Where kernels run (in the interpreter on the CPU, or on CUDA), and the backends of sampling on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from aioinfer.sampling.backend import SamplingBackend
from tests.model.kernels import DEVICES, kernels_or_skip
from tests.sampling.support import native_thread_pool


@pytest.fixture(params=["torch", "native"])
def sampling(request: pytest.FixtureRequest) -> SamplingBackend:
    """A backend of sampling on a CPU."""
    if request.param == "native":
        native_thread_pool()
    found: SamplingBackend = request.param
    return found


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """A device that this process can run kernels on. Overflow to infinity, which rows near the end of float32
    bring with them, is a warning of numpy's to the interpreter."""
    kernels_or_skip(request.param)
    with np.errstate(all="ignore"):
        yield request.param
