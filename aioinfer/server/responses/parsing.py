"""Parsing: the body of ``/v1/responses`` becomes a checked call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from aioinfer.chat.fields import check
from aioinfer.errors import InvalidRequest, shown
from aioinfer.inputs import freeze
from aioinfer.server.openai.protocol import Call, Served, object_of
from aioinfer.server.responses import fields
from aioinfer.server.responses.fields import EFFORTS, HOSTED_TOOLS, INCLUDABLE, LOGPROBS, NESTED, RESPONSES
from aioinfer.server.responses.items import Conversation
from aioinfer.server.translation import ChatBody, given_list, given_object, given_text

__all__ = ["parse_response"]


def parse_response(raw: bytes, served: Served) -> Call:
    """A body of ``/v1/responses``. Raises InvalidRequest, and Refused for another model."""
    body = object_of(raw, served, RESPONSES)
    chat = ChatBody(body, served)
    _conversation(body, chat, served)
    for name, source in (
        ("max_tokens", "max_output_tokens"),
        *((same, same) for same in ("stop", "stream", "prompt_cache_key", "parallel_tool_calls")),
    ):
        chat.put(name, body.get(source), source)
    _logprobs(body, chat)
    tools = _tools(body, chat)
    _choice(body, chat)
    text = _format(body, chat)
    reasoning = given_object("reasoning", body.get("reasoning"), {})
    check(reasoning, NESTED["reasoning"], "reasoning.")
    effort = chat.effort(reasoning.get("effort"), "reasoning.effort", EFFORTS)
    options = given_object("stream_options", body.get("stream_options"), {})
    check(options, NESTED["stream_options"], "stream_options.")
    metadata = _metadata(body.get("metadata"))
    call = chat.call("resp_")
    if call.params.logprobs is not None and call.answer is not None:
        message = f"{LOGPROBS} cannot be combined with tools or a model that thinks"
        raise InvalidRequest("include", message, code="unsupported_parameter")
    given = {"tools": tools, "text": text, "metadata": metadata}
    return _with_repeated(call, body, {**given, "reasoning": {"effort": effort, "summary": None}})


def _with_repeated(call: Call, body: Mapping[str, Any], parsed: Mapping[str, Any]) -> Call:
    """The call with what the answer tells of it: the values in effect, not those of the body."""
    params, choice = call.params, body.get("tool_choice")
    repeated = {
        **parsed,
        "instructions": body.get("instructions"),
        "max_output_tokens": params.max_tokens,
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "presence_penalty": float(params.presence_penalty),
        "frequency_penalty": float(params.frequency_penalty),
        "prompt_cache_key": body.get("prompt_cache_key"),
        "temperature": float(params.temperature),
        "tool_choice": "auto" if choice is None else choice,
        "top_logprobs": params.logprobs or 0,
        "top_p": float(params.top_p),
        # the same in every answer
        **dict.fromkeys(
            (
                *("previous_response_id", "conversation", "prompt", "max_tool_calls", "moderation"),
                # which pydantic-ai reads even with clients that do not know it
                "prompt_cache_diagnostics",
            )
        ),
        "background": False,
        "store": False,
        "truncation": "disabled",
        "service_tier": "default",
    }
    repeated |= {
        name: body[name] for name in ("user", "safety_identifier") if isinstance(body.get(name), str)
    }
    for name, value in repeated.items():
        freeze(name, value)  # refuses what is nested too deeply to be written
    return replace(call, repeated=repeated)


def _conversation(body: Mapping[str, Any], chat: ChatBody, served: Served) -> None:
    given, instructions = body.get("input"), body.get("instructions")
    if isinstance(given, list) and len(given) > served.max_messages:
        most = f"at most {served.max_messages} items (max_messages), got {len(given)}"
        raise InvalidRequest("input", most)
    if instructions is not None:
        given_text("instructions", instructions)
    conversation = Conversation(instructions, served.chat.order)
    conversation.read(given)
    chat.put("messages", conversation.messages, "input")
    chat.names.update(conversation.names)


def _logprobs(body: Mapping[str, Any], chat: ChatBody) -> None:
    include = given_list("include", body.get("include"), [])
    for number, each in enumerate(include):
        if not isinstance(each, str) or each not in INCLUDABLE:
            raise InvalidRequest(f"include[{number}]", f"{shown(each)} is not supported by this server")
    top = body.get("top_logprobs")
    if LOGPROBS in include:
        chat.put("logprobs", True, "include")
        chat.put("top_logprobs", top, "top_logprobs")
    elif top is not None and (isinstance(top, bool) or top != 0):
        raise InvalidRequest("top_logprobs", f"needs include with {LOGPROBS!r}")


def _tools(body: Mapping[str, Any], chat: ChatBody) -> list[dict[str, Any]]:
    """Puts the functions in; returns them as the answer repeats them."""
    given = body.get("tools")
    if given is None:
        return []
    functions: list[dict[str, Any]] = []
    repeated: list[dict[str, Any]] = []
    for number, tool in enumerate(given_list("tools", given)):
        field = f"tools[{number}]"
        kind = given_object(field, tool).get("type")
        if isinstance(kind, str) and kind in HOSTED_TOOLS:
            continue
        if kind != "function":
            message = f"must be 'function' or a hosted tool, got {shown(kind)}"
            raise InvalidRequest(f"{field}.type", message, code="unsupported_parameter")
        check(tool, NESTED["tools[] function"], f"{field}.")
        function = {name: tool.get(name) for name in ("name", "description", "parameters", "strict")}
        chat.names[f"tools[{len(functions)}]"] = chat.names[f"tools[{len(functions)}].function"] = field
        functions.append({"type": "function", "function": function})
        repeated.append({"type": "function", **function, "strict": bool(tool.get("strict"))})
    chat.put("tools", functions, "tools")
    return repeated


def _choice(body: Mapping[str, Any], chat: ChatBody) -> None:
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        if choice.get("type") != "function":
            message = f"must be 'function', got {shown(choice.get('type'))}"
            raise InvalidRequest("tool_choice.type", message, code="unsupported_parameter")
        check(choice, NESTED["tool_choice"], "tool_choice.")
        choice = {"type": "function", "function": {"name": choice.get("name")}}
        chat.names["tool_choice.function"] = "tool_choice"
    if choice == "auto" and not chat.fields.get("tools"):
        return  # clients send it whether they have tools or not
    chat.put("tool_choice", choice, "tool_choice")


def _format(body: Mapping[str, Any], chat: ChatBody) -> dict[str, Any]:
    """Puts the format of the answer in; returns it as the answer repeats it."""
    text = given_object("text", body.get("text"), {})
    check(text, NESTED["text"], "text.")
    given = text.get("format")
    plain = {"format": {"type": "text"}, "verbosity": "medium"}
    if given is None:
        return plain
    check(given_object("text.format", given), NESTED["text.format"], "text.format.")
    kind, schema = given.get("type"), given.get("schema")
    if schema is not None and kind != "json_schema":
        raise InvalidRequest("text.format.schema", "needs the type json_schema")
    wanted: dict[str, Any] = {"type": kind}
    if kind == "json_schema":
        wanted["json_schema"] = {"schema": schema}
        chat.names["response_format.json_schema"] = "text.format"
    chat.put("response_format", wanted, "text.format")
    if kind == "json_schema":
        # What strict clients read, whether the body has it or not.
        given_object("text.format.schema", schema)
        labels = {
            name: None if (label := given.get(name)) is None else given_text(f"text.format.{name}", label)
            for name in ("name", "description")
        }
        labels = {"name": labels["name"] or "answer", "description": labels["description"] or None}
        given = {"type": kind, **labels, "schema": schema, "strict": True}
    return {**plain, "format": given}


def _metadata(given: Any) -> dict[str, str]:
    metadata = given_object("metadata", given, {})
    if len(metadata) > fields.MOST_METADATA:
        raise InvalidRequest("metadata", f"at most {fields.MOST_METADATA} entries, got {len(metadata)}")
    for key, value in metadata.items():
        if len(key) > fields.LONGEST_KEY or len(given_text("metadata", value)) > fields.LONGEST_VALUE:
            message = f"keys have at most {fields.LONGEST_KEY} characters, values {fields.LONGEST_VALUE}"
            raise InvalidRequest("metadata", message)
    return metadata
