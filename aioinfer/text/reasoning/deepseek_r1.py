"""Reasoning of DeepSeek R1 and of other models whose chat template contains the opening tag."""

from __future__ import annotations

from aioinfer.text.reasoning.base import ReasoningParser

__all__ = ["DeepSeekR1"]


class DeepSeekR1(ReasoningParser):
    """The prompt opens the reasoning; a repeated opening tag at the start of the output is omitted."""

    name = "deepseek-r1"
    opened = True
