"""Fields of the bodies of ``/v1/messages`` and ``/v1/messages/count_tokens``, and what the server does with
each of them.

:mod:`aioinfer.chat.fields` has the rules.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from aioinfer.chat.fields import Harmless, Honoured, Table, Unsupported
from aioinfer.server.translation import EXTENSIONS

__all__ = ["COUNT", "MESSAGES", "NESTED", "SERVER_TOOL"]

_BOOKKEEPING = Harmless("the client's bookkeeping")
_CACHING = Harmless("how long a prefix stays cached")
_NO = Unsupported()
_TEXT = {"type": "string"}
_FLAG = {"type": "boolean"}
_OBJECT = {"type": "object"}
_LIST = {"type": "array", "items": _OBJECT}
_BLOCKS = {"anyOf": [_TEXT, _LIST]}

#: Types of tools that are left out of a request: Anthropic defines them, and no schema comes with them. An
#: offered tool is a permission: the answer is that of a model that does not use it. A ``tool_choice`` that
#: names one is refused.
SERVER_TOOL = re.compile(
    r"(web_search|web_fetch|code_execution|computer|computer_toolset|bash|text_editor|memory|advisor"
    r"|tool_search_tool_regex|tool_search_tool_bm25|mcp_toolset|browser_toolset)(_[0-9]{8})?"
)

#: of ``/v1/messages/count_tokens``
COUNT: Table = {
    "model": Honoured("the served model's name; a request without it gets the served model", schema=_TEXT),
    "messages": Honoured("the conversation", schema={**_LIST, "minItems": 1}, required=True),
    "system": Honoured("text, or a list of blocks of text", schema=_BLOCKS),
    "tools": Honoured(
        "functions that the model may call; tools that Anthropic defines are left out",
        schema={**_LIST, "maxItems": 128},
    ),
    "tool_choice": Honoured("of type `auto`, `any`, `tool` or `none`", schema=_OBJECT),
    "thinking": Honoured("whether the model thinks", schema=_OBJECT),
    "output_config": Honoured("the format of the answer, and how much the model thinks", schema=_OBJECT),
    "chat_template_kwargs": EXTENSIONS["chat_template_kwargs"],
    # accepted
    "metadata": _BOOKKEEPING,
    "user_profile_id": _BOOKKEEPING,
    "workspace_id": _BOOKKEEPING,
    "cache_control": _CACHING,
    "diagnostics": _BOOKKEEPING,
    "inference_geo": Harmless("where it is computed"),
    "betas": Harmless("features that a request uses have fields of their own"),
    # refused
    "service_tier": Unsupported(("auto", "standard_only")),
    "speed": Unsupported(("standard",)),
    "container": _NO,
    "mcp_servers": Unsupported(([],)),
    "context_management": Unsupported(
        ({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    ),
    "output_format": Unsupported((), "use output_config.format"),
}

#: of ``/v1/messages``
MESSAGES: Table = {
    **COUNT,
    **EXTENSIONS,
    "max_tokens": Honoured(
        "at most so many new tokens",
        schema={"type": "integer", "minimum": 1},
        param="max_tokens",
        required=True,
    ),
    "stop_sequences": Honoured("`stop` of `SamplingParams`", schema={"type": "array", "items": _TEXT}),
    "stream": Honoured("server-sent events", schema=_FLAG),
    "stop": Unsupported((), "use stop_sequences"),
    "max_tokens_to_sample": Unsupported((), "use max_tokens"),
    "prompt": Unsupported((), "is for /v1/completions"),
    "n": Unsupported((1,)),
}

_TYPE = Honoured("of the block", schema=_TEXT)

#: objects within a body, by their path; of a block with its type
NESTED: Mapping[str, Table] = {
    "messages[]": {
        "role": Honoured("`user`, `assistant` or `system`", schema=_TEXT),
        "content": Honoured("text or a list of blocks", schema=_BLOCKS),
        "id": _BOOKKEEPING,
        "type": Unsupported(("message",)),
        "model": _BOOKKEEPING,
        "stop_reason": _BOOKKEEPING,
        "stop_sequence": _BOOKKEEPING,
        "usage": _BOOKKEEPING,
    },
    "content[] text": {
        "type": _TYPE,
        "text": Honoured("text", schema=_TEXT),
        "cache_control": _CACHING,
        "citations": Unsupported(([],)),
    },
    "content[] thinking": {
        "type": _TYPE,
        "thinking": Honoured("goes to the chat template, which may not read it", schema=_TEXT),
        "signature": _BOOKKEEPING,
        "cache_control": _CACHING,
    },
    "content[] tool_use": {
        "type": _TYPE,
        "id": Honoured("goes to the chat template", schema=_TEXT),
        "name": Honoured("goes to the chat template", schema=_TEXT),
        "input": Honoured("goes to the chat template", schema=_OBJECT),
        "cache_control": _CACHING,
        "caller": Unsupported(({"type": "direct"},)),
        "toolset_name": _NO,
    },
    "content[] tool_result": {
        "type": _TYPE,
        "tool_use_id": Honoured("goes to the chat template", schema=_TEXT),
        "content": Honoured("text or a list of blocks of text", schema=_BLOCKS),
        "is_error": Honoured("true: the model reads `Error: ` in front of the content", schema=_FLAG),
        "cache_control": _CACHING,
        "toolset_name": _NO,
    },
    "tools[]": {
        "type": Honoured("`custom`, or absent; tools that Anthropic defines are left out", schema=_TEXT),
        "name": Honoured("1 to 64 letters, digits, `_`, `-`", schema=_TEXT),
        "description": Honoured("goes to the chat template", schema=_TEXT),
        "input_schema": Honoured("the JSON schema of the arguments", schema=_OBJECT),
        "strict": Honoured("the arguments obey the schema", schema=_FLAG),
        "cache_control": _CACHING,
        "eager_input_streaming": Harmless("how arguments are streamed"),
        "defer_loading": Unsupported((False,)),
        "allowed_callers": Unsupported((["direct"],)),
        "input_examples": Unsupported(([],)),
    },
    "tool_choice": {
        "type": Honoured("`auto`, `any`, `tool` or `none`", schema=_TEXT),
        "name": Honoured("of type `tool`: the function to call", schema=_TEXT),
        "disable_parallel_tool_use": Honoured("true: one call at most", schema=_FLAG),
    },
    "thinking": {
        "type": Honoured(
            "`enabled` and `disabled` switch thinking in a template with such a switch, and are refused "
            "where the model does otherwise; `adaptive` leaves it to the model",
            schema=_TEXT,
        ),
        "budget_tokens": Harmless("an aim, not a limit; `max_tokens` is the limit"),
        "display": Unsupported(("summarized",)),
    },
    "output_config": {
        "effort": Honoured(
            "goes to the chat template as `reasoning_effort`; refused if that does not read it, but for "
            "`high`, which is the default",
            schema=_TEXT,
        ),
        "format": Honoured("of type `json_schema`", schema=_OBJECT),
        "task_budget": _NO,
    },
    "output_config.format": {
        "type": Honoured("`json_schema`", schema=_TEXT),
        "schema": Honoured("the JSON schema", schema=_OBJECT),
        "name": Harmless("a label"),
    },
}
