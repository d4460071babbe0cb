"""Fields of the objects within a chat: messages, tools and response formats in OpenAI's form."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from aioinfer.chat.bodies import (
    CACHING,
    CLIENTS,
    NO,
    OFF,
    Items,
    Object,
    Refused,
    TextOr,
    field,
    later,
    tagged,
)
from aioinfer.errors import InvalidRequest, shown

__all__ = [
    *("FINE", "NAME", "ChosenTool", "ImageURLPart", "Message", "ResponseFormat", "StructuredOutputs"),
    *("TextWithHoles", "Tool", "ToolFunction"),
]

#: the pattern of a function's name
NAME = "^[a-zA-Z0-9_-]{1,64}$"
#: how finely an image is looked at: as the model's own processor does
FINE = Refused(("auto", "high"), "send a smaller image")
_READ = "goes to the chat template"
_MAYBE = "goes to the chat template, which may not read it"
#: what becomes a grammar is checked there
_Schema = Annotated[Any, later(dict[str, Any] | bool | str)]
_Choices = Annotated[Any, later(Annotated[list[str], Field(min_length=1)] | str)]
_Text = Annotated[Any, later(str)]


class TextPart(
    Object,
    harmless={"id": CLIENTS, "index": CLIENTS, "cache_control": CACHING},
    refused={"annotations": Refused(([],))},
):
    """A part of a message's content."""

    type: Literal["text"] = field("`text`", ...)
    text: str = field("text", ...)


class ImageURL(Object, refused={"detail": FINE}):
    """An image."""

    url: str = field("a data URI in base64, or a URL of a host that the server fetches images from", ...)


class ImageURLPart(Object, harmless={"id": CLIENTS, "index": CLIENTS, "cache_control": CACHING}):
    """An image of a message of a user or a tool."""

    type: Literal["image_url"] = field("`image_url`", ...)
    image_url: TextOr[ImageURL] = field("the URL, or an object that has it", ...)


_PARTS = {"text": TextPart, "image_url": ImageURLPart}


def _unknown_part(kind: Any) -> str:
    return f"must be 'text' or 'image_url', got {shown(kind)}"


_Part = Annotated[Any, tagged(TextPart, ImageURLPart, pick=_PARTS.get, unknown=_unknown_part)]


class CalledFunction(Object, harmless={"parsed_arguments": "the client's reading of `arguments`"}):
    """The call of a function."""

    name: str = field(_READ, ...)
    arguments: TextOr[dict[str, Any]] | None = field(_READ)


class CalledTool(Object, harmless={"index": CLIENTS, "provider_specific_fields": CLIENTS}):
    """A call of a message."""

    id: Any = field(_READ)
    type: Literal["function"] | None = field("`function`")
    function: CalledFunction = field("the call", ...)


class Message(
    Object,
    open_ended=True,
    harmless={
        "id": CLIENTS,
        "parsed": "the client's reading of `content`",
        "cache_control": CACHING,
        "provider_specific_fields": CLIENTS,
    },
    refused={
        "type": Refused(("text", "message")),
        "refusal": NO,
        "annotations": Refused(([],)),
        "audio": NO,
        "images": Refused(([],)),
        "function_call": Refused((), "use tool_calls"),
        "prefix": Refused((False,), "use continue_final_message"),
        "partial": Refused((False,), "use continue_final_message"),
        "thinking_blocks": Refused(([],)),
        "reasoning_details": Refused(([],)),
    },
):
    """A message; what else the chat template reads may stand in it."""

    role: str = field(
        "`user`, `assistant`, `system`, `developer`, `tool`, `function`, or one of the chat template's own",
        ...,
    )
    content: TextOr[Items[_Part]] | None = field("text or a list of parts of text and images")
    name: Any = field(_MAYBE)
    tool_calls: Items[CalledTool] | None = field(_READ)
    tool_call_id: str | None = field(_MAYBE)
    reasoning_content: Any = field(f"{_MAYBE}; also as `thinking`")
    reasoning: Any = field(f"{_MAYBE}; also as `thinking`")


