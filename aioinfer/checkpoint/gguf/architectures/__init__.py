"""The architectures of GGUF files that are read: what each adds to the config, and how it stores weights.

Defaults of metadata that a file leaves out are those of llama.cpp, which its converter relies on:
https://github.com/ggml-org/llama.cpp/tree/master/src/models
"""

from __future__ import annotations

from aioinfer.checkpoint.gguf.architectures import (
    deepseek,
    dense,
    gemma,
    gemma4,
    gpt_oss,
    hybrid,
    llama,
    mamba,
    mixtures,
    others,
    qwen,
)
from aioinfer.checkpoint.gguf.architectures.base import Architecture
from aioinfer.checkpoint.gguf.file import GGUFFile
from aioinfer.errors import ConfigError, shown

__all__ = ["architecture_of"]

_ARCHITECTURES: dict[str, Architecture] = {
    name: architecture
    for family in (llama, qwen, gemma, gemma4, gpt_oss, hybrid, mamba, deepseek, dense, mixtures, others)
    for name, architecture in family.ARCHITECTURES.items()
}


def architecture_of(file: GGUFFile) -> Architecture:
    """Raises ConfigError if it is not read."""
    stated = file.value("general.architecture", str)
    found = _ARCHITECTURES.get(stated)
    if found is None:
        raise ConfigError(
            f"model: GGUF files of the architecture {shown(stated)} are not supported: "
            f"{', '.join(sorted(_ARCHITECTURES))} are"
        )
    return found
