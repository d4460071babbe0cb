"""Native kernels in tests: compiled for the first that needs them, not when tests are collected."""

from __future__ import annotations

import pytest

from aioinfer.native.bindings import native_obstacle
from aioinfer.native.build import BuildFailed, find_compiler

__all__ = ["require_native"]


def require_native() -> None:
    """The one place where a compiler that is not there skips tests. Where there is one, kernels that cannot
    be made are a failure: else a broken build would pass."""
    try:
        find_compiler()
    except BuildFailed as error:
        pytest.skip(f"native kernels are compiled, and {error}; the tests of torch's kernels have run")
    assert native_obstacle() is None, native_obstacle()
