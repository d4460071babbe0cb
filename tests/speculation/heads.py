"""Small models with draft heads of every kind, and plain implementations of these heads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from aioinfer.config import EngineConfig
from tests.model.checkpoints import FAMILIES, RECURRENT, make_model

Tensors = dict[str, torch.Tensor]
KINDS = ("mtp", "mtp-moe", "mtp-glm", "mtp-deepseek", "eagle3", "dflash")
_GLM: tuple[str, dict[str, Any]] = (
    "Glm4Moe",
    {
        "hidden_size": 64, "head_dim": 16, "num_hidden_layers": 3, "first_k_dense_replace": 1,
        "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
        "use_qk_norm": True,
    },
)  # fmt: skip
BUNDLED = EngineConfig().model_path
#: that of the bundled tokenizer
VOCAB = 864
HIDDEN, _HEADS, _KV, SIZE, _MIDDLE = 64, 4, 2, 16, 96
_DRAFTED = 300


class Head(NamedTuple):
    """A model, and the setting of what drafts for it."""

    model: Path
    speculation: str


def make(kind: str, folder: Path, seed: int = 0, *, recurrent: bool = False) -> Head:
    """A random model with a tokenizer, and a random head of a kind."""
    model = folder / "model"
    changes: dict[str, Any] = {"vocab_size": VOCAB, "eos_token_id": 1, "max_position_embeddings": 512}
    if kind in ("mtp-glm", "mtp-deepseek"):
        prefix, shape = _GLM if kind == "mtp-glm" else FAMILIES["deepseek-v3"]
        make_model(prefix, {**shape, **changes}, model, seed=seed)
        add_layer_behind(model, seed)
    elif kind.startswith("mtp"):
        prefix, shape = RECURRENT["qwen3-next" if kind == "mtp-moe" else "qwen3.5"]
        if not recurrent:
            changes["layer_types"] = ["full_attention"] * len(shape["layer_types"])
        make_model(prefix, {**shape, **changes}, model, seed=seed)
        add_mtp(model, seed)
    else:
        prefix, shape = RECURRENT["qwen3.5"] if recurrent else FAMILIES["qwen3-blocks"]
        if not recurrent:
            changes |= {"num_hidden_layers": 6, "head_dim": SIZE}
        make_model(prefix, {**shape, **changes}, model, seed=seed)
    for file in (*BUNDLED.glob("*token*"), BUNDLED / "chat_template.jinja"):
        shutil.copy(file, model)
    if kind.startswith("mtp"):
        return Head(model, "auto")
    torch.manual_seed(seed)
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    if kind == "eagle3":
        # Heads have it one way or the other.
        config = {**eagle3_config(layers), "norm_before_residual": recurrent}
        write_head(folder / kind, config, eagle3_tensors())
    else:
        write_head(folder / kind, dflash_config(layers), dflash_tensors())
    return Head(model, str(folder / kind))


def add_mtp(folder: Path, seed: int = 0) -> None:
    """Give a model of Qwen3-Next or Qwen3.5 an MTP layer, like its last layer that attends."""
    torch.manual_seed(seed)
    file = folder / "model.safetensors"
    tensors, config = load_file(file), json.loads((folder / "config.json").read_text())
    types, hidden = config["layer_types"], config["hidden_size"]
    prefix = f"model.layers.{len(types) - 1 - types[::-1].index('full_attention')}."
    for name, tensor in [each for each in tensors.items() if each[0].startswith(prefix)]:
        noise = torch.randn(tensor.shape) * (tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else 0.1)
        tensors[name.replace(prefix, "mtp.layers.0.")] = noise
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"mtp.{name}.weight"] = torch.randn(hidden) * 0.1
    tensors["mtp.fc.weight"] = torch.randn(hidden, 2 * hidden) * hidden**-0.5
    save_file(tensors, file, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "mtp_num_hidden_layers": 1}))


def add_layer_behind(folder: Path, seed: int = 0) -> None:
    """Give a model of GLM-4.5 or DeepSeek-V3 an MTP layer, like its last layer."""
    torch.manual_seed(seed)
    file = folder / "model.safetensors"
    tensors, config = load_file(file), json.loads((folder / "config.json").read_text())
    count, hidden = config["num_hidden_layers"], config["hidden_size"]
    last, at = f"model.layers.{count - 1}.", f"model.layers.{count}."
    for name, tensor in [each for each in tensors.items() if each[0].startswith(last)]:
        noise = torch.randn(tensor.shape)
        tensors[name.replace(last, at)] = (
            noise * tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else 1 + 0.1 * noise
        )
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{at}{name}.weight"] = 1 + 0.1 * torch.randn(hidden)
    tensors[f"{at}eh_proj.weight"] = torch.randn(hidden, 2 * hidden) * hidden**-0.5
    # Files have these once more.
    tensors[f"{at}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    tensors[f"{at}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))


def write_head(folder: Path, config: dict[str, Any], tensors: Tensors) -> None:
    """A directory with a head."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _layer(width: int, prefix: str, *, qk_norm: bool) -> Tensors:
    queries, keys = _HEADS * SIZE, _KV * SIZE
    shapes = {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (HIDDEN, queries),
        "mlp.gate_proj": (_MIDDLE, HIDDEN),
        "mlp.up_proj": (_MIDDLE, HIDDEN),
        "mlp.down_proj": (HIDDEN, _MIDDLE),
    }
    norms = {"input_layernorm": HIDDEN, "post_attention_layernorm": HIDDEN}
    if qk_norm:
        norms |= {"self_attn.q_norm": SIZE, "self_attn.k_norm": SIZE}
    found = {
        f"{prefix}{name}.weight": torch.randn(shape) * shape[1] ** -0.5 for name, shape in shapes.items()
    }
    return found | {f"{prefix}{name}.weight": 1 + 0.1 * torch.randn(size) for name, size in norms.items()}


