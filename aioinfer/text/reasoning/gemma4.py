"""Reasoning of Gemma 4, between special tokens and behind the name of a channel."""

from __future__ import annotations

from aioinfer.text.reasoning.base import ReasoningParser

__all__ = ["Gemma4"]


class Gemma4(ReasoningParser):
    """``<|channel>thought`` and a line break, the reasoning, ``<channel|>``: the output contains both tags,
    or neither if it has no reasoning. Where thinking is switched off, templates may close it in the prompt.
    """

    name = "gemma4"
    opening = "<|channel>"
    header = "thought"
    closing = "<channel|>"
    opened = None
    tags = (opening, closing)
