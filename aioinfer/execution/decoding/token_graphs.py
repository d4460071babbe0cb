"""CapturedTokens: steps of decodes and of chunks on memory that lies still, and moves on by itself::

    columns   slots │ starts │ seeds │ top_k │ temperature │ top_p │ min_p       one entry per row
    table     pages of each row
                 │                 chunks   ids, positions, KV cells, rows, pages
                 │                    │
    forward      relay[slots] ─► positions, KV cells ─► model ─► logits,  starts += 1
    sampling     greedy │ drawn │ wide ─► tokens ─► relay[slots], tokens of the last steps

So a step of decodes with the rows and pages of the one before needs nothing from the host but its replay.

The rows are those that sample: decodes, and after them the chunks that end their prompts, which decode in
the next step. Of a step with chunks the forward is told how many are decodes; what it computes of the others
is in the chunks (:mod:`~aioinfer.execution.decoding.chunk_rows`), and so are rows that verify drafts.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from aioinfer.execution.decoding.base import Output, Send
from aioinfer.execution.decoding.chunk_rows import ChunkRows
from aioinfer.execution.decoding.mirror import KEPT, Mirror
from aioinfer.execution.decoding.relay import Relay
from aioinfer.execution.decoding.sampling_metadata import FLOAT_FIELDS
from aioinfer.execution.graph_shapes import GraphShape, GraphShapes
from aioinfer.execution.packed import PackedStep
from aioinfer.model.attention.base import Attention
from aioinfer.model.batch import Batch
from aioinfer.model.spec import CausalLM
from aioinfer.model.state import RowStates, StatePool
from aioinfer.sampling.batch import SamplingBatch
from aioinfer.sampling.sampler import Sampler

__all__ = ["CapturedTokens", "DecodeRows"]

_INT_COLUMNS = ("slots", "starts", "seeds", "top_k")
_FLOAT_COLUMNS = ("temperature", "top_p", "min_p")
_NO_VERSION = -1
_NO_PAGES = np.empty((0, 1), np.int64)
_FLOAT_ROWS = [FLOAT_FIELDS.index(name) for name in _FLOAT_COLUMNS]


class DecodeRows:
    """Inputs of captured steps, for rows that sample: columns of integers, of float32, two to a cell, and
    pages."""

    def __init__(self, num_rows: int, max_pages: int, device: torch.device) -> None:
        #: rows per column; kernels like what begins at round addresses
        self._width = width = -(-num_rows // 32) * 32
        self._ints = ints = len(_INT_COLUMNS) * width
        self._mirror = Mirror(ints + len(_FLOAT_COLUMNS) * width // 2, num_rows, max_pages, device)
        cells, known = self._mirror.columns, self._mirror.known_columns
        #: int64 [rows]
        self.slots, self.starts, self.seeds, self.top_k = cells[:ints].view(-1, width)[:, :num_rows]
        #: float32 [rows]
        self.temperature, self.top_p, self.min_p = (
            cells[ints:].view(torch.float32).view(-1, width)[:, :num_rows]
        )
        #: int64 [rows, max_pages]
        self.table = self._mirror.table
        self._known_slots, self._known_starts, *_ = known[:ints].reshape(-1, width)
        #: of the pages that each row has there
        self._versions = np.full(num_rows, _NO_VERSION)

    def forget(self) -> None:
        """A step failed: the state of the rows is unknown."""
        self._mirror.forget()
        self._versions[:] = _NO_VERSION

    def update(self, packed: PackedStep, send: Send) -> bool:
        """Make the rows those of the step, followed by padding. False if they were so already."""
        return self._mirror.update(self._columns_of(packed), *self._pages_of(packed), send)

    def _pages_of(self, packed: PackedStep) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Rows whose pages may differ from those of the step, and what these are. Only rows with another
        version are looked at."""
        tables = packed.work.tables
        assert tables is not None, "the step was not packed for a graph"
        rows = np.flatnonzero(self._versions[: len(tables.rows)] != tables.versions)
        if not len(rows):
            return rows, _NO_PAGES
        self._versions[rows] = tables.versions[rows]
        return rows, np.stack([tables.rows[row] for row in rows.tolist()])

    def moved_on(self) -> None:
        """A replay moved all rows, but for padding, to their next position."""
        self._known_starts += self._known_slots > 0

    def _columns_of(self, packed: PackedStep) -> npt.NDArray[np.int64]:
        """Columns of a step; the rest is padding."""
        columns, rows = np.zeros_like(self._mirror.known_columns), len(packed.work.tables.rows)
        ints = columns[: self._ints].reshape(-1, self._width)
        for at, name in enumerate(("sample_slots", "sample_positions", "seeds", "top_k")):
            ints[at, :rows] = packed.sections[name][:rows]
        # The forward moves them on to where the token will be.
        ints[1, :rows] -= 1
        floats = columns[self._ints :].view(np.float32).reshape(-1, self._width)
        floats[:, :rows] = packed.work.sampling.floats[_FLOAT_ROWS, :rows]
        return columns


