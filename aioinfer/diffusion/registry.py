"""Registry: algorithms by name, found by looking. To add one, add a file to ``algorithms``.

The file ``low_confidence.py`` is the algorithm ``low_confidence`` and holds the class ``LowConfidence``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from aioinfer.diffusion import algorithms
from aioinfer.diffusion.names import algorithm_names

if TYPE_CHECKING:
    from aioinfer.diffusion.algorithm import Algorithm

__all__ = ["algorithm_class"]


def algorithm_class(name: str) -> type[Algorithm]:
    """The class of an algorithm.

    Raises:
        KeyError: there is none of this name.
    """
    if name not in algorithm_names():
        raise KeyError(name)
    module = importlib.import_module(f"{algorithms.__name__}.{name}")
    found: type[Algorithm] = getattr(module, "".join(word.capitalize() for word in name.split("_")))
    return found
