"""Small checkpoints that read images as two GGUF files, by the names of the package gguf, as llama.cpp's
converter writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from tests.checkpoint.gguf_models import write_file, write_gguf

__all__ = ["MODEL", "PAIRED", "mmproj_parts", "write_pair"]

MODEL, PAIRED = "model.gguf", "mmproj-model.gguf"
#: parts of names in files, without "model." in front, and those of the releases that the converter knows
_RELEASED = {
    "Gemma3ForConditionalGeneration": {
        "vision_tower.": "vision_tower.vision_model.",
        "mm_input_projection_weight": "mm_input_projection.weight",
    },
    "Idefics3ForConditionalGeneration": {
        "vision_model.": "model.vision_model.",
        "connector.": "model.connector.",
    },
    "InternVLForConditionalGeneration": {
        "vision_tower.": "model.vision_tower.",
        "multi_modal_projector.layer_norm.": "mlp1.0.",
        "multi_modal_projector.linear_1.": "mlp1.1.",
        "multi_modal_projector.linear_2.": "mlp1.3.",
        ".lambda_1": ".lambda_1.weight",
        ".lambda_2": ".lambda_2.weight",
        ".position_embeddings": ".position_embeddings.weight",
    },
    "Qwen3VLForConditionalGeneration": {},
}
#: mean and deviation of colours where a processor's settings do not say
_LEVELS = {"InternVLForConditionalGeneration": (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD)}
_TEXTS = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "language_model.": "model.",
    "text_model.": "model.",
    "lm_head.": "lm_head.",
}


def write_pair(folder: Path, target: Path, kind: str = "F32", *, lacking: str = "") -> None:
    """The checkpoint in ``folder`` as two files in ``target``. ``lacking``: the text of a token that the
    vocabulary does not have; an unused one is in its place."""
    _write_text(folder, target / MODEL, kind, lacking)
    metadata, tensors = mmproj_parts(folder)
    write_file(target / PAIRED, metadata, "clip", tensors)


def _write_text(folder: Path, target: Path, kind: str, lacking: str) -> None:
    """The text model with the vocabulary."""
    config = json.loads((folder / "config.json").read_text())
    inner = folder / "text"
    inner.mkdir(exist_ok=True)
    stated = {**config["text_config"], "tie_word_embeddings": config.get("tie_word_embeddings", True)}
    (inner / "config.json").write_text(json.dumps(stated))
    found = {}
    for name, tensor in _tensors(folder).items():
        prefix = next((prefix for prefix in _TEXTS if name.startswith(prefix)), None)
        if prefix is not None:
            found[_TEXTS[prefix] + name.removeprefix(prefix)] = tensor
    save_file(found, inner / "model.safetensors")
    more = _vocabulary(folder, lacking)
    if sections := stated["rope_parameters"].get("mrope_section"):
        more["qwen3vl.rope.dimension_sections"] = [*sections, 0]
    write_gguf(inner, target, kind, more=more)


def _tensors(folder: Path) -> dict[str, Any]:
    """Without "model." in front of their names."""
    found = load_file(folder / "model.safetensors")
    return {name.removeprefix("model."): tensor for name, tensor in found.items()}


def _vocabulary(folder: Path, lacking: str) -> dict[str, Any]:
    """Metadata of a tokenizer of :func:`tests.images.checkpoints.write_tokenizer`. A file has merges; here is
    one of bytes that no text has, whose token stands in place of another one."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    special = set(tokenizer.get_added_vocab())
    first, second = tokens[254:256]
    tokens[253] = first + second
    named = ["[PAD7]" if token == lacking else token for token in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": named,
        "tokenizer.ggml.token_type": [
            5 if token == "[PAD7]" else 3 if token in special else 1 for token in named
        ],
        "tokenizer.ggml.merges": [f"{first} {second}"],
        "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
        "tokenizer.chat_template": tokenizer.chat_template,
    }


