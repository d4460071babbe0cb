"""Reasoning of Magistral and Ministral 3, whose tags are special tokens."""

from __future__ import annotations

from aioinfer.text.reasoning.base import ReasoningParser

__all__ = ["Mistral"]


class Mistral(ReasoningParser):
    """``[THINK]...[/THINK]``: the output contains both tags, or neither if it has no reasoning."""

    name = "mistral"
    opening = "[THINK]"
    closing = "[/THINK]"
    opened = None
    tags = (opening, closing)
