"""Checks of a draft model before any weights are read: it must mean the same tokens by the same ids."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aioinfer.checkpoint.files import Checkpoint, checkpoint_at
from aioinfer.errors import ConfigError

__all__ = ["check_draft"]

#: parts of a tokenizer that decide which text an id stands for
_PARTS = ("model", "added_tokens", "decoder")


def check_draft(target: Path, draft: Path) -> None:
    """Raise ConfigError unless the model at ``draft`` can draft for the one at ``target``."""
    models = checkpoint_at(target), checkpoint_at(draft)
    sizes = [_vocab_size(model.config()) for model in models]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"speculation: {draft.name} has {sizes[1]} tokens, and the model it drafts for {sizes[0]}"
        )
    tokenizers = [_tokenizer(model) for model in models]
    for part in _PARTS:
        if tokenizers[0].get(part) != tokenizers[1].get(part):
            raise ConfigError(
                f"speculation: {draft.name} has another tokenizer than the model it drafts for "
                f"({part.replace('_', ' ')})"
            )


def _vocab_size(config: Mapping[str, Any]) -> Any:
    text = config.get("text_config")
    return config.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)


def _tokenizer(checkpoint: Checkpoint) -> dict[str, Any]:
    """The parts of a tokenizer; empty if there is none."""
    tokenizer = checkpoint.tokenizer()
    if tokenizer is None:
        return {}
    if not tokenizer.is_fast:
        return {"model": tokenizer.get_vocab()}
    found: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    return found
