"""Mmproj: the image encoder of a GGUF file, which llama.cpp's converter puts into a file of its own.

Of its metadata (``clip.``), its tensors (``v.`` and ``mm.``) and the text model's file follow the config, the
settings of the image processor, and the tensors of a checkpoint as transformers has it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aioinfer.checkpoint.gguf.file import GGUFFile
from aioinfer.checkpoint.gguf.tensors import StoredTensors
from aioinfer.checkpoint.mmproj_families import FAMILIES, Family
from aioinfer.checkpoint.mmproj_file import MmprojFile, NotItsEncoder
from aioinfer.errors import ConfigError, shown

if TYPE_CHECKING:
    import torch

__all__ = ["Mmproj", "NotItsEncoder", "mmproj_beside"]

_BLOCK = re.compile(r"v\.(blk|deepstack)\.(\d+)\.(\w+)\.(weight|bias)")
_MERGER = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}
#: tensors of three sizes, the first of which are 1 and may be left out
_OF_THREE = ("vision_tower.embeddings.cls_token", "vision_tower.embeddings.position_embeddings")
#: a norm whose weight is less by 1 in transformers
_PLUS_ONE = "multi_modal_projector.mm_soft_emb_norm.weight"
#: the end of the name of the second half of a convolution in three dimensions
_SECOND = ".1"


class Mmproj:
    """An image encoder beside a text model."""

    def __init__(self, path: Path, text: GGUFFile) -> None:
        """``text``: the text model's file; to its vocabulary a token is added if the encoder needs one that
        converters leave out. Raises ConfigError, of the kind NotItsEncoder if the files do not belong
        together."""
        self.path = path
        self._file = MmprojFile(path, text)
        self._family = _family(self._file)
        if self._family.lacking is not None:
            self._file.add_token(self._family.lacking)

    def config(self) -> dict[str, Any]:
        """The config.json of the whole model. Raises ConfigError."""
        file, family, text = self._file, self._family, self._file.text_config
        return {
            "model_type": family.model_type,
            "architectures": [family.architecture],
            "text_config": family.text(file),
            "vision_config": family.vision(file),
            **{name: text[name] for name in ("tie_word_embeddings", "dtype", "bos_token_id", "eos_token_id")},
            **family.config(file),
        }

    def processor(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The settings of its image processor, and the contents of processor_config.json. Raises
        ConfigError."""
        settings, processor = self._family.settings(self._file)
        levels = {name: self._file.levels(name) for name in ("image_mean", "image_std")}
        if 0 in levels["image_std"]:
            raise ConfigError(f"mmproj: clip.vision.image_std of {self.path.name} has a 0")
        return {**settings, **levels}, processor

    def tensors(self) -> StoredTensors:
        """Its weights, under transformers' names. Raises ConfigError."""
        names, swapped, deep = {}, self._swapped(), self._family.deep(self._file)
        for stored in self._file.file.tensors:
            if stored.endswith(_SECOND) and self._file.has(stored.removesuffix(_SECOND)):
                continue
            own = _own_name(stored, self._family, swapped, deep)
            if own is None:
                raise ConfigError(
                    f"mmproj: {self.path.name} has a tensor {shown(stored)}, which is not known"
                )
            names[own] = stored
        return _MmprojTensors(self._file.file, names)

    def _swapped(self) -> dict[str, str]:
        """The names of both products of feed-forward parts, which old files have the other way round."""
        up = self._file.file.tensors.get("v.blk.0.ffn_up.weight")
        width, middle = self._file.size("embedding_length"), self._file.size("feed_forward_length")
        if up is not None and up.shape == (width, middle) != (middle, width):
            return {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
        return {}


def _family(file: MmprojFile) -> Family:
    """Raises ConfigError if the encoder is none for the text model."""
    name, stated = file.path.name, file.text.value("general.architecture", str)
    family = FAMILIES.get(file.projector)
    if family is None:
        raise NotItsEncoder(
            f"mmproj: projectors of the type {shown(file.projector)} are not supported: "
            f"{', '.join(FAMILIES)} are"
        )
    if stated not in family.texts:
        raise NotItsEncoder(
            f"mmproj: {name} is of {family.architecture}, whose text models are of the architecture "
            f"{' or '.join(family.texts)}, not {shown(stated)}"
        )
    hidden, dimension = file.text_config["hidden_size"], file.size("projection_dim")
    if dimension != hidden:
        raise NotItsEncoder(
            f"mmproj: {name} belongs to another model: its features have {dimension} elements, the text "
            f"model has {hidden}"
        )
    return family


def _own_name(stored: str, family: Family, swapped: Mapping[str, str], deep: list[int]) -> str | None:
    """transformers' name of a tensor; None: there is none."""
    match = _BLOCK.fullmatch(stored)
    if match is None:
        stem, _, end = stored.rpartition(".")
        return family.names.get(stored) or (f"{family.names[stem]}.{end}" if stem in family.names else None)
    kind, layer, part, end = match[1], int(match[2]), match[3], match[4]
    if kind == "deepstack":
        known = part in _MERGER and layer in deep
        return f"visual.deepstack_merger_list.{deep.index(layer)}.{_MERGER[part]}.{end}" if known else None
    own = family.block.get(swapped.get(part, part))
    if own is None:
        return None
    # Factors of outputs are no weights there.
    return f"{family.blocks}.{layer}.{own}" + ("" if own.startswith("lambda_") else f".{end}")


class _MmprojTensors(StoredTensors):
    def __init__(self, file: GGUFFile, names: Mapping[str, str]) -> None:
        """``names``: in the file, by transformers'."""
        super().__init__({own: file.tensors[stored] for own, stored in names.items()})
        seconds = {own: file.tensors.get(f"{stored}{_SECOND}") for own, stored in names.items()}
        #: second halves of convolutions in time, by the names of the first ones
        self._seconds = StoredTensors({own: second for own, second in seconds.items() if second is not None})

    def shape(self, name: str) -> tuple[int, ...]:
        shape = super().shape(name)
        if name in self._seconds.names:
            return (*shape[:2], 2, *shape[2:])
        return (1,) * (3 - len(shape)) + shape if name in _OF_THREE else shape

    def read(self, name: str) -> torch.Tensor:
        tensor = super().read(name)
        if name in self._seconds.names:
            import torch

            return torch.stack((tensor, self._seconds.read(name)), dim=2)
        return tensor.float() - 1 if name == _PLUS_ONE else tensor.reshape(self.shape(name))


def mmproj_beside(path: Path) -> Path | None:
    """The file with the image encoder beside a GGUF file, by its name; None: there is none. Raises
    ConfigError if there are several."""
    found = sorted(file for file in path.parent.glob("*.gguf") if "mmproj" in file.name.lower())
    found = [file for file in found if file.name != path.name and file.is_file()]
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ConfigError(f"mmproj: there are several beside {path.name}, name one: {names}")
    return found[0] if found else None
