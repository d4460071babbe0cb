"""Native kernels in tests: compiled for the first that needs them, not when tests are collected."""

from __future__ import annotations

import pytest

from aioinfer.native.bindings import native_unsupported
from tests.system.simulated import simulated

__all__ = ["require_native"]


def require_native() -> None:
    """Fails where they cannot be made: the tests install a compiler for machines that have none. On a
    simulated system, where they would be those of the real one, the test is skipped."""
    if simulated():
        pytest.skip(f"kernels are not simulated for {simulated()}")
    assert native_unsupported() is None, native_unsupported()
