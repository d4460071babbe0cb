"""Random small block diffusion checkpoints, the logits that transformers computes from them, and steps of
rows built by hand."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
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
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, shape in _shapes(config):
        values = torch.randn(shape, generator=generator)
        norm = len(shape) == 1 and not name.endswith("bias")
        tensors[name] = 1 + 0.3 * values if norm else 0.25 * values
    write_config(path, config)
    save_file(tensors, path / "model.safetensors")
    return tensors


def _shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors of a checkpoint."""
    hidden, size, vocab = config["hidden_size"], config["head_dim"], config["vocab_size"]
    q_rows, kv_rows = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    llada2, count = config["model_type"].startswith("llada2"), config.get("num_experts") or 0
    yield f"model.{'word_embeddings' if llada2 else 'embed_tokens'}.weight", (vocab, hidden)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        if llada2:
            at, rows = f"{prefix}.attention", q_rows + 2 * kv_rows
            yield f"{at}.query_key_value.weight", (rows, hidden)
            yield f"{at}.dense.weight", (hidden, q_rows)
            if config["use_qkv_bias"]:
                yield f"{at}.query_key_value.bias", (rows,)
            if config["use_bias"]:
                yield f"{at}.dense.bias", (hidden,)
            norms = "query_layernorm", "key_layernorm"
        else:
            at, norms = f"{prefix}.self_attn", ("q_norm", "k_norm")
            for name, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
                yield f"{at}.{name}_proj.weight", (rows, hidden)
            yield f"{at}.o_proj.weight", (hidden, q_rows)
        yield from ((f"{at}.{norm}.weight", (size,)) for norm in norms)
        at, middle = f"{prefix}.mlp", config.get("moe_intermediate_size", 0)
        if not count or index < config.get("first_k_dense_replace", 0):
            yield from _swiglu(at, hidden, config["intermediate_size"])
            continue
        yield f"{at}.gate.weight", (count, hidden)
        if llada2:
            yield f"{at}.gate.expert_bias", (count,)
        for expert in range(count):
            yield from _swiglu(f"{at}.experts.{expert}", hidden, middle)
        if shared := config.get("num_shared_experts"):
            yield from _swiglu(f"{at}.shared_experts", hidden, shared * middle)


