"""Fields of the bodies of ``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from aioinfer.chat.bodies import CACHING, CLIENTS, NO, Items, Object, Refused, TextOr, field, tagged
from aioinfer.chat.fields import NAME
from aioinfer.errors import shown
from aioinfer.server.openai.fields import EFFORT_BUDGETS, Budget, Extensions, Model, TokenLimit

__all__ = [
    "NO_THREADS",
    "SEARCH_TOOL",
    "CountTokensBody",
    "CustomTool",
    "HostedTool",
    "ImageBlock",
    "MessageParam",
    "MessagesBody",
    "TextBlock",
    "ThinkingBlock",
    "ToolChoice",
    "ToolReferenceBlock",
    "ToolResultBlock",
    "ToolUseBlock",
    "URLSource",
]

_READ = "goes to the chat template"
_DIRECT = Refused(({"type": "direct"},))
_CACHED = {"cache_control": CACHING}
#: Types of tools that are left out of a request: Anthropic defines them, and no schema comes with them. An
#: offered tool is a permission: the answer is that of a model that does not use it. A ``tool_choice`` that
#: names one is refused.
_HOSTED = re.compile(
    r"(web_search|web_fetch|code_execution|computer|computer_toolset|bash|text_editor|memory|advisor"
    r"|tool_search_tool_regex|tool_search_tool_bm25|mcp_toolset|browser_toolset)(_[0-9]{8})?"
)
#: those that search among deferred tools
SEARCH_TOOL = re.compile(r"tool_search_tool_(regex|bm25)(_[0-9]{8})?")
#: The code of an error by which clients know that they have to send the whole conversation.
NO_THREADS = "thread_unsupported_request"
_Effort = Literal["low", "medium", "high", "xhigh", "max"]


class TextBlock(Object, harmless=_CACHED, refused={"citations": Refused(([],))}):
    """Text."""

    type: Literal["text"] = field("`text`", ...)
    text: str = field("text", ...)


class ThinkingBlock(Object, harmless={"signature": CLIENTS, **_CACHED}):
    """Reasoning of an earlier answer."""

    type: Literal["thinking"] = field("`thinking`", ...)
    thinking: str = field("goes to the chat template, which may not read it", ...)


class ToolUseBlock(Object, harmless=_CACHED, refused={"caller": _DIRECT, "toolset_name": NO}):
    """A call."""

    type: Literal["tool_use"] = field("`tool_use`", ...)
    id: str = field(_READ, ...)
    name: str = field(_READ, ...)
    input: dict[str, Any] | None = field("an object; empty if it is null or absent")


class ToolReferenceBlock(Object, harmless=_CACHED):
    """A reference to a deferred tool."""

    type: Literal["tool_reference"] = field("`tool_reference`", ...)
    tool_name: str = field("the model reads it, and learns of the tool", ...)


def _unsupported(kind: Any) -> str:
    return f"{shown(kind)} is not supported by this server"


class Base64Source(Object):
    """An image in base64."""

    type: Literal["base64"] = field("`base64`", ...)
    media_type: str = field("`image/png`, `image/jpeg`, `image/webp` or `image/gif`", ...)
    data: str = field("the file", ...)


class URLSource(Object):
    """An image of another host."""

    type: Literal["url"] = field("`url`", ...)
    url: str = field("a URL of a host that the server fetches images from", ...)


_SOURCES = {"base64": Base64Source, "url": URLSource}


def _unknown_source(kind: Any) -> str:
    return f"must be 'base64' or 'url', got {shown(kind)}: files are not stored here"


_Source = Annotated[Any, tagged(*_SOURCES.values(), pick=_SOURCES.get, unknown=_unknown_source)]


class ImageBlock(Object, harmless=_CACHED):
    """An image."""

    type: Literal["image"] = field("`image`", ...)
    source: _Source = field("an image in base64, or of another host", ...)


_RESULTS = {"text": TextBlock, "image": ImageBlock, "tool_reference": ToolReferenceBlock}
_Result = Annotated[Any, tagged(*_RESULTS.values(), pick=_RESULTS.get, unknown=_unsupported)]


class ToolResultBlock(Object, harmless=_CACHED, refused={"toolset_name": NO}):
    """The result of a call."""

    type: Literal["tool_result"] = field("`tool_result`", ...)
    tool_use_id: str = field(_READ, ...)
    content: TextOr[Items[_Result]] = field(
        "text, or a list of blocks of text, of images and of references to deferred tools", ""
    )
    is_error: bool = field("true: the model reads `Error: ` in front of the content", False)


_BLOCKS = {
    "text": TextBlock,
    "image": ImageBlock,
    "thinking": ThinkingBlock,
    "tool_use": ToolUseBlock,
    "tool_result": ToolResultBlock,
}
_Block = Annotated[Any, tagged(*_BLOCKS.values(), pick=_BLOCKS.get, unknown=_unsupported)]


class LaterEffort(Object):
    """The amount of thinking from a system message on."""

    effort: _Effort | None = field("as in `output_config` of the body; the last one counts")


class MessageParam(
    Object,
    harmless=dict.fromkeys(("id", "model", "stop_reason", "stop_sequence", "usage"), CLIENTS),
    refused={"type": Refused(("message",))},
):
    """A message."""

    role: Literal["user", "assistant", "system"] = field("`user`, `assistant` or `system`", ...)
    content: TextOr[Items[_Block]] | None = field(
        "text or a list of blocks; a system message with `output_config` needs none"
    )
    output_config: LaterEffort | None = field("of `system`: how much the model thinks from there on")
    clear_at: Literal["never", "next_user_message"] | None = field(
        "of `system`: `next_user_message` leaves it out where a message of the user follows"
    )


class CustomTool(
    Object,
    harmless={**_CACHED, "eager_input_streaming": "how arguments are streamed"},
    refused={"allowed_callers": Refused((["direct"],)), "input_examples": Refused(([],))},
):
    """A function that the model may call."""

    type: Literal["custom"] | None = field("`custom`, or absent")
    name: str = field("1 to 64 letters, digits, `_`, `-`", ..., pattern=NAME)
    description: str | None = field(_READ)
    input_schema: dict[str, Any] = field("the JSON schema of the arguments", ...)
    strict: bool | None = field("the arguments obey the schema")
    defer_loading: bool = field(
        "true: the model learns of the tool when a result refers to it; at once if it is the one of "
        "`tool_choice`, or if `tools` has a search of Anthropic's, which this server cannot run",
        False,
    )


class HostedTool(BaseModel):
    """A tool that is left out; what else it has is not read."""

    model_config = ConfigDict(extra="allow")

    type: Annotated[str, Field(pattern=f"^({_HOSTED.pattern})$")] = field(
        "a tool that Anthropic defines", ...
    )


def _tool(kind: str | None) -> Any:
    if kind is not None and _HOSTED.fullmatch(kind):
        return HostedTool
    return CustomTool if kind in (None, "custom") else None


def _unknown_tool(kind: Any) -> str:
    return f"must be 'custom' or a tool of Anthropic's, got {shown(kind)}"


_Tool = Annotated[Any, tagged(CustomTool, HostedTool, pick=_tool, unknown=_unknown_tool)]


class ToolChoice(Object):
    """The choice among the tools."""

    type: Literal["auto", "any", "tool", "none"] = field("`auto`, `any`, `tool` or `none`", ...)
    name: str | None = field("of type `tool`: the function to call", pattern=NAME)
    disable_parallel_tool_use: bool | None = field("true: one call at most")


class Thinking(Object):
    """The switch of thinking."""

    type: Literal["enabled", "disabled", "adaptive"] = field(
        "`enabled` and `disabled` switch thinking in a template with such a switch, and are refused "
        "where the model does otherwise; `adaptive` leaves it to the model",
        ...,
    )
    budget_tokens: Budget | None = field("of type `enabled`: `thinking_budget` of `SamplingParams`")
    display: Literal["summarized", "updates", "omitted"] | None = field(
        "`omitted`: blocks of thinking come without their text; `summarized`, `updates`: with all of it"
    )


class OutputFormat(Object, harmless={"name": "a label"}):
    """The format of the answer."""

    type: Literal["json_schema"] = field("`json_schema`", ...)
    schema_: dict[str, Any] = field("the JSON schema", ..., alias="schema")


class OutputConfig(Object, refused={"task_budget": NO}):
    """The format of the answer, and how much the model thinks."""

    effort: _Effort | None = field(
        "a wish: goes to the chat template as `reasoning_effort`, if that reads it, and else limits a model "
        f"that thinks: {EFFORT_BUDGETS}, unless there are `budget_tokens`"
    )
    format: OutputFormat | None = field("of type `json_schema`")


class CountTokensBody(
    Object,
    harmless={
        **dict.fromkeys(("metadata", "user_profile_id", "workspace_id", "diagnostics"), CLIENTS),
        **_CACHED,
        "inference_geo": "where it is computed",
        "betas": "features that a request uses have fields of their own",
    },
    refused={
        "service_tier": Refused(("auto", "standard_only")),
        "speed": Refused(("standard",)),
        "container": NO,
        "mcp_servers": Refused(([],)),
        "context_management": Refused(
            ({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]})
        ),
        "output_format": Refused((), "use output_config.format"),
        "thread": Refused((), "nothing is stored: send the whole conversation as messages", NO_THREADS),
    },
):
    """A body of ``/v1/messages/count_tokens``."""

    model: Model = field("name of the served model (the default), or of an adapter")
    messages: Annotated[Items[MessageParam], Field(min_length=1)] = field("the conversation", ...)
    system: TextOr[Items[TextBlock]] | None = field("text, or a list of blocks of text")
    tools: Items[_Tool] = field(
        "functions that the model may call; tools that Anthropic defines are left out", list
    )
    tool_choice: ToolChoice | None = field("of type `auto`, `any`, `tool` or `none`")
    thinking: Thinking | None = field("whether the model thinks")
    output_config: OutputConfig = field(
        "the format of the answer, and how much the model thinks", OutputConfig
    )
    chat_template_kwargs: dict[str, Any] | None = field(
        "variables of the chat template; one that it does not read is refused"
    )


class MessagesBody(
    CountTokensBody,
    Extensions,
    refused={
        "stop": Refused((), "use stop_sequences"),
        "max_tokens_to_sample": Refused((), "use max_tokens"),
        "prompt": Refused((), "is for /v1/completions"),
        "n": Refused((1,)),
    },
):
    """A body of ``/v1/messages``."""

    aliases: ClassVar[Mapping[str, str]] = {**Extensions.aliases, "stop_sequences": "stop"}

    max_tokens: TokenLimit = field("maximum number of new tokens", ...)
    stop_sequences: (
        Annotated[list[Annotated[str, Field(min_length=1, max_length=1024)]], Field(max_length=16)] | None
    ) = field("`stop` of `SamplingParams`")
