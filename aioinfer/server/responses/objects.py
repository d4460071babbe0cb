"""Objects of the Responses protocol: items of the output, and the response around them, as JSON."""

from __future__ import annotations

import json
import time
from json.encoder import encode_basestring_ascii as _quoted
from typing import Any

from aioinfer.chat.parts import Part
from aioinfer.outputs import Usage
from aioinfer.server.http.failures import Failure

__all__ = ["ITEM", "content_part", "error_code", "item", "response", "usage_body"]

#: kind of part -> prefix of its id, type of its item, and type of its content
ITEM = {
    "reasoning": ("rs", "reasoning", "reasoning_text"),
    "text": ("msg", "message", "output_text"),
    "call": ("fc", "function_call", ""),
}


def content_part(kind: str, text: str, logprobs: str) -> str:
    """The content of an item. ``text`` is JSON with its quotes, ``logprobs`` entries in JSON."""
    if kind == "reasoning":
        return f'{{"type":"reasoning_text","text":{text}}}'
    return f'{{"type":"output_text","annotations":[],"logprobs":[{logprobs}],"text":{text}}}'


def item(part: Part, name: str, status: str, text: str | None, logprobs: str = "") -> str:
    """An item with the id ``name``. ``text`` is JSON with its quotes, None of an item that begins."""
    head = f'{{"id":"{name}","type":"{ITEM[part.kind][1]}","status":"{status}"'
    if part.kind == "call":
        arguments = '""' if text is None else text
        call = f'"call_id":{_quoted(part.call_id)},"name":{_quoted(part.name)}'
        return f'{head},{call},"arguments":{arguments}}}'
    content = "" if text is None else content_part(part.kind, text, logprobs)
    if part.kind == "reasoning":
        return f'{head},"summary":[],"content":[{content}],"encrypted_content":null}}'
    return f'{head},"role":"assistant","content":[{content}]}}'


def response(
    head: str,
    common: str,
    status: str,
    items: list[str],
    *,
    reason: str | None = None,
    failure: Failure | None = None,
    usage: dict[str, Any] | None = None,
) -> str:
    """The whole object: ``head`` and ``common`` are members of it in JSON, ``reason`` is why it is
    incomplete."""
    error = None if failure is None else {"code": error_code(failure), "message": failure.message}
    details = {"reason": reason} if status == "incomplete" else None
    completed = int(time.time()) if status == "completed" else None
    more = {"error": error, "incomplete_details": details, "usage": usage, "completed_at": completed}
    return f'{{{head},"status":"{status}",{json.dumps(more)[1:-1]},"output":[{",".join(items)}],{common}}}'


def error_code(failure: Failure) -> str:
    """One of the codes that clients know of responses that failed."""
    if failure.status == 429:
        return "rate_limit_exceeded"
    return "invalid_prompt" if failure.status < 500 else "server_error"


def usage_body(usage: Usage) -> dict[str, Any]:
    """``usage`` of a response."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }
