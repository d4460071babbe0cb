"""Harmony, the format of gpt-oss: an answer is a sequence of messages, each in a channel.

The prompt ends with ``<|start|>assistant``, and an output goes on like this::

    <|channel|>analysis<|message|>...<|end|><|start|>assistant
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

``analysis`` is reasoning; ``final``, and ``commentary`` that is addressed to no one, are for the user. The
recipient can also stand before the channel. The package ``openai-harmony`` is not used: it parses tokens
of its own vocabulary, which it downloads when it is first used.
"""

from __future__ import annotations

import regex

from aioinfer.text.tags import partial_length

__all__ = [
    "BEGINS",
    "CALL",
    "CHANNEL",
    "CONSTRAIN",
    "END",
    "ENDS",
    "HEADER",
    "MESSAGE",
    "START",
    "TAGS",
    "held_length",
    "in_template",
]

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN, END, CALL = "<|constrain|>", "<|end|>", "<|call|>"
#: tags that the text of an answer keeps
TAGS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, "<|return|>")

_TO = r"\s*+to=(?:functions\.)?+(?P<recipient>[^\s<]++)"
_CHANNEL = r"\s*+<\|channel\|>\s*+(?P<channel>\w++)"
#: models repeat the channel after a recipient
_ADDRESSED = rf"{_CHANNEL}(?:{_TO}(?:\s*+<\|channel\|>\s*+\w++)?+)?+"
#: The header of a message. Its beginning can be in the prompt, so that the channel or the recipient is
#: the first thing of an output.
HEADER = (
    rf"\s*+(?:<\|start\|>\s*+assistant(?:{_TO})?+(?:{_ADDRESSED})?+|(?:{_TO})?+{_ADDRESSED})"
    r"(?:\s*+<\|constrain\|>)?+\s*+\w*+\s*+<\|message\|>"
)
#: tags with which a header can begin
BEGINS = regex.compile(r"<\|(?:start|channel)\|>")
#: tags that end a message
ENDS = regex.compile(r"<\|(?:end|return|call)\|>")


def in_template(template: str) -> bool:
    """A chat template writes messages in this format."""
    return CHANNEL in template and MESSAGE in template


def held_length(text: str, *tags: str) -> int:
    """Length of the longest suffix of a text without the tags that is a proper prefix of one of them."""
    return max(partial_length(text, tag) for tag in tags)
