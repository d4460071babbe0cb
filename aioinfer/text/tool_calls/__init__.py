"""Parsers of tool calls in streamed output.

Each format has a file; :data:`PARSERS` maps names to classes. To add a format, add its class to the tuple
below and its texts to ``tests/text/call_formats.py``, for the tests that run over all formats.
"""

from __future__ import annotations

from collections.abc import Iterable

from aioinfer.text import AUTO
from aioinfer.text.tool_calls.base import Functions, Parsed, ToolCallDelta, ToolCallParser
from aioinfer.text.tool_calls.deepseek import DeepSeekV3, DeepSeekV31
from aioinfer.text.tool_calls.deepseek_v32 import DeepSeekV4, DeepSeekV32
from aioinfer.text.tool_calls.gemma4 import Gemma4
from aioinfer.text.tool_calls.glm45 import Glm45
from aioinfer.text.tool_calls.harmony import Harmony
from aioinfer.text.tool_calls.hermes import Hermes
from aioinfer.text.tool_calls.json_lists import Apriel, Functools, Granite, Nemotron
from aioinfer.text.tool_calls.kimi_k2 import KimiK2
from aioinfer.text.tool_calls.llama3 import Llama3
from aioinfer.text.tool_calls.minimax_m2 import MinimaxM2
from aioinfer.text.tool_calls.mistral import Mistral, MistralV11
from aioinfer.text.tool_calls.pythonic import Lfm2, Pythonic
from aioinfer.text.tool_calls.qwen3_coder import Qwen3Coder
from aioinfer.text.tool_calls.seed_oss import SeedOss

__all__ = [
    "PARSERS",
    "Apriel",
    "DeepSeekV3",
    "DeepSeekV4",
    "DeepSeekV31",
    "DeepSeekV32",
    "Functions",
    "Functools",
    "Gemma4",
    "Glm45",
    "Granite",
    "Harmony",
    "Hermes",
    "KimiK2",
    "Lfm2",
    "Llama3",
    "MinimaxM2",
    "Mistral",
    "MistralV11",
    "Nemotron",
    "Parsed",
    "Pythonic",
    "Qwen3Coder",
    "SeedOss",
    "ToolCallDelta",
    "ToolCallParser",
    "parser_of",
]

PARSERS: dict[str, type[ToolCallParser]] = {
    parser.name: parser
    for parser in (
        *(Hermes, Granite, Apriel, Nemotron, Functools),
        *(Qwen3Coder, SeedOss, Glm45, MinimaxM2, Gemma4),
        *(Mistral, MistralV11, Llama3, Harmony),
        *(DeepSeekV3, DeepSeekV31, DeepSeekV32, DeepSeekV4, KimiK2, Lfm2, Pythonic),
    )
}


def parser_of(name: str | None, templates: Iterable[str]) -> type[ToolCallParser] | None:
    """The parser of a setting: the one of that name, none, or for "auto" the one in whose format one of the
    chat templates writes calls, if there is one."""
    if name != AUTO:
        return None if name is None else PARSERS[name]
    texts = tuple(templates)
    return next((parser for parser in PARSERS.values() if any(map(parser.in_template, texts))), None)
