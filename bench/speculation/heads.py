"""EAGLE-3 heads for random models: one that is always right, and one that never is.

A target whose layers add nothing repeats its newest token for ever, and a head that adds nothing either,
whose own head has the vectors of tokens, drafts just that. All products are computed all the same. A random
head is wrong but for chance.
"""

from __future__ import annotations

import json
from pathlib import Path

from bench.gpu.roofline import Shape
from bench.gpu.shapes import SHAPES, write_model, write_tokenizer
from bench.peers.checkpoint import tensor_shapes

__all__ = ["find_right", "find_wrong"]

#: tokens that a head drafts, as heads of that kind have them
_DRAFTED = 32_000
_ZERO = ("o_proj.weight", "down_proj.weight")


def find_right(name: str, place: Path) -> tuple[Path, Path]:
    """Directories of a target in the shape of that name and of a head that is always right, for prompts that
    end with one of its tokens; made under ``place`` unless they are there."""
    import torch
    from safetensors.torch import save_file

    from aioinfer.model.weights import RandomWeights

    target, head = (place / "models" / f"head-{name}-{part}" for part in ("target", "right"))
    if (head / "model.safetensors").is_file():
        return target, head
    shape, device = SHAPES[name], torch.device("cpu")
    weights = RandomWeights(dtype=torch.bfloat16, device=device)
    tensors = {each: weights.take(each, size) for each, size in tensor_shapes(shape)}
    for each, tensor in tensors.items():
        if each.endswith(_ZERO):
            tensor.zero_()
    write_model(shape, target)
    write_tokenizer(shape.vocab, target)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    made = {each: weights.take(each, size) for each, size in _head_shapes(shape).items()}
    for each in (f"midlayer.self_attn.{_ZERO[0]}", f"midlayer.mlp.{_ZERO[1]}", "fc.weight"):
        made[each].zero_()
    made["fc.weight"][:, : shape.hidden] = torch.eye(shape.hidden)
    count = _drafted(shape)
    made["lm_head.weight"] = tensors["model.embed_tokens.weight"][:count].clone()
    ids = torch.arange(shape.vocab)
    save_file(
        {**made, "d2t": torch.zeros(count, dtype=torch.int64), "t2d": ids < count},
        _write_head(shape, head) / "model.safetensors",
        metadata={"format": "pt"},
    )
    return target, head


def find_wrong(name: str, place: Path) -> Path:
    """The directory of a head for the shape of that name, for ``load_format="random"``."""
    return _write_head(SHAPES[name], place / "models" / f"head-{name}-wrong")


def _drafted(shape: Shape) -> int:
    return min(_DRAFTED, shape.vocab)


def _write_head(shape: Shape, folder: Path) -> Path:
    write_model(shape, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": _drafted(shape),
        "eagle_aux_hidden_state_layer_ids": [1, shape.layers // 2, shape.layers - 1],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _head_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    hidden, start = shape.hidden, "model.layers.0."
    found = {
        "fc.weight": (hidden, 3 * hidden),
        "norm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
    }
    for name, size in tensor_shapes(shape):
        inner = name.removeprefix(start)
        if name.startswith(start) and "q_norm" not in inner and "k_norm" not in inner:
            wide = inner.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
            found[f"midlayer.{inner}"] = (size[0], 2 * hidden) if wide else size
    return found
