"""Reasoning of Qwen 3 and of others whose template leaves both tags to the model."""

from __future__ import annotations

from aioinfer.text.reasoning.base import ReasoningParser

__all__ = ["Qwen3"]


class Qwen3(ReasoningParser):
    """The model writes both tags, or none when it does not think."""

    name = "qwen3"
    opened = False
