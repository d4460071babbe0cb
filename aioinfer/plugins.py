"""Implementations found by file name: to add an implementation, add a file to its folder.

The file ``scheduling/policies/dfs_weight.py`` is the policy ``dfs_weight`` and defines ``DfsWeight``.
Listing the names imports none of the modules, so configs and parameters are checked without torch.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["ALGORITHMS", "FILTERS", "POLICIES", "load", "names"]

#: folder of the denoising algorithms of diffusion models
ALGORITHMS = "diffusion/algorithms"
#: folder of the sampling filters that the kernels do not have; the file name is the field of SamplingParams
FILTERS = "sampling/further_filters"
#: folder of the queue policies
POLICIES = "scheduling/policies"

_PACKAGE = Path(__file__).parent


@cache
def names(folder: str) -> tuple[str, ...]:
    """The modules in a folder of the package, sorted; imports none of them."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules([str(_PACKAGE / folder)])))


def load(folder: str, name: str) -> type[Any]:
    """The class of the module ``name`` of a folder. Raises KeyError for an unknown name."""
    if name not in names(folder):
        raise KeyError(name)
    module = importlib.import_module(f"aioinfer.{folder.replace('/', '.')}.{name}")
    found: type[Any] = getattr(module, "".join(word.capitalize() for word in name.split("_")))
    return found