def _of_object(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type", "object") != "object":
        raise InvalidRequest("type", "must be 'object'")
    if not isinstance(schema.get("properties", {}), dict):
        raise InvalidRequest("properties", "must be an object")
    return {"type": "object", **schema}


#: the JSON schema of a function's arguments
Parameters = Annotated[dict[str, Any], AfterValidator(_of_object)]


class ToolFunction(Object):
    """A function that the model may call."""

    name: str = field("1 to 64 letters, digits, `_`, `-`", ..., pattern=NAME)
    description: str | None = field(_READ)
    parameters: Parameters = field(
        "the JSON schema of the arguments",
        {"type": "object", "properties": {}, "additionalProperties": False},
    )
    strict: bool = field("the arguments obey the schema", False)


class Tool(Object, harmless={"cache_control": CACHING}):
    """A tool in OpenAI's form."""

    type: Literal["function"] = field("`function`", ...)
    function: ToolFunction = field("a function", ...)


class ChosenFunction(Object):
    """The function that must be called."""

    name: str = field("the function to call", ...)


class ChosenTool(Object):
    """The tool that must be called."""

    type: Literal["function"] = field("`function`", ...)
    function: ChosenFunction = field("the function to call", ...)


class LabelledSchema(
    Object, harmless={"name": "a label", "description": "a label", "strict": "every schema is enforced"}
):
    """The schema of an answer."""

    schema_: Annotated[Any, later(dict[str, Any] | bool | str, required=True)] = field(
        "the JSON schema", ..., alias="schema"
    )


class ResponseFormat(Object):
    """The format of an answer."""

    type: Literal["text", "json_object", "json_schema"] = field("`text`, `json_object` or `json_schema`", ...)
    json_schema: LabelledSchema | None = field("of type `json_schema`")
    schema_: _Schema = field("of type `json_object`: its JSON schema", alias="schema")


class TextWithHoles(Object):
    """A template whose holes are not all usual."""

    text: str = field("text with holes, `{name}`", ...)
    holes: Annotated[Any, later(dict[str, int | str | list[str]])] = field(
        "by name: a number of characters at most, a regular expression, or a list of texts", {}
    )


class StructuredOutputs(
    Object,
    harmless={"disable_fallback": "there is no fallback"},
    refused={
        "structural_tag": NO,
        "whitespace_pattern": NO,
        "disable_any_whitespace": OFF,
        "disable_additional_properties": OFF,
    },
):
    """vLLM's object of one constraint."""

    json_: _Schema = field("as `guided_json`", alias="json")
    json_object: bool = field("as `guided_json_object`", False)
    regex: _Text = field("as `guided_regex`")
    choice: _Choices = field("as `guided_choice`")
    grammar: _Text = field("as `guided_grammar`")
    template: Annotated[Any, later(str | TextWithHoles)] = field("a text with holes, `{name}`")


class GrammarFields(
    Object,
    harmless={"guided_decoding_backend": "which library enforces a grammar"},
    refused={"guided_whitespace_pattern": NO},
):
    """The fields of a body that constrain an answer."""

    response_format: Annotated[Any, later(ResponseFormat)] = field("JSON, or an instance of a JSON schema")
    structured_outputs: Annotated[Any, later(StructuredOutputs)] = field("vLLM's object of one constraint")
    guided_json: _Schema = field("an instance of this JSON schema")
    guided_json_object: bool = field("any JSON object", False)
    guided_regex: _Text = field("a match of this regular expression")
    guided_choice: _Choices = field("one of these texts")
    guided_grammar: _Text = field("a text of this grammar, in Lark or GBNF")
    json_schema: _Schema = field("SGLang's name of `guided_json`")
    regex: _Text = field("SGLang's name of `guided_regex`")
    ebnf: _Text = field("SGLang's name of `guided_grammar`")
    grammar: _Text = field("llama.cpp's name of `guided_grammar`")
