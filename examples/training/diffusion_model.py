"""A LLaDA2 in plain torch that can be trained: the model of the bundled tiny-diffusion, its files, its start.

It computes what LLaDA2 computes, in the simplest way: RMS norms on queries and keys before the rotation,
which turns the first half of every head only; a router of sigmoids that picks experts within the best
groups by score plus bias and weighs them by score alone; a shared expert beside the picked ones. All experts
are computed for all tokens, which at this size is faster than sorting tokens, and needs no other code to
differentiate.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["DiffusionConfig", "DiffusionModel", "Experts", "layers_of", "load", "save", "upcycle"]


@dataclass(frozen=True)
class DiffusionConfig:
    """The keys of a LLaDA2 ``config.json`` that say something, and the two that the real ones leave out:
    ``mask_token_id`` and ``block_size``."""

    vocab_size: int = 864
    hidden_size: int = 192
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 512
    moe_intermediate_size: int = 32
    first_k_dense_replace: int = 1
    num_experts: int = 8
    num_experts_per_tok: int = 2
    num_shared_experts: int = 16
    n_group: int = 2
    topk_group: int = 1
    routed_scaling_factor: float = 2.5
    partial_rotary_factor: float = 0.5
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 1024
    pad_token_id: int = 0
    eos_token_id: int = 1
    mask_token_id: int = 5
    block_size: int = 16

    @property
    def rotary_dim(self) -> int:
        """How many of a head's dimensions, the first ones, are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def shared_size(self) -> int:
        """Width of the shared expert: all of them side by side."""
        return self.moe_intermediate_size * self.num_shared_experts


#: what is the same for every model that this file can hold
_FIXED: dict[str, Any] = {
    "architectures": ["LLaDA2MoeModelLM"],
    "model_type": "llada2_moe",
    "hidden_act": "silu",
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "router_dtype": "fp32",
    "norm_topk_prob": True,
    "use_qk_norm": True,
    "use_bias": False,
    "use_qkv_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "dtype": "bfloat16",
}


class Norm(nn.Module):
    """RMS norm in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class FeedForward(nn.Module):
    """SwiGLU; ``gains`` weigh the inner activations."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor, gains: Tensor | None = None) -> Tensor:
        inner = functional.silu(self.gate_proj(x)) * self.up_proj(x)
        out: Tensor = self.down_proj(inner if gains is None else inner * gains.to(inner.dtype))
        return out


