"""Sizes: the bytes that the weights of a checkpoint take in memory, from the headers of its files."""

from __future__ import annotations

from aioinfer.checkpoint.tensors import Rounding, Tensors, stored_bytes
from aioinfer.model.backend import Backend
from aioinfer.model.embedding_checkpoint import with_prefix
from aioinfer.model.families.base import Family
from aioinfer.model.inspection import LoadOptions, Opened, choose_dtype, kept
from aioinfer.model.quantization import FLOAT8, Quantization, rounding_of

__all__ = ["weight_bytes"]


def weight_bytes(opened: Opened, options: LoadOptions, layers: Backend) -> int:
    """Bytes that the weights of a checkpoint take at least. ``layers``: the backend of the layers."""
    tensors, config, family = with_prefix(opened.checkpoint.tensors()), opened.config, opened.family
    dtype, quantization = opened.dtype, options.quantization
    if family is None:
        return stored_bytes(tensors, dtype.itemsize)
    quantised = kept(tensors) if quantization == "auto" and layers.name == "native" else frozenset()
    # Tables that are converted are copied.
    as_stored = options.device.type == "cpu" and dtype == choose_dtype(config, "auto", options.device)
    tables = [name for name in family.tables(config) if as_stored and tensors.rounding(name) is None]
    small = frozenset() if options.deterministic else _small(tensors, quantization, layers)
    roundings = _roundings(tensors, family, quantization)
    text = stored_bytes(tensors, dtype.itemsize, roundings, quantised, tables, small)
    return text + _vision_bytes(opened, layers)


def _vision_bytes(opened: Opened, layers: Backend) -> int:
    """Bytes that the weights of the image encoder take at least."""
    vision = opened.vision
    if vision is None or vision.tensors is None:
        return 0
    quantised = kept(vision.tensors) if vision.native(layers) else frozenset()
    return stored_bytes(vision.tensors, opened.dtype.itemsize, kept=quantised)


def _roundings(tensors: Tensors, family: Family, quantization: Quantization) -> dict[str, Rounding]:
    """How matrices are rounded while the model is loaded; of experts, by the same as other layers."""
    rounding, head = rounding_of(quantization), rounding_of(quantization, head=True)
    if rounding is None or head is None:
        return {}
    ends = {f"{family.words(tensors.names)}.weight", "lm_head.weight"}
    matrices = [name for name in tensors.names if len(tensors.shape(name)) > 1]
    return {name: head if name in ends else rounding for name in matrices}


def _small(tensors: Tensors, quantization: Quantization, layers: Backend) -> frozenset[str]:
    """Names of the matrices that are floats of 8 bits, or become such."""
    if layers.name != "triton" or quantization not in ("auto", *FLOAT8):
        return frozenset()
    if quantization == "auto":
        return frozenset(name for name in tensors.names if tensors.float8(name) is not None)
    return frozenset(name for name in tensors.names if len(tensors.shape(name)) > 1)
