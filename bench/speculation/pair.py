"""A target model and a draft model that agree on most tokens, with random weights.

The draft model is the first layers of the target, whose other layers add little, so that both mostly draw the
same token. That makes the survival of drafts a setting, and leaves costs as they are.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bench.gpu.shapes import SHAPES, write_model, write_tokenizer
from bench.peers.checkpoint import tensor_shapes

__all__ = ["DRAFT_LAYERS", "find_pair"]

#: layers of the draft model
DRAFT_LAYERS = 2
#: a vocabulary like that of Llama 2, because both models have the head
_VOCAB = 32_768
#: what the layers of the target alone are multiplied with where they add to the residual stream
_SMALL = 0.02


def find_pair(name: str, place: Path) -> tuple[Path, Path]:
    """Directories of the target, in the shape of that name but for the vocabulary, and of the draft model;
    made under ``place`` unless they are there."""
    target, draft = (place / "models" / f"pair-{name}-{part}" for part in ("target", "draft"))
    if not (draft / "model.safetensors").is_file():
        _make(name, target, draft)
    return target, draft


def _make(name: str, target: Path, draft: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from aioinfer.model.weights import RandomWeights

    shape = replace(SHAPES[name], vocab=_VOCAB)
    weights = RandomWeights(dtype=torch.bfloat16, device=torch.device("cpu"))
    tensors = {each: weights.take(each, size) for each, size in tensor_shapes(shape)}
    for each, tensor in tensors.items():
        if _of_target_alone(each) and each.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.mul_(_SMALL)
    for folder, layers in ((target, shape.layers), (draft, DRAFT_LAYERS)):
        write_model(replace(shape, layers=layers), folder)
        write_tokenizer(_VOCAB, folder)
        kept = {
            each: tensor for each, tensor in tensors.items() if folder is target or not _of_target_alone(each)
        }
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def _of_target_alone(tensor: str) -> bool:
    parts = tensor.split(".")
    return "layers" in parts and int(parts[parts.index("layers") + 1]) >= DRAFT_LAYERS
