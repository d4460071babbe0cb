"""Namespace: which requests may share the KV of a prefix."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["COMMON", "Namespace"]


class Namespace(NamedTuple):
    """The same tokens have the same KV for two requests if all of this is equal: a typed tuple, so that no
    caller's salt can be taken for an adapter."""

    #: the caller's own
    salt: str = ""
    #: of the adapter; every load mints a new one, and 0 is none
    adapter: int = 0
    #: how often the model's weights have been replaced
    weights: int = 0


#: of requests without salt and adapter
COMMON = Namespace()
