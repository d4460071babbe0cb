"""LoRA adapters as PEFT writes them, with random matrices; and the weights that they are merged into."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

#: the fields that PEFT 0.21 writes, as it writes them unless told otherwise
FIELDS: dict[str, Any] = {
    **dict.fromkeys(
        (
            *("alora_invocation_tokens", "arrow_config", "auto_mapping", "corda_config", "eva_config"),
            *("exclude_modules", "kasa_config", "layer_replication", "layers_pattern", "layers_to_transform"),
            *("lora_ga_config", "megatron_config", "modules_to_save", "monteclora_config", "revision"),
            *("target_parameters", "trainable_token_indices", "use_bdlora", "velora_config"),
        )
    ),
    **dict.fromkeys(("ensure_weight_tying", "fan_in_fan_out", "lora_bias", "use_dora"), False),
    **dict.fromkeys(("use_qalora", "use_rslora"), False),
    "alpha_pattern": {},
    "loftq_config": {},
    "rank_pattern": {},
    "target_modules": [],
    "base_model_name_or_path": "nobody/nothing",
    "megatron_core": "megatron.core",
    "bias": "none",
    "peft_type": "LORA",
    "peft_version": "0.21.2",
    "task_type": "CAUSAL_LM",
    "inference_mode": True,
    "init_lora_weights": True,
    "lora_alpha": 16,
    "lora_dropout": 0.05,
    "qalora_group_size": 16,
    "r": 4,
}


def factors(
    shapes: Mapping[str, tuple[int, int]], ranks: Mapping[str, int], *, seed: int, dtype: torch.dtype
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Random A and B for modules of weights [outputs, inputs]."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, (outputs, inputs) in shapes.items():
        a = torch.randn(ranks[name], inputs, generator=generator) * inputs**-0.5
        b = torch.randn(outputs, ranks[name], generator=generator) * 0.3
        found[name] = a.to(dtype), b.to(dtype)
    return found


def write_adapter(
    path: Path,
    matrices: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    *,
    prefix: str = "base_model.model.",
    infix: str = "",
    further: Mapping[str, torch.Tensor] | None = None,
    **fields: Any,
) -> Path:
    """An adapter of modules by name, with A and B of each. ``infix``: in the names of tensors, behind
    lora_A; ``further``: tensors."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, (a, b) in matrices.items():
        tensors[f"{prefix}{name}.lora_A{infix}.weight"] = a.contiguous()
        tensors[f"{prefix}{name}.lora_B{infix}.weight"] = b.contiguous()
    tensors |= {f"{prefix}{name}": tensor.contiguous() for name, tensor in (further or {}).items()}
    targets = sorted({name.rpartition(".")[2] for name in matrices})
    write_config(path, **{"target_modules": targets, **fields})
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    return path


def write_config(path: Path, **fields: Any) -> None:
    (path / "adapter_config.json").write_text(json.dumps({**FIELDS, **fields}))
