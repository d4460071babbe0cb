"""Tool calls: found in a model's output while it streams.

One class and file per format; :data:`PARSERS` finds them by name. To add one, write it and list it here.
"""

from __future__ import annotations

from aioinfer.text.tool_calls.base import Parsed, ToolCallDelta, ToolCallParser, WrittenCall
from aioinfer.text.tool_calls.hermes import Hermes

__all__ = ["PARSERS", "Hermes", "Parsed", "ToolCallDelta", "ToolCallParser", "WrittenCall"]

PARSERS: dict[str, type[ToolCallParser]] = {parser.name: parser for parser in (Hermes,)}
