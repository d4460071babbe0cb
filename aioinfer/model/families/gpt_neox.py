"""GPT-NeoX (arXiv 2204.06745) and Pythia (arXiv 2304.01373): layer norms, a feed-forward part without gates,
and, as a rule, parts that read the same residual, each by a norm of its own.

The rows of queries, keys and values alternate by head in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch

from aioinfer.model import rope
from aioinfer.model.attention.base import AttentionParams
from aioinfer.model.families.base import Family, Source, head_dim
from aioinfer.model.gates import PLAIN_GATES
from aioinfer.model.layer import Layer
from aioinfer.model.norm import Norm

__all__ = ["GPTNeoX"]


class GPTNeoX(Family):
    """GPT-NeoX."""

    def unsupported_reason(self, config: Any) -> str | None:
        if not rope.supported(config, head_dim(config), partial=True):
            return "its kind of rotary positions"
        return None if config.hidden_act in PLAIN_GATES else f"the activation {config.hidden_act}"

    def words(self, names: Container[str]) -> str:
        return "gpt_neox.embed_in"

    def head(self, names: Container[str]) -> str:
        return "embed_out"

    def final_norm(self, source: Source) -> Norm:
        return source.layer_norm("gpt_neox.final_layer_norm")

    def layer(self, source: Source, index: int) -> Layer:
        config, prefix = source.config, f"gpt_neox.layers.{index}"
        hidden, size = config.hidden_size, head_dim(config)
        order = torch.arange(3 * hidden).view(-1, 3, size).transpose(0, 1).flatten()
        bias, gate = config.attention_bias, PLAIN_GATES[config.hidden_act]
        names = [f"{prefix}.attention.query_key_value"]
        attention = source.attention(
            index,
            qkv=source.linear(names, [3 * hidden], hidden, bias=bias, order=order),
            rope=source.rope(index),
            params=AttentionParams(size**-0.5, block=source.block),
            out=source.linear([f"{prefix}.attention.dense"], [hidden], hidden, bias=bias),
        )
        middle, both = config.intermediate_size, ("dense_h_to_4h", "dense_4h_to_h")
        return Layer(
            mixer_norm=source.layer_norm(f"{prefix}.input_layernorm"),
            mixer=attention,
            mlp_norm=source.layer_norm(f"{prefix}.post_attention_layernorm"),
            mlp=source.plain_mlp(f"{prefix}.mlp", both, middle, gate, bias=True),
            parallel=config.use_parallel_residual,
        )
