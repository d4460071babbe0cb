"""Conversation: the changes that make a chat's messages fit a template which would refuse or lose some.

What a message says stays in the prompt, in its order. Which changes a template needs is found out by trying
(``chat_template``). llama.cpp tries templates in a similar way, and folds and joins in some of these places.
"""

from __future__ import annotations

import enum
import hashlib
import json
import re
import string
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from aioinfer.text.messages import IMAGE, RESULT_ROLES, parts_of

__all__ = ["PLACES", "Change", "Message", "fitted"]

Message = dict[str, Any]

#: what is said to the model by whom built the application
_SYSTEM_ROLES = ("system", "developer")
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_OTHER = {"user": "assistant", "assistant": "user"}
_LETTERS = string.ascii_letters + string.digits
#: ids of Mistral's templates
_NINE = re.compile("[a-zA-Z0-9]{9}")


class Change(enum.Flag):
    """What is put otherwise for a template."""

    #: contents are lists of parts; those with images always are
    PARTS = enum.auto()
    #: successive messages of the user are one
    JOIN_USERS = enum.auto()
    #: successive messages of the assistant are one
    JOIN_ASSISTANTS = enum.auto()
    #: a conversation that begins with the assistant, or with a call, begins with an empty turn of the user
    BEGIN_WITH_USER = enum.auto()
    #: the system messages in front are text of the first message of the user
    SYSTEM_TO_USER = enum.auto()
    #: the system messages in front are one
    JOIN_SYSTEMS = enum.auto()
    #: later system messages are messages of the user
    LATE_SYSTEM_TO_USER = enum.auto()
    #: developer messages are system messages
    DEVELOPER_TO_SYSTEM = enum.auto()
    #: results with the role "function" have the role "tool"
    FUNCTION_TO_TOOL = enum.auto()
    #: the content beside calls is null
    NULL_BESIDE_CALLS = enum.auto()
    #: arguments are JSON text
    TEXT_ARGUMENTS = enum.auto()
    #: arguments that are no JSON object are one: its only value is their text
    OBJECT_ARGUMENTS = enum.auto()
    #: calls and results without an id have one
    SOME_IDS = enum.auto()
    #: ids have nine letters and digits
    NINE_IDS = enum.auto()
    #: text beside calls is a message in front of them
    SPLIT_TEXT = enum.auto()
    #: a message has one call, and its result follows
    SPLIT_CALLS = enum.auto()
    #: between messages of one role that calls or results stand between is an empty turn of the other
    SPLIT_TURNS = enum.auto()
    #: between a result and a message of the user is an empty turn of the assistant
    ANSWER_RESULTS = enum.auto()
    #: empty turns are a space
    SPACE = enum.auto()
    #: thoughts are parts of the content
    THOUGHT_PARTS = enum.auto()


#: changes of the order of turns
_TURNS = (
    Change.JOIN_USERS
    | Change.JOIN_ASSISTANTS
    | Change.BEGIN_WITH_USER
    | Change.SPLIT_TURNS
    | Change.ANSWER_RESULTS
    | Change.SPACE
)
#: changes of where something stands, and not of how it is written
PLACES = (
    _TURNS
    | Change.SYSTEM_TO_USER
    | Change.JOIN_SYSTEMS
    | Change.LATE_SYSTEM_TO_USER
    | Change.DEVELOPER_TO_SYSTEM
    | Change.FUNCTION_TO_TOOL
    | Change.SPLIT_TEXT
    | Change.SPLIT_CALLS
)


def fitted(messages: Sequence[Message], changes: Change) -> list[Message]:
    """The conversation with these changes. ``messages`` are plain, and are not changed themselves."""
    found = _roles([{**message} for message in messages], changes)
    if changes & (Change.SOME_IDS | Change.NINE_IDS):
        _set_ids(found, changes)
    if any("tool_calls" in message for message in found):
        found = list(_calls(found, changes))
    if changes & _TURNS:
        found = _turns(_merged(found, changes), changes)
    parts, thought_parts = Change.PARTS in changes, Change.THOUGHT_PARTS in changes
    for message in found:
        content = message["content"]
        if content is None and "tool_calls" not in message:
            message["content"] = content = ""
        if content is not None and (parts or IMAGE in content):
            message["content"] = parts_of(content)
        if thought_parts and message["role"] == "assistant":
            _put_thoughts(message)
    return found


def _joined(*contents: str | None) -> str:
    return "\n\n".join(filter(None, contents))


def _roles(messages: list[Message], changes: Change) -> list[Message]:
    """The messages with roles that the template knows, in places where it knows them."""
    front = 0
    for message in messages:
        if message["role"] == "developer" and Change.DEVELOPER_TO_SYSTEM in changes:
            message["role"] = "system"
        elif message["role"] == "function" and Change.FUNCTION_TO_TOOL in changes:
            message["role"] = "tool"
    while front < len(messages) and messages[front]["role"] in _SYSTEM_ROLES:
        front += 1
    systems, others = messages[:front], messages[front:]
    if Change.LATE_SYSTEM_TO_USER in changes:
        for message in others:
            if message["role"] in _SYSTEM_ROLES:
                message["role"] = "user"
    if not systems:
        return others
    text = _joined(*(message["content"] for message in systems))
    if Change.SYSTEM_TO_USER in changes:
        if not others or others[0]["role"] != "user":
            return [{"role": "user", "content": text}, *others]
        others[0]["content"] = _joined(text, others[0]["content"])
        return others
    if front > 1 and Change.JOIN_SYSTEMS in changes:
        systems = [{**systems[0], "role": "system", "content": text}]
    return [*systems, *others]


