"""CapturedBlocks: rounds of blocks on memory that lies still.

A captured round has rows of one block each, B positions, so that everything has the same shape for any
step. A step's row with one block is a row of it; one with two blocks, which commits the first and begins
with the second, is two: all rows of a layer write their KV before any of them attends, so the second sees
the first::

    rows        slots │ ends │ to_second     one entry per row; what does not change is not sent again
    table       pages of each row
                     │
    forward     records[slots] ─► turns ─► ids, KV cells ─► model ─► logits of the block that is denoised
    step        one algorithm, greedy │ drawn │ filtered ─► records[slots]

    step's rows     a: block 3    b: blocks 1, 2    c: block 7
    graph's rows    a 3 │ b 1 │ c 7 │ b 2 │ padding ...            to_second  0 2 0 0 0

Padding, and the second block of a row, has slot 0, whose block is done: algorithms leave it alone. Padding
has no context and writes its KV to the null page.

Forward and algorithm are captured apart, since to each of the first there are several of the second, and
what is between them lies outside of the graphs' memory. Where algorithms are mixed, which is rare, and where
one of many rows has a temperature, the forward is a replay and the algorithms are launched one by one: to
capture them for every division of the rows would take too many graphs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import torch

from aioinfer.diffusion.registry import usable_algorithms
from aioinfer.execution.decoding.base import Guided, Output, Send
from aioinfer.execution.decoding.block_table import AlgorithmRows, BlockTable, Round
from aioinfer.execution.decoding.mirror import KEPT, Mirror
from aioinfer.execution.graph_shapes import GraphShape
from aioinfer.execution.packed import PackedStep
from aioinfer.model.attention.base import Attention
from aioinfer.model.batch import Batch
from aioinfer.model.spec import CausalLM

__all__ = ["BlockRows", "CapturedBlocks"]

_COLUMNS = 3
#: Of more rows, rounds with a temperature are no replays but for their forward, which then takes longer than
#: to launch what follows: graphs for every algorithm, size and kind would be hundreds
_DRAWN_ROWS = 8


class BlockRows:
    """Inputs of captured rounds, by row."""

    def __init__(self, num_rows: int, max_pages: int, block_size: int, device: torch.device) -> None:
        self._num_rows = num_rows
        self._block = block_size
        self._mirror = Mirror(_COLUMNS * num_rows, num_rows, max_pages, device)
        #: int64 [rows]: the slot; where the row's block ends in its sequence, 0 for padding; and how many
        #: rows further the second block of the same is, 0 for none
        self.slots, self.ends, self.to_second = self._mirror.columns.view(_COLUMNS, num_rows)
        #: int64 [rows, max_pages]
        self.table = self._mirror.table

    def forget(self) -> None:
        """A step failed: the state of the rows is unknown."""
        self._mirror.forget()

    def update(self, packed: PackedStep, send: Send) -> bool:
        """Make the rows those of a step of rounds, followed by padding. False if they were so already."""
        slots, targets, pairs = (packed.sections[name] for name in ("block_slots", "targets", "pairs"))
        count, paired = len(slots), np.flatnonzero(pairs)
        end = count + len(paired)
        columns = np.zeros((_COLUMNS, self._num_rows), np.int64)
        columns[0, :count] = slots
        columns[1, :count] = targets + (1 - pairs) * self._block
        columns[1, count:end] = targets[paired] + self._block
        columns[2, paired] = np.arange(count, end) - paired
        table = packed.sections["block_table"].reshape(-1, packed.num_pages)[packed.work.rows]
        if len(paired):
            table = np.concatenate((table, table[paired]))
        return self._mirror.update(columns.reshape(-1), np.arange(end), table, send)


class CapturedBlocks:
    """See :class:`~aioinfer.execution.decoding.base.Captured`."""

    def __init__(
        self,
        model: CausalLM,
        attention: Attention,
        table: BlockTable,
        *,
        max_rows: int,
        max_pages: int,
        page_size: int,
        device: torch.device,
        warm_up: Callable[[], None],
    ) -> None:
        spec = model.spec
        assert spec.block_size is not None, "not a diffusion model"
        self._model = model
        self._attention = attention
        self._table = table
        self._warm_up = warm_up
        self._page_size = page_size
        self._block = block = spec.block_size
        self._rows = BlockRows(max_rows, max_pages, block, device)
        self._numbers = torch.arange(max_rows, device=device)
        self._offsets = torch.arange(block, device=device)
        self._cu_q = torch.arange(max_rows + 1, device=device) * block
        # Of all sizes, and not in the graphs' pool.
        self._logits = torch.empty(max_rows * block, spec.vocab_size, dtype=spec.dtype, device=device)
        #: steps with chunks of prompts are not captured
        self.broken: torch.Tensor = torch.zeros(0, dtype=torch.bool, device=device)
        self._records = torch.empty(max_rows, table.words, dtype=torch.int64, device=device)
        self._kept = torch.empty(KEPT, max_rows, table.words, dtype=torch.int64, device=device)
        self._turn = 0

    def prepare(self) -> None:
        self._table.prepare(usable_algorithms(self._table.edit_ids))
        self._warm_up()

    def clear(self, shape: GraphShape) -> None:
        """Rows are padding until a step has some."""

    def variants(self, size: int) -> list[tuple[str, str]]:
        """Algorithm, and what some row has: nothing, a temperature, or filters as well."""
        kinds = ["greedy"]
        if size <= _DRAWN_ROWS:
            # The search of torch's operations takes memory of many times the logits.
            kinds += ["drawn", "filtered"] if self._table.kernels else ["drawn"]
        return list(itertools.product(usable_algorithms(self._table.edit_ids), kinds))

    def update(self, packed: PackedStep, shape: GraphShape, send: Send) -> bool:
        return self._rows.update(packed, send)

    def moved_on(self) -> None:
        """The slots say how far the rows are."""

    def forget(self) -> None:
        self._rows.forget()

    def logits(self, packed: PackedStep) -> torch.Tensor:
        """[K * B, V]"""
        return self._logits[: len(packed.work.rows) * self._block]

    def finish(self, packed: PackedStep, replay: Callable[[int, object], bool]) -> Output:
        """Records, int64 [K * words]; the slots have them."""
        work = packed.work
        count = len(work.rows)
        groups = work.groups
        assert packed.shape is not None, "the step was not packed for a graph"
        first = groups[0]
        guided: dict[int, Guided] = {}
        alike = len(groups) == 1 and not first.steered
        if not alike or not replay(packed.shape.rows, (first.algorithm, _kind(first))):
            guided = self._denoise(count, groups)
        records = self._kept[self._turn, :count]
        self._turn = (self._turn + 1) % KEPT
        return Output([records.copy_(self._records[:count]).view(-1)], guided=guided)

    def forward(self, shape: GraphShape) -> None:
        rows, block, size = self._rows, self._block, shape.rows
        slots, ends, to_second = rows.slots[:size], rows.ends[:size], rows.to_second[:size]
        table, own = rows.table[:size], self._numbers[:size]
        owned, second = slots > 0, own + to_second
        round = self._table.take(slots, (ends[second] - block) * owned, to_second, may_turn=True)
        assert round.behind is not None
        ids = torch.where(owned.unsqueeze(1), round.ids, self._table.mask_id)
        starts = (ends - block).clamp_(min=0)
        page = table.gather(1, (starts // self._page_size).unsqueeze(1)).squeeze(1)
        cells = (page * self._page_size + starts % self._page_size) * (ends > 0)
        batch = Batch(
            input_ids=ids.view(-1),
            positions=self._each(starts),
            slot_mapping=self._each(cells),
            cu_q=self._cu_q[: size + 1],
            kv_len=ends,
            block_table=table,
            logits_rows=self._each(torch.where(round.behind, second, own) * block),
            q_lens=[block] * size,
            # Lengths are known to the device alone: kernels that ask the host cannot be captured.
            kv_lens=[],
            num_decodes=0,
        )
        self._logits[: size * block].copy_(self._model.forward(batch, self._attention))
        self._records[:size].copy_(round.records)

    def _each(self, first: torch.Tensor) -> torch.Tensor:
        """Values for every token of the rows, from those of their first, [rows]."""
        return (first.unsqueeze(1) + self._offsets).view(-1)

    def step(self, size: int, variant: tuple[str, str]) -> None:
        algorithm, kind = variant
        # The tenants of the slots are not known yet.
        rows = AlgorithmRows(algorithm, 0, size, None, kind != "greedy", filtered=kind == "filtered")
        self._denoise(size, [rows])

    def _denoise(self, count: int, groups: list[AlgorithmRows]) -> dict[int, Guided]:
        block, records = self._block, self._records[:count]
        logits = self._logits[: count * block].view(count, block, -1)
        round = Round(self._rows.slots[:count], records, records[:, :block], None)
        return self._table.step(logits, round, groups)


def _kind(group: AlgorithmRows) -> str:
    return "filtered" if group.filtered else "drawn" if group.drawn else "greedy"
