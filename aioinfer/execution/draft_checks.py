"""Checks of a draft model before any weights are read: it must mean the same tokens by the same ids. And the
choice of a draft head."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aioinfer.checkpoint.files import Checkpoint, checkpoint_at
from aioinfer.checkpoint.locate import locate
from aioinfer.config import EngineConfig
from aioinfer.errors import ConfigError, OutOfMemory

if TYPE_CHECKING:
    from aioinfer.model.draft_heads.base import DraftHead
    from aioinfer.model.inspection import LoadOptions
    from aioinfer.model.spec import CausalLM

__all__ = ["check_draft", "load_draft_head"]

_log = logging.getLogger("aioinfer")

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


def load_draft_head(
    config: EngineConfig, options: LoadOptions, model: CausalLM, kind: str, claim: Callable[[int], None]
) -> DraftHead | None:
    """The head that drafts for a model; None: there is none.

    Args:
        options: those of the model.
        kind: of the head in the directory ``speculation``; empty: it is none, and the model's own checkpoint
            may have one. That it cannot draft is a warning.
        claim: is told the bytes of its weights.

    Raises:
        ConfigError: the head in the directory cannot draft.
        OutOfMemory: there is no memory for it.
    """
    from aioinfer.model.decoder import Decoder
    from aioinfer.model.draft_heads.loading import load_head, load_mtp, no_head, no_mtp
    from aioinfer.model.inspection import Opened
    from aioinfer.model.native import NativeDecoder

    target = model if isinstance(model, Decoder | NativeDecoder) else None
    own = config.speculation == "auto" and options.stored and target is not None
    if not kind and (not own or no_mtp(config.model_path)):
        return None
    opened = Opened.of(config.model_path, options)
    reason = no_head(opened, options.device.type == "cpu")
    try:
        if reason or target is None:
            raise ConfigError(f"no {kind or 'MTP'} head can draft: {reason}")
        if kind:
            return load_head(target, locate(config.speculation), options, claim)
        return load_mtp(target, opened, options, claim)
    except (ConfigError, OutOfMemory) as error:
        if kind:
            raise
        message = str(error).removeprefix("model: ")
        _log.warning("the MTP layer of the checkpoint does not draft: %s", message)
        return None


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
