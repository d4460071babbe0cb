"""Arguments: the structures that the kernels' entry points take; those of sampling follow in
:mod:`aioinfer.native.sampling_arguments`.

``source/interface.hpp`` gives the meaning of every field.
"""

from __future__ import annotations

from aioinfer.native.structures import Address, Arguments, structure

__all__ = [
    "AdaptArguments", "AdaptedLayer", "AttendArguments", "DecoderArguments", "DeltaRuleArguments",
    "DequantiseArguments", "DualArguments", "EmbedArguments", "ExpertsArguments", "ForwardArguments",
    "LatentAttentionArguments", "LayerArguments", "LinearArguments", "LowRankTarget", "MambaArguments",
    "MappedWeightsArguments", "MixArguments", "PerLayerArguments", "PerLayerInputsArguments",
    "QuantisedWeightsArguments", "RepackArguments", "RouteArguments", "RouterArguments",
    "SelfAttentionArguments", "ShortConvArguments", "WeightsArguments",
]  # fmt: skip


@structure("weights", makes=True)
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


@structure("mapped_weights", makes=True)
class MappedWeightsArguments(Arguments):
    """Make a layer of weights that are packed already."""

    packed: Address
    size: int
    bias: Address
    outputs: int
    inner: int
    bits: int
    group: int
    factors: int
    table: Address
    gated: bool


@structure("quantised_weights", makes=True)
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
    table: Address
    gated: bool


@structure("repack")
class RepackArguments(Arguments):
    """Pack other weights into a layer that is there."""

    pool: Address
    weights: Address
    rows: Address
    bias: Address


@structure("dequantise")
class DequantiseArguments(Arguments):
    """The weights of a layer as they were rounded, or given."""

    pool: Address
    weights: Address
    out: Address


@structure("linear")
class LinearArguments(Arguments):
    """``out`` = ``values`` times the weights; gated: gate(gates) * up, else gate(outputs)."""

    pool: Address
    weights: Address
    values: Address
    count: int
    inner: int
    gate: int
    out: Address


@structure("add_norm")
class AddNormArguments(Arguments):
    """``out``: the normed rows of ``hidden``, or of its sum with ``delta``, which goes to ``sums``."""

    pool: Address
    hidden: Address
    delta: Address
    count: int
    size: int
    weight: Address
    bias: Address
    eps: float
    sums: Address
    out: Address


@structure("router", makes=True)
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
    rounds: bool
    normalize: bool


@structure("route")
class RouteArguments(Arguments):
    """Choose the experts of tokens."""

    pool: Address
    router: Address
    values: Address
    count: int
    hidden: int
    weights: Address
    experts: Address


@structure("experts", makes=True)
class ExpertsArguments(Arguments):
    """Make the experts of a layer out of linear layers."""

    count: int
    gate_up: Address
    down: Address


@structure("mix")
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


@structure("attend")
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
    ends: Address
    window: int
    block: int
    spans: bool
    scale: float
    soft_cap: float
    sinks: Address
    norm_eps: float
    out: Address


@structure()
class PerLayerInputsArguments(Arguments):
    """The inputs of layers that every token has of its own."""

    table: Address
    words: Address
    projection: Address
    norm: Address
    layers: int
    size: int
    table_scale: float
    projection_scale: float
    sum_scale: float


@structure()
class PerLayerArguments(Arguments):
    """The use of a layer's own inputs."""

    gate: Address
    out: Address
    function: int
    post_norm: Address


@structure()
class DualArguments(Arguments):
    """Experts beside a dense part."""

    router_norm: Address
    experts_norm: Address
    dense_post_norm: Address
    experts_post_norm: Address


@structure("decoder", makes=True)
class DecoderArguments(Arguments):
    """Make a decoder without layers."""

    embedding: Address
    words: Address
    embedding_scale: float
    position_embedding: Address
    norm: Address
    norm_bias: Address
    head: Address
    logit_scale: float
    logit_cap: float
    positions: int
    hidden: int
    norm_eps: float
    per_layer: Address


@structure()
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
    norm_last: bool
    head_norm_eps: float
    cos: Address
    sin: Address
    rotary_dim: int
    out: Address
    window: int
    block: int
    spans: bool
    scale: float
    soft_cap: float
    sinks: Address
    query_growth: float
    query_length: int
    out_scale: float


@structure()
class LatentAttentionArguments(Arguments):
    """Attention over latents that all heads share, the first half of a layer."""

    heads: int
    plain: int
    rotated: int
    rank: int
    value_dim: int
    kv: int
    into: Address
    query_norm: Address
    queries: Address
    latent_norm: Address
    eps: float
    cos: Address
    sin: Address
    absorb: Address
    expand: Address
    out: Address
    scale: float


@structure()
class ShortConvArguments(Arguments):
    """A gated convolution of each channel by itself, the first half of a layer."""

    into: Address
    weight: Address
    bias: Address
    size: int
    out: Address
    state: int


@structure()
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


@structure()
class MambaArguments(Arguments):
    """A state space with one decay for each head, the first half of a layer."""

    heads: int
    head_dim: int
    groups: int
    state_size: int
    into: Address
    conv: Address
    conv_bias: Address
    size: int
    bias: Address
    rate: Address
    skip: Address
    norm: Address
    eps: float
    gate_scale: float
    step_scale: float
    out: Address
    out_scale: float
    state: int


@structure("add_layer")
class LayerArguments(Arguments):
    """Append a layer."""

    decoder: Address
    word_norm: Address
    mixer_norm: Address
    mixer_norm_bias: Address
    attention: Address
    latent: Address
    conv: Address
    delta_rule: Address
    mamba: Address
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
    part_scale: float
    parallel: bool


@structure("forward")
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
    ends: Address
    state_pools: Address
    num_states: int
    num_cells: int
    read: Address
    write: Address
    replays: Address
    kept: Address
    stash_pools: Address
    num_stashes: int
    num_drafts: int
    logits_rows: Address
    logits: Address
    adapters: Address
    num_hidden: int
    hidden_rows: Address
    hidden: Address
    seconds: Address
    num_features: int
    feature_rows: Address
    features: Address
    num_deep: int
    cos: Address
    sin: Address
    num_captured: int
    captured: Address
    captures: Address


@structure("embed")
class EmbedArguments(Arguments):
    """Read the vectors of tokens."""

    decoder: Address
    ids: Address
    count: int
    out: Address


@structure()
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
    rescaling: Address


@structure()
class AdaptedLayer(Arguments):
    """The summands of one linear layer."""

    layer: int
    part: int
    targets: Address
    count: int


@structure("adapt")
class AdaptArguments(Arguments):
    """Make the summands of layers an adapter's."""

    decoder: Address
    adapter: Address
    layers: Address
    count: int
