"""Reasoning of Qwen 3 and of other models that generate both tags."""

from __future__ import annotations

from aioinfer.text.reasoning.base import ReasoningParser

__all__ = ["Qwen3"]


class Qwen3(ReasoningParser):
    """The output contains both tags, or neither if it has no reasoning, unless the prompt has opened it."""

    name = "qwen3"
    opened = None
