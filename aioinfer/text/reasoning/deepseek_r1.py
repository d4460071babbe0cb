"""Reasoning of DeepSeek R1 and of others whose template writes the opening tag."""

from __future__ import annotations

from aioinfer.text.reasoning.base import ReasoningParser

__all__ = ["DeepSeekR1"]


class DeepSeekR1(ReasoningParser):
    """The template has opened the reasoning; an opening tag that the model writes as well is left out."""

    name = "deepseek-r1"
    opened = True
