"""Endpoints of Anthropic's protocol, and the types of their answers, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from aioinfer.server.anthropic.errors import error_body
from aioinfer.server.anthropic.fields import CountTokensBody, MessagesBody
from aioinfer.server.openapi.endpoints import Endpoint, ErrorBody

__all__ = ["COUNT_ENDPOINT", "MESSAGES_ENDPOINT"]


class TextBlock(TypedDict):
    type: Literal["text"]
    text: str


class ThinkingBlock(TypedDict):
    """Reasoning. The signature is empty: earlier reasoning is taken as it is sent."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(TypedDict):
    """A call. Arguments that are no JSON object, such as those of a call that was cut off, are text in
    `INVALID_JSON`."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ThinkingTokens(TypedDict):
    thinking_tokens: int


class MessageUsage(TypedDict):
    """Tokens of a message; those of the prompt that were cached count apart."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: NotRequired[ThinkingTokens]


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class AnthropicMessage(TypedDict):
    """The answer in a conversation."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(TypedDict):
    """An event of a message that is streamed; what it has depends on its type."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "ping",
        "error",
    ]
    message: NotRequired[AnthropicMessage]
    index: NotRequired[int]
    content_block: NotRequired[TextBlock | ThinkingBlock | ToolUseBlock]
    delta: NotRequired[dict[str, Any]]
    usage: NotRequired[MessageUsage]
    error: NotRequired[dict[str, Any]]
    request_id: NotRequired[str]


class TokenCount(TypedDict):
    input_tokens: int


_ERROR = ErrorBody(
    "AnthropicError",
    {
        "type": "object",
        "description": "Anthropic's error object.",
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "properties": {
                    "type": {"type": "string"},
                    "message": {"type": "string", "description": "begins with the field of the body"},
                },
                "required": ["type", "message"],
            },
            "request_id": {"type": "string"},
        },
        "required": ["type", "error"],
    },
    error_body,
)
_EXAMPLE = {"messages": [{"role": "user", "content": "What is 17 + 25?"}]}

MESSAGES_ENDPOINT = Endpoint(
    "POST",
    "/messages",
    "Generate the answer in a conversation",
    body=MessagesBody,
    example={**_EXAMPLE, "max_tokens": 64},
    answer=AnthropicMessage,
    events=MessageEvent,
    form="Events, each a line `event: ` with its type, a line `data: ` with JSON and an empty line.",
    last=None,
    generates=True,
    error=_ERROR,
    tag="Anthropic",
)
COUNT_ENDPOINT = Endpoint(
    "POST",
    "/messages/count_tokens",
    "How many tokens a conversation has",
    body=CountTokensBody,
    example=_EXAMPLE,
    answer=TokenCount,
    error=_ERROR,
    tag="Anthropic",
)
