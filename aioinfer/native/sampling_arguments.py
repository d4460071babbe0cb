"""The structures that the entry points of sampling take; see :mod:`aioinfer.native.arguments`."""

from __future__ import annotations

from aioinfer.native.arguments import Address, Arguments, structure

__all__ = ["LogprobsArguments", "MasksArguments", "PenaliseArguments", "SampleArguments"]


@structure
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


@structure
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


@structure
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


@structure
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
