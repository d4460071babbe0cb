"""BlockGraphs: rounds that are captured once and replayed, so that launching one costs a few calls.

A captured round has rows of one block each, B positions, so that everything has the same shape whatever the
step is. A step's row with one block is a row of it; one with two blocks, which commits the first and begins
with the second, is two: all rows of a layer write their KV before any of them attends, so the second sees
the first::

    rows        slots │ ends │ to_second     one entry per row; what does not change is not sent again
    table       pages of each row
                     │
    forward     records[slots] ─► turns ─► ids, KV cells ─► model ─► logits of the block that is denoised
    step        one algorithm, greedy │ drawn and filtered ─► records[slots]

    step's rows     a: block 3    b: blocks 1, 2    c: block 7
    graph's rows    a 3 │ b 1 │ c 7 │ b 2 │ padding ...            to_second  0 2 0 0 0

Padding, and the second block of a row, has slot 0, whose block is done: algorithms leave it alone. Padding
has no context and writes its KV to the null page.

Forward and algorithm are captured apart, since to each of the first there are several of the second, and
what is between them lies outside of the graphs' memory. Where algorithms are mixed, which is rare, the
forward is a replay and the algorithms are launched one by one: to capture them for every division of the
rows would take too many graphs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from aioinfer.diffusion.registry import algorithm_names
from aioinfer.execution.block_packing import AlgorithmRows, BlockPacked
from aioinfer.execution.block_table import BlockTable, Round
from aioinfer.execution.graphs import KEPT, Capture, Graph
from aioinfer.execution.mirror import Mirror
from aioinfer.model.attention.base import Attention
from aioinfer.model.batch import Batch
from aioinfer.model.spec import CausalLM

__all__ = ["BlockGraphs", "BlockRows", "round_sizes"]

_COLUMNS = 3


def round_sizes(most: int) -> list[int]:
    """Numbers of rows to capture for up to ``most``: each up to 8, and then four per doubling. A row is a
    whole block of tokens, so that padding counts, and rather by its share than by its number."""
    sizes = {number << shift for shift in range(most.bit_length()) for number in range(1, 9)}
    return sorted({size for size in sizes if size < most} | {most}) if most else []


class BlockRows:
    """What captured rounds read of their rows."""

    __slots__ = ("_block", "_mirror", "_num_rows", "ends", "slots", "table", "to_second")

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
        """A step failed: nobody knows how far it came."""
        self._mirror.forget()

    def update(self, packed: BlockPacked, send: Callable[[npt.NDArray[np.int64]], torch.Tensor]) -> bool:
        """Make the rows those of a step of rounds, and padding behind. False if they were so already."""
        slots, targets, pairs = (packed.section(name) for name in ("slots", "targets", "pairs"))
        count, paired = len(slots), np.flatnonzero(pairs)
        end = count + len(paired)
        columns = np.zeros((_COLUMNS, self._num_rows), np.int64)
        columns[0, :count] = slots
        columns[1, :count] = targets + (1 - pairs) * self._block
        columns[1, count:end] = targets[paired] + self._block
        columns[2, paired] = np.arange(count, end) - paired
        table = packed.section("block_table").reshape(-1, packed.num_pages)[packed.rows]
        if len(paired):
            table = np.concatenate((table, table[paired]))
        return self._mirror.update(columns.reshape(-1), np.arange(end), table, send)


class BlockGraphs:
    """The captured rounds of one model. Launch thread only."""

    def __init__(
        self,
        model: CausalLM,
        attention: Attention,
        table: BlockTable,
        *,
        sizes: list[int],
        max_pages: int,
        page_size: int,
        device: torch.device,
    ) -> None:
        spec = model.spec
        assert spec.block_size is not None, "not a diffusion model"
        self._model = model
        self._attention = attention
        self._table = table
        self._page_size = page_size
        self._block = block = spec.block_size
        self._sizes = sorted(sizes)
        most = self._sizes[-1]
        self._rows = BlockRows(most, max_pages, block, device)
        self._numbers = torch.arange(most, device=device)
        self._offsets = torch.arange(block, device=device)
        self._cu_q = torch.arange(most + 1, device=device) * block
        # Of all sizes, and not in the graphs' pool.
        self._logits = torch.empty(most * block, spec.vocab_size, dtype=spec.dtype, device=device)
        self._records = torch.empty(most, table.words, dtype=torch.int64, device=device)
        self._kept = torch.empty(KEPT, most, table.words, dtype=torch.int64, device=device)
        self._turn = 0
        #: by size, and by size, algorithm and whether rows may have a temperature
        self._forwards: dict[int, Graph] = {}
        self._steps: dict[tuple[int, str, bool], Graph] = {}
        self._size = 0

    @torch.inference_mode()
    def capture(self, capture: Capture, progress: Callable[[int, int], None] | None = None) -> None:
        """Capture all sizes, on padding alone. ``progress`` is called with (done, total)."""
        # What an algorithm has on the device must not be made while its graph is.
        self._table.prepare(algorithm_names())
        for done, size in enumerate(reversed(self._sizes), 1):
            self._forwards[size] = capture(partial(self._forward, size))
            for algorithm in algorithm_names():
                for drawn in (False, True):
                    step = partial(self._step, size, algorithm, drawn)
                    self._steps[size, algorithm, drawn] = capture(step)
            if progress is not None:
                progress(done, len(self._sizes))

    def hold(self, packed: BlockPacked) -> bool:
        """Whether a step can be a replay."""
        return 0 < packed.num_rounds <= self._sizes[-1]

    def forward(self, packed: BlockPacked, send: Callable[[npt.NDArray[np.int64]], torch.Tensor]) -> None:
        """Take the blocks of a step, and compute the logits to denoise them by."""
        self._size = self._sizes[bisect_left(self._sizes, packed.num_rounds)]
        try:
            self._rows.update(packed, send)
            self._forwards[self._size].replay()
        except BaseException:
            self._rows.forget()
            raise

    def step(self, packed: BlockPacked) -> torch.Tensor:
        """Denoise the last forward's blocks: their records, int64 [K * words], valid until ``KEPT`` calls
        later. The slots have them."""
        count = len(packed.rows)
        if len(packed.groups) == 1:
            (group,) = packed.groups
            self._steps[self._size, group.algorithm, group.drawn].replay()
        else:
            self._denoise(count, packed.groups)
        records = self._kept[self._turn, :count]
        self._turn = (self._turn + 1) % KEPT
        return records.copy_(self._records[:count]).view(-1)

    def _forward(self, size: int) -> None:
        rows, block = self._rows, self._block
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
        """Of every token of the rows, from what it is for their first, [rows]."""
        return (first.unsqueeze(1) + self._offsets).view(-1)

    def _step(self, size: int, algorithm: str, drawn: bool) -> None:
        # Who is in the slots is not known yet.
        self._denoise(size, [AlgorithmRows(algorithm, 0, size, None, drawn, filtered=drawn)])

    def _denoise(self, count: int, groups: list[AlgorithmRows]) -> None:
        block, records = self._block, self._records[:count]
        logits = self._logits[: count * block].view(count, block, -1)
        self._table.step(logits, Round(self._rows.slots[:count], records, records[:, :block], None), groups)
