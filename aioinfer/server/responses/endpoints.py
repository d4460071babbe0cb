"""The endpoint of the Responses protocol, and the types of its answers, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from aioinfer.server.openai.objects import TopLogprobs
from aioinfer.server.openapi.endpoints import Endpoint
from aioinfer.server.responses.fields import ResponsesBody

__all__ = ["RESPONSES_ENDPOINT"]

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TopLogprobs]


class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class OutputMessage(TypedDict):
    """Text of the model."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputText]


class ReasoningItem(TypedDict):
    """Reasoning."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[Any]
    content: list[ReasoningText]
    encrypted_content: None


class FunctionCallItem(TypedDict):
    """A call of a function."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class InputDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(TypedDict):
    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"] | None


class Response(TypedDict):
    """The answer, and the settings that made it."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete", "failed", "in_progress"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputMessage | ReasoningItem | FunctionCallItem]
    usage: ResponseUsage | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    presence_penalty: float
    frequency_penalty: float
    previous_response_id: str | None
    conversation: None
    prompt: None
    moderation: None
    prompt_cache_diagnostics: None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    background: Literal[False]
    store: bool
    truncation: Literal["disabled"]
    service_tier: Literal["default"]
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    user: NotRequired[str]
    safety_identifier: NotRequired[str]


class ResponseEvent(TypedDict):
    """An event of a response that is streamed; what it has besides depends on its type."""

    type: str
    sequence_number: int
    response: NotRequired[Response]
    output_index: NotRequired[int]
    content_index: NotRequired[int]
    item_id: NotRequired[str]
    item: NotRequired[OutputMessage | ReasoningItem | FunctionCallItem]
    part: NotRequired[OutputText | ReasoningText]
    delta: NotRequired[str]
    text: NotRequired[str]
    name: NotRequired[str]
    arguments: NotRequired[str]
    logprobs: NotRequired[list[TopLogprobs]]
    code: NotRequired[str | None]
    message: NotRequired[str]
    param: NotRequired[str | None]


RESPONSES_ENDPOINT = Endpoint(
    "POST",
    "/responses",
    "Generate an answer to text or items",
    body=ResponsesBody,
    example={"input": "What is 17 + 25?", "max_output_tokens": 64},
    answer=Response,
    events=ResponseEvent,
    form="Events, each a line `event: ` with its type, a line `data: ` with JSON and an empty line. The last "
    "one has the whole response.",
    last=None,
    generates=True,
)
