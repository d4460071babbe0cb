"""Native kernels in tests: compiled for the first that needs them, not when tests are collected."""

from __future__ import annotations

from aioinfer.native.bindings import native_unsupported

__all__ = ["require_native"]


def require_native() -> None:
    """Fails where they cannot be made: the tests install a compiler for machines that have none."""
    assert native_unsupported() is None, native_unsupported()
