"""Fields of the bodies of ``/v1/responses``, and what the server does with each of them.

:mod:`aioinfer.chat.fields` has the rules.
"""

from __future__ import annotations

from collections.abc import Mapping

from aioinfer.chat.fields import Harmless, Honoured, Table, Unsupported
from aioinfer.chat.schemas import FLAG, OBJECT, TEXT, array, choice, either, integer, text
from aioinfer.server.openai.fields import TOKENS, VERBOSITIES
from aioinfer.server.translation import EXTENSIONS

__all__ = [
    "EFFORTS",
    "HOSTED_TOOLS",
    "INCLUDABLE",
    "LOGPROBS",
    "LONGEST_KEY",
    "LONGEST_VALUE",
    "MOST_METADATA",
    "NESTED",
    "RESPONSES",
]

#: entries of ``metadata``, and characters of their keys and values
MOST_METADATA, LONGEST_KEY, LONGEST_VALUE = 16, 64, 512

_NAME = text(pattern="[a-zA-Z0-9_-]{1,64}")
_BOOKKEEPING = Harmless("the client's bookkeeping")
_NO = Unsupported()
_METADATA = {
    "type": "object",
    "maxProperties": MOST_METADATA,
    "propertyNames": {"maxLength": LONGEST_KEY},
    "additionalProperties": text(0, LONGEST_VALUE),
}
_SUMMARIES = ("auto", "concise", "detailed")
_STATE = Harmless("of an item that is complete")

#: Types of tools that are left out of a request. An offered tool is a permission: the answer is that of a
#: model that does not use it. A ``tool_choice`` that demands one is refused.
HOSTED_TOOLS = frozenset(
    {
        *("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"),
        *("file_search", "code_interpreter", "image_generation", "computer", "computer_use_preview", "mcp"),
        *("local_shell", "shell", "apply_patch", "custom", "namespace", "tool_search"),
        "programmatic_tool_calling",
    }
)

#: ``reasoning.effort``
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

LOGPROBS = "message.output_text.logprobs"
#: what ``include`` may name: besides logprobs, parts of answers that this server's do not have
INCLUDABLE = frozenset(
    {
        *(LOGPROBS, "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results"),
        *("web_search_call.action.sources", "message.input_image.image_url"),
        *("computer_call_output.output.image_url", "code_interpreter_call.outputs"),
    }
)

#: of the body
RESPONSES: Table = {
    **EXTENSIONS,
    "model": Honoured("name of the served model (the default), or of an adapter", schema=TEXT),
    "input": Honoured(
        "text, or items: messages, calls and their outputs, reasoning",
        schema=TEXT,
        required=True,
    ),
    "instructions": Honoured("a system message in front of `input`", schema=TEXT),
    "max_output_tokens": Honoured("`max_tokens`", "max_tokens", TOKENS),
    "stop": Honoured("as in `SamplingParams`", "stop"),
    "top_logprobs": Honoured(
        f"likely alternatives of each token; needs `include` with `{LOGPROBS}`",
        schema=integer(0, 20),
    ),
    "include": Honoured(
        f"`{LOGPROBS}`; what else it may name is in no answer of this server",
        schema=array(choice(*sorted(INCLUDABLE))),
    ),
    "tools": Honoured(
        "functions that the model may call; hosted tools are left out",
        schema=array(OBJECT),
    ),
    "tool_choice": Honoured(
        "`none`, `auto`, `required`, or one function",
        schema=choice("none", "auto", "required"),
    ),
    "parallel_tool_calls": Honoured("false: one call at most", schema=FLAG),
    "text": Honoured("the format of the answer"),
    "reasoning": Honoured("how much the model thinks"),
    "stream": Honoured("server-sent events", schema=FLAG),
    "stream_options": Honoured("what a stream includes"),
    "prompt_cache_key": Honoured("`routing_key`, unless that is given", schema=TEXT),
    "metadata": Honoured("is repeated in the answer", schema=_METADATA),
    # accepted
    "user": _BOOKKEEPING,
    "safety_identifier": _BOOKKEEPING,
    "client_metadata": _BOOKKEEPING,
    "store": Harmless("nothing is stored, whatever it says"),
    "prompt_cache_retention": Harmless("how long a prefix stays cached"),
    "prompt_cache_options": Harmless("how a prefix is cached"),
    "max_tool_calls": Harmless("a limit of hosted tools, which this server does not have"),
    # refused
    "previous_response_id": Unsupported((), "nothing is stored: send the whole conversation as input"),
    "conversation": Unsupported((), "nothing is stored: send the whole conversation as input"),
    "background": Unsupported((False,)),
    "background_options": _NO,
    "prompt": Unsupported((), "nothing is stored: use input and instructions"),
    "truncation": Unsupported(("disabled",)),
    "context_management": Unsupported(([],)),
    "service_tier": Unsupported(("auto", "default")),
    "moderation": _NO,
    "image": _NO,
    "access_programs": _NO,
    "messages": Unsupported((), "use input"),
    "max_tokens": Unsupported((), "use max_output_tokens"),
    "max_completion_tokens": Unsupported((), "use max_output_tokens"),
    "response_format": Unsupported((), "use text.format"),
    "reasoning_effort": Unsupported((), "use reasoning.effort"),
    "logprobs": Unsupported((False,), "use top_logprobs and include"),
    "n": Unsupported((1,)),
}

