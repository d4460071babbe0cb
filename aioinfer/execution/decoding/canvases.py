"""Canvases: of each slot, what a canvas has on the device from round to round besides its record.

The record has the likeliest tokens, which the host reads. The canvas itself and the vectors of the last
round's distributions (:mod:`aioinfer.model.canvas`) stay on the device, and are lost with the slot: a
request that is retracted begins its canvas again. Its noise is the same then, and so are the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from aioinfer.diffusion.algorithms.renoise import Renoise
from aioinfer.execution.decoding.block_table import AlgorithmRows, BlockTable, Round
from aioinfer.model.canvas import Canvas
from aioinfer.model.spec import ModelSpec

__all__ = ["Canvases"]


class Canvases:
    """By slot."""

    def __init__(self, spec: ModelSpec, table: BlockTable, num_slots: int, device: torch.device) -> None:
        shape = num_slots + 1, spec.unit
        self._table = table
        self._vocab_size = spec.vocab_size
        self._tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self._vectors = torch.zeros(*shape, spec.hidden_size, dtype=spec.dtype, device=device)

    def take(
        self, round: Round, groups: Sequence[AlgorithmRows], positions: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[Round, Canvas]:
        """The canvases of a step's rows, copied.

        Args:
            round: its records.
            groups: all of its rows, which have one algorithm.
            positions: [T], of the step's tokens.
            tokens: [K * B], those of the rows among them.
        """
        canvas, temperatures = self._input(round, groups, self._tokens.index_select(0, round.slots))
        block, _ = self._table.blocks(round.records)
        begun = (block.rounds > 0)[:, None, None]
        vectors = torch.where(begun, self._vectors.index_select(0, round.slots), 0.0)
        found = Canvas.of(positions, tokens.view_as(canvas), ~block.done, temperatures, vectors)
        return replace(round, ids=canvas, canvas=canvas), found

    def again(self, round: Round, groups: Sequence[AlgorithmRows], canvas: Canvas) -> torch.Tensor:
        """What the next forward over the same rows reads, [K, B], while none of them is done."""
        assert round.canvas is not None, "it was taken from here"
        round.canvas[:], canvas.temperatures = self._input(round, groups, round.canvas)
        return round.canvas

    def keep(self, round: Round, canvas: Canvas) -> None:
        """The slots have what the forward and its algorithm left."""
        assert round.canvas is not None, "it was taken from here"
        self._tokens.index_copy_(0, round.slots, round.canvas)
        self._vectors.index_copy_(0, round.slots, canvas.vectors)

    def _input(
        self, round: Round, groups: Sequence[AlgorithmRows], canvas: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the forward reads, and the temperatures of its distributions."""
        (group,) = groups
        algorithm, block, state = self._table.group(round, group)
        assert isinstance(algorithm, Renoise), "requests for others are refused"
        tokens = algorithm.begin(block, canvas, state, self._vocab_size)
        return tokens, algorithm.temperatures(block, state)
