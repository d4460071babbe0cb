"""ImageSupport: what a model's image encoder needs of the engine."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ImageSupport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSupport:
    """Facts about the image encoder of a model."""

    #: stands in the prompt at the positions of an image
    token_id: int
    #: is there in the ids that the model gets, whose vectors features replace; None: ``token_id``
    filler_id: int | None = None
    #: the positions of a unit see each other both ways, so that no chunk ends within one
    two_way: bool = False
    #: positions have three coordinates (M-RoPE)
    m_rope: bool = False
    #: bytes of the features of one position
    position_bytes: int = 1
    #: positions of the longest unit
    longest: int = 0