_MESSAGE: Table = {
    "type": Honoured("`message`, or absent", schema=choice("message")),
    "role": Honoured(
        "`user`, `assistant`, `system`, or `developer`, which is the same",
        schema=choice("user", "assistant", "system", "developer"),
        required=True,
    ),
    "content": Honoured("text or a list of parts of text", schema=TEXT, required=True),
    "id": _BOOKKEEPING,
    "status": _STATE,
    "phase": Harmless("a label of OpenAI's own models"),
}
_CALL: Table = {
    "type": Honoured("`function_call`", schema=choice("function_call"), required=True),
    "call_id": Honoured("goes to the chat template", schema=TEXT, required=True),
    "name": Honoured("goes to the chat template", schema=TEXT),
    "arguments": Honoured("goes to the chat template", schema=TEXT, required=True),
    "id": _BOOKKEEPING,
    "status": _STATE,
    "parsed_arguments": Harmless("the client's reading of `arguments`"),
    "caller": Unsupported(({"type": "direct"},)),
    "namespace": _NO,
    "async": Unsupported((False,)),
}
_OUTPUT: Table = {
    "type": Honoured("`function_call_output`", schema=choice("function_call_output"), required=True),
    "call_id": Honoured("goes to the chat template", schema=TEXT, required=True),
    "output": Honoured("text or a list of parts of text", schema=either(TEXT, array(OBJECT)), required=True),
    "name": Honoured("goes to the chat template", schema=TEXT),
    "id": _BOOKKEEPING,
    "status": _STATE,
    "caller": Unsupported(({"type": "direct"},)),
    "namespace": _NO,
}
_REASONING_ITEM: Table = {
    "type": Honoured("`reasoning`", schema=choice("reasoning"), required=True),
    "content": Honoured(
        "the reasoning; goes to the chat template, which may not read it", schema=array(OBJECT)
    ),
    "summary": Honoured("is used without `content`", schema=array(OBJECT)),
    "id": _BOOKKEEPING,
    "status": _STATE,
    "encrypted_content": Unsupported(("",), "of another server, it cannot be read"),
}


def _thought(kind: str) -> Table:
    return {
        "type": Honoured(f"`{kind}`", schema=choice(kind), required=True),
        "text": Honoured("text", schema=TEXT, required=True),
    }


_PART: Table = {
    "type": Honoured(
        "`input_text` or `output_text`", schema=choice("input_text", "output_text", "text"), required=True
    ),
    "text": Honoured("text", schema=TEXT, required=True),
    "annotations": Unsupported(([],)),
    "logprobs": Harmless("of an earlier answer"),
    "parsed": Harmless("the client's reading of `text`"),
    "cache_control": Harmless("how long a prefix stays cached"),
    "prompt_cache_breakpoint": Harmless("how a prefix is cached"),
}

#: objects within a body, by their path; of an item with its type
NESTED: Mapping[str, Table] = {
    "input[] message": _MESSAGE,
    "input[] function_call": _CALL,
    "input[] function_call_output": _OUTPUT,
    "input[] reasoning": _REASONING_ITEM,
    "input[].content[] text": _PART,
    "input[].content[] reasoning": _thought("reasoning_text"),
    "input[].summary[]": _thought("summary_text"),
    "tools[] hosted": {"type": Honoured("is left out", schema=choice(*sorted(HOSTED_TOOLS)), required=True)},
    "tools[] function": {
        "type": Honoured("`function`", schema=choice("function"), required=True),
        "name": Honoured("1 to 64 letters, digits, `_`, `-`", schema=_NAME, required=True),
        "description": Honoured("goes to the chat template", schema=TEXT),
        "parameters": Honoured("the JSON schema of the arguments", schema=OBJECT),
        "strict": Honoured("the arguments obey the schema", schema=FLAG),
        "defer_loading": Harmless("the model learns of all tools at once"),
        "allowed_callers": Unsupported((["direct"],)),
        "async": Unsupported((False,)),
        "output_schema": _NO,
    },
    "tool_choice": {
        "type": Honoured("`function`", schema=choice("function"), required=True),
        "name": Honoured("the function to call", schema=_NAME, required=True),
    },
    "text": {
        "format": Honoured("`text`, `json_object` or `json_schema`"),
        "verbosity": Unsupported(VERBOSITIES),
    },
    "text.format": {
        "type": Honoured(
            "`text`, `json_object` or `json_schema`",
            schema=choice("text", "json_object", "json_schema"),
            required=True,
        ),
        "schema": Honoured("of type `json_schema`: the JSON schema", schema=OBJECT),
        "name": Harmless("a label"),
        "description": Harmless("a label"),
        "strict": Harmless("every schema is enforced"),
    },
    "reasoning": {
        "effort": Honoured(
            "a wish: goes to the chat template as `reasoning_effort`, if that reads it; `none` switches "
            "thinking off, and is refused of a model that always thinks",
            schema=choice(*EFFORTS),
        ),
        "summary": Unsupported(_SUMMARIES, "answers have the reasoning itself"),
        "generate_summary": Unsupported(_SUMMARIES, "answers have the reasoning itself"),
        "mode": Unsupported(("standard",)),
        "context": Unsupported(("auto", "all_turns"), "what of it is in input"),
    },
    "stream_options": {"include_obfuscation": Harmless("padding of events")},
}
