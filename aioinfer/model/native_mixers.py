"""Arguments of native layers for their mixers, and the owners of their memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from aioinfer.model.linear import Linear
from aioinfer.model.mixers.base import Mixer
from aioinfer.model.mixers.delta_rule import DeltaRule
from aioinfer.model.mixers.latent_attention import LatentAttention
from aioinfer.model.mixers.mamba2 import Mamba2
from aioinfer.model.mixers.self_attention import SelfAttention
from aioinfer.model.mixers.short_conv import ShortConv
from aioinfer.model.mixers.side_by_side import SideBySide
from aioinfer.model.native_linear import NativeLinear
from aioinfer.model.rope import Rope
from aioinfer.model.spec import ModelSpec
from aioinfer.model.updates.new_weights import is_missing, merged
from aioinfer.native.arguments import (
    DeltaRuleArguments,
    LatentAttentionArguments,
    MambaArguments,
    SelfAttentionArguments,
    ShortConvArguments,
)
from aioinfer.native.structures import Address, Arguments
from aioinfer.native.tensors import address

__all__ = ["Kept", "Rekept", "mixer_arguments", "projections"]


class Kept(list[object]):
    """Owners of the memory of arguments."""

    def __init__(self, owners: Iterable[object] = ()) -> None:
        super().__init__(owners)
        #: copies that :meth:`copy_of` has made, in order
        self.copies: list[torch.Tensor] = []

    def copy_of(self, tensor: torch.Tensor, dtype: torch.dtype, count: int) -> int:
        """The address of a copy in a type, of ``count`` elements. A view of a mapped checkpoint would keep
        all of it mapped, packed weights included."""
        own = tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)
        self.append(own)
        self.copies.append(own)
        return address(own, dtype, count)

    def floats(self, tensor: torch.Tensor | None, count: int) -> Address:
        """The address of a copy in float32; None for None."""
        return None if tensor is None else self.copy_of(tensor, torch.float32, count)

    def nested(self, arguments: Arguments) -> int:
        """The address of arguments to which others refer."""
        self.append(arguments)
        return ctypes.addressof(arguments)

    def layer(self, linear: Linear) -> int:
        """A linear layer that is native."""
        assert isinstance(linear, NativeLinear)
        self.append(linear.packed)
        return linear.packed.handle


class Rekept(Kept):
    """Replaces the :class:`Kept` of a layer that is there: collects the tensors that it would have copied, to
    be written into the present copies."""

    def __init__(self, copies: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._old = iter(copies)
        #: present tensors and their replacements, NaN where these are missing
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def copy_of(self, tensor: torch.Tensor, dtype: torch.dtype, count: int) -> int:
        """The address of the copy that there is."""
        old = next(self._old)
        if old.shape != tensor.shape:
            raise ValueError(f"{tuple(tensor.shape)} in place of {tuple(old.shape)}")
        self.pairs.append((old, tensor))
        return address(old, dtype, count)

    def write(self) -> None:
        """Write everything."""
        for old, new in self.pairs:
            if not is_missing(new):
                old.copy_(merged(old, new))


def mixer_arguments(mixer: Mixer, spec: ModelSpec, kept: Kept) -> dict[str, Any]:
    """The fields of :class:`~aioinfer.native.arguments.LayerArguments` that concern a native mixer, valid as
    long as ``kept`` is."""
    made: Arguments
    fields: dict[str, Any] = dict.fromkeys(("attention", "latent", "conv", "delta_rule", "mamba"))
    if isinstance(mixer, SelfAttention):
        field, made = "attention", _attention(mixer, spec, kept)
    elif isinstance(mixer, LatentAttention):
        field, made = "latent", _latent(mixer, spec, kept)
    elif isinstance(mixer, ShortConv):
        field, made = "conv", _conv(mixer, spec, kept)
    elif isinstance(mixer, DeltaRule):
        field, made = "delta_rule", _delta_rule(mixer, kept)
    elif isinstance(mixer, Mamba2):
        field, made = "mamba", _mamba(mixer, kept)
    else:
        assert isinstance(mixer, SideBySide)
        attention = _attention(mixer.attention, spec, kept, mixer.attention_scale)
        fields["attention"] = kept.nested(attention)
        field, made = "mamba", _mamba(mixer.mamba, kept, mixer.mamba_scale)
    return {**fields, field: kept.nested(made)}


def projections(mixer: Mixer) -> list[int | None]:
    """The handles of the linear layers before a native mixer, after it, to its gates, or to queries that
    have a layer of their own, and of a state space beside it, before and after that."""
    if isinstance(mixer, SideBySide):
        return [*projections(mixer.attention)[:3], *projections(mixer.mamba)[:2]]
    assert isinstance(mixer, SelfAttention | LatentAttention | ShortConv | DeltaRule | Mamba2)
    into = mixer.qkv if isinstance(mixer, SelfAttention) else mixer.into
    gates: Linear | None = mixer.gates if isinstance(mixer, DeltaRule) else None
    if isinstance(mixer, LatentAttention):
        gates = mixer.queries
    found: list[int | None] = []
    for linear in (into, mixer.out, gates):
        assert isinstance(linear, NativeLinear | None)
        found.append(None if linear is None else linear.packed.handle)
    return [*found, None, None]


def _attention(
    mixer: SelfAttention, spec: ModelSpec, kept: Kept, out_scale: float = 1.0
) -> SelfAttentionArguments:
    (kv_heads, head_dim, _), norm, params = mixer.kv, mixer.qk_norm, mixer.params
    cos, sin, rotary_dim = _tables(mixer.rope, spec, kept)
    value_norm = norm is not None and len(norm.weight) == mixer.num_heads + 2 * kv_heads
    normed = (mixer.num_heads + (0 if params.shared else kv_heads * (1 + value_norm))) * head_dim
    return SelfAttentionArguments(
        heads=mixer.num_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        kv=mixer.kv_layer,
        into=kept.layer(mixer.qkv),
        gated=mixer.gated,
        head_norm=None if norm is None else kept.floats(norm.weight, normed),
        value_norm=value_norm,
        shared=params.shared,
        whole_norm=norm is not None and norm.whole,
        norm_last=norm is not None and norm.last,
        head_norm_eps=0.0 if norm is None else norm.eps,
        cos=cos,
        sin=sin,
        rotary_dim=rotary_dim,
        out=kept.layer(mixer.out),
        window=params.window or 0,
        block=params.block,
        spans=params.spans,
        scale=params.scale,
        soft_cap=params.soft_cap or 0.0,
        sinks=kept.floats(mixer.sinks, mixer.num_heads),
        query_growth=0.0 if mixer.growth is None else mixer.growth.rate,
        query_length=0 if mixer.growth is None else mixer.growth.length,
        out_scale=out_scale,
    )


def _latent(mixer: LatentAttention, spec: ModelSpec, kept: Kept) -> LatentAttentionArguments:
    cos, sin, rotated = _tables(mixer.rope, spec, kept)
    norm, queries = mixer.query_norm, mixer.queries
    assert norm is None or norm.eps == mixer.latent_norm.eps, "norms of a mixer have one eps"
    return LatentAttentionArguments(
        heads=mixer.num_heads,
        plain=mixer.plain,
        rotated=rotated,
        rank=mixer.rank,
        value_dim=mixer.value_dim,
        kv=mixer.kv_layer,
        into=kept.layer(mixer.into),
        query_norm=None if norm is None else kept.floats(norm.weight, len(norm.weight)),
        queries=None if queries is None else kept.layer(queries),
        latent_norm=kept.floats(mixer.latent_norm.weight, mixer.rank),
        eps=mixer.latent_norm.eps,
        cos=cos,
        sin=sin,
        absorb=kept.layer(mixer.absorb),
        expand=kept.layer(mixer.expand),
        out=kept.layer(mixer.out),
        scale=mixer.params.scale,
    )


def _tables(rope: Rope | None, spec: ModelSpec, kept: Kept) -> tuple[Address, Address, int]:
    """The addresses of cosines and sines, and how many dimensions they rotate."""
    if rope is None:
        return None, None, 0
    cos, sin = rope.table
    count, size = len(cos), cos.shape[-1]
    if count < spec.max_model_len:
        raise ValueError(f"a table of {count} positions for {spec.max_model_len}")
    kept += (cos, sin)
    return address(cos, spec.dtype, count * size), address(sin, spec.dtype, count * size), size


def _conv(mixer: ShortConv, spec: ModelSpec, kept: Kept) -> ShortConvArguments:
    conv, channels = mixer.conv, spec.hidden_size
    return ShortConvArguments(
        into=kept.layer(mixer.into),
        weight=kept.floats(conv.weight, conv.size * channels),
        bias=kept.floats(conv.bias, channels),
        size=conv.size,
        out=kept.layer(mixer.out),
        state=conv.state,
    )


def _delta_rule(mixer: DeltaRule, kept: Kept) -> DeltaRuleArguments:
    heads, conv = mixer.heads, mixer.conv
    assert conv.bias is None, "there is no kernel for a bias of this convolution"
    assert mixer.state == conv.state + 1, "the states of a layer are side by side"
    return DeltaRuleArguments(
        key_heads=heads.key_heads,
        value_heads=heads.value_heads,
        key_dim=heads.key_dim,
        value_dim=heads.value_dim,
        into=kept.layer(mixer.into),
        gates=kept.layer(mixer.gates),
        conv=kept.floats(conv.weight, conv.size * heads.channels),
        size=conv.size,
        rate=kept.floats(mixer.rate, heads.value_heads),
        bias=kept.floats(mixer.bias, heads.value_heads),
        norm=kept.floats(mixer.norm, heads.value_dim),
        eps=mixer.eps,
        out=kept.layer(mixer.out),
        state=conv.state,
    )


def _mamba(mixer: Mamba2, kept: Kept, out_scale: float = 1.0) -> MambaArguments:
    heads, conv = mixer.heads, mixer.conv
    assert mixer.state == conv.state + 1, "the states of a layer are side by side"
    return MambaArguments(
        heads=heads.heads,
        head_dim=heads.head_dim,
        groups=heads.groups,
        state_size=heads.state_size,
        into=kept.layer(mixer.into),
        conv=kept.floats(conv.weight, conv.size * heads.channels),
        conv_bias=kept.floats(conv.bias, heads.channels),
        size=conv.size,
        bias=kept.floats(mixer.bias, heads.heads),
        rate=kept.floats(mixer.rate, heads.heads),
        skip=kept.floats(mixer.skip, heads.heads),
        norm=kept.floats(mixer.norm, heads.values),
        eps=mixer.eps,
        gate_scale=mixer.gate_scale,
        step_scale=mixer.step_scale,
        out=kept.layer(mixer.out),
        out_scale=out_scale,
        state=conv.state,
    )
