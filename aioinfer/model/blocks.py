"""Blocks: the parameters of a block diffusion model, besides its shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aioinfer.errors import ConfigError

__all__ = ["Blocks", "choose_blocks"]


@dataclass(frozen=True, slots=True)
class Blocks:
    """A model that generates ``size`` positions at a time. Unknown positions hold the mask token."""

    #: positions of a block, a power of two
    size: int
    mask_token_id: int


def choose_blocks(config: Any, usual: Blocks, size: int | None = None) -> Blocks:
    """The blocks of a model, from its config.

    Args:
        config: its config.json, as transformers reads it.
        usual: the values of its family, for what the config does not state.
        size: positions of a block; overrides the config if not None.

    Raises:
        ConfigError: if the size is no power of two, or the mask token is outside the vocabulary.
    """
    name = config.architectures[0]
    stated = getattr(config, "block_size", None)
    source = "block_size" if size is not None or stated is None else "the config's block_size"
    size = next(value for value in (size, stated, usual.size) if value is not None)
    if not _is_count(size) or size < 1 or size & (size - 1):
        raise ConfigError(f"model: {source} of {name} must be a power of two, got {size!r}")
    mask = getattr(config, "mask_token_id", None)
    if mask is None:
        mask = usual.mask_token_id
    if not _is_count(mask) or not 0 <= mask < config.vocab_size:
        raise ConfigError(
            f"model: the mask token of {name} would be {mask!r}, outside its {config.vocab_size} tokens:"
            " config.json must state its mask_token_id"
        )
    return Blocks(size, mask)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
