"""Answers: what the writers of protocols with parts have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from aioinfer.chat.answers import AnswerReader
from aioinfer.chat.parts import Part
from aioinfer.errors import InvalidRequest
from aioinfer.outputs import Chunk, Result, Usage
from aioinfer.server.http.pace import Pace
from aioinfer.text.tokenizer import Tokenizer

__all__ = ["as_chunk", "deltas_of", "thinking_tokens"]


def as_chunk(result: Result) -> Chunk:
    """The whole output as one chunk."""
    return Chunk(
        result.text, result.token_ids, result.finish_reason, result.stop_reason, result.usage, result.logprobs
    )


async def deltas_of(reader: AnswerReader, chunk: Chunk, pace: Pace) -> list[dict[str, Any]]:
    """The deltas that the parser makes of this chunk."""
    # A client that reads late gets much at once.
    for _ in reader.read(chunk.text, ended=chunk.finish_reason is not None):
        await pace()
    return list(reader.deltas())


async def thinking_tokens(parts: Iterable[Part], tokenizer: Tokenizer | None, usage: Usage) -> int:
    """About how many tokens of the output are reasoning: those of its text, tokenized again."""
    text = "".join(part.text for part in parts if part.kind == "reasoning")
    if not text or tokenizer is None:
        return 0
    try:
        ids = await asyncio.to_thread(tokenizer.encode_part, text)
    except InvalidRequest:  # text that a tokenizer made need not be text that it takes
        return 0
    return min(len(ids), usage.completion_tokens)