def mmproj_parts(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The metadata and the tensors of the file with the encoder of a checkpoint."""
    config = json.loads((folder / "config.json").read_text())
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    vision, architecture = config["vision_config"], config["architectures"][0]
    patch = _first(vision["patch_size"])
    image = _first(vision.get("image_size") or round(vision["num_position_embeddings"] ** 0.5) * patch)
    keys: Any = gguf.Keys.ClipVision
    mean, std = _LEVELS.get(architecture, ([0.5] * 3, [0.5] * 3))
    metadata = {
        gguf.Keys.Clip.HAS_VISION_ENCODER: True,
        keys.PROJECTION_DIM: config["text_config"]["hidden_size"],
        keys.IMAGE_SIZE: image,
        keys.PATCH_SIZE: patch,
        keys.EMBEDDING_LENGTH: vision["hidden_size"],
        keys.FEED_FORWARD_LENGTH: vision["intermediate_size"],
        keys.BLOCK_COUNT: vision.get("num_hidden_layers") or vision["depth"],
        keys.Attention.HEAD_COUNT: vision.get("num_attention_heads") or vision["num_heads"],
        keys.Attention.LAYERNORM_EPS: vision.get("layer_norm_eps", 1e-6),
        keys.IMAGE_MEAN: settings.get("image_mean", mean),
        keys.IMAGE_STD: settings.get("image_std", std),
        keys.USE_GELU: True,
    }
    projector, scale = gguf.Keys.Clip.PROJECTOR_TYPE, keys.Projector.SCALE_FACTOR
    if architecture == "Gemma3ForConditionalGeneration":
        side = int(config["mm_tokens_per_image"] ** 0.5)
        metadata |= {projector: "gemma3", scale: image // patch // side}
    elif architecture == "Qwen3VLForConditionalGeneration":
        marked = [layer in vision["deepstack_visual_indexes"] for layer in range(vision["depth"])]
        metadata |= {projector: "qwen3vl_merger", keys.SPATIAL_MERGE_SIZE: vision["spatial_merge_size"]}
        metadata |= {keys.IS_DEEPSTACK_LAYERS: marked}
        # Not written by the converter: here they are not those of releases.
        edges = settings["size"]
        metadata |= {
            keys.IMAGE_MIN_PIXELS: edges["shortest_edge"],
            keys.IMAGE_MAX_PIXELS: edges["longest_edge"],
        }
    elif architecture == "InternVLForConditionalGeneration":
        tiles = {
            keys.PREPROC_MIN_TILES: settings["min_patches"],
            keys.PREPROC_MAX_TILES: settings["max_patches"],
        }
        metadata |= {projector: "internvl", scale: int(1 / config["downsample_ratio"]), **tiles}
    else:
        longest = {keys.PREPROC_IMAGE_SIZE: settings["size"]["longest_edge"]}
        metadata |= {projector: "idefics3", scale: config["scale_factor"], **longest}
    deep = vision.get("deepstack_visual_indexes", [])
    return metadata, _placed(folder, architecture, metadata[keys.BLOCK_COUNT], deep)


def _first(size: Any) -> int:
    found: int = size[0] if isinstance(size, list) else size
    return found


def _of_qwen(name: str, values: Any, names: Any, deep: list[int]) -> dict[str, Any]:
    """A tensor of Qwen3-VL, some of which the converter names by itself, or cuts."""
    end = name.rpartition(".")[2]
    if name == "visual.patch_embed.proj.weight":
        return {f"v.patch_embd.weight{second}": values[:, :, at] for at, second in enumerate(("", ".1"))}
    if name.startswith("visual.deepstack_merger_list."):
        _, _, number, part, _ = name.split(".")
        return {f"v.deepstack.{deep[int(number)]}.{part.removeprefix('linear_')}.{end}": values}
    for ours, theirs in {"linear_fc1": "mm.0", "linear_fc2": "mm.2", "norm": "v.post_ln"}.items():
        if name.startswith(f"visual.merger.{ours}"):
            return {f"{theirs}.{end}": values}
    return {names.get_name(name, (".weight", ".bias")): values}


def _placed(folder: Path, architecture: str, layers: int, deep: list[int]) -> dict[str, Any]:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, max(layers, 4))  # of projectors, too
    found: dict[str, Any] = {}
    for name, tensor in _tensors(folder).items():
        if name.startswith(tuple(_TEXTS)) or ".head." in name:
            continue
        if architecture.startswith("Qwen3VL"):
            found |= _of_qwen(name, tensor.float().numpy(), names, deep)
            continue
        released = name
        for ours, theirs in _RELEASED[architecture].items():
            released = released.replace(ours, theirs)
        place = names.get_name(released, (".weight", ".bias"))
        assert place is not None, released
        values = tensor.float().numpy()
        found[place] = values + 1 if "soft_emb_norm" in name else values
    return found
