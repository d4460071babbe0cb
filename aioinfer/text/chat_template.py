"""ChatTemplate: the text of a conversation through a template, with everything that its messages say.

Templates leave out what they do not expect, without a word: a role, a second system message, text beside
calls. What a template needs is found out by rendering small conversations with unique words. A conversation
is then changed only where that helps, and refused where some of it would not reach the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from aioinfer.errors import InvalidRequest, shown
from aioinfer.text import template
from aioinfer.text.conversation import PLACES, Change, Message, fitted
from aioinfer.text.messages import IMAGE, check_text
from aioinfer.text.template_environment import rendered

__all__ = ["UNREAD", "ChatTemplate"]

#: why a field is refused that the template would have to read
UNREAD = "is not read by the model's chat template"

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
#: Times that the search for texts goes back: templates put the system message elsewhere.
_BACK = 8
#: Texts that are searched in vain: each search may take the whole prompt.
_MISSES = 64
#: Unique words: digits and one letter, which templates neither escape nor trim, nor print in upper case.
_WORD = "9007199254"
_WORDS = re.compile(f"a?{_WORD}[0-9]{{6}}|b9007[0-9]{{4}}")
#: a value in the notation of Python, or a thought as JSON
_REPR = re.compile(f"""': 'a?{_WORD}|"thinking": "{_WORD}""")


