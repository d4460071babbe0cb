"""The blocks of SigLIP (Zhai et al., arXiv 2303.15343): several families have them, with the same names."""

from __future__ import annotations

from typing import Any

from aioinfer.model.vision.source import GELUS, TowerSource
from aioinfer.model.vision.tower import Block

__all__ = ["siglip_blocks", "siglip_unsupported"]


def siglip_unsupported(vision: Any) -> str | None:
    """The feature of a config of the tower that its blocks do not have; None if there is none."""
    if vision.hidden_act not in GELUS:
        return f"the activation {vision.hidden_act} in its encoder"
    if vision.hidden_size % vision.num_attention_heads:
        return f"{vision.num_attention_heads} heads of {vision.hidden_size} dimensions in its encoder"
    return None


def siglip_blocks(source: TowerSource, prefix: str, vision: Any) -> list[Block]:
    """The blocks under ``prefix``. ``vision``: the config of the tower."""
    width, middle, heads = vision.hidden_size, vision.intermediate_size, vision.num_attention_heads
    eps = vision.layer_norm_eps
    blocks = []
    for index in range(vision.num_hidden_layers):
        name = f"{prefix}.{index}"
        attention = f"{name}.self_attn"
        names = [f"{attention}.{part}_proj" for part in "qkv"]
        qkv = source.linear(names, [width] * 3, width, bias=True)
        out = source.linear([f"{attention}.out_proj"], [width], width, bias=True)
        both = f"{name}.mlp.fc1", f"{name}.mlp.fc2"
        blocks.append(
            Block(
                source.kernels.operations,
                attention_norm=source.layer_norm(f"{name}.layer_norm1", width, eps),
                attention=source.attention(qkv, out, heads, (width // heads) ** -0.5),
                mlp_norm=source.layer_norm(f"{name}.layer_norm2", width, eps),
                mlp=source.mlp(both, (width, middle, width), vision.hidden_act),
            )
        )
    return blocks