# -- calls and their results --------------------------------------------------------------------


def _set_ids(messages: list[Message], changes: Change) -> None:
    """Give calls and results ids that the template takes, the same to a call and its results. A result
    without an id belongs to the first call that has none yet."""
    number = 0
    open_ids: deque[str] = deque()
    for message in messages:
        if calls := message.get("tool_calls"):
            ids = [_id(call.get("id"), number + at, changes) for at, call in enumerate(calls)]
            number += len(ids)
            open_ids = deque(each for each, call in zip(ids, calls, strict=True) if not call.get("id"))
            message["tool_calls"] = [{**call, "id": each} for call, each in zip(calls, ids, strict=True)]
        elif message["role"] in RESULT_ROLES:
            given = message.get("tool_call_id")
            if not given and open_ids:
                message["tool_call_id"] = open_ids.popleft()
            else:
                message["tool_call_id"] = _id(given, number, changes)


def _id(given: Any, number: int, changes: Change) -> str:
    if given and (Change.NINE_IDS not in changes or _NINE.fullmatch(str(given))):
        return str(given)
    rest = int.from_bytes(hashlib.sha256(str(given or number).encode()).digest()[:8])
    letters = []
    for _ in range(9):
        rest, letter = divmod(rest, len(_LETTERS))
        letters.append(_LETTERS[letter])
    return "".join(letters)


def _calls(messages: list[Message], changes: Change) -> Iterable[Message]:
    """The messages, with calls as the template reads them."""
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls")
        if not calls:
            yield message
            continue
        beside = None if Change.NULL_BESIDE_CALLS in changes else ""
        calls = [_call(call, changes) for call in calls]
        if Change.SPLIT_TEXT in changes and (message["content"] or "").strip():
            yield {key: value for key, value in message.items() if key != "tool_calls"}
            message = {"role": message["role"], "content": beside}
        elif not message["content"]:
            message["content"] = beside
        if len(calls) == 1 or Change.SPLIT_CALLS not in changes:
            yield {**message, "tool_calls": calls}
            continue
        first = at
        while at < len(messages) and messages[at]["role"] in RESULT_ROLES:
            at += 1
        yield from _one_by_one(message, calls, messages[first:at], beside)


def _one_by_one(
    message: Message, calls: list[Any], results: list[Message], beside: str | None
) -> Iterable[Message]:
    """Each call as a message, and its results behind it: those with its id, or the one in its place."""
    places = {str(call.get("id")): at for at, call in enumerate(calls)}
    behind: list[list[Message]] = [[] for _ in calls]
    for at, result in enumerate(results):
        behind[places.get(str(result.get("tool_call_id")), min(at, len(calls) - 1))].append(result)
    for call, its_results in zip(calls, behind, strict=True):
        yield {**message, "tool_calls": [call]}
        message = {"role": message["role"], "content": beside}
        yield from its_results


def _call(call: Any, changes: Change) -> Any:
    """A call with its arguments as the template reads them."""
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        return call
    arguments = function.get("arguments")
    if arguments is None or (isinstance(arguments, str) and arguments.strip() in ("", "null")):
        arguments = {}
    if isinstance(arguments, str) and Change.OBJECT_ARGUMENTS in changes:
        arguments = _parsed(arguments)
    if Change.TEXT_ARGUMENTS in changes and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _parsed(arguments: str) -> Any:
    """The object that a text is; else one that keeps the text, as the model wrote it."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"arguments": arguments}


# -- the order of turns -------------------------------------------------------------------------


def _merged(messages: list[Message], changes: Change) -> Iterable[Message]:
    """The messages, with successive ones of a role as one where the template takes no others."""
    joins = {"user": Change.JOIN_USERS, "assistant": Change.JOIN_ASSISTANTS}
    for (role, calls), same in groupby(messages, key=lambda each: (each["role"], "tool_calls" in each)):
        run = list(same)
        if len(run) == 1 or calls or role not in joins or joins[role] not in changes:
            yield from run
        else:
            merged = {key: value for message in reversed(run) for key, value in message.items()}
            yield {**merged, "content": _joined(*(message["content"] for message in run))}


def _turns(messages: Iterable[Message], changes: Change) -> list[Message]:
    """The messages in an order that the template takes. Turns are messages of the user, and of the assistant
    without calls."""
    empty = " " if Change.SPACE in changes else ""
    last = "" if Change.BEGIN_WITH_USER in changes else None
    found: list[Message] = []
    for message in messages:
        role = message["role"]
        if last == "" and role == "assistant":
            found.append({"role": "user", "content": empty})
            last = "user"
        if role in _OTHER and "tool_calls" not in message:
            behind_result = bool(found) and found[-1]["role"] in RESULT_ROLES
            apart = behind_result or (bool(found) and "tool_calls" in found[-1])
            again = last == role and apart and Change.SPLIT_TURNS in changes
            answered = role == "user" and behind_result and Change.ANSWER_RESULTS in changes
            if again or answered:
                found.append({"role": _OTHER[role], "content": empty})
            last = role
        found.append(message)
    return found


def _put_thoughts(message: Message) -> None:
    """Have the thoughts of a message in its content."""
    thought = next((message[name] for name in _THOUGHTS if message.get(name)), None)
    if thought is None:
        return
    content = message["content"]
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []
    message["content"] = [{"type": "thinking", "thinking": thought}, *parts]
    for name in _THOUGHTS:
        message.pop(name, None)
