"""Reasoning of DeepSeek R1 and of other models that do not generate the opening tag."""

from __future__ import annotations

from aioinfer.text.reasoning.base import ReasoningParser

__all__ = ["DeepSeekR1"]


class DeepSeekR1(ReasoningParser):
    """The output begins with reasoning unless the prompt has closed it.

    A repeated opening tag at the start of the output is omitted.
    """

    name = "deepseek-r1"
    opened = True
