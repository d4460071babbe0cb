"""EAGLE-3 heads and random models for them: one that is always right, and one that never is.

A target whose layers add nothing repeats its newest token for ever, and a head that adds nothing either,
whose own head has the vectors of tokens, drafts just that. Where the target's own head has the vectors of the
tokens in front of them, it counts instead, in which no text repeats, and that head is always wrong. All
products are computed all the same.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from bench.gpu.roofline import Shape
from bench.gpu.shapes import SHAPES, write_model, write_tokenizer
from bench.peers.checkpoint import tensor_shapes

__all__ = ["find_heads"]

#: tokens that a head drafts, as heads of that kind have them
_DRAFTED = 32_000
_ZERO = ("o_proj.weight", "down_proj.weight")


def find_heads(name: str, place: Path) -> tuple[tuple[Path, Path], tuple[Path, Path]]:
    """Directories of a target in the shape of that name and of a head that is always right, for prompts that
    end with one of its tokens, and of a target and a head that never is; made under ``place`` unless they are
    there."""
    shape = SHAPES[name]
    counting = replace(shape, tied=False)
    return _made(shape, place / "models" / f"head-{name}"), _made(counting, place / "models" / f"no-{name}")


def _made(shape: Shape, start: Path) -> tuple[Path, Path]:
    import torch
    from safetensors.torch import save_file

    from aioinfer.model.weights import RandomWeights

    target, head = (start.with_name(f"{start.name}-{part}") for part in ("target", "head"))
    if (head / "model.safetensors").is_file():
        return target, head
    weights = RandomWeights(dtype=torch.bfloat16, device=torch.device("cpu"))
    tensors = {each: weights.take(each, size) for each, size in tensor_shapes(shape)}
    words = tensors["model.embed_tokens.weight"]
    for each, tensor in tensors.items():
        if each.endswith(_ZERO):
            tensor.zero_()
        elif each == "lm_head.weight":
            tensor.copy_(words.roll(1, dims=0))
    write_model(shape, target)
    write_tokenizer(shape.vocab, target)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    made = {each: weights.take(each, size) for each, size in _head_shapes(shape).items()}
    for each in (f"midlayer.self_attn.{_ZERO[0]}", f"midlayer.mlp.{_ZERO[1]}", "fc.weight"):
        made[each].zero_()
    made["fc.weight"][:, : shape.hidden] = torch.eye(shape.hidden)
    count = _drafted(shape)
    made["lm_head.weight"] = words[:count].clone()
    ids = torch.arange(shape.vocab)
    made |= {"d2t": torch.zeros(count, dtype=torch.int64), "t2d": ids < count}
    save_file(made, _write_head(shape, head) / "model.safetensors", metadata={"format": "pt"})
    return target, head


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
