"""Parsers that split the reasoning between tags off a streamed answer.

Each format is a class; :data:`REASONING_PARSERS` maps names to classes. To add a format, add its class to the
tuple below.
"""

from __future__ import annotations

from collections.abc import Iterable

from aioinfer.text import AUTO
from aioinfer.text.reasoning.base import Answer, ReasoningParser
from aioinfer.text.reasoning.harmony import Harmony
from aioinfer.text.reasoning.tagged import (
    Apertus,
    Apriel,
    Cohere,
    DeepSeekR1,
    Ernie45,
    Gemma4,
    Granite,
    HunyuanA13B,
    HunyuanV3,
    KimiK3,
    MinimaxM3,
    Mistral,
    Qwen3,
    SeedOss,
    Solar,
)

__all__ = [
    "REASONING_PARSERS",
    "Answer",
    "DeepSeekR1",
    "Gemma4",
    "Harmony",
    "Mistral",
    "Qwen3",
    "ReasoningParser",
    "parser_of",
]

#: What a template writes around the tags of another one tells them apart, so such formats come first.
_ALL: tuple[type[ReasoningParser], ...] = (
    *(Ernie45, HunyuanA13B, Qwen3, DeepSeekR1, Mistral, Gemma4, Harmony, SeedOss, Cohere, Apriel, Granite),
    *(MinimaxM3, HunyuanV3, Solar, Apertus, KimiK3),
)
REASONING_PARSERS: dict[str, type[ReasoningParser]] = {parser.name: parser for parser in _ALL}


def parser_of(name: str | None, templates: Iterable[str]) -> type[ReasoningParser] | None:
    """The parser of a setting: the one of that name, none, or for "auto" one that fits the chat templates.

    That is never one whose reasoning is opened by default: where a template opens it, the prompt shows it.
    """
    if name != AUTO:
        return None if name is None else REASONING_PARSERS[name]
    texts = tuple(templates)
    known = (parser for parser in _ALL if any(map(parser.in_template, texts)))
    return next((parser for parser in known if not parser.opened), None)
