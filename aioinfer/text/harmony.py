"""Harmony, the format of gpt-oss: an answer is a sequence of messages, each in a channel.

The prompt ends with ``<|start|>assistant``, and an output goes on like this::

    <|channel|>analysis<|message|>...<|end|><|start|>assistant
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

``analysis`` is reasoning; ``final``, and ``commentary`` that is addressed to no one, are for the user. The
recipient can also stand before the channel. The package ``openai-harmony`` is not used: it parses tokens
of its own vocabulary, which it downloads when it is first used.
"""

from __future__ import annotations

__all__ = [
    "BEGINS",
    "CALL",
    "CHANNEL",
    "CONSTRAIN",
    "END",
    "ENDS",
    "HEADER",
    "LEAD",
    "MESSAGE",
    "START",
    "TAGS",
    "USERS",
    "in_template",
]

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN, END, CALL, RETURN = "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"
#: tags with which a header can begin
BEGINS = (START, CHANNEL)
#: tags that end a message
ENDS = (END, CALL, RETURN)
#: tags that the text of an answer keeps
TAGS = (*BEGINS, MESSAGE, CONSTRAIN, *ENDS)

_WORD = r"(?:[^\s<]|<(?!\|))++"
#: the type of the content: a few words with any punctuation, but no JSON
_TYPE = r"(?:(?!to=)[!-;=-Z^-z|~]++\s*+){0,4}+"
_ROLE = r"(?:(?!to=)[\w.:-]++\s*+){0,2}+"
_TO = rf"to=(?P<recipient>{_WORD})"
_CHANNEL = r"<\|channel\|>\s*+(?P<channel>\w*+)"
#: what precedes the first tag of a header if that did not begin a message: the rest may be in the prompt
LEAD = rf"\s*+(?:assistant(?=[\s<]))?+(?:\s*+to={_WORD})?+\s*+(?=<\|)"
#: The header of a message: role, recipient, channel and type of the content. Models leave parts out, repeat
#: the channel after a recipient, and change the order.
HEADER = (
    rf"(?={LEAD})\s*+(?:assistant(?=[\s<])\s*+)?+(?:<\|start\|>\s*+{_ROLE})?+"
    rf"(?:(?:{_TO}|{_CHANNEL}|<\|constrain\|>)\s*+{_TYPE})*+<\|message\|>"
)

#: recipients that are no tools: a message to them is for the user
USERS = (None, "user", "all")


def in_template(template: str) -> bool:
    """A chat template writes messages in this format."""
    return CHANNEL in template and MESSAGE in template
