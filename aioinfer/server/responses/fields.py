"""Fields of the bodies of ``/v1/responses``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from aioinfer.chat.bodies import CACHING, CLIENTS, NO, Items, Object, Refused, TextOr, field, later, tagged
from aioinfer.chat.fields import FINE, NAME
from aioinfer.errors import shown
from aioinfer.server.openai.fields import EFFORT_BUDGETS, VERBOSITIES, Extensions, TokenLimit

__all__ = [
    "ITEMS",
    "LOGPROBS",
    "CallItem",
    "FunctionTool",
    "InputImage",
    "MessageItem",
    "OutputItem",
    "ReasoningItem",
    "ResponsesBody",
]

_READ = "goes to the chat template"
_STATE = "of an item that is complete"
_ITEM = {"id": CLIENTS, "status": _STATE}
_CALLS = {"caller": Refused(({"type": "direct"},)), "namespace": NO}
_STORED = "use previous_response_id, or send the whole conversation as input"
_REASONING = Refused(("auto", "concise", "detailed"), "answers have the reasoning itself")

#: Types of tools that are left out of a request. An offered tool is a permission: the answer is that of a
#: model that does not use it. A ``tool_choice`` that demands one is refused.
_HOSTED = (
    *("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"),
    *("file_search", "code_interpreter", "image_generation", "computer", "computer_use_preview", "mcp"),
    *("local_shell", "shell", "apply_patch", "custom", "namespace", "tool_search"),
    "programmatic_tool_calling",
)
LOGPROBS = "message.output_text.logprobs"
#: what ``include`` may name: besides logprobs, parts of answers that this server's do not have
_Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


def _unsupported(kind: Any) -> str:
    if kind == "item_reference":
        return "is not supported by this server: send the item itself"
    return f"{shown(kind)} is not supported by this server"


class InputText(
    Object,
    harmless={
        "logprobs": "of an earlier answer",
        "parsed": "the client's reading of `text`",
        "cache_control": CACHING,
        "prompt_cache_breakpoint": "how a prefix is cached",
    },
    refused={"annotations": Refused(([],))},
):
    """A part of a message."""

    type: Literal["input_text", "output_text", "text"] = field("`input_text` or `output_text`", ...)
    text: str = field("text", ...)


class InputImage(
    Object,
    harmless={"cache_control": CACHING, "prompt_cache_breakpoint": "how a prefix is cached"},
    refused={"detail": FINE, "file_id": Refused((), "send a data URI as image_url")},
):
    """An image of a message of a user, or of the output of a call."""

    type: Literal["input_image"] = field("`input_image`", ...)
    image_url: str = field(
        "a data URI in base64, or a URL of a host that the server fetches images from", ...
    )


_PARTS: dict[str | None, type[Object]] = {
    **dict.fromkeys(("input_text", "output_text", "text"), InputText),
    "input_image": InputImage,
}
_Part = Annotated[Any, tagged(InputText, InputImage, pick=_PARTS.get, unknown=_unsupported)]


class ReasoningPart(Object):
    """A part of what the model thought."""

    type: Literal["reasoning_text"] = field("`reasoning_text`", ...)
    text: str = field("text", ...)


class SummaryPart(Object):
    """A part of a summary of it."""

    type: Literal["summary_text"] = field("`summary_text`", ...)
    text: str = field("text", ...)


class MessageItem(Object, harmless={**_ITEM, "phase": "a label of OpenAI's own models"}):
    """A message."""

    type: Literal["message"] | None = field("`message`, or absent")
    role: Literal["user", "assistant", "system", "developer"] = field(
        "`user`, `assistant`, `system` or `developer`", ...
    )
    content: TextOr[Items[_Part]] | None = field(
        "text or a list of parts of text and images; null only of the assistant"
    )


class CallItem(
    Object,
    harmless={**_ITEM, "parsed_arguments": "the client's reading of `arguments`"},
    refused={**_CALLS, "async": Refused((False,))},
):
    """A call."""

    type: Literal["function_call"] = field("`function_call`", ...)
    call_id: str = field(_READ, ...)
    name: str = field(_READ, ...)
    arguments: str | None = field("text; none if it is null or absent")


class OutputItem(Object, harmless=_ITEM, refused=_CALLS):
    """The result of a call."""

    type: Literal["function_call_output"] = field("`function_call_output`", ...)
    call_id: str = field(_READ, ...)
    output: TextOr[Items[_Part]] | None = field(
        "text or a list of parts of text and images; empty if it is null"
    )
    name: str | None = field(_READ)


class ReasoningItem(
    Object,
    harmless=_ITEM,
    refused={"encrypted_content": Refused(("",), "of another server, it cannot be read")},
):
    """Reasoning of an earlier answer."""

    type: Literal["reasoning"] = field("`reasoning`", ...)
    content: Items[ReasoningPart] = field(
        "the reasoning; goes to the chat template, which may not read it", list
    )
    summary: Items[SummaryPart] = field("is used without `content`", list)


#: models of items by their type
ITEMS: dict[str | None, type[Object]] = {
    None: MessageItem,
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": OutputItem,
    "reasoning": ReasoningItem,
}
_Item = Annotated[
    Any, tagged(MessageItem, CallItem, OutputItem, ReasoningItem, pick=ITEMS.get, unknown=_unsupported)
]


class FunctionTool(
    Object,
    harmless={"defer_loading": "the model learns of all tools at once"},
    refused={"allowed_callers": Refused((["direct"],)), "async": Refused((False,)), "output_schema": NO},
):
    """A function that the model may call."""

    type: Literal["function"] = field("`function`", ...)
    name: str = field("1 to 64 letters, digits, `_`, `-`", ..., pattern=NAME)
    description: str | None = field(_READ)
    parameters: dict[str, Any] | None = field("the JSON schema of the arguments")
    strict: bool | None = field("the arguments obey the schema")


class LeftOutTool(BaseModel):
    """A hosted tool, which is left out; what else it has is not read."""

    model_config = ConfigDict(extra="allow")

    type: Annotated[str, Field(json_schema_extra={"enum": [*_HOSTED]})] = field("a hosted tool", ...)


_TOOLS: dict[str | None, Any] = {**dict.fromkeys(_HOSTED, LeftOutTool), "function": FunctionTool}


def _unknown_tool(kind: Any) -> str:
    return f"must be 'function' or a hosted tool, got {shown(kind)}"


_Tool = Annotated[Any, tagged(FunctionTool, LeftOutTool, pick=_TOOLS.get, unknown=_unknown_tool)]


class NamedTool(Object):
    """The function that must be called."""

    type: Literal["function"] = field("`function`", ...)
    name: str = field("the function to call", ..., pattern=NAME)


class TextFormat(Object, harmless={"strict": "every schema is enforced"}):
    """The format of an answer."""

    type: Literal["text", "json_object", "json_schema"] = field("`text`, `json_object` or `json_schema`", ...)
    schema_: dict[str, Any] | None = field("of type `json_schema`: the JSON schema", alias="schema")
    name: str | None = field("a label, which is repeated in the answer")
    description: str | None = field("a label, which is repeated in the answer")


class TextConfig(Object, refused={"verbosity": Refused(VERBOSITIES)}):
    """The format of an answer."""

    format: TextFormat | None = field("`text`, `json_object` or `json_schema`")


class Reasoning(
    Object,
    refused={
        "summary": _REASONING,
        "generate_summary": _REASONING,
        "mode": Refused(("standard",)),
        "context": Refused(("auto", "all_turns"), "what of it is in input"),
    },
):
    """The amount of thinking."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = field(
        "a wish: goes to the chat template as `reasoning_effort`, if that reads it, and else limits a model "
        f"that thinks: {EFFORT_BUDGETS}; `none` switches thinking off, and is refused of a model that always "
        "thinks"
    )


