"""Whether a CUDA device is waited for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

__all__ = ["WATCHING", "waits"]

#: for tests that use :func:`waits`: torch warns that this is a prototype
WATCHING = pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")


@contextmanager
def waits(allowed: bool) -> Iterator[None]:
    """Unless ``allowed``, RuntimeError wherever the block has the host wait for the device."""
    torch.cuda.set_sync_debug_mode("default" if allowed else "error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
