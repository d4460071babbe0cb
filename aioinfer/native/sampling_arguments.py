"""Arguments of sampling kernels, and the tables of the arguments of all kernels.

``source/interface.hpp`` gives the meaning of every field.
"""

from __future__ import annotations

import aioinfer.native.arguments  # noqa: F401  Its structures come first in the tables.
from aioinfer.native.structures import ENTRIES, STRUCTURES, Address, Arguments, structure

__all__ = [
    "ENTRIES", "STRUCTURES", "LogprobsArguments", "MasksArguments", "PenaliseArguments", "SampleArguments",
]  # fmt: skip


@structure("sample", by_number=False)
class SampleArguments(Arguments):
    """Sample one token per row."""

    pool: Address
    logits: Address
    rows: int
    vocab: int
    stride: int
    temperature: Address
    top_p: Address
    min_p: Address
    top_k: Address
    seeds: Address
    positions: Address
    bans: int
    banned_rows: Address
    banned_ids: Address
    bad: int
    tokens: Address


@structure("penalise", by_number=False)
class PenaliseArguments(Arguments):
    """``out``: logits with penalties."""

    pool: Address
    logits: Address
    rows: int
    vocab: int
    stride: int
    counts: Address
    lines: int
    row_of: Address
    num_slots: int
    slots: Address
    repetition: Address
    presence: Address
    frequency: Address
    in_prompt: int
    out: Address


@structure("apply_masks", by_number=False)
class MasksArguments(Arguments):
    """Set logits to -inf where the masks have no bit."""

    pool: Address
    logits: Address
    num_rows: int
    vocab: int
    stride: int
    count: int
    rows: Address
    masks: Address
    words: int


@structure("logprobs", by_number=False)
class LogprobsArguments(Arguments):
    """Logprobs of rows."""

    pool: Address
    logits: Address
    vocab: int
    stride: int
    count: int
    top: int
    totals: Address
    top_values: Address
    top_ids: Address
