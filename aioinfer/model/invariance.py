"""Invariance: whether a decoder of torch's layers gives a token the same bits in any batch.

With Triton's kernels that depends on its parts: some have sums in one order for any batch
(:class:`~aioinfer.model.triton_linear.TritonLinear`, the norms and heads of Triton, routers and experts with
fixed tiles, an ``invariant`` attention). torch's own products and reductions do not promise it; its
elementwise operations and look-ups always have it.
"""

from __future__ import annotations

from collections.abc import Iterable

from aioinfer.model.adapters.slots import AdaptedLinear
from aioinfer.model.layer import Layer, Trunk
from aioinfer.model.linear import Linear
from aioinfer.model.mixers.self_attention import SelfAttention
from aioinfer.model.mlp import FeedForward, GatedMLP, PlainMLP
from aioinfer.model.moe.sparse import SparseMLP
from aioinfer.model.norm import Norm

__all__ = ["variant_part"]


def variant_part(trunk: Trunk) -> str:
    """The part of a decoder, made with the kernels that add in one order, that still adds in an order that
    may depend on the batch, in words for the user; empty if none does."""
    if trunk.embedding.per_layer is not None:
        return "inputs by layer"
    norms = [trunk.norm, *(each for layer in trunk.layers for each in _norms(layer))]
    if any(each.bias is not None for each in norms):
        return "layer norms"
    return next(filter(None, map(_of_layer, trunk.layers)), "")


def _norms(layer: Layer) -> Iterable[Norm]:
    norms = layer.mixer_norm, layer.mixer_post_norm, layer.mlp_norm, layer.mlp_post_norm
    return (norm for norm in norms if norm is not None)


def _of_layer(layer: Layer) -> str:
    mixer = layer.mixer
    if not isinstance(mixer, SelfAttention):
        return f"the mixer {type(mixer).__name__}"
    if mixer.qk_norm is not None and mixer.qk_norm.whole:
        return "norms of all heads as one vector"
    if not (_fixed(mixer.qkv) and _fixed(mixer.out)):
        return "products of layers"
    return "" if layer.mlp is None else _of_mlp(layer.mlp)


def _of_mlp(mlp: FeedForward) -> str:
    if isinstance(mlp, GatedMLP):
        return "" if _fixed(mlp.gate_up) and _fixed(mlp.down) else "products of layers"
    if isinstance(mlp, PlainMLP):
        return "" if _fixed(mlp.up) and _fixed(mlp.down) else "products of layers"
    if not isinstance(mlp, SparseMLP):
        return f"the part {type(mlp).__name__}"
    from aioinfer.model.moe.triton_experts import TritonExperts
    from aioinfer.model.moe.triton_routing import TritonRouter

    if not isinstance(mlp.router, TritonRouter):
        return "a router of torch's operations"
    if not (isinstance(mlp.experts, TritonExperts) and mlp.experts.invariant):
        return "the kernels of experts"
    return "" if mlp.shared is None else _of_mlp(mlp.shared)


def _fixed(linear: Linear) -> bool:
    from aioinfer.model.triton_linear import TritonLinear

    return isinstance(linear.linear if isinstance(linear, AdaptedLinear) else linear, TritonLinear)
