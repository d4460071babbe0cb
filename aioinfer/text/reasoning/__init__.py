"""Reasoning: what a model thinks aloud between tags before it answers, split off while it streams.

One small class and file each; :data:`REASONING_PARSERS` finds them by name. To add one, write it and list it
here.
"""

from __future__ import annotations

from aioinfer.text.reasoning.base import ReasoningParser
from aioinfer.text.reasoning.deepseek_r1 import DeepSeekR1
from aioinfer.text.reasoning.qwen3 import Qwen3

__all__ = ["REASONING_PARSERS", "DeepSeekR1", "Qwen3", "ReasoningParser"]

REASONING_PARSERS: dict[str, type[ReasoningParser]] = {parser.name: parser for parser in (Qwen3, DeepSeekR1)}
