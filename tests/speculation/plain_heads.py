"""Draft heads in a few lines of torch, without pages and caches, from their published definitions."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

from tests.speculation.heads import Head, Tensors

__all__ = ["Plain"]


def _rms(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def _rotate(heads: torch.Tensor, positions: torch.Tensor, rotated: int) -> torch.Tensor:
    """``heads``: [T, heads, size], of which the first ``rotated`` elements are."""
    rates = 10000.0 ** (-torch.arange(0, rotated, 2) / rotated)
    angles = (positions[:, None] * rates)[:, None].repeat(1, 1, 2)
    part, rest = heads[..., :rotated], heads[..., rotated:]
    one, two = part.chunk(2, -1)
    return torch.cat((part * angles.cos() + torch.cat((-two, one), -1) * angles.sin(), rest), -1)


class Plain:
    """A head of :mod:`tests.speculation.heads`: what it drafts for a whole sequence."""

    def __init__(self, head: Head) -> None:
        kind = "mtp" if head.speculation == "auto" else Path(head.speculation).name
        self.kind = kind
        folder = head.model if kind == "mtp" else Path(head.speculation)
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.weights: Tensors = load_file(folder / "model.safetensors")
        model: Any = transformers.AutoModelForCausalLM
        self.model = model.from_pretrained(
            head.model, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.words = self.model.get_input_embeddings().weight.detach()
        self.lm_head = self.model.get_output_embeddings().weight.detach()
        #: of GLM and DeepSeek: transformers' model of the MTP layer alone
        self.alone: Any = None
        if "num_nextn_predict_layers" in self.config:
            self._take_layer(head.model)
        #: norms of Qwen3.5 store their weights less one
        self.offset = 1.0 if kind == "mtp" and self.alone is None else 0.0

    def _take_layer(self, model: Path) -> None:
        behind = f"model.layers.{self.config['num_hidden_layers']}."
        own = {
            name.removeprefix(behind): each for name, each in self.weights.items() if name.startswith(behind)
        }
        names = {"eh_proj": "mtp.fc", "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden"}
        self.weights |= {f"{new}.weight": own[f"{old}.weight"] for old, new in names.items()}
        layer = {f"model.layers.0.{name}": each for name, each in own.items()}
        layer |= {"model.norm.weight": own["shared_head.norm.weight"], "lm_head.weight": self.lm_head}
        layer |= {"model.embed_tokens.weight": self.words}
        with tempfile.TemporaryDirectory() as folder:
            config = {
                **self.config,
                "num_hidden_layers": 1,
                "first_k_dense_replace": 0,
                "mlp_layer_types": ["sparse"],
            }
            (Path(folder) / "config.json").write_text(json.dumps(config))
            layer = {name: each.clone() for name, each in layer.items()}
            save_file(layer, Path(folder) / "model.safetensors", metadata={"format": "pt"})
            model_class: Any = transformers.AutoModelForCausalLM
            self.alone = model_class.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager"
            ).eval()

    @torch.no_grad()
    def drafts(self, ids: list[int], count: int) -> torch.Tensor:
        """Logits [count, V] of what follows ``ids``, if the likeliest tokens of all before are right."""
        hidden = self.model.model(torch.tensor([ids[:-1]]), output_hidden_states=True)
        states = [each[0] for each in hidden.hidden_states]
        if self.kind == "mtp":
            return self._chain(hidden.last_hidden_state[0], ids, count)
        if self.kind == "eagle3":
            places = self.config["eagle_aux_hidden_state_layer_ids"]
            return self._chain(
                torch.cat([states[at] for at in places], -1) @ self.weights["fc.weight"].T, ids, count
            )
        places = [layer + 1 for layer in self.config["dflash_config"]["target_layer_ids"]]
        context = torch.cat([states[at] for at in places], -1) @ self.weights["fc.weight"].T
        return self._block(_rms(context, self.weights["hidden_norm.weight"]), ids[-1], count)

    def _chain(self, features: torch.Tensor, ids: list[int], count: int) -> torch.Tensor:
        """``features``: of all positions but the last."""
        tokens, found = ids[1:], []
        for _ in range(count):
            normed, following = (self._mtp if self.kind == "mtp" else self._eagle3)(
                torch.tensor(tokens), features
            )
            if self.kind == "mtp":
                logits = normed[-1] @ self.lm_head.T
            else:
                own = normed[-1] @ self.weights["lm_head.weight"].T
                at = self.weights["d2t"] + torch.arange(len(own))
                logits = torch.full((len(self.words),), -torch.inf).index_copy(0, at, own)
            found.append(logits)
            tokens = [*tokens, int(logits.argmax())]
            features = torch.cat((features, following[-1:]))
        return torch.stack(found)

    def _mtp(self, tokens: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        words = self._norm(self.words[tokens], "mtp.pre_fc_norm_embedding")
        both = torch.cat((words, self._norm(features, "mtp.pre_fc_norm_hidden")), -1)
        hidden, at = both @ self.weights["mtp.fc.weight"].T, "mtp.layers.0."
        if self.alone is not None:
            found: torch.Tensor = self.alone.model(inputs_embeds=hidden[None]).last_hidden_state[0]
            return found, found
        hidden = hidden + self._attend(self._norm(hidden, f"{at}input_layernorm"), None, at, causal=True)
        hidden = hidden + self._mlp(self._norm(hidden, f"{at}post_attention_layernorm"), f"{at}mlp.")
        normed = self._norm(hidden, "mtp.norm")
        return normed, normed

    def _eagle3(self, tokens: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        words = self._norm(self.words[tokens], "midlayer.input_layernorm")
        normed = self._norm(features, "midlayer.hidden_norm")
        both = torch.cat((words, normed), -1)
        residual = normed if self.config["norm_before_residual"] else features
        hidden = residual + self._attend(both, None, "midlayer.", causal=True)
        normed = self._norm(hidden, "midlayer.post_attention_layernorm")
        hidden = hidden + self._mlp(normed, "midlayer.mlp.")
        return self._norm(hidden, "norm"), hidden

    def _block(self, context: torch.Tensor, own: int, count: int) -> torch.Tensor:
        """The first ``count`` drafts of a block of ``count + 1`` positions."""
        mask = self.config["dflash_config"]["mask_token_id"]
        hidden = self.words[torch.tensor([own, *[mask] * count])]
        for layer in range(self.config["num_hidden_layers"]):
            at = f"layers.{layer}."
            normed = self._norm(hidden, f"{at}input_layernorm")
            hidden = hidden + self._attend(normed, context, at, causal=False)
            hidden = hidden + self._mlp(self._norm(hidden, f"{at}post_attention_layernorm"), f"{at}mlp.")
        logits: torch.Tensor = self._norm(hidden, "norm")[1:] @ self.lm_head.T
        return logits

    # -- parts of layers ------------------------------------------------------------------------

    def _norm(self, values: torch.Tensor, name: str) -> torch.Tensor:
        return _rms(values, self.weights[f"{name}.weight"] + self.offset)

    def _project(self, values: torch.Tensor, name: str) -> torch.Tensor:
        return values @ self.weights[f"{name}.weight"].T

    def _attend(
        self, values: torch.Tensor, context: torch.Tensor | None, prefix: str, *, causal: bool
    ) -> torch.Tensor:
        """Of ``values``, which see ``context`` in front of them, too."""
        at, config, gates = f"{prefix}self_attn.", self.config, None
        heads, kv, size = (
            config[f"{name}"] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        rotated = int(size * (config.get("rope_parameters") or {}).get("partial_rotary_factor", 1.0))
        queries = self._project(values, f"{at}q_proj")
        if self.kind == "mtp":
            queries, gates = queries.view(len(values), heads, 2, size).unbind(2)
        queries = queries.reshape(-1, heads, size)
        read = values if context is None else torch.cat((context, values))
        keys, found = (self._project(read, f"{at}{name}_proj").view(-1, kv, size) for name in "kv")
        if f"{at}q_norm.weight" in self.weights:
            queries, keys = self._norm(queries, f"{at}q_norm"), self._norm(keys, f"{at}k_norm")
        positions = torch.arange(len(read))
        queries = _rotate(queries, positions[len(read) - len(values) :], rotated)
        keys = _rotate(keys, positions, rotated).repeat_interleave(heads // kv, 1)
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * size**-0.5
        if causal:
            scores = scores.masked_fill(~torch.ones(scores.shape[1:], dtype=torch.bool).tril(), -torch.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), found.repeat_interleave(heads // kv, 1))
        if gates is not None:
            mixed = mixed * gates.sigmoid()
        return self._project(mixed.flatten(1), f"{at}o_proj")

    def _mlp(self, values: torch.Tensor, prefix: str) -> torch.Tensor:
        if f"{prefix}gate.weight" not in self.weights:
            gates = F.silu(self._project(values, f"{prefix}gate_proj"))
            return self._project(gates * self._project(values, f"{prefix}up_proj"), f"{prefix}down_proj")
        scores = self._project(values, f"{prefix}gate").softmax(-1)
        weights, chosen = scores.topk(self.config["num_experts_per_tok"], -1)
        if self.config.get("norm_topk_prob"):
            weights = weights / weights.sum(-1, keepdim=True)
        share = self._project(values, f"{prefix}shared_expert_gate").sigmoid()
        found = share * self._mlp(values, f"{prefix}shared_expert.")
        for expert in range(scores.shape[1]):
            weight = (weights * (chosen == expert)).sum(-1, keepdim=True)
            found = found + weight * self._mlp(values, f"{prefix}experts.{expert}.")
        return found
