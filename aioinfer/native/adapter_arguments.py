"""The argument structures of adapters; see ``interface.hpp``."""

from __future__ import annotations

from aioinfer.native.arguments import Address, Arguments, structure

__all__ = ["AdaptArguments", "AdaptedLayer", "LowRankTarget"]


@structure
class LowRankTarget(Arguments):
    """What is added to some outputs of a layer."""

    __slots__ = ()

    a: Address
    b: Address
    a_is_bfloat16: bool
    b_is_bfloat16: bool
    rank: int
    start: int
    rows: int
    scale: float


@structure
class AdaptedLayer(Arguments):
    """The summands of one linear layer."""

    __slots__ = ()

    layer: int
    part: int
    targets: Address
    count: int


@structure
class AdaptArguments(Arguments):
    """Make the summands of layers an adapter's."""

    __slots__ = ()

    decoder: Address
    adapter: Address
    layers: Address
    count: int
