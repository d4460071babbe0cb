"""Mmproj: the image encoder of a GGUF file, which llama.cpp's converter puts into a file of its own.

Of its metadata (``clip.``), its tensors (``v.`` and ``mm.``) and the text model's file follow the config, the
settings of the image processor, and the tensors of a checkpoint as transformers has it. What metadata do not
state is what releases of the family have.
Names: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from aioinfer.checkpoint.gguf_config import CONTROL, config_of
from aioinfer.checkpoint.gguf_file import GGUFFile
from aioinfer.checkpoint.gguf_tensors import StoredTensors
from aioinfer.errors import ConfigError, shown

if TYPE_CHECKING:
    import torch

__all__ = ["Mmproj", "NotItsEncoder", "mmproj_beside"]

_NUMBER = (int, float)
_KINDS = "tokenizer.ggml.token_type"
_BLOCK = re.compile(r"v\.blk\.(\d+)\.(\w+)\.(weight|bias)")
#: texts of tokens that no text has
_UNUSED = re.compile(r"\[PAD\d+\]|<unused\d+>")
#: names of the tensors of a block
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
_INTERN = {
    "ln1": "layernorm_before",
    "ln2": "layernorm_after",
    "attn_q": "attention.q_proj",
    "attn_k": "attention.k_proj",
    "attn_v": "attention.v_proj",
    "attn_q_norm": "attention.q_norm",
    "attn_k_norm": "attention.k_norm",
    "attn_out": "attention.projection_layer",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
    "ls1": "lambda_1",
    "ls2": "lambda_2",
}
#: tensors of three sizes, the first of which are 1 and may be left out
_OF_THREE = ("vision_tower.embeddings.cls_token", "vision_tower.embeddings.position_embeddings")
_PLUS_ONE = "multi_modal_projector.mm_soft_emb_norm.weight"


class NotItsEncoder(ConfigError):
    """The file is whole, and its encoder is none for this text model, or none that is supported."""


@dataclass(frozen=True, slots=True)
class _Family:
    """What the files of one kind of projector are."""

    model_type: str
    architecture: str
    #: architectures of the text models
    texts: tuple[str, ...]
    #: names of the tensors outside blocks, with their ends where these differ
    names: Mapping[str, str]
    #: where the blocks are, and the names of their tensors
    blocks: str
    block: Mapping[str, str]
    #: further entries of the config, and of vision_config
    config: Callable[[Mmproj], dict[str, Any]]
    vision: Callable[[Mmproj], dict[str, Any]]
    #: the settings of the image processor, and of the processor
    settings: Callable[[Mmproj], tuple[dict[str, Any], dict[str, Any]]]
    #: patches on a side of a position, where the file does not say
    factor: int
    #: a token that a converted vocabulary may lack
    lacking: str | None = None


class Mmproj:
    """An image encoder beside a text model."""

    def __init__(self, path: Path, text: GGUFFile) -> None:
        """``text``: the text model's file; to its vocabulary a token is added if the encoder needs one that
        converters leave out. Raises ConfigError, of the kind NotItsEncoder if the files do not belong
        together."""
        self.path = path
        try:
            self.file = GGUFFile(path)
        except ConfigError as error:
            raise ConfigError(f"mmproj: {str(error).removeprefix('model: ')}") from error
        self._text = config_of(text)
        self._family = self._found(text)
        self.layers, self.width = self.size("block_count"), self.size("embedding_length")
        self.image, self.patch = self.size("image_size"), self.size("patch_size")
        self.factor = self.size("projector.scale_factor", self._family.factor)
        heads = self.size("attention.head_count")
        if self.width % heads or self.image < self.patch * self.factor:
            raise ConfigError(
                f"mmproj: the sizes of {path.name} make no sense: {heads} heads of {self.width} elements, "
                f"patches of {self.patch} in images of {self.image} pixels, merged by {self.factor}"
            )
        self._tokens = self._vocabulary(text)

    def _found(self, text: GGUFFile) -> _Family:
        """The family. Raises ConfigError."""
        name, stated = self.path.name, text.value("general.architecture", str)
        architecture = self._value("general.architecture", str)
        if architecture != "clip":
            raise ConfigError(
                f"mmproj: {name} holds a model of the architecture {shown(architecture)}, no image encoder"
            )
        if not self._value("clip.has_vision_encoder", bool, False):
            raise NotItsEncoder(f"mmproj: {name} has no image encoder")
        kind = self._value("clip.projector_type", str, self._value("clip.vision.projector_type", str, ""))
        family = _FAMILIES.get(kind)
        if family is None:
            known = ", ".join(_FAMILIES)
            raise NotItsEncoder(
                f"mmproj: projectors of the type {shown(kind)} are not supported: {known} are"
            )
        if stated not in family.texts:
            raise NotItsEncoder(
                f"mmproj: {name} is of {family.architecture}, whose text models are of the architecture "
                f"{' or '.join(family.texts)}, not {shown(stated)}"
            )
        hidden, dimension = self._text["hidden_size"], self.size("projection_dim")
        if dimension != hidden:
            raise NotItsEncoder(
                f"mmproj: {name} belongs to another model: its features have {dimension} elements, the text "
                f"model has {hidden}"
            )
        return family

    def _value(self, name: str, kind: Any, default: Any = None) -> Any:
        """The metadata of a name. Raises ConfigError."""
        try:
            return self.file.value(name, kind, default)
        except ConfigError as error:
            text = str(error).removeprefix("model: ").replace("the GGUF file", self.path.name)
            raise ConfigError(f"mmproj: {text}") from error

    def size(self, name: str, default: int | None = None) -> int:
        """A positive number of ``clip.vision``. Raises ConfigError."""
        found: int = self._value(f"clip.vision.{name}", int, default)
        if found < 1:
            raise ConfigError(f"mmproj: clip.vision.{name} of {self.path.name} is {found}")
        return found

    def levels(self, name: str) -> list[float]:
        """Three numbers of ``clip.vision``, one of a colour each. Raises ConfigError."""
        found: list[Any] = self._value(f"clip.vision.{name}", list)
        if len(found) != 3 or not all(isinstance(each, float) and math.isfinite(each) for each in found):
            raise ConfigError(f"mmproj: clip.vision.{name} of {self.path.name} is {shown(found)}")
        return [_decimal(each) for each in found]

    @property
    def side(self) -> int:
        """Positions on a side of a tile."""
        return self.image // self.patch // self.factor

    def token(self, text: str) -> int:
        """The id of a token. Raises ConfigError."""
        if text not in self._tokens:
            raise NotItsEncoder(f"mmproj: the vocabulary of the GGUF file has no token {text}")
        return self._tokens[text]

    def has(self, name: str) -> bool:
        """Whether the file has a tensor."""
        return name in self.file.tensors

    def _vocabulary(self, text: GGUFFile) -> dict[str, int]:
        """Ids by texts of tokens, with the one that is lacking in place of an unused one."""
        tokens, lacking = text.metadata.get("tokenizer.ggml.tokens", []), self._family.lacking
        if lacking is not None and lacking not in tokens:
            unused = [at for at, token in enumerate(tokens) if _UNUSED.fullmatch(token)]
            if not unused:
                raise NotItsEncoder(f"mmproj: the vocabulary of the GGUF file has no token {lacking}")
            tokens[unused[-1]] = lacking
            kinds = text.metadata.get(_KINDS, [])
            if len(kinds) == len(tokens):
                kinds[unused[-1]] = CONTROL
        return {token: at for at, token in enumerate(tokens)}

    def config(self) -> dict[str, Any]:
        """The config.json of the whole model. Raises ConfigError."""
        text, family = self._text, self._family
        return {
            "model_type": family.model_type,
            "architectures": [family.architecture],
            "text_config": text,
            "vision_config": {
                "hidden_size": self.width,
                "num_hidden_layers": self.layers,
                "num_attention_heads": self.size("attention.head_count"),
                "intermediate_size": self.size("feed_forward_length"),
                "layer_norm_eps": _decimal(self._value("clip.vision.attention.layer_norm_epsilon", _NUMBER)),
                **family.vision(self),
            },
            **{name: text[name] for name in ("tie_word_embeddings", "dtype", "bos_token_id", "eos_token_id")},
            **family.config(self),
        }

    def processor(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The settings of its image processor, and the contents of processor_config.json. Raises
        ConfigError."""
        settings, processor = self._family.settings(self)
        levels = {name: self.levels(name) for name in ("image_mean", "image_std")}
        if 0 in levels["image_std"]:
            raise ConfigError(f"mmproj: clip.vision.image_std of {self.path.name} has a 0")
        return {**settings, **levels}, processor

    def tensors(self) -> StoredTensors:
        """Its weights, under transformers' names. Raises ConfigError."""
        return _MmprojTensors(self.file, self._own_names())

    def _own_names(self) -> dict[str, str]:
        """Names in the file, by transformers'. Raises ConfigError."""
        names = {}
        swapped = self._swapped()
        for stored in self.file.tensors:
            own = self._own_name(stored, swapped)
            if own is None:
                raise ConfigError(
                    f"mmproj: {self.path.name} has a tensor {shown(stored)}, which is not known"
                )
            names[own] = stored
        return names

    def _own_name(self, stored: str, swapped: dict[str, str]) -> str | None:
        family, match = self._family, _BLOCK.fullmatch(stored)
        if match is None:
            stem, _, kind = stored.rpartition(".")
            whole = family.names.get(stored)
            return whole or (f"{family.names[stem]}.{kind}" if stem in family.names else None)
        layer, part, kind = match.groups()
        own = family.block.get(swapped.get(part, part))
        found = f"{family.blocks}.{layer}.{own}.{kind}"
        return None if own is None else found.removesuffix(".weight") if own.startswith("lambda") else found

    def _swapped(self) -> dict[str, str]:
        """The names of both products of feed-forward parts, which old files have the other way round."""
        up = self.file.tensors.get("v.blk.0.ffn_up.weight")
        middle = self.size("feed_forward_length")
        if up is not None and up.shape == (self.width, middle) != (middle, self.width):
            return {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
        return {}


class _MmprojTensors(StoredTensors):
    def __init__(self, file: GGUFFile, names: Mapping[str, str]) -> None:
        """``names``: in the file, by transformers'."""
        super().__init__()
        self._stored = {own: file.tensors[stored] for own, stored in names.items()}

    def shape(self, name: str) -> tuple[int, ...]:
        shape = super().shape(name)
        return (1,) * (3 - len(shape)) + shape if name in _OF_THREE else shape

    def read(self, name: str) -> torch.Tensor:
        tensor = super().read(name).reshape(self.shape(name))
        return tensor.float() - 1 if name == _PLUS_ONE else tensor


def mmproj_beside(path: Path) -> Path | None:
    """The file with the image encoder beside a GGUF file, by its name; None: there is none. Raises
    ConfigError if there are several."""
    found = sorted(file for file in path.parent.glob("*.gguf") if "mmproj" in file.name.lower())
    found = [file for file in found if file.name != path.name]
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ConfigError(f"mmproj: there are several beside {path.name}, name one: {names}")
    return found[0] if found else None


def _decimal(value: float) -> float:
    """The number of which a file has the float32."""
    return float(str(np.float32(value)))


# -- families ------------------------------------------------------------------------------------------


def _square(file: Mmproj) -> dict[str, Any]:
    return {"image_size": file.image, "patch_size": file.patch, "hidden_act": "gelu_pytorch_tanh"}


def _idefics3_config(file: Mmproj) -> dict[str, Any]:
    return {"image_token_id": file.token("<image>"), "scale_factor": file.factor}


def _idefics3_settings(file: Mmproj) -> tuple[dict[str, Any], dict[str, Any]]:
    settings = {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": file.size("preproc_image_size", 4 * file.image)},
        "max_image_size": {"longest_edge": file.image},
    }
    return settings, {"image_seq_len": file.side**2}


def _gemma3_config(file: Mmproj) -> dict[str, Any]:
    tokens = {"boi": "<start_of_image>", "eoi": "<end_of_image>", "image": _SOFT}
    indices = {f"{name}_token_index": file.token(token) for name, token in tokens.items()}
    return {**indices, "mm_tokens_per_image": file.side**2}


def _gemma3_settings(file: Mmproj) -> tuple[dict[str, Any], dict[str, Any]]:
    size = {"height": file.image, "width": file.image}
    settings = {"image_processor_type": "Gemma3ImageProcessor", "size": size}
    return settings, {"image_seq_length": file.side**2}


def _internvl_config(file: Mmproj) -> dict[str, Any]:
    return {"image_token_id": file.token("<IMG_CONTEXT>"), "downsample_ratio": 1 / file.factor}


def _internvl_vision(file: Mmproj) -> dict[str, Any]:
    silu = file.file.metadata.get("clip.use_silu") is True
    return {
        "image_size": [file.image] * 2,
        "patch_size": [file.patch] * 2,
        "hidden_act": "silu" if silu else "gelu",
        "attention_bias": file.has("v.blk.0.attn_q.bias"),
        "use_qk_norm": file.has("v.blk.0.attn_q_norm.weight"),
        "norm_type": "layer_norm" if file.has("v.blk.0.ln1.bias") else "rms_norm",
    }


def _internvl_settings(file: Mmproj) -> tuple[dict[str, Any], dict[str, Any]]:
    settings = {
        "image_processor_type": "GotOcr2ImageProcessor",
        "size": {"height": file.image, "width": file.image},
        "min_patches": file.size("preproc_min_tiles", 1),
        "max_patches": file.size("preproc_max_tiles", 12),
    }
    return settings, {"image_seq_length": file.side**2}


_SOFT = "<image_soft_token>"
_PROJECTOR = "multi_modal_projector"


def _siglip_names(prefix: str) -> dict[str, str]:
    names = {"patch_embd": "embeddings.patch_embedding", "position_embd": "embeddings.position_embedding"}
    return {f"v.{name}": f"{prefix}.{own}" for name, own in {**names, "post_ln": "post_layernorm"}.items()}


_FAMILIES = {
    "idefics3": _Family(
        model_type="idefics3",
        architecture="Idefics3ForConditionalGeneration",
        texts=("llama",),
        names={**_siglip_names("vision_model"), "mm.model.fc": "connector.modality_projection.proj"},
        blocks="vision_model.encoder.layers",
        block=_SIGLIP,
        config=_idefics3_config,
        vision=_square,
        settings=_idefics3_settings,
        factor=2,
    ),
    "gemma3": _Family(
        model_type="gemma3",
        architecture="Gemma3ForConditionalGeneration",
        texts=("gemma3",),
        names={
            **_siglip_names("vision_tower"),
            "mm.input_projection": f"{_PROJECTOR}.mm_input_projection",
            "mm.soft_emb_norm": f"{_PROJECTOR}.mm_soft_emb_norm",
        },
        blocks="vision_tower.encoder.layers",
        block=_SIGLIP,
        config=_gemma3_config,
        vision=_square,
        settings=_gemma3_settings,
        factor=4,
        lacking=_SOFT,
    ),
    "internvl": _Family(
        model_type="internvl",
        architecture="InternVLForConditionalGeneration",
        texts=("llama", "qwen2", "qwen3"),
        names={
            "v.class_embd": "vision_tower.embeddings.cls_token",
            "v.position_embd.weight": "vision_tower.embeddings.position_embeddings",
            "v.patch_embd": "vision_tower.embeddings.patch_embeddings.projection",
            "mm.model.mlp.0": f"{_PROJECTOR}.layer_norm",
            "mm.model.mlp.1": f"{_PROJECTOR}.linear_1",
            "mm.model.mlp.3": f"{_PROJECTOR}.linear_2",
        },
        blocks="vision_tower.encoder.layer",
        block=_INTERN,
        config=_internvl_config,
        vision=_internvl_vision,
        settings=_internvl_settings,
        factor=2,
    ),
}
