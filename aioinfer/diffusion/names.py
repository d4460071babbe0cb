"""Names of the algorithms, found by looking: apart from the algorithms themselves, which need torch."""

from __future__ import annotations

import pkgutil
from functools import cache

from aioinfer.diffusion import algorithms

__all__ = ["algorithm_names"]


@cache
def algorithm_names() -> tuple[str, ...]:
    """Every algorithm there is, in alphabetical order; imports none of them."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(algorithms.__path__)))
