"""Random LoRA adapters of a shape, as PEFT writes them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.gpu.roofline import Shape

__all__ = ["write_adapter"]


def write_adapter(shape: Shape, folder: Path, rank: int, *, seed: int) -> Path:
    """An adapter of all linear layers of a shape without experts, in bfloat16."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(shape.layers):
        for name, (outputs, inputs) in _modules(shape).items():
            at = f"base_model.model.model.layers.{layer}.{name}"
            a = torch.randn(rank, inputs, generator=generator) * inputs**-0.5
            b = torch.randn(outputs, rank, generator=generator) * 0.05
            tensors[f"{at}.lora_A.weight"] = a.to(torch.bfloat16)
            tensors[f"{at}.lora_B.weight"] = b.to(torch.bfloat16)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    targets = sorted({name.rpartition(".")[2] for name in _modules(shape)})
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": targets,
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _modules(shape: Shape) -> dict[str, tuple[int, int]]:
    """Outputs and inputs by the names of modules."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    hidden, middle = shape.hidden, shape.intermediate
    return {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (middle, hidden),
        "mlp.up_proj": (middle, hidden),
        "mlp.down_proj": (hidden, middle),
    }
