"""The families of image encoders in GGUF files: configs, settings of image processors, names of tensors.

Metadata are those that llama.cpp's converter writes; what they do not say is what releases of the family
have. Names: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from aioinfer.checkpoint.mmproj_file import MmprojFile
from aioinfer.errors import ConfigError, shown

__all__ = ["FAMILIES", "Family"]

Fields = dict[str, Any]
_PROJECTOR = "multi_modal_projector"
_SIGLIP = {
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}


class Family:
    """What the files of one kind of projector are; methods raise ConfigError."""

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    #: architectures of the text models
    texts: ClassVar[tuple[str, ...]]
    #: names in transformers of the tensors outside blocks, and where these have no ends, of whole ones
    names: ClassVar[Mapping[str, str]]
    #: where the blocks are, and the names of their tensors
    blocks: ClassVar[str]
    block: ClassVar[Mapping[str, str]]
    #: the metadata with the patches on a side of a position, and how many they are without it
    factor: ClassVar[tuple[str, int]] = ("projector.scale_factor", 2)
    #: a token that converters leave out of the vocabulary
    lacking: ClassVar[str | None] = None

    def config(self, file: MmprojFile) -> Fields:
        """Entries of the config that only this family has."""
        raise NotImplementedError

    def vision(self, file: MmprojFile) -> Fields:
        """The config of the encoder."""
        heads, width = file.size("attention.head_count"), file.size("embedding_length")
        image, patch, factor = file.size("image_size"), file.size("patch_size"), self.merged(file)
        if width % heads or image < patch * factor:
            raise ConfigError(
                f"mmproj: the sizes of {file.path.name} make no sense: {heads} heads of {width} elements, "
                f"patches of {patch} in images of {image} pixels, merged by {factor}"
            )
        return {
            "hidden_size": width,
            "num_hidden_layers": file.size("block_count"),
            "num_attention_heads": heads,
            "intermediate_size": file.size("feed_forward_length"),
            "layer_norm_eps": file.epsilon,
            "image_size": image,
            "patch_size": patch,
            "hidden_act": "gelu_pytorch_tanh",
        }

    def text(self, file: MmprojFile) -> Fields:
        """The config of the text model within that of the whole one."""
        return file.text_config

    def settings(self, file: MmprojFile) -> tuple[Fields, Fields]:
        """The settings of the image processor, but for the levels of colours, and the contents of
        processor_config.json."""
        raise NotImplementedError

    def merged(self, file: MmprojFile) -> int:
        """Patches on a side of a position."""
        return file.size(*self.factor)

    def length(self, file: MmprojFile) -> int:
        """Positions of a tile."""
        side = file.size("image_size") // file.size("patch_size") // self.merged(file)
        return side * side

    def deep(self, file: MmprojFile) -> list[int]:
        """The layers behind which there are features, too."""
        return []


class _Idefics3(Family):
    model_type, architecture, texts = "idefics3", "Idefics3ForConditionalGeneration", ("llama",)
    names: ClassVar[Mapping[str, str]] = {
        "v.patch_embd": "vision_model.embeddings.patch_embedding",
        "v.position_embd": "vision_model.embeddings.position_embedding",
        "v.post_ln": "vision_model.post_layernorm",
        "mm.model.fc": "connector.modality_projection.proj",
    }
    blocks, block = "vision_model.encoder.layers", _SIGLIP

    def config(self, file: MmprojFile) -> Fields:
        return {"image_token_id": file.token("<image>"), "scale_factor": self.merged(file)}

    def settings(self, file: MmprojFile) -> tuple[Fields, Fields]:
        image = file.size("image_size")
        settings = {
            "image_processor_type": "Idefics3ImageProcessor",
            "size": {"longest_edge": file.size("preproc_image_size", 4 * image)},
            "max_image_size": {"longest_edge": image},
        }
        return settings, {"image_seq_len": self.length(file)}


class _Gemma3(Family):
    model_type, architecture, texts = "gemma3", "Gemma3ForConditionalGeneration", ("gemma3",)
    names: ClassVar[Mapping[str, str]] = {
        "v.patch_embd": "vision_tower.embeddings.patch_embedding",
        "v.position_embd": "vision_tower.embeddings.position_embedding",
        "v.post_ln": "vision_tower.post_layernorm",
        "mm.input_projection": f"{_PROJECTOR}.mm_input_projection",
        "mm.soft_emb_norm": f"{_PROJECTOR}.mm_soft_emb_norm",
    }
    blocks, block = "vision_tower.encoder.layers", _SIGLIP
    factor, lacking = ("projector.scale_factor", 4), "<image_soft_token>"

    def config(self, file: MmprojFile) -> Fields:
        tokens = {"boi": "<start_of_image>", "eoi": "<end_of_image>", "image": "<image_soft_token>"}
        indices = {f"{name}_token_index": file.token(token) for name, token in tokens.items()}
        return {**indices, "mm_tokens_per_image": self.length(file)}

    def settings(self, file: MmprojFile) -> tuple[Fields, Fields]:
        size = dict.fromkeys(("height", "width"), file.size("image_size"))
        settings = {"image_processor_type": "Gemma3ImageProcessor", "size": size}
        return settings, {"image_seq_length": self.length(file)}


class _InternVL(Family):
    model_type, architecture = "internvl", "InternVLForConditionalGeneration"
    texts = ("llama", "qwen2", "qwen3")
    names: ClassVar[Mapping[str, str]] = {
        "v.class_embd": "vision_tower.embeddings.cls_token",
        "v.position_embd.weight": "vision_tower.embeddings.position_embeddings",
        "v.patch_embd": "vision_tower.embeddings.patch_embeddings.projection",
        "mm.model.mlp.0": f"{_PROJECTOR}.layer_norm",
        "mm.model.mlp.1": f"{_PROJECTOR}.linear_1",
        "mm.model.mlp.3": f"{_PROJECTOR}.linear_2",
    }
    blocks = "vision_tower.encoder.layer"
    block: ClassVar[Mapping[str, str]] = {
        "ln1": "layernorm_before",
        "ln2": "layernorm_after",
        **{f"attn_{part}": f"attention.{part}_proj" for part in "qkv"},
        **{f"attn_{part}_norm": f"attention.{part}_norm" for part in "qk"},
        "attn_out": "attention.projection_layer",
        "ffn_up": "mlp.fc1",
        "ffn_down": "mlp.fc2",
        "ls1": "lambda_1",
        "ls2": "lambda_2",
    }

    def config(self, file: MmprojFile) -> Fields:
        return {"image_token_id": file.token("<IMG_CONTEXT>"), "downsample_ratio": 1 / self.merged(file)}

    def vision(self, file: MmprojFile) -> Fields:
        found = super().vision(file)
        return {
            **found,
            "image_size": [found["image_size"]] * 2,
            "patch_size": [found["patch_size"]] * 2,
            "hidden_act": "silu" if file.value("clip.use_silu", bool, False) else "gelu",
            "attention_bias": file.has("v.blk.0.attn_q.bias"),
            "use_qk_norm": file.has("v.blk.0.attn_q_norm.weight"),
            "norm_type": "layer_norm" if file.has("v.blk.0.ln1.bias") else "rms_norm",
        }

    def settings(self, file: MmprojFile) -> tuple[Fields, Fields]:
        settings = {
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": dict.fromkeys(("height", "width"), file.size("image_size")),
            "min_patches": file.size("preproc_min_tiles", 1),
            "max_patches": file.size("preproc_max_tiles", 12),
        }
        return settings, {"image_seq_length": self.length(file)}


class _Qwen3VL(Family):
    model_type, architecture, texts = "qwen3_vl", "Qwen3VLForConditionalGeneration", ("qwen3vl",)
    names: ClassVar[Mapping[str, str]] = {
        "v.patch_embd": "visual.patch_embed.proj",
        "v.position_embd": "visual.pos_embed",
        "v.post_ln": "visual.merger.norm",
        "mm.0": "visual.merger.linear_fc1",
        "mm.2": "visual.merger.linear_fc2",
    }
    blocks = "visual.blocks"
    block: ClassVar[Mapping[str, str]] = {
        "ln1": "norm1",
        "ln2": "norm2",
        "attn_qkv": "attn.qkv",
        "attn_out": "attn.proj",
        "ffn_up": "mlp.linear_fc1",
        "ffn_down": "mlp.linear_fc2",
    }
    factor = "spatial_merge_size", 2

    def config(self, file: MmprojFile) -> Fields:
        tokens = {
            "image_token_id": "<|image_pad|>",
            "video_token_id": "<|video_pad|>",
            "vision_start_token_id": "<|vision_start|>",
            "vision_end_token_id": "<|vision_end|>",
        }
        return {name: file.token(token) for name, token in tokens.items()}

    def vision(self, file: MmprojFile) -> Fields:
        found = super().vision(file)
        return {
            "hidden_size": found["hidden_size"],
            "intermediate_size": found["intermediate_size"],
            "hidden_act": found["hidden_act"],
            "patch_size": found["patch_size"],
            "depth": found["num_hidden_layers"],
            "num_heads": found["num_attention_heads"],
            "out_hidden_size": file.size("projection_dim"),
            "spatial_merge_size": self.merged(file),
            "temporal_patch_size": 2,
            "num_position_embeddings": (found["image_size"] // found["patch_size"]) ** 2,
            "deepstack_visual_indexes": self.deep(file),
        }

    def text(self, file: MmprojFile) -> Fields:
        sections = file.text.value("qwen3vl.rope.dimension_sections", list)[:3]
        if (
            not all(isinstance(each, int) for each in sections)
            or 2 * sum(sections) != file.text_config["head_dim"]
        ):
            raise ConfigError(f"model: qwen3vl.rope.dimension_sections of the GGUF file is {shown(sections)}")
        rope = {**file.text_config["rope_parameters"], "mrope_section": sections, "mrope_interleaved": True}
        return {**file.text_config, "model_type": "qwen3_vl_text", "rope_parameters": rope}

    def settings(self, file: MmprojFile) -> tuple[Fields, Fields]:
        square = (file.size("patch_size") * self.merged(file)) ** 2
        settings = {
            "image_processor_type": "Qwen2VLImageProcessor",
            "size": {
                # From 64 to 16384 positions.
                "shortest_edge": file.size("image_min_pixels", 64 * square),
                "longest_edge": file.size("image_max_pixels", 16384 * square),
            },
            "patch_size": file.size("patch_size"),
            "temporal_patch_size": 2,
            "merge_size": self.merged(file),
        }
        return settings, {}

    def deep(self, file: MmprojFile) -> list[int]:
        flags: list[Any] = file.value("clip.vision.is_deepstack_layers", list, [])
        return [layer for layer, flag in enumerate(flags) if flag is True]


#: by ``clip.projector_type``
FAMILIES: dict[str, Family] = {
    "idefics3": _Idefics3(),
    "gemma3": _Gemma3(),
    "internvl": _InternVL(),
    "qwen3vl_merger": _Qwen3VL(),
}