def _swiglu(at: str, hidden: int, middle: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, shape in (("gate", (middle, hidden)), ("up", (middle, hidden)), ("down", (hidden, middle))):
        yield f"{at}.{name}_proj.weight", shape


class Plain:
    """What transformers computes with a mask of blocks, without a cache: SDAR's layers are Qwen3's, LLaDA2's
    are GLM-4-MoE's by other names."""

    def __init__(self, config: dict[str, Any], tensors: Tensors, block: int) -> None:
        self.block = block
        llada2 = config["model_type"].startswith("llada2")
        kind = "Glm4Moe" if llada2 else "Qwen3Moe" if "num_experts" in config else "Qwen3"
        config_class = getattr(transformers, f"{kind}Config")
        stated = config_class.from_dict(_as_glm4(config) if llada2 else config)
        self._model = getattr(transformers, f"{kind}ForCausalLM")(stated).eval()
        self._model.set_attn_implementation("eager")
        own = _stacked(_renamed(tensors, config) if llada2 else tensors, config.get("num_experts") or 0)
        left = self._model.load_state_dict(own, strict=False)
        assert not left.unexpected_keys
        assert set(left.missing_keys) <= {"lm_head.weight"}
        for index, layer in enumerate(self._model.model.layers):
            if "expert_capacity" in config and index >= config["first_k_dense_replace"]:
                layer.mlp.gate.forward = _SharedByBlocks(layer.mlp.gate, block, config["expert_capacity"])
            bias = tensors.get(f"model.layers.{index}.attention.dense.bias")
            if bias is not None:
                layer.self_attn.o_proj.bias = torch.nn.Parameter(bias)

    @torch.no_grad()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """[len(ids), vocab_size]"""
        of = torch.arange(len(ids)) // self.block
        mask = torch.where(of[None, :] > of[:, None], torch.finfo(torch.float32).min, 0.0)
        found = self._model(torch.tensor([[*ids]]), attention_mask=mask[None, None], use_cache=False)
        logits: torch.Tensor = found.logits[0].double()
        return logits


class _SharedByBlocks:
    """LLaDA2.2's way to choose experts, token after token: of those with the highest best score of the
    block."""

    def __init__(self, gate: Any, block: int, capacity: int) -> None:
        self._gate, self._block, self._capacity = gate, block, capacity

    def __call__(self, hidden: torch.Tensor) -> tuple[None, torch.Tensor, torch.Tensor]:
        gate, weights, experts = self._gate, [], []
        scores = (hidden.view(-1, hidden.shape[-1]) @ gate.weight.T).sigmoid().tolist()
        bias = gate.e_score_correction_bias.tolist()
        for at, mine in enumerate(scores):
            start = at // self._block * self._block
            block = scores[start : start + self._block]
            best = [max(token[e] for token in block) + bias[e] for e in range(len(bias))]
            shared = sorted(range(len(bias)), key=lambda e: -best[e])[: self._capacity]
            own = sorted(shared, key=lambda e: -(mine[e] + bias[e]))[: gate.top_k]
            total = sum(mine[e] for e in own)
            experts.append(own)
            weights.append([mine[e] / total * gate.routed_scaling_factor for e in own])
        return None, torch.tensor(weights), torch.tensor(experts)


def _stacked(tensors: Tensors, count: int) -> Tensors:
    """With the experts of a layer in one tensor, as transformers computes with them."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for at in {name.partition(".experts.")[0] for name in tensors.keys() - found.keys()}:
        gate, up, down = (
            torch.stack([tensors[f"{at}.experts.{e}.{name}_proj.weight"] for e in range(count)])
            for name in ("gate", "up", "down")
        )
        found |= {f"{at}.experts.gate_up_proj": torch.cat((gate, up), 1), f"{at}.experts.down_proj": down}
    return found


def _as_glm4(config: dict[str, Any]) -> dict[str, Any]:
    """LLaDA2's config by the names of GLM-4-MoE."""
    experts, layers = config.get("num_experts"), config["num_hidden_layers"]
    changes = {
        "n_routed_experts": experts or 1, "n_shared_experts": config.get("num_shared_experts") or 1,
        "first_k_dense_replace": config["first_k_dense_replace"] if experts else layers, "use_qk_norm": True,
        "attention_bias": config["use_qkv_bias"], "num_mtp_layers": 0,
    }  # fmt: skip
    return {**config, **changes}


def _renamed(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """LLaDA2's tensors by the names of GLM-4-MoE, whose experts always have one beside them: of zeros if
    LLaDA2's have none."""
    size, hidden, middle = config["head_dim"], config["hidden_size"], config["moe_intermediate_size"]
    q_rows, kv_rows = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    names = {
        "word_embeddings": "embed_tokens", "attention.": "self_attn.", "query_layernorm": "q_norm",
        "key_layernorm": "k_norm", ".dense.": ".o_proj.", "gate.expert_bias": "gate.e_score_correction_bias",
    }  # fmt: skip
    renamed = {}
    for name, tensor in tensors.items():
        for old, new in names.items():
            name = name.replace(old, new)
        if "query_key_value" in name:
            for part, rows in zip("qkv", tensor.split((q_rows, kv_rows, kv_rows)), strict=True):
                renamed[name.replace("query_key_value", f"{part}_proj")] = rows.clone()
        elif not name.endswith("o_proj.bias"):
            renamed[name] = tensor
        if name.endswith("mlp.gate.weight") and not config.get("num_shared_experts"):
            at = name.replace("gate.weight", "shared_experts")
            renamed |= {part: torch.zeros(shape) for part, shape in _swiglu(at, hidden, middle)}
    return renamed


class Rows:
    """Runs steps of rows (request, start, ids) and checks every logit of each against :class:`Plain`: a row
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
