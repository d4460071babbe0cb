"""Algorithms by name. To add one, add a file to ``algorithms``; see :mod:`aioinfer.plugins`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioinfer import plugins

if TYPE_CHECKING:
    from aioinfer.diffusion.algorithm import Algorithm

__all__ = ["algorithm_class", "algorithm_names", "usable_algorithms"]


def algorithm_names() -> tuple[str, ...]:
    """Every algorithm, sorted; imports none of them."""
    return plugins.names(plugins.ALGORITHMS)


def algorithm_class(name: str) -> type[Algorithm]:
    """The class of an algorithm; imports torch. Raises KeyError for an unknown name."""
    found: type[Algorithm] = plugins.load(plugins.ALGORITHMS, name)
    return found


def usable_algorithms(edit_ids: tuple[int, int] | None, *, canvas: bool = False) -> tuple[str, ...]:
    """The algorithms that a model with these tokens that delete and split can have, or one with canvases;
    imports torch."""
    found = {name: algorithm_class(name) for name in algorithm_names()}
    return tuple(
        name for name, each in found.items() if each.canvas == canvas and (edit_ids or not each.moves)
    )
