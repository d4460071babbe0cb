"""Answers: what the writers of protocols with parts have in common."""

from __future__ import annotations

from typing import Any

from aioinfer.chat.answers import AnswerReader
from aioinfer.outputs import Chunk, Result
from aioinfer.server.http.pace import Pace

__all__ = ["as_chunk", "deltas_of"]


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
