"""scan: the tokens of a step go through recurrent states one by one, wherever chunks begin."""

from __future__ import annotations

from typing import Protocol

import torch

from aioinfer.model.batch import Batch
from aioinfer.model.mixers.short_conv import states_before
from aioinfer.model.state import RowStates

__all__ = ["Tokens", "scan"]


class Tokens(Protocol):
    """What tokens bring to the states of a layer."""

    def step(self, at: slice, state: torch.Tensor) -> torch.Tensor:
        """One token of each of R sequences: their results [R, ...]; changes their states [R, ...]."""


def scan(tokens: Tokens, states: RowStates, index: int, batch: Batch) -> torch.Tensor:
    """The results [T, ...] of all positions that the rows go through. Writes the states of all rows, of which
    ``index`` is the tensor in a cell."""
    cells, results = states.pool.tensors[index], []
    decodes, lengths = states.lengths(batch)
    if decodes:
        rows = slice(0, decodes)
        state = states_before(states, index, rows)
        results.append(tokens.step(rows, state))
        cells.index_copy_(0, states.write[rows], state)
    at = decodes
    for row, (count, kept) in enumerate(lengths, decodes):
        rows = slice(row, row + 1)
        state = states_before(states, index, rows)
        for token in range(at, at + count):
            results.append(tokens.step(slice(token, token + 1), state))
            if token + 1 == at + kept:
                cells.index_copy_(0, states.write[rows], state)
        at += count
    return torch.cat(results)
