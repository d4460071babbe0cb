"""Parsers of tool calls in streamed output.

Each format has a file with one class; :data:`PARSERS` maps names to classes. To add a format, add its class
to the tuple below.
"""

from __future__ import annotations

from aioinfer.text.tool_calls.base import Parsed, ToolCallDelta, ToolCallParser, WrittenCall
from aioinfer.text.tool_calls.hermes import Hermes

__all__ = ["PARSERS", "Hermes", "Parsed", "ToolCallDelta", "ToolCallParser", "WrittenCall"]

PARSERS: dict[str, type[ToolCallParser]] = {parser.name: parser for parser in (Hermes,)}
