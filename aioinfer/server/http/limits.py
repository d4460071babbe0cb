"""Limits: what a call may cost, checked before the work is done. They follow from the model's context unless
the config states them."""

from __future__ import annotations

import time
from dataclasses import dataclass

from aioinfer.config import ServerConfig
from aioinfer.errors import InvalidRequest
from aioinfer.server.http.failures import Failure, Refused

__all__ = ["CHARACTERS_PER_ENTRY", "IMAGES_BODY_MIB", "MOST_BODY_MIB", "Limits", "too_large"]

_MIB = 1 << 20
#: bytes that are searched at once, in about a millisecond
_SLICE = 1 << 20
#: the largest body whatever the context
MOST_BODY_MIB = 16.0
#: the same where it may have images: json.loads reads a MiB of a text in 2 ms
IMAGES_BODY_MIB = 24.0
#: bytes of a body per token of the context: escaped text has up to 12 per character
_BYTES_PER_TOKEN = 64
#: json.loads holds the interpreter's lock: it reads this many values in 25 to 50 ms on a Xeon
_VALUES = 1 << 18
#: entries of logprobs that take about 100 MB
_ENTRIES = 1 << 18
_MOST_TOP_LOGPROBS = 20
#: characters of an echoed prompt that cost no more than an entry
CHARACTERS_PER_ENTRY = 64


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one server.

    Attributes:
        context: tokens of prompt and output together.
        body: bytes of a request body, after decompression.
        values: JSON values of a body, and keys.
        logprobs: entries of logprobs in an answer: choices x tokens x (1 + top_logprobs).
    """

    context: int
    body: int
    values: int
    logprobs: int

    @classmethod
    def of(
        cls, config: ServerConfig, max_model_len: int | None, *, batch: bool = False, images: bool = False
    ) -> Limits:
        """``max_model_len`` is None while no model is there. ``batch``: a call may have many prompts, each of
        which may fill the context; ``images``: the model reads images."""
        context = max_model_len or 1 << 20
        body = config.max_body_mib
        if body is None:
            body = MOST_BODY_MIB if batch else min(MOST_BODY_MIB, 1.0 + _BYTES_PER_TOKEN * context / _MIB)
            body = IMAGES_BODY_MIB if images else body
        return cls(
            context=context,
            body=int(body * _MIB),
            values=config.max_body_values or max(_VALUES, 2 * context),
            logprobs=config.max_answer_logprobs or max(_ENTRIES, (1 + _MOST_TOP_LOGPROBS) * context),
        )

    def check_values(self, raw: bytes) -> int:
        """The number of values of a body; marks inside texts count, too. Raises InvalidRequest for more than
        the limit."""
        values = 0
        for at in range(0, len(raw), _SLICE):
            values += sum(raw.count(mark, at, at + _SLICE) for mark in (b",", b":", b"[", b"{"))
            if at + _SLICE < len(raw):
                time.sleep(0)  # lets go of the interpreter's lock
        if values > self.values:
            message = f"has {values} values; this server reads at most {self.values} (max_body_values)"
            raise InvalidRequest("body", message)
        return values

    @property
    def echo(self) -> int:
        """Characters of prompts in an answer: choices x prompt. Far fewer bytes than as many logprobs."""
        return CHARACTERS_PER_ENTRY * self.logprobs


def too_large(limit: int) -> Refused:
    """The failure of a body of more than ``limit`` bytes."""
    message = f"the body has more than {limit} bytes (max_body_mib)"
    return Refused(Failure(413, "invalid_request_error", message, param="body", code="body_too_large"))
