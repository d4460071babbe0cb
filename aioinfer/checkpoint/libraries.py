"""Importing transformers, one thread at a time."""

from __future__ import annotations

import threading

from aioinfer.forks import in_children

__all__ = ["import_transformers"]

#: held while it is imported
_importing = threading.Lock()


@in_children
def _forked() -> None:
    global _importing
    _importing = threading.Lock()


def import_transformers() -> None:
    """Import what reads configs and tokenizers, before it is used. Blocks, for seconds the first time.

    The modules of transformers import each other when they are used, and of several threads that begin with
    them at once some find halves of them.
    """
    with _importing:
        from transformers import AutoConfig, PreTrainedTokenizerFast  # noqa: F401
