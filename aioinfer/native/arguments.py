"""Arguments: the structures that the kernels' entry points take; those of models.

Names, fields and layout are those of ``source/interface.hpp``, which gives the meaning of every field;
:class:`~aioinfer.native.bindings.Kernels` compares the two when it loads the library. A structure is filled
by name: the type checker rejects a field that is missing or does not exist.
"""

from __future__ import annotations

import ctypes
from typing import Any, Self, TypeAlias, TypeVar, cast, dataclass_transform

__all__ = [
    "STRUCTURES", "AdaptArguments", "AdaptedLayer", "Address", "Arguments", "AttendArguments",
    "DecoderArguments", "DeltaRuleArguments", "DequantiseArguments", "DualArguments",
    "ExpertBiasesArguments", "ExpertsArguments", "ForwardArguments", "LayerArguments", "LinearArguments",
    "LowRankTarget", "MappedExpertsArguments", "MappedWeightsArguments", "MixArguments",
    "PerLayerArguments", "PerLayerInputsArguments", "QuantisedWeightsArguments", "RepackArguments",
    "RouteArguments", "RouterArguments", "SelfAttentionArguments", "SetExpertArguments",
    "ShortConvArguments", "WeightsArguments", "describe", "structure",
]  # fmt: skip

#: of memory, or of an object that the library made; None is null
Address: TypeAlias = int | None

_KINDS: dict[str, type[Any]] = {
    "Address": ctypes.c_void_p,
    "int": ctypes.c_int64,
    "float": ctypes.c_float,
    "bool": ctypes.c_bool,
}
#: every structure, in the order of ``layout.hpp``
STRUCTURES: list[type[Arguments]] = []


class Arguments(ctypes.Structure):
    """The arguments of one call. They hold addresses only: the caller keeps the memory alive until the call
    returns."""

    __slots__ = ()

    @classmethod
    def zeros(cls) -> Self:
        """A structure to be filled field by field and used again, which is quicker than to make new ones."""
        return cls.__new__(cls)


_Structure = TypeVar("_Structure", bound=type[Arguments])


@dataclass_transform(kw_only_default=True)
def structure(cls: _Structure) -> _Structure:
    """The same class with its annotations as fields, and no others: it has no ``__dict__``."""
    fields = [(name, _KINDS[kind]) for name, kind in cls.__annotations__.items()]
    namespace = {"__doc__": cls.__doc__, "__module__": cls.__module__, "__slots__": (), "_fields_": fields}
    made: Any = type(cls.__name__, cls.__bases__, namespace)
    STRUCTURES.append(made)
    return cast(_Structure, made)


def describe(structure: type[Arguments]) -> str:
    """A structure as ``layout.hpp`` writes it: name, name:kind@offset of every field, and size."""
    kinds = {kind: name.lower() for name, kind in _KINDS.items()}
    fields = [
        f"{name}:{kinds[kind]}@{getattr(structure, name).offset}" for name, kind, *_ in structure._fields_
    ]
    return " ".join([structure.__name__, *fields, f"size:{ctypes.sizeof(structure)}"])


@structure
class WeightsArguments(Arguments):
    """Make a layer: round its weights or not, and pack them."""

    pool: Address
    rows: Address
    bias: Address
    outputs: int
    inner: int
    bits: int
    group: int
    gated: bool


@structure
class MappedWeightsArguments(Arguments):
    """Make a layer of weights that are packed already."""

    packed: Address
    size: int
    bias: Address
    outputs: int
    inner: int
    bits: int
    group: int
    gated: bool


@structure
class QuantisedWeightsArguments(Arguments):
    """Make a layer of weights that are quantised already."""

    pool: Address
    values: Address
    scales: Address
    offsets: Address
    bias: Address
    outputs: int
    inner: int
    bits: int
    group: int
    gated: bool


@structure
class RepackArguments(Arguments):
    """Pack other weights into a layer that is there."""

    pool: Address
    weights: Address
    rows: Address
    bias: Address


@structure
class DequantiseArguments(Arguments):
    """The weights of a layer as they were rounded, or given."""

    pool: Address
    weights: Address
    out: Address


@structure
class LinearArguments(Arguments):
    """``out`` = ``values`` times the weights; gated: gate(gates) * up, else gate(outputs)."""

    pool: Address
    weights: Address
    values: Address
    count: int
    inner: int
    gate: int
    out: Address


@structure
class RouterArguments(Arguments):
    """Make a router."""

    weight: Address
    bias: Address
    scales: Address
    top_k: int
    groups: int
    top_groups: int
    scale: float
    sigmoid: bool
    normalize: bool


@structure
class RouteArguments(Arguments):
    """Choose the experts of tokens."""

    pool: Address
    router: Address
    values: Address
    count: int
    hidden: int
    weights: Address
    experts: Address


@structure
class ExpertsArguments(Arguments):
    """Allocate the experts of a layer."""

    count: int
    hidden: int
    middle: int
    bits: int
    hidden_group: int
    middle_group: int