def eagle3_tensors() -> Tensors:
    ids = torch.randperm(VOCAB)[:_DRAFTED].sort().values
    return _layer(2 * HIDDEN, "midlayer.", qk_norm=False) | {
        "fc.weight": torch.randn(HIDDEN, 3 * HIDDEN) * (3 * HIDDEN) ** -0.5,
        "midlayer.hidden_norm.weight": 1 + 0.1 * torch.randn(HIDDEN),
        "norm.weight": 1 + 0.1 * torch.randn(HIDDEN),
        "lm_head.weight": torch.randn(_DRAFTED, HIDDEN) * HIDDEN**-0.5,
        "d2t": ids - torch.arange(_DRAFTED),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True),
    }


def dflash_tensors() -> Tensors:
    found: Tensors = {}
    for index in range(2):
        found |= _layer(HIDDEN, f"layers.{index}.", qk_norm=True)
    return found | {
        "fc.weight": torch.randn(HIDDEN, 3 * HIDDEN) * (3 * HIDDEN) ** -0.5,
        "hidden_norm.weight": 1 + 0.1 * torch.randn(HIDDEN),
        "norm.weight": 1 + 0.1 * torch.randn(HIDDEN),
    }


_COMMON: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _KV,
    "head_dim": SIZE,
    "intermediate_size": _MIDDLE,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
}


def eagle3_config(layers: int) -> dict[str, Any]:
    """``layers``: of the model."""
    return {
        **_COMMON,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": _DRAFTED,
        "eagle_aux_hidden_state_layer_ids": [1, layers // 2, layers - 1],
    }


def dflash_config(layers: int) -> dict[str, Any]:
    """``layers``: of the model."""
    return {
        **_COMMON,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "block_size": 8,
        "num_target_layers": layers,
        "dflash_config": {"mask_token_id": 5, "target_layer_ids": [0, layers // 2, layers - 2]},
    }
