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
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "auto_mapping": None,
    "base_model_name_or_path": "nobody/nothing",
    "bias": "none",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "kasa_config": None,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 16,
    "lora_bias": False,
    "lora_dropout": 0.05,
    "lora_ga_config": None,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "monteclora_config": None,
    "peft_type": "LORA",
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "r": 4,
    "rank_pattern": {},
    "revision": None,
    "target_modules": [],
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
    "velora_config": None,
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
    **fields: Any,
) -> Path:
    """An adapter of modules by name, with A and B of each. ``infix``: in the names of tensors, behind
    lora_A."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, (a, b) in matrices.items():
        tensors[f"{prefix}{name}.lora_A{infix}.weight"] = a.contiguous()
        tensors[f"{prefix}{name}.lora_B{infix}.weight"] = b.contiguous()
    targets = sorted({name.rpartition(".")[2] for name in matrices})
    write_config(path, **{"target_modules": targets, **fields})
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    return path


def write_config(path: Path, **fields: Any) -> None:
    (path / "adapter_config.json").write_text(json.dumps({**FIELDS, **fields}))
