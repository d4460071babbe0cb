"""A chat in this process: the checked request, deltas while it is computed, one result at the end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from aioinfer.chat.answers import AnswerFormat
from aioinfer.outputs import Draft, FinishReason, Result, TokenLogprob, Usage
from aioinfer.params import SamplingParams
from aioinfer.text.tool_calls import ToolCallDelta

__all__ = ["ChatDelta", "ChatFinishReason", "ChatRequest", "ChatResult", "Parse", "ToolCall", "message_of"]

#: as of a stream; "tool_calls": the answer has complete calls and came to its end
ChatFinishReason = FinishReason | Literal["tool_calls"]
#: fields of a result that its repr spells out
_SHOWN = ("content", "reasoning", "tool_calls", "finish_reason", "usage")
#: text -> object; raises ValueError
Parse = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat, checked and copied."""

    messages: list[dict[str, Any]]
    template_kwargs: dict[str, Any] | None
    params: SamplingParams
    #: parsers of the answer; None: all of it is content
    answer: AnswerFormat | None
    #: argument of ``generate`` -> what the caller calls it, where the names differ
    names: Mapping[str, str]
    #: of the content
    parse: Parse | None = None
    #: of the arguments of calls, by the name of the function
    parse_arguments: Mapping[str, Parse] = field(default_factory=dict)


@dataclass(slots=True)
class ChatDelta:
    """The answer since the previous delta. Concatenated, they are the result.

    A reader that comes late gets fewer, larger deltas. Only the last one has ``finish_reason`` and ``usage``.
    """

    content: str = ""
    reasoning: str = ""
    #: parts of calls: the first of a call has its id and its name, the others have arguments
    tool_calls: Sequence[ToolCallDelta] = ()
    finish_reason: ChatFinishReason | None = None
    usage: Usage | None = None
    #: diffusion models: the newest draft, if drafts were requested
    draft: Draft | None = None
    #: one entry per token that came since the previous delta, also of text that is held back, if requested
    logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True)
class ToolCall:
    """A call of a function. The caller makes it, and gives the model what :meth:`reply` makes of the
    outcome."""

    id: str
    name: str
    #: JSON, as the model wrote it
    arguments: str
    _parse: Parse = field(default=json.loads, repr=False, compare=False)

    @cached_property
    def parsed(self) -> Any:
        """The arguments as an object; of a tool that is a pydantic model, an instance of it.

        Raises ValueError if they are not what the tool takes. Arguments of functions, of models and of
        ``strict`` tools obey their schema unless the answer was cut (``finish_reason`` "length").
        """
        return self._parse(self.arguments)

    def reply(self, outcome: Any) -> dict[str, Any]:
        """The message that tells the model of the outcome: text, or a value that becomes JSON."""
        text = outcome if isinstance(outcome, str) else json.dumps(outcome)
        return {"role": "tool", "tool_call_id": self.id, "name": self.name, "content": text}


@dataclass(frozen=True, repr=False)
class ChatResult:
    """A finished answer of a chat."""

    #: None if there are calls and nothing else
    content: str | None
    #: what the model thought, as far as its format is known
    reasoning: str | None
    tool_calls: list[ToolCall]
    finish_reason: ChatFinishReason
    usage: Usage
    #: the generation: token ids, logprobs, metrics, and the text as the model wrote it
    result: Result
    _parse: Parse | None = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        shown = (f"{name}={getattr(self, name)!r}" for name in _SHOWN)
        return f"ChatResult({', '.join(shown)}, result=<Result of {len(self.result.token_ids)} tokens>)"

    @cached_property
    def parsed(self) -> Any:
        """The content as ``response_format`` has it: of a class an instance, of a schema the value.
        None without a format, and without content.

        Raises ValueError if the content is not complete (``finish_reason`` "length", or a stop string), or
        if the model's own validators refuse it.
        """
        return None if self._parse is None or self.content is None else self._parse(self.content)

    @property
    def request_id(self) -> str:
        """The caller's name for the request, or one that was made for it."""
        return self.result.request_id

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message, for the next turn of the conversation."""
        return message_of(self.content or "", self.reasoning, self.tool_calls)


def message_of(
    content: str, reasoning: str | None, calls: Iterable[ToolCall | ToolCallDelta]
) -> dict[str, Any]:
    """An answer as a message."""
    calls = list(calls)
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {
                "id": call.id or "",
                "type": "function",
                "function": {"name": call.name or "", "arguments": call.arguments},
            }
            for call in calls
        ]
    return message
