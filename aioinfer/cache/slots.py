"""SlotPool: allocates the rows of the device-side per-request buffers (relay, penalties, parameters)."""

from __future__ import annotations

from aioinfer.cache.fenced import FencedPool

__all__ = ["SlotPool"]


class SlotPool(FencedPool):
    """Slots ``1 .. total``; slot 0 is the null slot of padding rows."""

    __slots__ = ()
