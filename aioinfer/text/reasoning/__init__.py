"""Parsers that split the reasoning between tags off a streamed answer.

Each format has a file with one class; :data:`REASONING_PARSERS` maps names to classes. To add a format, add
its class to the tuple below.
"""

from __future__ import annotations

from collections.abc import Iterable

from aioinfer.text import AUTO
from aioinfer.text.reasoning.base import ReasoningParser
from aioinfer.text.reasoning.deepseek_r1 import DeepSeekR1
from aioinfer.text.reasoning.qwen3 import Qwen3

__all__ = ["REASONING_PARSERS", "DeepSeekR1", "Qwen3", "ReasoningParser", "parser_of"]

REASONING_PARSERS: dict[str, type[ReasoningParser]] = {parser.name: parser for parser in (Qwen3, DeepSeekR1)}


def parser_of(name: str | None, templates: Iterable[str], prompt_end: str) -> type[ReasoningParser] | None:
    """The parser of a setting: the one of that name, none, or for "auto" one that fits the chat templates.

    ``prompt_end``: the text in front of an answer: it may have the opening tag already.
    """
    if name != AUTO:
        return None if name is None else REASONING_PARSERS[name]
    if not any(ReasoningParser.closing in template for template in templates):
        return None
    return DeepSeekR1 if prompt_end.rstrip().endswith(ReasoningParser.opening) else Qwen3