class Router(nn.Module):
    """Weights of the picked experts, 0 for the others."""

    def __init__(self, config: DiffusionConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        # Moved by the load of the experts, not by a gradient.
        self.expert_bias: Tensor
        self.register_buffer("expert_bias", torch.zeros(config.num_experts))

    def forward(self, x: Tensor) -> Tensor:
        """``x [..., hidden]`` to float32 weights ``[..., num_experts]``."""
        config = self.config
        with torch.autocast(x.device.type, enabled=False):
            scores = functional.linear(x.float(), self.weight.float()).sigmoid()
        ranks = scores.detach() + self.expert_bias.float()
        groups = ranks.unflatten(-1, (config.n_group, -1))
        strength = groups.topk(2, dim=-1).values.sum(-1)
        kept = torch.zeros_like(strength).scatter(-1, strength.topk(config.topk_group, dim=-1).indices, 1.0)
        ranks = groups.masked_fill(kept.unsqueeze(-1) == 0, -torch.inf).flatten(-2)
        best = ranks.topk(config.num_experts_per_tok, dim=-1).indices
        weights = scores * torch.zeros_like(scores).scatter(-1, best, 1.0)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor


class Experts(nn.Module):
    """The routed experts as one wide SwiGLU, and the shared one beside them."""

    def __init__(self, config: DiffusionConfig) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = FeedForward(config.hidden_size, config.num_experts * config.moe_intermediate_size)
        self.shared_experts = FeedForward(config.hidden_size, config.shared_size)
        self.inner = config.moe_intermediate_size

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of the experts, and which share of the tokens each was picked by, ``[num_experts]``."""
        weights = self.gate(x)
        load = (weights.detach() > 0).float().flatten(0, -2).mean(0)
        routed = self.experts(x, weights.repeat_interleave(self.inner, dim=-1))
        return routed + self.shared_experts(x), load


class Attention(nn.Module):
    def __init__(self, config: DiffusionConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.size, self.rotary = config.head_dim, config.rotary_dim
        rows = (self.heads + 2 * self.kv_heads) * self.size
        self.query_key_value = nn.Linear(config.hidden_size, rows, bias=False)
        self.dense = nn.Linear(self.heads * self.size, config.hidden_size, bias=False)
        self.query_layernorm = Norm(self.size, config.rms_norm_eps)
        self.key_layernorm = Norm(self.size, config.rms_norm_eps)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned, rest = x[..., : self.rotary], x[..., self.rotary :]
        left, right = turned.chunk(2, dim=-1)
        swapped = torch.cat([-right, left], dim=-1)
        return torch.cat([(turned * cos + swapped * sin).to(x.dtype), rest], dim=-1)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        fused = self.query_key_value(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
        q, k, v = fused.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        q = self._rotate(self.query_layernorm(q), cos, sin)
        k = self._rotate(self.key_layernorm(k), cos, sin)
        repeats = self.heads // self.kv_heads
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        out = functional.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, attn_mask=mask)
        projected: Tensor = self.dense(out.transpose(1, 2).flatten(-2))
        return projected


class Layer(nn.Module):
    def __init__(self, config: DiffusionConfig, dense: bool) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.mlp: FeedForward | Experts = (
            FeedForward(config.hidden_size, config.intermediate_size) if dense else Experts(config)
        )


def layers_of(model: DiffusionModel) -> list[Layer]:
    """The layers by their own type, which torch's ModuleList does not keep."""
    return [layer for layer in model.layers if isinstance(layer, Layer)]


class DiffusionModel(nn.Module):
    """Logits of the token at each position, and the loads of the experts."""

    def __init__(self, config: DiffusionConfig) -> None:
        super().__init__()
        self.config = config
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Layer(config, index < config.first_k_dense_replace) for index in range(config.num_hidden_layers)
        )
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The last hidden states ``[batch, length, hidden]`` and the loads ``[moe layers, num_experts]``.

        Args:
            ids: ``[batch, length]``.
            positions: the same shape, what the rotation counts.
            mask: ``[batch, 1, length, length]`` bool: row may see column.
        """
        config = self.config
        powers = torch.arange(0, config.rotary_dim, 2, device=ids.device) / config.rotary_dim
        angles = positions[:, None, :, None].float() * config.rope_theta**-powers
        cos, sin = torch.cat([angles, angles], dim=-1).cos(), torch.cat([angles, angles], dim=-1).sin()
        x = self.word_embeddings(ids)
        loads = []
        for layer in layers_of(self):
            x = x + layer.attention(layer.input_layernorm(x), cos, sin, mask)
            out = layer.mlp(layer.post_attention_layernorm(x))
            if isinstance(out, tuple):
                out, load = out
                loads.append(load)
            x = x + out
        return self.norm(x), torch.stack(loads)

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits ``[..., vocab]``."""
        return functional.linear(hidden, self.word_embeddings.weight).float()


# -- files ---------------------------------------------------------------------------------------------

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def save(model: DiffusionModel, directory: Path) -> None:
    """Write ``config.json`` and bf16 ``model.safetensors`` under the names of LLaDA2's own checkpoints."""
    weights: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        value = tensor.detach().to(torch.bfloat16)
        if ".mlp.experts." not in name:
            weights[f"model.{name}"] = value.contiguous()
            continue
        start, projection = name.split("experts.")
        parts = value.chunk(model.config.num_experts, dim=1 if "down_proj" in projection else 0)
        for index, part in enumerate(parts):
            weights[f"model.{start}experts.{index}.{projection}"] = part.contiguous()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = dict(sorted((asdict(model.config) | _FIXED).items()))
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def load(directory: Path, dtype: torch.dtype = torch.float32) -> DiffusionModel:
    """The model that :func:`save` has written."""
    values = json.loads((directory / "config.json").read_text("utf-8"))
    config = DiffusionConfig(**{name: values[name] for name in DiffusionConfig.__dataclass_fields__})
    weights = {
        name.removeprefix("model."): value.float()
        for name, value in load_file(directory / "model.safetensors").items()
    }
    for layer in range(config.first_k_dense_replace, config.num_hidden_layers):
        for projection in _PROJECTIONS:
            names = [
                f"layers.{layer}.mlp.experts.{index}.{projection}.weight"
                for index in range(config.num_experts)
            ]
            stacked = torch.cat(
                [weights.pop(name) for name in names], dim=1 if projection == "down_proj" else 0
            )
            weights[f"layers.{layer}.mlp.experts.{projection}.weight"] = stacked
    model = DiffusionModel(config)
    model.load_state_dict(weights)
    return model.to(dtype).eval()


