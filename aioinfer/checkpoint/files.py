"""Checkpoint: the files of a model in either form: a directory of safetensors, or a GGUF file."""

from __future__ import annotations

import logging
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from aioinfer.checkpoint.tensors import SafetensorsTensors, Tensors, read_json_object, weight_files
from aioinfer.errors import ConfigError

if TYPE_CHECKING:
    from aioinfer.checkpoint.mmproj import Mmproj

__all__ = ["Checkpoint", "Directory", "GGUFCheckpoint", "checkpoint_at", "has_mmproj", "open_checkpoint"]

_log = logging.getLogger("aioinfer")


class Checkpoint(Protocol):
    """The files of a model. Methods raise ConfigError."""

    path: Path

    def config(self) -> dict[str, Any]:
        """The contents of config.json, or their equivalent."""

    def generation_config(self) -> dict[str, Any]:
        """The contents of generation_config.json; empty without one."""

    def tokenizer(self) -> Any | None:
        """A tokenizer of transformers; None if there is none."""

    def processor(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """The settings of the image processor, and the contents of processor_config.json; None: it has
        none."""

    def tensors(self) -> Tensors:
        """Its weights."""

    def files(self) -> list[Path]:
        """The files that decide the weights."""


class Directory:
    """A directory as the hub has it: config.json, safetensors, tokenizer."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def config(self) -> dict[str, Any]:
        return read_json_object(self.path / "config.json")

    def generation_config(self) -> dict[str, Any]:
        file = self.path / "generation_config.json"
        return read_json_object(file) if file.is_file() else {}

    def tokenizer(self) -> Any | None:
        from aioinfer.checkpoint.tokenizer_files import tokenizer_in

        tokenizer = tokenizer_in(self.path)
        if tokenizer is None:
            return None
        template = self.path / "chat_template.json"
        if not tokenizer.chat_template and template.is_file():
            # Of models with more than text; transformers reads it with their processors only.
            stated = read_json_object(template).get("chat_template")
            if not isinstance(stated, str):
                raise ConfigError(f"model: {template.name} has no chat_template that is text")
            tokenizer.chat_template = stated
        return tokenizer

    def processor(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        file, alone = self.path / "processor_config.json", self.path / "preprocessor_config.json"
        stated = read_json_object(file) if file.is_file() else {}
        # Newer files have the settings of all processors; transformers prefers them, too.
        within = stated.get("image_processor")
        if isinstance(within, dict):
            return within, stated
        return (read_json_object(alone), stated) if alone.is_file() else None

    def quantisation(self) -> Any | None:
        """How its weights are quantised: ``quantization_config``, or what stands for it; None: they are
        not."""
        from aioinfer.checkpoint.formats.stated import stated_quantisation

        return stated_quantisation(self.path, self.config())

    def tensors(self) -> Tensors:
        stored, quantisation = SafetensorsTensors(self.path), self.quantisation()
        if quantisation is None:
            return stored
        from aioinfer.checkpoint.formats import quantised_tensors

        return quantised_tensors(stored, quantisation)

    def files(self) -> list[Path]:
        from aioinfer.checkpoint.formats.stated import side_files

        return [self.path / "config.json", *side_files(self.path), *weight_files(self.path)]


class GGUFCheckpoint:
    """A GGUF file, which holds everything, or one with an image encoder beside it."""

    def __init__(self, path: Path, mmproj: Path | bool = False) -> None:
        """``mmproj``: the file of an image encoder; True: the one beside this file, if there is one and the
        files belong together."""
        self.path = path
        self._stated = mmproj

    @cached_property
    def _file(self) -> Any:
        try:
            from aioinfer.checkpoint.gguf.file import GGUFFile

            return GGUFFile(self.path)
        except ImportError as error:
            raise ConfigError(
                "model: GGUF files need the package gguf: pip install aioinfer[gguf]"
            ) from error

    @cached_property
    def mmproj(self) -> Mmproj | None:
        """Its image encoder. Raises ConfigError."""
        if self._stated is False:
            return None
        text = self._file
        from aioinfer.checkpoint.mmproj import Mmproj, NotItsEncoder, mmproj_beside

        if self._stated is not True:
            return Mmproj(self._stated, text)
        found = mmproj_beside(self.path)
        try:
            return None if found is None else Mmproj(found, text)
        except NotItsEncoder as error:
            _log.warning("%s reads no images: %s", self.path.name, str(error).removeprefix("mmproj: "))
            return None

    def config(self) -> dict[str, Any]:
        return self._text_config() if self.mmproj is None else self.mmproj.config()

    def _text_config(self) -> dict[str, Any]:
        from aioinfer.checkpoint.gguf.config import config_of

        return config_of(self._file)

    def generation_config(self) -> dict[str, Any]:
        return {}

    def tokenizer(self) -> Any | None:
        from aioinfer.checkpoint.gguf.tokenizer import tokenizer_of

        _ = self.mmproj  # which may name a token
        return tokenizer_of(self._file)

    def processor(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        return None if self.mmproj is None else self.mmproj.processor()

    def tensors(self) -> Tensors:
        """Those of the text model."""
        from aioinfer.checkpoint.gguf.tensors import GGUFTensors

        return GGUFTensors(self._file, self._text_config())

    def files(self) -> list[Path]:
        from aioinfer.checkpoint.gguf.file import parts_of

        return [*parts_of(self.path), *([] if self.mmproj is None else [self.mmproj.path])]


def open_checkpoint(path: Path, mmproj: Path | bool = False) -> Checkpoint:
    """The checkpoint in a directory or file. Raises ConfigError, with the kind of path that it is."""
    found = checkpoint_at(path, mmproj)
    if isinstance(found, Directory):
        _check_directory(path)
    return found


def checkpoint_at(path: Path, mmproj: Path | bool = False) -> Directory | GGUFCheckpoint:
    """The checkpoint that a path would be; the path is not checked. ``mmproj``: see
    :class:`GGUFCheckpoint`. Raises ConfigError if one is named for another kind of checkpoint."""
    if path.suffix == ".gguf" and path.is_file():
        return GGUFCheckpoint(path, mmproj)
    if isinstance(mmproj, Path):
        raise ConfigError(
            f"mmproj: is for models in GGUF files; {path.name} has its own image encoder, or none"
        )
    return Directory(path)


def has_mmproj(checkpoint: Checkpoint) -> bool:
    """Whether there is a second file, with an image encoder. Raises ConfigError."""
    return isinstance(checkpoint, GGUFCheckpoint) and checkpoint.mmproj is not None


def _check_directory(path: Path) -> None:
    """Raise ConfigError, with the kind of path that it is, unless it is a directory with a config.json."""
    try:
        found = path.is_dir()
        names = {entry.name for entry in path.iterdir()} if found else set()
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: {path} cannot be read: {error}") from error
    if found and "config.json" in names:
        return
    if "adapter_config.json" in names:
        raise ConfigError(
            f"model: {path} is a LoRA adapter, not a model; load its base, and the adapter into it"
        )
    if found:
        raise ConfigError(f"model: {path} has no config.json")
    if path.exists():
        raise ConfigError(
            f"model: {path} is a file; a GGUF file, or a directory with config.json and safetensors is needed"
        )
    raise ConfigError(f"model: there is no directory {path}")