class CapturedTokens:
    """See :class:`~aioinfer.execution.decoding.base.Captured`."""

    def __init__(
        self,
        model: CausalLM,
        attention: Attention,
        sampler: Sampler,
        relay: Relay,
        *,
        shapes: GraphShapes,
        max_pages: int,
        page_size: int,
        states: StatePool | None = None,
    ) -> None:
        device = relay.device
        max_rows = max(shape.logits for shape in shapes)
        self._model = model
        self._attention = attention
        self._sampler = sampler
        #: by kernels, which take hints
        self._searches = sampler.backend.name == "triton"
        self._relay = relay
        self._page_size = page_size
        self._states = states
        self._rows = DecodeRows(max_rows, max_pages, device)
        self._chunks = ChunkRows(shapes, max_pages, device)
        # Of all sizes, and not in the graphs' pool: the next forward would write there while tokens are still
        # copied to the host.
        self._logits = torch.empty(max_rows, model.spec.vocab_size, device=device)
        chunks = max(shape.chunks for shape in shapes)
        self.broken: torch.Tensor = torch.zeros(chunks, dtype=torch.bool, device=device)
        self._tokens = torch.empty(KEPT, max_rows, dtype=torch.int64, device=device)
        #: which of these the next step's are, on the device and on the host, and whether they agree
        self._turns = torch.zeros(1, dtype=torch.int64, device=device)
        self._turn, self._in_turn = 0, False
        self._neutral = torch.ones(max_rows, device=device)
        self._numbers = torch.arange(max_rows + 1, device=device)
        #: by turn and number of rows
        self._sampled: dict[tuple[int, int], torch.Tensor] = {}

    def prepare(self) -> None:
        """Everything is there."""

    def clear(self, shape: GraphShape) -> None:
        """Rows are padding until a step has some."""
        if shape.tokens:
            self._chunks.clear(shape)

    def variants(self, size: int) -> tuple[str, ...]:
        """The ways of sampling: maxima only; draws with any filters; or, in ten launches more, draws in which
        no row stalls the others if its nucleus is wide."""
        return ("greedy", "drawn", "wide") if self._searches else ("greedy", "drawn")

    def update(self, packed: PackedStep, shape: GraphShape, send: Send) -> bool:
        changed = self._rows.update(packed, send)
        if not shape.tokens:
            return changed
        self._chunks.update(packed, shape, send)
        return True

    def moved_on(self) -> None:
        self._rows.moved_on()

    def forget(self) -> None:
        self._rows.forget()

    def logits(self, packed: PackedStep) -> torch.Tensor:
        """float32 [S, V] of the S rows that sample"""
        return self._logits[: len(packed.work.sample_rows)]

    def finish(self, packed: PackedStep, replay: Callable[[int, object], bool]) -> Output | None:
        """Tokens, int64 [S]; the relay has them, too."""
        sampling = packed.work.sampling
        if not packed.work.plain or (self._searches and sampling.wide_top_k):
            return None
        count = len(packed.work.sample_rows)
        if not count:
            return Output([])
        if not self._in_turn:
            self._turns.fill_(self._turn)
        self._in_turn = False
        wide = self._searches and sampling.wide_nucleus
        if not replay(count, "greedy" if sampling.all_greedy else "wide" if wide else "drawn"):
            return None
        self._in_turn = True
        which = self._turn, count
        self._turn = (self._turn + 1) % KEPT
        tokens = self._sampled.get(which)
        if tokens is None:
            tokens = self._sampled[which] = self._tokens[which[0], : which[1]]
        return Output([tokens])

    def forward(self, shape: GraphShape) -> None:
        rows = self._rows
        sampling = (rows.slots[: shape.logits] > 0).to(torch.int64)
        batch = self._with_chunks(shape) if shape.tokens else self._decodes(shape.rows, sampling)
        self._logits[: shape.logits].copy_(self._model.forward(batch, self._attention))
        if batch.hidden is not None:
            self.broken[: shape.chunks].copy_(batch.hidden.isfinite().all(1).logical_not_())
        rows.starts[: shape.logits] += sampling

    def _decodes(self, size: int, live: torch.Tensor) -> Batch:
        """Mask of the first rows that are ``live``, 0 or 1; the others are padding."""
        rows = self._rows
        slots, starts, table = rows.slots[:size], rows.starts[:size], rows.table[:size]
        page = table.gather(1, (starts // self._page_size).unsqueeze(1)).squeeze(1)
        row = self._numbers[: size + 1]
        return Batch(
            input_ids=self._relay.of(slots),
            positions=starts.clone(),
            slot_mapping=torch.add(starts % self._page_size, page, alpha=self._page_size) * live,
            cu_q=row,
            kv_len=torch.addcmul(live, starts, live),
            block_table=table,
            logits_rows=row[:-1],
            all_logits=True,
            q_lens=[1] * size,
            # Lengths are known to the device alone: kernels that ask the host cannot be captured.
            kv_lens=[],
            num_decodes=size,
            # Padding has the null slot and the null cell.
            states=None if self._states is None else RowStates(self._states, slots, slots),
        )

    def _with_chunks(self, shape: GraphShape) -> Batch:
        """Decodes, as many as the chunks say, followed by the chunks."""
        chunks, table = self._chunks.of(shape)
        decodes = self._decodes(shape.rows, (self._numbers[: shape.rows] < chunks.decodes).to(torch.int64))
        first, ids = decodes.cu_q[:-1], self._relay.named(chunks.ids)
        return Batch(
            input_ids=torch.cat((decodes.input_ids, ids)),
            positions=torch.cat((decodes.positions, chunks.positions)),
            slot_mapping=torch.cat((decodes.slot_mapping, chunks.slot_mapping)),
            cu_q=torch.cat((first, chunks.cu_q)),
            kv_len=torch.cat((decodes.kv_len, chunks.kv_len)),
            block_table=torch.cat((decodes.block_table, table)),
            logits_rows=chunks.logits_rows,
            # Those of rows without positions are others' or padding, and are not looked at.
            hidden_rows=chunks.cu_q[1:-1] - 1,
            q_lens=[],
            kv_lens=[],
            num_decodes=shape.rows,
        )

    def step(self, size: int, variant: str) -> None:
        """Sample from logits whose rows have moved on already: they stand where the token will."""
        rows = self._rows
        neutral = self._neutral[:size]
        tokens = self._sampler.sample(
            self._logits[:size],
            SamplingBatch(
                slots=rows.slots[:size],
                positions=rows.starts[:size],
                seeds=rows.seeds[:size],
                temperature=rows.temperature[:size],
                top_p=rows.top_p[:size],
                min_p=rows.min_p[:size],
                top_k=rows.top_k[:size],
                repetition_penalty=neutral,
                presence_penalty=neutral,
                frequency_penalty=neutral,
                all_greedy=variant == "greedy",
                any_top_k=True,
                any_top_p=True,
                any_min_p=True,
                any_penalty=False,
                wide_nucleus=variant == "wide",
            ),
        )
        self._relay.scatter(rows.slots[:size], tokens)
        self._tokens[:, :size].index_copy_(0, self._turns, tokens.unsqueeze(0))
        self._turns.add_(1).remainder_(KEPT)
