"""Quantization: to how many bits the weights of linear layers are rounded when a model is loaded.

In native layers to whole numbers: a rounded weight is ``scale * q + offset`` with a whole number ``q``, and
one scale and offset for each output and *group*, a run of the inner dimension. The head and the embedding
have 8 bits wherever anything is rounded: they take the largest share of small models, and errors of logits
are errors of the result.

In layers and experts by Triton to floats of 8 bits, with a scale for each output. The head and the embedding
stay as they are.
"""

from __future__ import annotations

from typing import Literal

from aioinfer.checkpoint.tensors import Rounding

__all__ = ["FLOAT8", "Quantization", "Rounding", "rounding_of"]

#: how the weights of linear layers are stored: auto as in the checkpoint, none without quantisation;
#: fp8-dynamic rounds activations, too
Quantization = Literal["auto", "none", "int8", "int4", "fp8", "fp8-dynamic"]
#: values that round to floats of 8 bits
FLOAT8 = ("fp8", "fp8-dynamic")


_LAYERS: dict[str, Rounding] = {"int8": Rounding(8, 128), "int4": Rounding(4, 64)}
_HEAD = Rounding(8, 128)


def rounding_of(quantization: Quantization, *, head: bool = False) -> Rounding | None:
    """Rounding of layers, or of the head and the embedding, to whole numbers; None: not at all."""
    if quantization in ("auto", "none", *FLOAT8):
        return None
    return _HEAD if head else _LAYERS[quantization]