class ChatTemplate:
    """One template of a tokenizer, for chats with or without tools. Its methods may be called from any
    thread."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, Any],
        names: frozenset[str] | None,
        tools: bool,
    ) -> None:
        """``special_tokens``: variables of every rendering; ``names``: what the template reads, if that is
        known; ``tools``: functions are offered."""
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._names = names
        self._tools = tools

    def render(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        """The text of plain messages. Raises InvalidRequest, by the message whose text is not in it."""
        self._check_roles(messages)
        changes, conversation = self._fitted(messages, variables)
        try:
            text = self._rendered(conversation, variables)
        except Exception as error:
            # A template is a program: unexpected messages can make it raise any exception.
            raise InvalidRequest("messages", f"the chat template refused them: {error}") from error
        check_text("messages", text)
        if missing := _missing(messages, text):
            # Some texts change on their way: templates trim them, or take thoughts out of them. Words do not.
            arrived = self._arrived(marked := _marked(messages), changes, variables)
            for at in missing:
                if marked[at]["content"].rstrip(IMAGE) not in arrived:
                    raise InvalidRequest(f"messages[{at}].content", UNREAD, code="unsupported_parameter")
        return text

    def _fitted(
        self, messages: Sequence[Message], variables: Mapping[str, Any]
    ) -> tuple[Change, list[Message]]:
        """The changes that this conversation needs, and itself with them. Messages stay in their places where
        nothing is lost there."""
        changes, calls_arrive = self._needs
        for at, message in enumerate(messages):
            if not calls_arrive and "tool_calls" in message:
                raise InvalidRequest(f"messages[{at}].tool_calls", UNREAD, code="unsupported_parameter")
        in_place = fitted(messages, less := changes & ~PLACES)
        if less == changes or (_usual(messages) and Change.SYSTEM_TO_USER not in changes):
            return less, in_place
        if (conversation := fitted(messages, changes)) != in_place:
            marked = _marked(messages)
            if not self._arrived(marked, less, variables) >= self._arrived(marked, changes, variables):
                return changes, conversation
        return less, in_place

    def _arrived(
        self, conversation: list[Message], changes: Change, variables: Mapping[str, Any], share: int = 1
    ) -> set[str]:
        """The words of a conversation that arrive; none if the template refuses it."""
        try:
            text = self._rendered(fitted(conversation, changes), variables, share)
        except Exception:
            return set()
        return set() if _REPR.search(text) else _words(conversation) & set(_WORDS.findall(text))

    def _rendered(self, messages: list[Message], variables: Mapping[str, Any], share: int = 1) -> str:
        prepared = template.prepare(self._source)
        with template.limited(share):
            return rendered(prepared, messages, **{**self._special_tokens, **variables})

    def _check_roles(self, messages: Sequence[Message]) -> None:
        for at, message in enumerate(messages):
            role = message["role"]
            if role not in _ROLES and self._names is not None and role not in self._names:
                said = f"{shown(role)} is not a role that the model's chat template knows"
                raise InvalidRequest(f"messages[{at}].role", said)

    # -- what the template needs ----------------------------------------------------------------

    @cached_property
    def _needs(self) -> tuple[Change, bool]:
        """The changes that some conversations need, and whether calls arrive. None if the template takes no
        message alone, because it needs variables for example."""
        changes = Change(0)
        for alternatives, conversations in _TRIALS:
            most, best = self._carried(conversations, changes), changes
            complete = sum(len(_words(each)) for each in conversations)
            for each in alternatives:
                if most < complete and (carried := self._carried(conversations, changes | each)) > most:
                    most, best = carried, changes | each
            if conversations is _PLAIN and not most:
                return changes, True
            changes = best
        # The words of the user and of the result are none of the call's.
        return changes, self._carried(_CALLS, changes) != 2

    def _carried(self, conversations: Sequence[list[Message]], changes: Change) -> int:
        """How many words of these conversations arrive."""
        total = 0
        for each in conversations:
            continues = each[-1]["role"] == "assistant"
            variables = {"tools": [_TOOL] if self._tools else None, "add_generation_prompt": not continues}
            total += len(self._arrived(each, changes, variables, _SHARE))
        return total


def _usual(messages: Sequence[Message]) -> bool:
    """Each message has a place that every template knows: a system message, then turns without calls."""
    roles = [message["role"] for message in messages]
    first = roles[0] == "system"
    in_turn = set(roles[first::2]) <= {"user"} and set(roles[first + 1 :: 2]) <= {"assistant"}
    return in_turn and not any("tool_calls" in message for message in messages)


def _missing(messages: Sequence[Message], text: str) -> list[int]:
    """Messages whose contents are not found in the text as they are. One with a role of the template's own
    never is: where the template reads it has not been tried."""
    missing: list[int] = []
    at, back = 0, _BACK
    for index, message in enumerate(messages):
        for content in map(str.strip, (message["content"] or "").split(IMAGE)):
            if not content:
                continue
            found = -1
            if len(missing) < _MISSES:
                found = text.find(content, at)
                if found < 0 and at and back:
                    back -= 1
                    found = text.find(content, 0, at)
                if found < 0 and (escaped := json.dumps(content, ensure_ascii=False)[1:-1]) != content:
                    found = text.find(escaped, at)
            if found < 0 or message["role"] not in _ROLES:
                missing.append(index)
                break
            at = found + len(content)
    return missing


# -- conversations to try with ------------------------------------------------------------------

#: a trial may take this share of the steps of a rendering
_SHARE = 50
_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "description": "Where"}},
            "required": ["place"],
        },
    },
}


def _marked(messages: Sequence[Message]) -> list[Message]:
    """The conversation with words in place of its texts and calls."""
    marked = []
    number = 0
    for at, message in enumerate(messages):
        changed = {**message}
        if content := (message["content"] or "").strip():
            changed["content"] = f"{_WORD}{at:06}{IMAGE * content.count(IMAGE)}"
        if calls := message.get("tool_calls"):
            changed["tool_calls"] = []
            for call in calls:
                number += 1
                word = f"a{_WORD}{number:06}"
                changed["tool_calls"].append({**call, "function": {"name": word, "arguments": {"at": word}}})
        marked.append(changed)
    return marked


def _words(conversation: list[Message]) -> set[str]:
    return set(_WORDS.findall(json.dumps(conversation)))


def _said(at: int, role: str, content: str | None = "", **more: Any) -> Message:
    """A message with a word of its own behind its content; without it if that is null."""
    return {"role": role, "content": None if content is None else f"{content}{_WORD}{at:06}", **more}


def _talk(*roles: str) -> list[Message]:
    """A conversation with a word in each message; "call" is a call alone, "text" is one beside text."""
    talk: list[Message] = []
    for at, role in enumerate(roles):
        if role == "call":
            talk.append(_calling(_called(at)))
        elif role == "text":
            talk.append(_said(at, "assistant", tool_calls=[_called(at)]))
        elif role in ("tool", "function"):
            result = {"tool_call_id": _made_id(at - 1), "name": _name(at - 1)}
            talk.append(_said(at, role, **result))
        else:
            talk.append(_said(at, role))
    return talk


def _name(at: int) -> str:
    return f"a{_WORD}{at + 100:06}"


def _made_id(at: int) -> str:
    return f"b9007{at:04}"


def _called(at: int, **more: Any) -> Any:
    arguments = {f"a{_WORD}{at + 200:06}": f"a{_WORD}{at + 300:06}"}
    function = {"name": _name(at), "arguments": arguments, **more}
    return {"id": _made_id(at), "type": "function", "function": function}


def _calling(*calls: Any, **more: Any) -> Message:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **more}


def _with_ids(given: str | None) -> list[Message]:
    """A call and its result with this id, or without one."""
    user, call, result = _talk("user", "call", "tool")
    called = {**call["tool_calls"][0], "id": given}
    if given is None:
        del called["id"], result["tool_call_id"]
    else:
        result["tool_call_id"] = given
    return [user, {**call, "tool_calls": [called]}, result]


_PLAIN = (_talk("user"), _talk("user", "assistant"))
_CALLS = (_talk("user", "call", "tool"),)
_LATER = _talk("user", "text", "tool", "assistant", "user")
_BROKEN = _called(1, arguments=f'{{"a{_WORD}000201": "a{_WORD}000301')
_SECOND = _said(3, "tool", tool_call_id=_made_id(3), name=_name(3))
_SPLITS = (Change.SPLIT_TURNS, Change.SPLIT_TURNS | Change.SPACE)
#: Changes to try, of which one at most is made, and the conversations that they are for. Later ones build on
#: earlier ones.
_TRIALS: tuple[tuple[tuple[Change, ...], Sequence[list[Message]]], ...] = (
    ((Change.PARTS,), _PLAIN),
    ((Change.JOIN_USERS,), (_talk("user", "user"), _talk("user", "assistant", "user", "user"))),
    ((Change.JOIN_ASSISTANTS,), (_talk("user", "assistant", "assistant", "user"),)),
    ((Change.BEGIN_WITH_USER, Change.BEGIN_WITH_USER | Change.SPACE), (_talk("assistant", "user"),)),
    ((Change.SYSTEM_TO_USER,), (_talk("system", "user"), _talk("system", "user", "assistant", "user"))),
    ((Change.JOIN_SYSTEMS,), (_talk("system", "system", "user"),)),
    (
        (Change.LATE_SYSTEM_TO_USER,),
        (
            _talk("user", "system"),
            _talk("user", "assistant", "system", "user"),
            _talk("system", "user", "assistant", "system", "user"),
        ),
    ),
    (
        (Change.DEVELOPER_TO_SYSTEM,),
        (
            _talk("developer", "user"),
            _talk("system", "developer", "user"),
            _talk("user", "assistant", "developer", "user"),
        ),
    ),
    (
        (
            Change.NULL_BESIDE_CALLS,
            Change.TEXT_ARGUMENTS,
            Change.NULL_BESIDE_CALLS | Change.TEXT_ARGUMENTS,
        ),
        _CALLS,
    ),
    ((Change.OBJECT_ARGUMENTS,), ([_said(0, "user"), _calling(_BROKEN), _talk("user", "call", "tool")[2]],)),
    ((Change.FUNCTION_TO_TOOL,), (_talk("user", "call", "function"),)),
    ((Change.NINE_IDS,), (_with_ids("call_0123456789abcdef"), _with_ids("0"))),
    ((Change.SOME_IDS,), (_with_ids(None),)),
    (
        (Change.SPLIT_CALLS,),
        ([_said(0, "user"), _calling(_called(1), _called(3)), _talk("user", "call", "tool")[2], _SECOND],),
    ),
    (
        (Change.SPLIT_TEXT, *(Change.SPLIT_TEXT | each for each in _SPLITS)),
        (_talk("user", "text", "tool"), _LATER),
    ),
    (
        _SPLITS,
        (
            _talk("user", "call", "tool", "user"),
            _LATER,
            _talk("user", "call", "user"),
        ),
    ),
    ((Change.BEGIN_WITH_USER, Change.BEGIN_WITH_USER | Change.SPACE), (_talk("call", "tool", "user"),)),
    (
        (Change.ANSWER_RESULTS, Change.ANSWER_RESULTS | Change.SPACE),
        (_talk("user", "call", "tool", "user"), _talk("user", "assistant", "call", "tool", "user")),
    ),
    (
        (Change.THOUGHT_PARTS,),
        (
            [
                _said(0, "user"),
                _calling(_called(1), reasoning_content=f"{_WORD}000400"),
                _said(2, "tool", tool_call_id=_made_id(1), name=_name(1)),
            ],
        ),
    ),
)