@structure
class MappedExpertsArguments(Arguments):
    """Make the experts of a layer that are packed already."""

    packed: Address
    size: int
    count: int
    hidden: int
    middle: int
    bits: int
    hidden_group: int
    middle_group: int


@structure
class SetExpertArguments(Arguments):
    """Pack one expert."""

    pool: Address
    experts: Address
    index: int
    gate_up: Address
    down: Address


@structure
class ExpertBiasesArguments(Arguments):
    """Give one expert biases."""

    experts: Address
    index: int
    gate_up: Address
    down: Address


@structure
class MixArguments(Arguments):
    """``out``: the weighted sum of each token's experts."""

    pool: Address
    experts: Address
    values: Address
    count: int
    top_k: int
    chosen: Address
    weights: Address
    gate: int
    out: Address


@structure
class AttendArguments(Arguments):
    """Attention of one layer."""

    pool: Address
    queries: Address
    keys: Address
    values: Address
    query_stride: int
    kv_stride: int
    heads: int
    kv_heads: int
    head_dim: int
    norm: Address
    value_norm: bool
    shared: bool
    cos: Address
    sin: Address
    rotary_dim: int
    kv_pool: Address
    page_size: int
    num_pages: int
    tokens: int
    rows: int
    slot_mapping: Address
    cu_q: Address
    kv_len: Address
    block_table: Address
    table_width: int
    window: int
    block: int
    scale: float
    soft_cap: float
    sinks: Address
    norm_eps: float
    out: Address


@structure
class PerLayerInputsArguments(Arguments):
    """The inputs of layers that every token has of its own."""

    table: Address
    projection: Address
    norm: Address
    layers: int
    size: int
    table_scale: float
    projection_scale: float
    sum_scale: float


@structure
class PerLayerArguments(Arguments):
    """The use of a layer's own inputs."""

    gate: Address
    out: Address
    function: int
    post_norm: Address


@structure
class DualArguments(Arguments):
    """Experts beside a dense part."""

    router_norm: Address
    experts_norm: Address
    dense_post_norm: Address
    experts_post_norm: Address


@structure
class DecoderArguments(Arguments):
    """Make a decoder without layers."""

    embedding: Address
    words: Address
    embedding_scale: float
    position_embedding: Address
    norm: Address
    norm_bias: Address
    head: Address
    logit_cap: float
    positions: int
    hidden: int
    norm_eps: float
    per_layer: Address


@structure
class SelfAttentionArguments(Arguments):
    """Attention, the first half of a layer."""

    heads: int
    kv_heads: int
    head_dim: int
    kv: int
    into: Address
    gated: bool
    head_norm: Address
    value_norm: bool
    shared: bool
    whole_norm: bool
    head_norm_eps: float
    cos: Address
    sin: Address
    rotary_dim: int
    out: Address
    window: int
    block: int
    scale: float
    soft_cap: float
    sinks: Address


@structure
class ShortConvArguments(Arguments):
    """A gated convolution of each channel by itself, the first half of a layer."""

    into: Address
    weight: Address
    bias: Address
    size: int
    out: Address
    state: int


@structure
class DeltaRuleArguments(Arguments):
    """The gated delta rule, the first half of a layer."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    into: Address
    gates: Address
    conv: Address
    size: int
    rate: Address
    bias: Address
    norm: Address
    eps: float
    out: Address
    state: int


@structure
class LayerArguments(Arguments):
    """Append a layer."""

    decoder: Address
    mixer_norm: Address
    mixer_norm_bias: Address
    attention: Address
    conv: Address
    delta_rule: Address
    mixer_post_norm: Address
    mlp_norm: Address
    mlp_norm_bias: Address
    gate_up: Address
    down: Address
    router: Address
    experts: Address
    gate: int
    shared_gate: Address
    mlp_post_norm: Address
    dual: Address
    per_layer: Address
    residual_scale: float


@structure
class ForwardArguments(Arguments):
    """Compute one step."""

    decoder: Address
    pool: Address
    kv_pools: Address
    num_kv_pools: int
    page_size: int
    num_pages: int
    tokens: int
    rows: int
    num_logits: int
    input_ids: Address
    positions: Address
    slot_mapping: Address
    cu_q: Address
    kv_len: Address
    block_table: Address
    table_width: int
    state_pools: Address
    num_states: int
    num_cells: int
    read: Address
    write: Address
    logits_rows: Address
    logits: Address
    adapters: Address
    num_hidden: int
    hidden_rows: Address
    hidden: Address
    seconds: Address


@structure
class LowRankTarget(Arguments):
    """The product that is added to some outputs of a layer."""

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

    layer: int
    part: int
    targets: Address
    count: int


@structure
class AdaptArguments(Arguments):
    """Make the summands of layers an adapter's."""

    decoder: Address
    adapter: Address
    layers: Address
    count: int
