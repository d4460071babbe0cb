"""Family: the interface of a model family; Source: the inputs from which it makes its layers."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import torch

from aioinfer.errors import ConfigError, shown
from aioinfer.model import rope
from aioinfer.model.attention.pool import KVShape
from aioinfer.model.blocks import Blocks
from aioinfer.model.gates import Gate
from aioinfer.model.heads import HeadNorm
from aioinfer.model.layer import Embedding, Layer, SelfConditioning, Trunk
from aioinfer.model.layer_kernels import LayerKernels
from aioinfer.model.linear import Linear
from aioinfer.model.mixers.self_attention import SelfAttention
from aioinfer.model.mixers.short_conv import CausalConv
from aioinfer.model.mlp import FeedForward
from aioinfer.model.moe.routing import GroupedSigmoidRouter, Rule
from aioinfer.model.moe.sparse import GATE_UP_DOWN, TOGETHER, SparseMLP, StoredExperts
from aioinfer.model.norm import Norm
from aioinfer.model.rope import Rope
from aioinfer.model.spec import CausalLM, ModelSpec, eos_token_ids
from aioinfer.model.state import StateShape
from aioinfer.model.weights import StoredMatrix, Weights

__all__ = [
    *("Family", "NormWeight", "Source"),
    *("build_decoder", "expert_count", "expert_middle", "expert_shape", "factor", "head_dim", "inner_sizes"),
    *("kv_heads", "latent_sizes", "norm_eps", "own"),
]

#: Endings of the names of tensors that follow from the config: rotary frequencies in old checkpoints, and the
#: masks of GPT-2 and GPT-NeoX.
_BUFFERS = (
    "rotary_emb.inv_freq",
    *(".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias"),
)


#: How a norm's weight is stored: as the factor of values that are rounded first (Llama), as their factor
#: before they are rounded (OLMo 2), or as that less one (Gemma).
NormWeight = Literal["rounded", "exact", "offset"]


@dataclass(frozen=True, slots=True)
class Source:
    """The inputs of a model's layers: a config, a checkpoint, and the chosen kernels."""

    config: Any
    weights: Weights
    kernels: LayerKernels
    #: length of a diffusion block, see :class:`~aioinfer.model.attention.base.AttentionParams`
    block: int
    device: torch.device
    #: positions of the longest sequence
    max_model_len: int
    #: states of the layers made so far, see :attr:`~aioinfer.model.spec.ModelSpec.states`
    states: list[StateShape] = field(default_factory=list)
    _ropes: dict[str | None, Rope] = field(default_factory=dict)

    def linear(
        self,
        names: list[str],
        rows: list[int],
        width: int,
        *,
        bias: bool,
        order: torch.Tensor | None = None,
        exact: bool = False,
    ) -> Linear:
        """The projections ``names``, of [rows[i], width] each, as one linear layer; ``order``: of its rows,
        see :class:`~aioinfer.model.weights.StoredMatrix`; ``exact``: it is not to be rounded."""
        stored = StoredMatrix(self.weights, names, rows, width, bias=bias, order=order)
        return self.kernels.linear(stored, exact=exact)

    def conv(self, name: str, channels: int, size: int, *, bias: bool = False) -> CausalConv:
        """The convolution of each channel over ``size`` positions, from the tensor ``name`` [channels, 1,
        size]. Adds its state to those of the model."""
        weight = self.weights.take(f"{name}.weight", (channels, 1, size), dtype=torch.float32)
        biases = self.weights.take(f"{name}.bias", (channels,), dtype=torch.float32) if bias else None
        conv = CausalConv(weight=weight[:, 0].T.contiguous(), bias=biases, state=len(self.states))
        self.states.append(conv.state_shape(self.weights.dtype))
        return conv

    def attention(self, index: int, **parts: Any) -> SelfAttention:
        """The attention of layer ``index``, in a model all of whose layers have the same heads. ``parts``:
        the other fields of :class:`~aioinfer.model.mixers.self_attention.SelfAttention`."""
        config = self.config
        kv = KVShape(kv_heads(config), head_dim(config))
        return SelfAttention(num_heads=config.num_attention_heads, kv=kv, kv_layer=index, **parts)

    def gated_mlp(
        self,
        prefix: str,
        middle: int,
        gate: Gate = "silu",
        *,
        bias: bool = False,
        names: tuple[str, ...] = GATE_UP_DOWN,
    ) -> FeedForward:
        """The dense feed-forward part under ``prefix``, of ``middle`` inner dimensions; ``names``: of the
        tensors of gate, up and down, or of both and down."""
        weights, hidden = self.weights, self.config.hidden_size
        both, rows = [f"{prefix}.{name}" for name in names[:-1]], [2 * middle // (len(names) - 1)]
        gate_up = StoredMatrix(weights, both, rows * len(both), hidden, bias=bias)
        down = StoredMatrix(weights, [f"{prefix}.{names[-1]}"], [hidden], middle, bias=bias)
        return self.kernels.gated_mlp(gate_up, down, gate)

    def plain_mlp(
        self, prefix: str, names: tuple[str, str], middle: int, gate: Gate, *, bias: bool
    ) -> FeedForward:
        """The feed-forward part without gates under ``prefix``, of ``middle`` inner dimensions."""
        weights, hidden = self.weights, self.config.hidden_size
        up = StoredMatrix(weights, [f"{prefix}.{names[0]}"], [middle], hidden, bias=bias)
        down = StoredMatrix(weights, [f"{prefix}.{names[1]}"], [hidden], middle, bias=bias)
        return self.kernels.plain_mlp(up, down, gate)

    def sparse(
        self,
        rule: Rule,
        prefix: str,
        shared: FeedForward | None = None,
        names: tuple[str, str, str] = GATE_UP_DOWN,
        together: tuple[str, str] = TOGETHER,
    ) -> SparseMLP:
        """The feed-forward part with the experts under ``prefix``; ``names``: of the tensors of gate, up and
        down; ``together``: of those of all experts, gate and up in one."""
        config = self.config
        sizes = expert_count(config), config.hidden_size, expert_middle(config)
        stored = StoredExperts(self.weights, prefix, *sizes, names, together=together)
        return self.kernels.sparse(rule, stored, shared)

    def sigmoid_rule(self, prefix: str, bias: str | None, **rule: Any) -> GroupedSigmoidRouter:
        """The rule from the tensor ``prefix``.gate.weight and that of a bias. Small differences of scores
        decide: they are computed in float32 for models of any dtype. ``rule``: its other fields. Raises
        ConfigError for groups that do not fit."""
        config, float32 = self.config, {"dtype": torch.float32}
        count = expert_count(config)
        gate = self.weights.take(f"{prefix}.gate.weight", (count, config.hidden_size), **float32)
        added = None if bias is None else self.weights.take(f"{prefix}.{bias}", (count,), **float32)
        scale, chosen = factor(config, "routed_scaling_factor"), config.num_experts_per_tok
        try:
            return GroupedSigmoidRouter(gate, added, chosen, scale=scale, **rule)
        except ValueError as error:
            raise ConfigError(f"model: {config.architectures[0]} cannot choose {error}") from error

    def norm(self, name: str, stored: NormWeight = "rounded") -> Norm:
        """The root mean square norm of the residual from the tensor ``name``."""
        weight = self._norm_weight(name, self.config.hidden_size, stored)
        return Norm(weight, norm_eps(self.config))

    def layer_norm(self, name: str, *, bias: bool = True, offset: bool = False) -> Norm:
        """The layer norm of the residual; ``offset``: the tensor ``name`` is its weight less one."""
        size = (self.config.hidden_size,)
        weight = self.weights.take(f"{name}.weight", size)
        added = self.weights.take(f"{name}.bias", size) if bias else torch.zeros_like(weight)
        return Norm(weight + 1 if offset else weight, norm_eps(self.config), added)

    def head_norm(
        self, query: str, key: str, stored: NormWeight = "rounded", *, whole: bool = False, last: bool = False
    ) -> HeadNorm:
        """The norm of each head's query and key, from the tensors ``query`` and ``key`` [head_dim];
        ``whole``: of all heads as one vector, from [heads * head_dim]; ``last``: once heads are rotated."""
        config, size = self.config, head_dim(self.config)
        norms = []
        for name, heads in ((query, config.num_attention_heads), (key, kv_heads(config))):
            if whole:
                norms.append(self._norm_weight(name, heads * size, stored).view(heads, size))
            else:
                norms.append(self._norm_weight(name, size, stored).expand(heads, -1))
        return HeadNorm(torch.cat(norms), norm_eps(config), whole, last)

    def _norm_weight(self, name: str, size: int, stored: NormWeight) -> torch.Tensor:
        dtype = None if stored == "rounded" else torch.float32
        weight = self.weights.take(f"{name}.weight", (size,), dtype=dtype)
        return weight + 1 if stored == "offset" else weight

    def rope(self, index: int, size: int | None = None) -> Rope:
        """The rotary factors of layer ``index``; ``size``: of its heads, where they differ between types of
        layers."""
        config, kind = self.config, rope.layer_type(self.config, index)
        if kind not in self._ropes:
            sizes = size or head_dim(config), self.max_model_len
            self._ropes[kind] = Rope(config, *sizes, self.weights.dtype, self.device, kind)
        return self._ropes[kind]


class Family(Protocol):
    """Reads the configs and checkpoints of one model family."""

    @property
    def blocks(self) -> Blocks | None:
        """The default blocks, for configs that do not state them; None for autoregressive models."""
        return None

    def unsupported_reason(self, config: Any) -> str | None:
        """The feature of a config that this package does not support, in words; None if there is none."""

    def kv_layers(self, config: Any) -> tuple[KVShape, ...]:
        """The keys and values of a position, in the order of the layers that write them."""
        layers: int = config.num_hidden_layers
        return (KVShape(kv_heads(config), head_dim(config)),) * layers

    def tables(self, config: Any) -> frozenset[str]:
        """Names of the tensors of which rows are read only: on a CPU they take no memory."""
        return frozenset()

    def sparse_layers(self, config: Any) -> frozenset[int]:
        """Indices of the layers with experts. Raises ConfigError."""
        return frozenset()

    def inner_sizes(self, config: Any) -> list[int]:
        """Inner dimensions of the layers' products, and other sizes that native kernels compute in whole
        vectors."""
        return inner_sizes(config)

    def recurrent(self, config: Any) -> bool:
        """Whether layers keep a state instead of keys and values."""
        return False

    def unread(self, config: Any, name: str) -> bool:
        """Whether a tensor of a checkpoint belongs to a part that is not computed here."""
        return False

    def layer(self, source: Source, index: int) -> Layer | None:
        """Layer ``index`` of a checkpoint; None: it is the second half of the one before. Raises ConfigError
        if a tensor is missing or has another shape."""

    def words(self, names: Container[str]) -> str:
        """Name of the token embedding, without ".weight", in a checkpoint with tensors of these names."""
        return "model.embed_tokens"

    def head(self, names: Container[str]) -> str:
        """Name of a head of its own, as :meth:`words`."""
        return "lm_head"

    def head_bias(self, config: Any) -> bool:
        """Whether a head of its own has a bias."""
        return False

    def embedding(self, source: Source) -> Embedding:
        """Operations on the vectors of tokens."""
        return Embedding()

    def final_norm(self, source: Source) -> Norm:
        """The norm in front of the head."""
        return source.norm("model.norm")

    def logit_scale(self, config: Any) -> float:
        """A factor of logits."""
        return 1.0

    def logit_cap(self, config: Any) -> float | None:
        """The soft cap of logits; None for none."""
        return None

    def canvas(self, source: Source) -> SelfConditioning | None:
        """What canvases read besides their tokens; None in a model without canvases."""
        return None


def build_decoder(
    generation_config: Mapping[str, Any],
    family: Family,
    config: Any,
    weights: Weights,
    kernels: LayerKernels,
    *,
    dtype: torch.dtype,
    device: torch.device,
    blocks: Blocks | None,
) -> CausalLM:
    """Build the model of a checkpoint. Raises ConfigError if a tensor is missing, unknown or has another
    shape."""
    heads = config.num_attention_heads
    for kv in family.kv_layers(config):
        if heads % kv.num_kv_heads:
            found = f"{heads} heads of queries are no multiple of {kv.num_kv_heads} heads of keys"
            raise ConfigError(f"model: {found}")
    positions = rope.longest(config)
    source = Source(config, weights, kernels, blocks.size if blocks else 1, device, positions)
    vocabulary, hidden = config.vocab_size, config.hidden_size
    name, own_head = family.words(weights), family.head(weights)
    if config.tie_word_embeddings and f"{name}.weight" not in weights and f"{own_head}.weight" in weights:
        # Stored once, under the name of the head.
        name = own_head
    words = StoredMatrix(weights, [name], [vocabulary], hidden)
    every = (family.layer(source, index) for index in range(config.num_hidden_layers))
    layers = [layer for layer in every if layer is not None]
    norm = family.final_norm(source)
    trunk = Trunk(
        family.embedding(source),
        layers,
        norm,
        family.logit_cap(config),
        family.canvas(source),
        family.logit_scale(config),
    )
    # Some configs say so of a head of its own; as in transformers, the weights decide.
    tied = config.tie_word_embeddings and not weights.differs(f"{own_head}.weight", f"{name}.weight")
    head = words
    if not tied:
        head = StoredMatrix(weights, [own_head], [vocabulary], hidden, bias=family.head_bias(config))
        head.declare_biases()
    ignored = [*_BUFFERS, f"{own_head}.weight"] if tied else _BUFFERS
    weights.check_all_taken(ignored, partial(family.unread, config))
    spec = ModelSpec(
        architecture=config.architectures[0],
        num_layers=config.num_hidden_layers,
        kv_layers=family.kv_layers(config),
        hidden_size=hidden,
        vocab_size=vocabulary,
        max_model_len=positions,
        dtype=dtype,
        eos_token_ids=eos_token_ids(generation_config, config),
        num_parameters=weights.num_parameters,
        block_size=blocks.size if blocks else None,
        mask_token_id=blocks.mask_token_id if blocks else None,
        edit_token_ids=blocks.edit_token_ids if blocks else None,
        canvas=blocks is not None and blocks.canvas,
        states=tuple(source.states),
        rotary_factors=rope.factors(config),
        latent=latent_sizes(config, family),
    )
    return kernels.decoder(spec, trunk, words, head)


def latent_sizes(config: Any, family: Family) -> tuple[int, ...]:
    """See :attr:`~aioinfer.model.spec.ModelSpec.latent`."""
    latent = any(kv.value_dim is not None for kv in family.kv_layers(config))
    return tuple(family.inner_sizes(config)) if latent else ()


def expert_shape(family: Family, config: Any) -> tuple[int, int] | None:
    """(hidden size, inner size) of the experts; None if no layer has experts. Raises ConfigError."""
    return (config.hidden_size, expert_middle(config)) if family.sparse_layers(config) else None


def expert_count(config: Any) -> int:
    """Number of experts of a layer. Raises ConfigError."""
    kind = type(config)
    for name in ("num_experts", "n_routed_experts", "num_local_experts"):
        if hasattr(kind, name) or name in kind.attribute_map:
            count = getattr(config, name)
            if type(count) is int or count is None:
                return count or 0
            raise ConfigError(f"model: {name} of the config must be a number, got {shown(count)}")
    return 0


def expert_middle(config: Any) -> int:
    """Inner dimension of one expert; where all layers have experts, some configs state no other."""
    size: int = own(config, "moe_intermediate_size") or config.intermediate_size
    return size


def inner_sizes(config: Any) -> list[int]:
    """Inner dimensions of the layers' matrix products, of a config with the usual names for them."""
    sizes = [getattr(config, name, None) for name in ("hidden_size", "intermediate_size", "n_inner")]
    return [size for size in (*sizes, own(config, "moe_intermediate_size")) if size]


def own(config: Any, name: str) -> Any:
    """A field of the config's class; None if it has no such field. Files state fields of other families, too,
    which their code does not read."""
    return getattr(config, name) if hasattr(type(config), name) else None


def factor(config: Any, name: str) -> float:
    """A factor that the config may state; 1 else."""
    value = own(config, name)
    return 1.0 if value is None else float(value)


def norm_eps(config: Any) -> float:
    """Summand of the mean square of a norm."""
    names = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
    # OPT states none, and has that of torch.
    eps: float = next(filter(None, (own(config, name) for name in names)), 1e-5)
    return eps


def head_dim(config: Any) -> int:
    """Elements of one head."""
    size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return size


def kv_heads(config: Any) -> int:
    """Number of heads of keys and values; that of queries if the config does not state it."""
    count: int = own(config, "num_key_value_heads") or config.num_attention_heads
    return count
