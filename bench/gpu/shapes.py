"""Models to measure: Qwen3's shapes as directories that hold a config.json, and a made-up tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from aioinfer.model.quantization import FLOAT8
from bench.gpu.roofline import Shape

__all__ = ["SHAPES", "shape_of", "write_model", "write_tokenizer"]

_VOCAB = 151_936
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("0.6b", 28, 1024, 16, 8, 128, 3072, _VOCAB, True),
        Shape("8b", 36, 4096, 32, 8, 128, 12288, _VOCAB, False),
        Shape("14b", 40, 5120, 40, 8, 128, 17408, _VOCAB, False),
        # For rehearsals on a CPU.
        Shape("tiny", 2, 64, 4, 2, 16, 128, 512, True),
    )
}


def shape_of(name: str, settings: Mapping[str, str]) -> Shape:
    """A shape as an engine with these settings keeps it in memory."""
    return replace(
        SHAPES[name],
        float8=settings.get("quantization") in FLOAT8,
        kv_float8=settings.get("kv_dtype") == "fp8",
    )


def write_model(shape: Shape, folder: Path) -> Path:
    """A model directory of a shape, to be loaded with ``load_format="random"``."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "bos_token_id": None,
        "eos_token_id": None,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_tokenizer(vocab: int, folder: Path) -> None:
    """A byte-level tokenizer of ``vocab`` tokens: the bytes, and words of three and more letters.

    It is for decoding, at the cost of a real one of that size; nothing was learned, so it merges nothing.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += ["Ġ" + _word(number) for number in range(vocab - len(tokens))]
    model = models.BPE(vocab={token: at for at, token in enumerate(tokens[:vocab])}, merges=[])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def _word(number: int) -> str:
    """Letters that spell a number; three of them at least."""
    letters = ""
    while number or len(letters) < 3:
        number, letter = divmod(number, 26)
        letters += chr(ord("a") + letter)
    return letters
