"""Fields of the bodies of ``/v1/messages`` and ``/v1/messages/count_tokens``, and what the server does with
each of them.

:mod:`aioinfer.chat.fields` has the rules.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from aioinfer.chat.fields import Harmless, Honoured, Table, Unsupported
from aioinfer.chat.schemas import FLAG, OBJECT, TEXT, array, choice, either, text
from aioinfer.server.openai.fields import TOKENS
from aioinfer.server.translation import EXTENSIONS

__all__ = [
    "CLEARINGS",
    "COUNT",
    "DISPLAYS",
    "EFFORTS",
    "MESSAGES",
    "NESTED",
    "NO_THREADS",
    "SEARCH_TOOL",
    "SERVER_TOOL",
]

_NAME = text(pattern="[a-zA-Z0-9_-]{1,64}")
_BOOKKEEPING = Harmless("the client's bookkeeping")
_CACHING = Harmless("how long a prefix stays cached")
_NO = Unsupported()
_BLOCKS = either(TEXT, array(OBJECT))

#: Types of tools that are left out of a request: Anthropic defines them, and no schema comes with them. An
#: offered tool is a permission: the answer is that of a model that does not use it. A ``tool_choice`` that
#: names one is refused.
_HOSTED = (
    r"(web_search|web_fetch|code_execution|computer|computer_toolset|bash|text_editor|memory|advisor"
    r"|tool_search_tool_regex|tool_search_tool_bm25|mcp_toolset|browser_toolset)(_[0-9]{8})?"
)
SERVER_TOOL = re.compile(_HOSTED)
#: those that search among deferred tools
SEARCH_TOOL = re.compile(r"tool_search_tool_(regex|bm25)(_[0-9]{8})?")
#: ``clear_at`` of a system message
CLEARINGS = ("never", "next_user_message")
#: ``thinking.display``
DISPLAYS = ("summarized", "updates", "omitted")
#: ``output_config.effort``
EFFORTS = ("low", "medium", "high", "xhigh", "max")
#: The code of an error by which clients know that they have to send the whole conversation.
NO_THREADS = "thread_unsupported_request"

#: of ``/v1/messages/count_tokens``
COUNT: Table = {
    "model": Honoured("name of the served model (the default), or of an adapter", schema=TEXT),
    "messages": Honoured("the conversation", schema=array(OBJECT, 1), required=True),
    "system": Honoured("text, or a list of blocks of text", schema=_BLOCKS),
    "tools": Honoured(
        "functions that the model may call; tools that Anthropic defines are left out",
        schema=array(OBJECT),
    ),
    "tool_choice": Honoured("of type `auto`, `any`, `tool` or `none`"),
    "thinking": Honoured("whether the model thinks"),
    "output_config": Honoured("the format of the answer, and how much the model thinks"),
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
    "thread": Unsupported((), "nothing is stored: send the whole conversation as messages", NO_THREADS),
}

#: of ``/v1/messages``
MESSAGES: Table = {
    **COUNT,
    **EXTENSIONS,
    "max_tokens": Honoured("at most so many new tokens", "max_tokens", TOKENS, required=True),
    "stop_sequences": Honoured("`stop` of `SamplingParams`", schema=array(text(1, 1024), 0, 16)),
    "stream": Honoured("server-sent events", schema=FLAG),
    "stop": Unsupported((), "use stop_sequences"),
    "max_tokens_to_sample": Unsupported((), "use max_tokens"),
    "prompt": Unsupported((), "is for /v1/completions"),
    "n": Unsupported((1,)),
}


def _block(kind: str) -> Honoured:
    return Honoured(f"`{kind}`", schema=choice(kind), required=True)


#: objects within a body, by their path; of a block with its type
NESTED: Mapping[str, Table] = {
    "messages[]": {
        "role": Honoured(
            "`user`, `assistant` or `system`", schema=choice("user", "assistant", "system"), required=True
        ),
        "content": Honoured(
            "text or a list of blocks; a system message with `output_config` needs none", schema=TEXT
        ),
        "output_config": Honoured("of `system`: how much the model thinks from there on", schema=OBJECT),
        "clear_at": Honoured(
            "of `system`: `next_user_message` leaves it out where a message of the user follows",
            schema=choice(*CLEARINGS),
        ),
        "id": _BOOKKEEPING,
        "type": Unsupported(("message",)),
        "model": _BOOKKEEPING,
        "stop_reason": _BOOKKEEPING,
        "stop_sequence": _BOOKKEEPING,
        "usage": _BOOKKEEPING,
    },
    "messages[].output_config": {
        "effort": Honoured("as in `output_config` of the body; the last one counts", schema=choice(*EFFORTS))
    },
    "messages[].content[] text": {
        "type": _block("text"),
        "text": Honoured("text", schema=TEXT, required=True),
        "cache_control": _CACHING,
        "citations": Unsupported(([],)),
    },
    "messages[].content[] thinking": {
        "type": _block("thinking"),
        "thinking": Honoured("goes to the chat template, which may not read it", schema=TEXT, required=True),
        "signature": _BOOKKEEPING,
        "cache_control": _CACHING,
    },
    "messages[].content[] tool_use": {
        "type": _block("tool_use"),
        "id": Honoured("goes to the chat template", schema=TEXT, required=True),
        "name": Honoured("goes to the chat template", schema=TEXT),
        "input": Honoured("goes to the chat template"),
        "cache_control": _CACHING,
        "caller": Unsupported(({"type": "direct"},)),
        "toolset_name": _NO,
    },
    "messages[].content[] tool_result": {
        "type": _block("tool_result"),
        "tool_use_id": Honoured("goes to the chat template", schema=TEXT, required=True),
        "content": Honoured(
            "text, or a list of blocks of text and of references to deferred tools", schema=_BLOCKS
        ),
        "is_error": Honoured("true: the model reads `Error: ` in front of the content", schema=FLAG),
        "cache_control": _CACHING,
        "toolset_name": _NO,
    },
    "messages[].content[].content[] tool_reference": {
        "type": _block("tool_reference"),
        "tool_name": Honoured("the model reads it, and learns of the tool", schema=TEXT, required=True),
        "cache_control": _CACHING,
    },
    "tools[] hosted": {
        "type": Honoured("a tool that Anthropic defines", schema=text(pattern=_HOSTED), required=True)
    },
    "tools[] custom": {
        "type": Honoured("`custom`, or absent", schema=choice("custom")),
        "name": Honoured("1 to 64 letters, digits, `_`, `-`", schema=_NAME, required=True),
        "description": Honoured("goes to the chat template", schema=TEXT),
        "input_schema": Honoured("the JSON schema of the arguments", schema=OBJECT, required=True),
        "strict": Honoured("the arguments obey the schema", schema=FLAG),
        "cache_control": _CACHING,
        "eager_input_streaming": Harmless("how arguments are streamed"),
        "defer_loading": Honoured(
            "true: the model learns of the tool when a result refers to it; at once if it is the one of "
            "`tool_choice`, or if `tools` has a search of Anthropic's, which nobody could run",
            schema=FLAG,
        ),
        "allowed_callers": Unsupported((["direct"],)),
        "input_examples": Unsupported(([],)),
    },
    "tool_choice": {
        "type": Honoured(
            "`auto`, `any`, `tool` or `none`", schema=choice("auto", "any", "tool", "none"), required=True
        ),
        "name": Honoured("of type `tool`: the function to call", schema=_NAME),
        "disable_parallel_tool_use": Honoured("true: one call at most", schema=FLAG),
    },
    "thinking": {
        "type": Honoured(
            "`enabled` and `disabled` switch thinking in a template with such a switch, and are refused "
            "where the model does otherwise; `adaptive` leaves it to the model",
            schema=choice("enabled", "disabled", "adaptive"),
            required=True,
        ),
        "budget_tokens": Harmless("an aim, not a limit; `max_tokens` is the limit"),
        "display": Honoured(
            "`omitted`: blocks of thinking come without their text; `summarized`, `updates`: with all of it",
            schema=choice(*DISPLAYS),
        ),
    },
    "output_config": {
        "effort": Honoured(
            "a wish: goes to the chat template as `reasoning_effort`, if that reads it",
            schema=choice(*EFFORTS),
        ),
        "format": Honoured("of type `json_schema`", schema=OBJECT),
        "task_budget": _NO,
    },
    "output_config.format": {
        "type": Honoured("`json_schema`", schema=choice("json_schema"), required=True),
        "schema": Honoured("the JSON schema", schema=OBJECT, required=True),
        "name": Harmless("a label"),
    },
}
