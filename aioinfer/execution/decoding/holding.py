"""Holding: masks and logits processors, which change rows of a step and keep some from having a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from aioinfer.execution.decoding.base import Transfer
from aioinfer.execution.grammar_worker import GrammarRow, GrammarWorker
from aioinfer.execution.steering import Steered, SteeredRow, steer
from aioinfer.sampling.logits_processors import LogitsProcessors

__all__ = ["Holding", "hold"]


@dataclass(slots=True)
class Holding:
    """What keeps sampling rows from having a token, and rows with drafts from sampling behind all of them:
    fields as of Constraints."""

    outcomes: dict[int, int] = field(default_factory=dict)
    forced: dict[int, list[int]] = field(default_factory=dict)
    usable: dict[int, int] = field(default_factory=dict)
    #: of ``forced``, what processors want
    steered: dict[int, list[int]] = field(default_factory=dict)

    def add(self, found: Steered) -> None:
        """Something else is kept by processors."""
        self.outcomes |= found.outcomes
        self.forced |= found.forced
        self.steered = found.forced
        for at, count in found.usable.items():
            self.usable[at] = min(count, self.usable.get(at, count))


def hold(
    logits: torch.Tensor,
    grammars: Sequence[GrammarRow],
    rows: Sequence[SteeredRow],
    num_rows: int,
    *,
    worker: GrammarWorker,
    operations: LogitsProcessors,
    transfer: Transfer,
) -> Holding:
    """Apply what logits processors decide of ``rows``, and the masks of ``grammars``, which were made while
    the forward ran.

    Args:
        logits: [S, V] float32, changed in place.
        rows: all of them awake.
        num_rows: rows of the step that sample.
    """
    held = Holding()
    if grammars:
        found = worker.collect(grammars, num_rows)
        held.outcomes, held.forced, held.usable = found.outcomes, found.forced, found.usable
    if rows:
        steered = _steer(logits, rows, held, worker.patience, transfer)
        if grammars:
            worker.skip(grammars, steered.outcomes)
        held.add(steered)
    if grammars:
        at = transfer.send(np.asarray(found.at, np.int64))
        operations.apply_masks_(logits, at, transfer.send(found.masks))
    return held


def _steer(
    logits: torch.Tensor, rows: Sequence[SteeredRow], held: Holding, patience: float, transfer: Transfer
) -> Steered:
    """On a device other than the CPU, copy these rows to the host and back."""
    decided = partial(steer, rows, patience=patience, outcomes=held.outcomes, usable=held.usable)
    if logits.device.type == "cpu":
        lines: Any = logits.numpy()
        return decided(lines)
    lines = [row.at + offset for row in rows for offset in range(1 + len(row.drafts))]
    at = transfer.send(np.asarray(lines, np.int64))
    copies = logits[at].cpu().numpy()
    found = decided(dict(zip(lines, copies, strict=True)))
    logits[at] = transfer.send(copies)
    return found
