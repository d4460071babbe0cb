"""Quantization: to how many bits the weights of linear layers are rounded when a model is loaded.

A rounded weight is ``scale * q + offset`` with a whole number ``q``, and one scale and offset for each output
and *group*, a run of the inner dimension. The head and the embedding have 8 bits wherever anything is
rounded: they take the largest share of small models, and errors of logits are errors of the result.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["Quantization", "Rounding", "rounding_of"]

#: how the weights of linear layers are stored
Quantization = Literal["none", "int8", "int4"]
#: groups are multiples of this
_LEAST_GROUP = 32


class Rounding(NamedTuple):
    """Bits and size of groups."""

    bits: Literal[4, 8]
    #: a multiple of 32; 0: one group
    group: int

    def for_size(self, inner: int) -> Rounding:
        """This rounding for an inner dimension, with groups halved until they divide it, or have 32 numbers;
        then the last one may be shorter."""
        group = self.group
        while group > _LEAST_GROUP and inner % group:
            group //= 2
        return Rounding(self.bits, group)


_LAYERS: dict[str, Rounding] = {"int8": Rounding(8, 128), "int4": Rounding(4, 64)}
_HEAD = Rounding(8, 128)


def rounding_of(quantization: Quantization, *, head: bool = False) -> Rounding | None:
    """How layers, or the head and the embedding, are rounded; None: not at all."""
    if quantization == "none":
        return None
    return _HEAD if head else _LAYERS[quantization]
