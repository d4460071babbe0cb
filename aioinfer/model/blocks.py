"""Blocks: the parameters of a block diffusion model, besides its shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aioinfer.errors import ConfigError

__all__ = ["Blocks", "choose_blocks"]


@dataclass(frozen=True, slots=True)
class Blocks:
    """A model that generates ``size`` positions at a time. Unknown positions hold the mask token, or, where
    blocks are canvases, random ones."""

    #: positions of a block, a power of two
    size: int
    mask_token_id: int
    #: tokens that delete a position and that split it in two (LLaDA2.2); None: the model has none
    edit_token_ids: tuple[int, int] | None = None
    #: see :attr:`~aioinfer.model.spec.ModelSpec.canvas`; there is no mask token then, and its id is not read
    canvas: bool = False


def choose_blocks(config: Any, usual: Blocks, size: int | None = None) -> Blocks:
    """The blocks of a model, from its config.

    Args:
        config: its config.json, as transformers reads it.
        usual: the values of its family, for what the config does not state.
        size: positions of a block; overrides the config if not None.

    Raises:
        ConfigError: if the size is no power of two, or a token is outside the vocabulary or has two meanings.
    """
    name = config.architectures[0]
    field = "canvas_length" if usual.canvas else "block_size"
    stated = getattr(config, field, None)
    source = "block_size" if size is not None or stated is None else f"the config's {field}"
    size = next(value for value in (size, stated, usual.size) if value is not None)
    if not _is_count(size) or size < 1 or size & (size - 1):
        raise ConfigError(f"model: {source} of {name} must be a power of two, got {size!r}")
    if usual.canvas:
        return Blocks(size, usual.mask_token_id, canvas=True)
    mask = getattr(config, "mask_token_id", None)
    if mask is None:
        mask = usual.mask_token_id
    if not _is_count(mask) or not 0 <= mask < config.vocab_size:
        raise ConfigError(
            f"model: the mask token of {name} would be {mask!r}, outside its {config.vocab_size} tokens:"
            " config.json must state its mask_token_id"
        )
    return Blocks(size, mask, _edit_tokens(config, mask))


def _edit_tokens(config: Any, mask: int) -> tuple[int, int] | None:
    delete: Any = getattr(config, "delete_token_id", None)
    split: Any = getattr(config, "split_token_id", None)
    if delete is None and split is None:
        return None
    valid = all(_is_count(token) and 0 <= token < config.vocab_size for token in (delete, split))
    if not valid or len({delete, split, mask}) < 3:
        raise ConfigError(
            f"model: delete_token_id and split_token_id of {config.architectures[0]} must be two tokens of "
            f"its {config.vocab_size}, and not the mask; got {delete!r} and {split!r}"
        )
    return delete, split


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
