"""Random small block diffusion checkpoints, what the description of such a model says of their logits, and
steps of rows built by hand."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from aioinfer.model.attention.base import Attention
from aioinfer.model.attention.sdpa import SDPAAttention
from aioinfer.model.spec import CausalLM
from tests.model.harness import build_batch, make_pool

VOCAB = 101
MASK = 100
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 40, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 600.0, "tie_word_embeddings": False,
    "torch_dtype": "float32", "mask_token_id": MASK,
}  # fmt: skip
_LLADA2 = {
    "architectures": ["LLaDA2MoeModelLM"], "model_type": "llada2_moe", "partial_rotary_factor": 0.5,
    "num_experts": 8, "num_experts_per_tok": 3, "num_shared_experts": 1, "moe_intermediate_size": 24,
    "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
    "norm_topk_prob": True, "score_function": "sigmoid", "use_qkv_bias": False, "use_bias": False,
}  # fmt: skip
_SDAR = {"architectures": ["SDARForCausalLM"], "model_type": "sdar"}
_SDAR_MOE = {
    "architectures": ["SDARMoeForCausalLM"], "model_type": "sdar_moe", "num_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True,
}  # fmt: skip
Tensors = dict[str, torch.Tensor]


def block_config(family: str = "llada2", **changes: Any) -> dict[str, Any]:
    """The config.json of a small model; what is None in ``changes`` is left out."""
    families: dict[str, dict[str, Any]] = {"llada2": _LLADA2, "sdar": _SDAR, "sdar_moe": _SDAR_MOE}
    both = {**_SHAPE, **families[family], **changes}
    return {name: value for name, value in both.items() if value is not None}


def write_config(path: Path, config: dict[str, Any]) -> None:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))


def write_checkpoint(path: Path, config: dict[str, Any], *, seed: int = 0) -> Tensors:
    """A random checkpoint of a config, in one file."""
    generator = torch.Generator().manual_seed(seed)

    def noise(name: str, *shape: int) -> None:
        values = torch.randn(shape, generator=generator)
        norm = len(shape) == 1 and not name.endswith("bias")
        tensors[name] = 1 + 0.3 * values if norm else 0.25 * values

    tensors: Tensors = {}
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    llada2 = config["model_type"].startswith("llada2")
    noise(f"model.{'word_embeddings' if llada2 else 'embed_tokens'}.weight", vocab, hidden)
    noise("model.norm.weight", hidden)
    if not config["tie_word_embeddings"]:
        noise("lm_head.weight", vocab, hidden)
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}"
        noise(f"{prefix}.input_layernorm.weight", hidden)
        noise(f"{prefix}.post_attention_layernorm.weight", hidden)
        (_llada2_attention if llada2 else _qwen3_attention)(noise, prefix, config)
        _mlp(noise, prefix, index, config)
    write_config(path, config)
    save_file(tensors, path / "model.safetensors")
    return tensors


def _llada2_attention(noise: Any, prefix: str, config: dict[str, Any]) -> None:
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    hidden, size = config["hidden_size"], config["head_dim"]
    rows = (heads + 2 * kv_heads) * size
    at = f"{prefix}.attention"
    noise(f"{at}.query_key_value.weight", rows, hidden)
    noise(f"{at}.dense.weight", hidden, heads * size)
    if config["use_qkv_bias"]:
        noise(f"{at}.query_key_value.bias", rows)
    if config["use_bias"]:
        noise(f"{at}.dense.bias", hidden)
    noise(f"{at}.query_layernorm.weight", size)
    noise(f"{at}.key_layernorm.weight", size)


def _qwen3_attention(noise: Any, prefix: str, config: dict[str, Any]) -> None:
    hidden, size = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    at = f"{prefix}.self_attn"
    for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        noise(f"{at}.{name}_proj.weight", count * size, hidden)
    noise(f"{at}.o_proj.weight", hidden, heads * size)
    noise(f"{at}.q_norm.weight", size)
    noise(f"{at}.k_norm.weight", size)


def _mlp(noise: Any, prefix: str, index: int, config: dict[str, Any]) -> None:
    hidden = config["hidden_size"]

    def swiglu(at: str, middle: int) -> None:
        noise(f"{at}.gate_proj.weight", middle, hidden)
        noise(f"{at}.up_proj.weight", middle, hidden)
        noise(f"{at}.down_proj.weight", hidden, middle)

    at = f"{prefix}.mlp"
    count = config.get("num_experts")
    if not count or index < config.get("first_k_dense_replace", 0):
        swiglu(at, config["intermediate_size"])
        return
    noise(f"{at}.gate.weight", count, hidden)
    if config["model_type"].startswith("llada2"):
        noise(f"{at}.gate.expert_bias", count)
    for expert in range(count):
        swiglu(f"{at}.experts.{expert}", config["moe_intermediate_size"])
    if shared := config.get("num_shared_experts"):
        swiglu(f"{at}.shared_experts", shared * config["moe_intermediate_size"])


class Plain:
    """The description, written out in float64: no cache, no pages, no fused anything, one dense mask."""

    def __init__(self, config: dict[str, Any], tensors: Tensors, block: int) -> None:
        self.config = config
        self.block = block
        self._tensors = {name: tensor.double() for name, tensor in tensors.items()}
        self._llada2 = config["model_type"].startswith("llada2")

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """[len(ids), vocab_size]"""
        get = self._tensors
        words = get[f"model.{'word_embeddings' if self._llada2 else 'embed_tokens'}.weight"]
        x = words[torch.tensor(ids)]
        for index in range(self.config["num_hidden_layers"]):
            at = f"model.layers.{index}"
            x = x + self._attention(at, self._norm(x, get[f"{at}.input_layernorm.weight"]))
            x = x + self._mlp(at, index, self._norm(x, get[f"{at}.post_attention_layernorm.weight"]))
        x = self._norm(x, get["model.norm.weight"])
        head: torch.Tensor = words if self.config["tie_word_embeddings"] else get["lm_head.weight"]
        return x @ head.T

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scale: torch.Tensor = (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt()
        return x / scale * weight

    def _attention(self, at: str, x: torch.Tensor) -> torch.Tensor:
        get, config = self._tensors, self.config
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        size, length = config["head_dim"], len(x)
        if self._llada2:
            at = f"{at}.attention"
            qkv = x @ get[f"{at}.query_key_value.weight"].T
            qkv = qkv + get.get(f"{at}.query_key_value.bias", torch.zeros(()))
            names = "query_layernorm", "key_layernorm", "dense"
        else:
            at = f"{at}.self_attn"
            qkv = torch.cat([x @ get[f"{at}.{name}_proj.weight"].T for name in "qkv"], -1)
            names = "q_norm", "k_norm", "o_proj"
        q, k, v = qkv.view(length, -1, size).split((heads, kv_heads, kv_heads), 1)
        q = self._rotate(self._norm(q, get[f"{at}.{names[0]}.weight"]))
        k = self._rotate(self._norm(k, get[f"{at}.{names[1]}.weight"]))
        of = torch.arange(length) // self.block
        mixed = []
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            scores = q[:, head] @ k[:, kv_head].T / size**0.5
            scores = scores.masked_fill(of[None, :] > of[:, None], float("-inf"))
            mixed.append(scores.softmax(-1) @ v[:, kv_head])
        out = torch.cat(mixed, -1) @ get[f"{at}.{names[2]}.weight"].T
        return out + get.get(f"{at}.{names[2]}.bias", torch.zeros(()))

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        rotated = int(x.shape[-1] * self.config.get("partial_rotary_factor", 1.0))
        x = x.clone()
        first, second = x[..., : rotated // 2].clone(), x[..., rotated // 2 : rotated].clone()
        for at in range(rotated // 2):
            angle = torch.arange(len(x)).double()[:, None] * self.config["rope_theta"] ** (-2 * at / rotated)
            x[..., at] = first[..., at] * angle.cos() - second[..., at] * angle.sin()
            x[..., rotated // 2 + at] = second[..., at] * angle.cos() + first[..., at] * angle.sin()
        return x

    def _swiglu(self, at: str, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = (self._tensors[f"{at}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        inner = x @ gate.T
        return (inner * inner.sigmoid() * (x @ up.T)) @ down.T

    def _mlp(self, at: str, index: int, x: torch.Tensor) -> torch.Tensor:
        config, at = self.config, f"{at}.mlp"
        if not config.get("num_experts") or index < config.get("first_k_dense_replace", 0):
            return self._swiglu(at, x)
        shares = torch.zeros(len(x), config["num_experts"], dtype=torch.float64)
        for row, scores in zip(shares, x @ self._tensors[f"{at}.gate.weight"].T, strict=True):
            for expert, share in self._chosen(at, scores).items():
                row[expert] = share
        out = torch.zeros_like(x)
        for expert in range(config["num_experts"]):
            out += shares[:, expert, None] * self._swiglu(f"{at}.experts.{expert}", x)
        return out + self._swiglu(f"{at}.shared_experts", x) if config.get("num_shared_experts") else out

    def _chosen(self, at: str, scores: torch.Tensor) -> dict[int, float]:
        """Expert to weight, for one token."""
        config = self.config
        if not self._llada2:
            shares = scores.softmax(-1).tolist()
            best = sorted(range(len(shares)), key=lambda e: -shares[e])[: config["num_experts_per_tok"]]
            total = sum(shares[e] for e in best) if config["norm_topk_prob"] else 1.0
            return {e: shares[e] / total for e in best}
        shares = scores.sigmoid().tolist()
        biased = (scores.sigmoid() + self._tensors[f"{at}.gate.expert_bias"]).tolist()
        size = len(shares) // config["n_group"]
        groups = [range(g * size, (g + 1) * size) for g in range(config["n_group"])]
        groups.sort(key=lambda group: -sum(sorted((biased[e] for e in group), reverse=True)[:2]))
        allowed = [e for group in groups[: config["topk_group"]] for e in group]
        best = sorted(allowed, key=lambda e: -biased[e])[: config["num_experts_per_tok"]]
        total = sum(shares[e] for e in best) if config["norm_topk_prob"] else 1.0
        return {e: shares[e] / total * config["routed_scaling_factor"] for e in best}


class Rows:
    """Runs steps of rows (request, start, ids) and checks every logit of each against the description: a row
    sees what its request's rows, those of this very step included, have last written before its end."""

    def __init__(
        self,
        model: CausalLM,
        plain: Plain,
        *,
        page_size: int = 16,
        num_pages: int = 64,
        attention: Any = SDPAAttention,
        device: str = "cpu",
    ) -> None:
        self.model = model
        self.plain = plain
        self.page_size = page_size
        self.device = device
        pool = make_pool(model.spec, num_pages, page_size, device)
        for store in pool.keys + pool.values:
            store.fill_(float("nan"))
        self.attention: Attention = attention(pool)
        self.free = list(range(1, num_pages + 1))
        random.Random(0).shuffle(self.free)
        self.ids: dict[str, list[int]] = {}
        self.pages: dict[str, list[int]] = {}

    @torch.inference_mode()
    def step(self, rows: Sequence[tuple[str, int, Sequence[int]]], bound: float = 1e-4) -> list[torch.Tensor]:
        """Logits of each row, [len(ids), vocab_size], checked."""
        for name, start, ids in rows:
            held = self.ids.setdefault(name, [])
            held[start : start + len(ids)] = ids
            pages = self.pages.setdefault(name, [])
            while len(pages) * self.page_size < len(held):
                pages.append(self.free.pop())
        batch = build_batch(
            [(ids, start, self.pages[name]) for name, start, ids in rows],
            self.page_size,
            num_decodes=0,
            logits_rows=range(sum(len(ids) for _, _, ids in rows)),
            device=self.device,
        )
        parts = self.model.forward(batch, self.attention).cpu().split([len(ids) for _, _, ids in rows])
        for (name, start, ids), got in zip(rows, parts, strict=True):
            stop = start + len(ids)
            wanted = self.plain.logits(self.ids[name][:stop])[start:]
            scale = float(wanted.abs().max())
            torch.testing.assert_close(got.double(), wanted, rtol=bound, atol=bound * scale)
        return list(parts)
