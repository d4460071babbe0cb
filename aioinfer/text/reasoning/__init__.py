"""Parsers that split the reasoning between tags off a streamed answer.

Each format has a file with one class; :data:`REASONING_PARSERS` maps names to classes. To add a format, add
its class to the tuple below.
"""

from __future__ import annotations

from aioinfer.text.reasoning.base import ReasoningParser
from aioinfer.text.reasoning.deepseek_r1 import DeepSeekR1
from aioinfer.text.reasoning.qwen3 import Qwen3

__all__ = ["REASONING_PARSERS", "DeepSeekR1", "Qwen3", "ReasoningParser"]

REASONING_PARSERS: dict[str, type[ReasoningParser]] = {parser.name: parser for parser in (Qwen3, DeepSeekR1)}