# -- start ---------------------------------------------------------------------------------------------


def _config_beside(chat: Path, block_size: int) -> DiffusionConfig:
    """The config of a diffusion model of the sizes that the chat model in a directory has."""
    values = json.loads((chat / "config.json").read_text("utf-8"))
    shared = {name: values[name] for name in DiffusionConfig.__dataclass_fields__ if name in values}
    shared["rope_theta"] = values["rope_parameters"]["rope_theta"]
    parts, rest = divmod(values["intermediate_size"], DiffusionConfig.moe_intermediate_size)
    assert not rest, "the shared expert is made of parts of the size of a routed one"
    return DiffusionConfig(**shared, num_shared_experts=parts, block_size=block_size)


def upcycle(chat: Path, block_size: int) -> DiffusionModel:
    """A model that starts from the weights of the autoregressive Qwen3 in the directory ``chat``.

    Its feed-forward layers become the shared experts; the routed ones start with nothing to say. A half
    rotation has every second frequency of a whole one, so the pairs of the others go to the half of the
    head that is not rotated: their rotation is the only thing lost at the start.
    """
    old = {
        name.removeprefix("model."): value.float()
        for name, value in load_file(chat / "model.safetensors").items()
    }
    config = _config_beside(chat, block_size)
    assert config.partial_rotary_factor == 0.5
    half = config.head_dim // 2
    turned, still = torch.arange(half)[::2], torch.arange(half)[1::2]
    order = torch.cat([turned, turned + half, still, still + half])
    model = DiffusionModel(config)
    state = {"word_embeddings.weight": old["embed_tokens.weight"], "norm.weight": old["norm.weight"]}
    for index in range(config.num_hidden_layers):
        start = f"layers.{index}."
        dense = index < config.first_k_dense_replace
        for name in ("input_layernorm", "post_attention_layernorm"):
            state[f"{start}{name}.weight"] = old[f"{start}{name}.weight"]
        q, k, v = (old[f"{start}self_attn.{name}_proj.weight"] for name in "qkv")
        q, k = (rows.unflatten(0, (-1, config.head_dim))[:, order].flatten(0, 1) for rows in (q, k))
        state[f"{start}attention.query_key_value.weight"] = torch.cat([q, k, v])
        state[f"{start}attention.dense.weight"] = old[f"{start}self_attn.o_proj.weight"]
        state[f"{start}attention.query_layernorm.weight"] = old[f"{start}self_attn.q_norm.weight"][order]
        state[f"{start}attention.key_layernorm.weight"] = old[f"{start}self_attn.k_norm.weight"][order]
        target = "mlp." if dense else "mlp.shared_experts."
        for name in _PROJECTIONS:
            state[f"{start}{target}{name}.weight"] = old[f"{start}mlp.{name}.weight"]
        if not dense:
            mlp = layers_of(model)[index].mlp
            assert isinstance(mlp, Experts)
            nn.init.normal_(mlp.gate.weight, std=0.02)
            nn.init.normal_(mlp.experts.gate_proj.weight, std=0.04)
            nn.init.normal_(mlp.experts.up_proj.weight, std=0.04)
            nn.init.zeros_(mlp.experts.down_proj.weight)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert all(".mlp.gate." in name or ".mlp.experts." in name for name in missing)
    return model
