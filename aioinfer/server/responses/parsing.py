"""Parsing: the body of ``/v1/responses`` becomes a checked call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aioinfer.chat.bodies import admit
from aioinfer.chat.variables import Variables
from aioinfer.errors import InvalidRequest
from aioinfer.inputs import freeze
from aioinfer.server.openai.protocol import Call, Served, chat_call, check_count, format_beside, read
from aioinfer.server.responses.fields import LOGPROBS, FunctionTool, NamedTool, ResponsesBody, TextFormat
from aioinfer.server.responses.items import Conversation
from aioinfer.server.responses.stored import new_response_id

__all__ = ["parse_response"]


def parse_response(raw: bytes, served: Served) -> Call:
    """A body of ``/v1/responses``. Raises InvalidRequest, and Refused for another model."""
    body = read(ResponsesBody, raw, served)
    stored = served.stored
    assert stored is not None
    previous = stored.previous(served.owner, body.previous_response_id)
    earlier = () if previous is None else previous.items
    check_count("input", body.input, served, before=len(earlier))
    conversation = Conversation(body.instructions, images=served.images)
    conversation.read(earlier, "previous_response_id")
    conversation.read(body.input)
    names = {**conversation.names, "messages": "input"}
    top, wanted = body.top_logprobs, LOGPROBS in body.include
    if top and not wanted:
        raise InvalidRequest("top_logprobs", f"needs include with {LOGPROBS!r}")
    names["logprobs"] = "include" if top is None else "top_logprobs"
    tools, repeated = _tools(body, names)
    choice = _choice(body, tools, names)
    form, text = _format(body.text.format, names)
    variables = Variables(served.chat, body.chat_template_kwargs)
    effort = variables.effort(body.reasoning.effort, "reasoning.effort", wish=True)
    call = chat_call(
        body,
        served,
        "resp_",
        conversation.messages,
        variables,
        logprobs=(top or 0) if wanted else None,
        response_format=format_beside(choice, form),
        names=names,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
    )
    if call.params.logprobs is not None and call.answer is not None:
        message = f"{LOGPROBS} cannot be combined with tools or a model that thinks"
        raise InvalidRequest("include", message, code="unsupported_parameter")
    given = {"tools": repeated, "text": text, "reasoning": {"effort": effort, "summary": None}}
    if stored.enabled and body.store is not False:
        name = call.id if body.request_id else new_response_id()
        call = replace(call, id=name, draft=stored.draft(served.owner, name, previous, body.input))
    return _with_repeated(call, body, given)


def _with_repeated(call: Call, body: ResponsesBody, parsed: dict[str, Any]) -> Call:
    """The call with what the answer tells of it: the values in effect, not those of the body."""
    params = call.params
    repeated = {
        **parsed,
        "metadata": body.metadata,
        "instructions": body.instructions,
        "max_output_tokens": params.max_tokens,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "presence_penalty": float(params.presence_penalty),
        "frequency_penalty": float(params.frequency_penalty),
        "prompt_cache_key": body.prompt_cache_key,
        "temperature": float(params.temperature),
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "top_logprobs": params.logprobs or 0,
        "top_p": float(params.top_p),
        # the same in every answer
        **dict.fromkeys(
            (
                *("conversation", "prompt", "max_tool_calls", "moderation"),
                # which pydantic-ai reads even with clients that do not know it
                "prompt_cache_diagnostics",
            )
        ),
        "background": False,
        "previous_response_id": body.previous_response_id,
        "store": call.draft is not None,
        "truncation": "disabled",
        "service_tier": "default",
    }
    for name in ("user", "safety_identifier"):
        if isinstance(value := getattr(body, name), str):
            repeated[name] = value
    for name, value in repeated.items():
        freeze(name, value)  # refuses what is nested too deeply to be written
    return replace(call, repeated=repeated)


def _tools(
    body: ResponsesBody, names: dict[str, str]
) -> tuple[list[dict[str, Any]] | None, list[dict[str, Any]]]:
    """The functions in OpenAI's form of chats, and as the answer repeats them. Enters where they come
    from."""
    functions: list[dict[str, Any]] = []
    repeated: list[dict[str, Any]] = []
    for number, tool in enumerate(body.tools):
        if not isinstance(tool, FunctionTool):
            continue
        function = {name: getattr(tool, name) for name in ("name", "description", "parameters", "strict")}
        at = f"tools[{len(functions)}]"
        names[at] = names[f"{at}.function"] = f"tools[{number}]"
        functions.append({"type": "function", "function": function})
        repeated.append({"type": "function", **function, "strict": bool(tool.strict)})
    return functions or None, repeated


def _choice(body: ResponsesBody, tools: Any, names: dict[str, str]) -> Any:
    """``tool_choice`` in OpenAI's form of chats. Enters where it comes from."""
    choice = body.tool_choice
    if isinstance(choice, dict):
        name = admit(NamedTool, choice, "tool_choice").name
        names["tool_choice.function"] = "tool_choice"
        return {"type": "function", "function": {"name": name}}
    # Clients send "auto" whether they have tools or not.
    return None if choice == "auto" and not tools else choice


def _format(given: TextFormat | None, names: dict[str, str]) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """``response_format``, and ``text`` as the answer repeats it. Enters where it comes from."""
    plain = {"format": {"type": "text"}, "verbosity": "medium"}
    if given is None:
        return None, plain
    if given.schema_ is not None and given.type != "json_schema":
        raise InvalidRequest("text.format.schema", "needs the type json_schema")
    names["response_format"] = names["response_format.json_schema"] = "text.format"
    if given.type != "json_schema":
        return {"type": given.type}, {**plain, "format": {"type": given.type}}
    if given.schema_ is None:
        raise InvalidRequest("text.format.schema", "is missing")
    labels = {"name": given.name or "answer", "description": given.description or None}
    # What strict clients read, whether the body has it or not.
    repeated = {"type": given.type, **labels, "schema": given.schema_, "strict": True}
    return {"type": given.type, "json_schema": {"schema": given.schema_}}, {**plain, "format": repeated}
