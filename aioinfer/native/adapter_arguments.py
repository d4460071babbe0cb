"""The argument structures of adapters; see ``interface.hpp``."""

from __future__ import annotations

from aioinfer.native.arguments import Address, Arguments, structure

__all__ = ["AdaptArguments", "LowRankTarget"]


@structure
class LowRankTarget(Arguments):
    """What is added to some outputs of a layer."""

    __slots__ = ()

    a: Address
    b: Address
    rank: int
    start: int
    rows: int
    scale: float


@structure
class AdaptArguments(Arguments):
    """Make the summands of one linear layer a part of an adapter."""

    __slots__ = ()

    decoder: Address
    adapter: Address
    layer: int
    part: int
    targets: Address
    count: int