class ResponseStreamOptions(Object, harmless={"include_obfuscation": "padding of events"}):
    """Parts of a stream."""


_Key = Annotated[str, Field(max_length=64)]
_Value = Annotated[str, Field(max_length=512)]


class ResponsesBody(
    Extensions,
    harmless={
        "client_metadata": CLIENTS,
        "prompt_cache_retention": CACHING,
        "prompt_cache_options": "how a prefix is cached",
        "max_tool_calls": "a limit of hosted tools, which this server does not have",
    },
    refused={
        "conversation": Refused((), _STORED),
        "background": Refused((False,)),
        "background_options": NO,
        "prompt": Refused((), "use input and instructions"),
        "truncation": Refused(("disabled",)),
        "context_management": Refused(([],)),
        "service_tier": Refused(("auto", "default")),
        "moderation": NO,
        "image": NO,
        "access_programs": NO,
        "messages": Refused((), "use input"),
        "max_tokens": Refused((), "use max_output_tokens"),
        "max_completion_tokens": Refused((), "use max_output_tokens"),
        "response_format": Refused((), "use text.format"),
        "reasoning_effort": Refused((), "use reasoning.effort"),
        "logprobs": Refused((False,), "use top_logprobs and include"),
        "n": Refused((1,)),
    },
):
    """A body of ``/v1/responses``."""

    aliases: ClassVar[Mapping[str, str]] = {**Extensions.aliases, "max_output_tokens": "max_tokens"}

    input: TextOr[Annotated[Items[_Item], Field(min_length=1)]] = field(
        "text, or items: messages, calls and their outputs, reasoning", ...
    )
    instructions: str | None = field("a system message in front of `input`, and of all before it")
    previous_response_id: str | None = field("the stored response that `input` follows")
    store: bool | None = field("false: the response is not kept for `previous_response_id`; default: it is")
    max_output_tokens: TokenLimit | None = field("`max_tokens`")
    stop: Annotated[Any, later(str | list[str])] = field("as in `SamplingParams`")
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = field(
        f"likely alternatives of each token; needs `include` with `{LOGPROBS}`"
    )
    include: Items[_Included] = field(
        f"`{LOGPROBS}`; what else it may name is in no answer of this server", list
    )
    tools: Items[_Tool] = field("functions that the model may call; hosted tools are left out", list)
    tool_choice: Annotated[Any, later(Literal["none", "auto", "required"] | NamedTool)] = field(
        "`none`, `auto`, `required`, or one function"
    )
    parallel_tool_calls: bool | None = field("false: one call at most")
    text: TextConfig = field("the format of the answer", TextConfig)
    reasoning: Reasoning = field("how much the model thinks", Reasoning)
    stream_options: ResponseStreamOptions | None = field("what a stream includes")
    prompt_cache_key: str | None = field("`routing_key`, unless that is given")
    user: Any = field("is repeated in the answer")
    safety_identifier: Any = field("is repeated in the answer")
    metadata: Annotated[dict[_Key, _Value], Field(max_length=16)] = field("is repeated in the answer", dict)
    chat_template_kwargs: dict[str, Any] | None = field(
        "variables of the chat template; one that it does not read is refused"
    )
