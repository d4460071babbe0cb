"""Calls as a list of JSON objects behind a tag: formats that differ in their tags."""

from __future__ import annotations

from typing import ClassVar

from aioinfer.text.tool_calls.json_calls import JsonLists

__all__ = ["Apriel", "Functools", "Granite", "Nemotron"]


class Granite(JsonLists):
    """``<|tool_call|>[{"name": ..., "arguments": {...}}]``: Granite 3; Granite 3.1 writes ``<tool_call>``."""

    name: ClassVar[str] = "granite"
    opening = "<|tool_call|>"
    also = ("<tool_call>",)
    tags: ClassVar[tuple[str, ...]] = (opening, *also)

    @staticmethod
    def in_template(template: str) -> bool:
        return Granite.opening in template


class Apriel(JsonLists):
    """``<tool_calls>[{"name": ..., "arguments": {...}}]</tool_calls>``: Apriel, Hunyuan A13B, Jamba.

    MiniMax M1 writes objects without the list.
    """

    name: ClassVar[str] = "apriel"
    opening = "<tool_calls>"
    # The instruction of Apriel 1.5 names both.
    also = ("<tool_call>",)
    closing = "</tool_calls>"
    tags: ClassVar[tuple[str, ...]] = (opening, closing)

    @staticmethod
    def in_template(template: str) -> bool:
        return Apriel.opening in template and '"arguments"' in template.replace('\\"', '"')


class Nemotron(JsonLists):
    """``<TOOLCALL>[{"name": ..., "arguments": {...}}]</TOOLCALL>``: Nemotron Nano 2."""

    name: ClassVar[str] = "nemotron"
    opening = "<TOOLCALL>"
    closing = "</TOOLCALL>"
    tags: ClassVar[tuple[str, ...]] = (opening, closing)

    @staticmethod
    def in_template(template: str) -> bool:
        return Nemotron.opening in template


class Functools(JsonLists):
    """``functools[{"name": ..., "arguments": {...}}]``: Phi-4-mini and FireFunction."""

    name: ClassVar[str] = "functools"
    opening = "functools"
    tags: ClassVar[tuple[str, ...]] = (opening,)

    @staticmethod
    def in_template(template: str) -> bool:
        return f"{Functools.opening}[" in template
