"""Objects: the answers of the OpenAI endpoints, as types. The OpenAPI document is made from them."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

__all__ = ["ChatAnswer", "ChatChunk", "CompletionAnswer", "CompletionChunk", "Model", "Models", "Permission"]

FinishReason = Literal["stop", "length", "tool_calls"]


class PromptDetails(TypedDict):
    cached_tokens: int


class CompletionDetails(TypedDict):
    """About how many tokens are reasoning; of a prediction, how many were verified and right, and others."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(TypedDict):
    """Tokens of a call; a prompt counts once for all its choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    #: of calls with a prediction, and of models that reason
    completion_tokens_details: NotRequired[CompletionDetails]


class FunctionCall(TypedDict):
    name: str
    arguments: str


class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(TypedDict):
    """The answer of a model. Without a parser of reasoning and of tools all of it is ``content``."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class TokenLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class TopLogprobs(TypedDict):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    content: list[TopLogprobs]
    refusal: None


class PromptLogprob(TypedDict):
    """``rank`` is null for a token that is not among the most likely ones that were asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


class ChatChoice(TypedDict):
    index: int
    message: Message
    finish_reason: FinishReason
    logprobs: ChatLogprobs | None
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]
    step_map: NotRequired[list[int]]


class ChatAnswer(TypedDict):
    """A chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[dict[str, PromptLogprob] | None]]


class FunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class Delta(TypedDict):
    """The new part of a message. The first one has the role."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str | None]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]


class Draft(TypedDict):
    """A diffusion model's provisional tokens after the final ones; the next event replaces it."""

    start: int
    token_ids: list[int | None]
    text: str


class ChatChunkChoice(TypedDict):
    index: int
    delta: Delta
    finish_reason: FinishReason | None
    logprobs: ChatLogprobs | None
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[int]]
    step_map: NotRequired[list[int]]
    draft: NotRequired[Draft]


class ChatChunk(TypedDict):
    """An event of a chat completion that is streamed."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    prompt_token_ids: NotRequired[list[int]]


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    index: int
    text: str
    finish_reason: FinishReason
    logprobs: CompletionLogprobs | None
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[dict[str, PromptLogprob] | None]]
    step_map: NotRequired[list[int]]


class CompletionAnswer(TypedDict):
    """A completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunkChoice(TypedDict):
    index: int
    text: str
    finish_reason: FinishReason | None
    logprobs: CompletionLogprobs | None
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    step_map: NotRequired[list[int]]
    draft: NotRequired[Draft]


class CompletionChunk(TypedDict):
    """An event of a completion that is streamed."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChunkChoice]
    usage: NotRequired[Usage | None]


class Permission(TypedDict):
    """A relic that clients of old versions of OpenAI's API read."""

    id: str
    object: Literal["model_permission"]
    created: int
    allow_create_engine: bool
    allow_sampling: bool
    allow_logprobs: bool
    allow_search_indices: bool
    allow_view: bool
    allow_fine_tuning: bool
    organization: str
    group: None
    is_blocking: bool


class Architecture(TypedDict):
    """What the model reads and writes."""

    input_modalities: list[Literal["text", "image"]]
    output_modalities: list[Literal["text"]]


class Model(TypedDict):
    """The served model, or an adapter of it, in the forms of OpenAI (``object``, ``created``), vLLM
    (``max_model_len``), OpenRouter (``architecture``) and Anthropic (``type``, ``created_at``)."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    #: of an adapter, the name of its directory
    root: str
    #: of an adapter, the model that it belongs to
    parent: str | None
    max_model_len: int | None
    #: positions per block, of a diffusion model
    block_size: NotRequired[int]
    permission: list[Permission]
    type: Literal["model"]
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int | None
    #: once the model is loaded
    architecture: NotRequired[Architecture]


class Models(TypedDict):
    """The list, which is whole; ``has_more`` and the ids of its ends are Anthropic's."""

    object: Literal["list"]
    data: list[Model]
    has_more: Literal[False]
    first_id: str
    last_id: str
