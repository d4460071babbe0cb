"""DecodeGraphs: decode steps that are captured once and replayed, so that launching one costs a call or two.

What a captured step reads lies still on the device, and moves on by itself::

    columns   slots │ starts │ seeds │ top_k │ temperature │ top_p │ min_p       one entry per row
    table     pages of each row
                 │
    forward      relay[slots] ─► positions, KV cells ─► model ─► logits,  starts += 1
    sampling     greedy │ filtered ─► tokens ─► relay[slots]

So a step with the rows and pages of the one before needs nothing from the host but its replay. Where they
changed, the host sends the difference to what it knows to be there. Rows beyond the step's own are padding:
slot 0, junk page, no context.

Graphs come in sizes; a step takes the next larger one. All share one pool of memory, the largest is captured
first (mini-sglang and nano-vllm do likewise), and only while nothing else touches the device. What a graph
leaves for others lies outside of the pool: there, any replay may overwrite it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from aioinfer.execution.packing import FLOAT_FIELDS, Packed
from aioinfer.execution.relay import Relay
from aioinfer.model.attention.base import Attention
from aioinfer.model.batch import Batch
from aioinfer.model.spec import CausalLM
from aioinfer.sampling.batch import SamplingBatch
from aioinfer.sampling.sampler import Sampler

__all__ = ["Capture", "DecodeGraphs", "DecodeRows", "Graph", "graph_obstacle", "graph_sizes"]

_INT_COLUMNS = ("slots", "starts", "seeds", "top_k")
_FLOAT_COLUMNS = ("temperature", "top_p", "min_p")
_COLUMNS = len(_INT_COLUMNS) + len(_FLOAT_COLUMNS)
_STARTS = _INT_COLUMNS.index("starts")
_FLOAT_ROWS = [FLOAT_FIELDS.index(name) for name in _FLOAT_COLUMNS]


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Do it again, on the memory it was captured with."""


#: capture what a call does, on memory that was there before or is of no use after
Capture = Callable[[Callable[[], None]], Graph]


def graph_sizes(most: int) -> list[int]:
    """Batch sizes to capture for up to ``most`` rows: steps of 8, and finer where a row counts."""
    return sorted({size for size in (1, 2, 4, *range(8, most, 8)) if size < most} | {most}) if most else []


def graph_obstacle(
    device: torch.device, attention: str, capturable: bool, experts: str | None = None
) -> str | None:
    """What keeps decode steps from being captured there, if anything does.

    Args:
        attention, experts: the kernels that were chosen.
        capturable: see :class:`~aioinfer.model.spec.CausalLM`.
    """
    if device.type != "cuda":
        return f"the device is a {device.type}"
    if attention != "triton":
        return f"{attention} attention asks the host for lengths"
    if experts not in (None, "triton"):
        return f"{experts} kernels of experts may ask the host how many tokens each has"
    return None if capturable else "the model's code is transformers' own"


class DecodeRows:
    """What captured decode steps read: a copy on the device and what the host knows of it."""

    def __init__(self, num_rows: int, max_pages: int, device: torch.device) -> None:
        ints = torch.zeros(len(_INT_COLUMNS), num_rows, dtype=torch.int64, device=device)
        floats = torch.zeros(len(_FLOAT_COLUMNS), num_rows, dtype=torch.float32, device=device)
        self._ints, self._floats = ints, floats
        #: int64 [rows]
        self.slots, self.starts, self.seeds, self.top_k = ints
        #: float32 [rows]
        self.temperature, self.top_p, self.min_p = floats
        #: int64 [rows, max_pages]
        self.table = torch.zeros(num_rows, max_pages, dtype=torch.int64, device=device)
        # The same in a row's 64 bits each, floats as theirs.
        self._known = np.zeros((_COLUMNS, num_rows), np.int64)
        self._known_table = np.zeros((num_rows, max_pages), np.int64)

    def forget(self) -> None:
        """A step failed: nobody knows how far it came."""
        self._known[:] = -1
        self._known_table[:] = -1

    def update(
        self, packed: Packed, size: int, send: Callable[[npt.NDArray[np.int64]], torch.Tensor]
    ) -> bool:
        """Make ``size`` rows those of the step and padding. False if they were so already.

        Columns of a row's pages that the step does not reach stay as they are: nobody reads them.
        """
        wanted = _columns(packed, size)
        known = self._known[:, :size]
        rows, width = len(packed.q_lens), packed.num_pages
        table = packed.section("block_table").reshape(rows, width)
        row, column = np.nonzero(self._known_table[:rows, :width] != table)
        if not len(row) and np.array_equal(known, wanted):
            return False
        cells = row * self._known_table.shape[1] + column
        pages = table[row, column]
        sent = send(np.concatenate((wanted.reshape(-1), cells, pages)))
        columns = sent[: wanted.size].view(_COLUMNS, size)
        self._ints[:, :size] = columns[: len(_INT_COLUMNS)]
        self._floats[:, :size] = columns[len(_INT_COLUMNS) :].to(torch.int32).view(torch.float32)
        if len(row):
            self.table.view(-1).index_copy_(0, *sent[wanted.size :].view(2, -1))
        known[:] = wanted
        self._known_table[row, column] = pages
        return True

    def moved_on(self, size: int) -> None:
        """A replay moved the first ``size`` rows, but for padding, to their next position."""
        known = self._known[:, :size]
        known[_STARTS] += known[0] > 0


def _columns(packed: Packed, size: int) -> npt.NDArray[np.int64]:
    """int64 [columns, size] of a step's rows; the rest is padding."""
    columns = np.zeros((_COLUMNS, size), np.int64)
    rows = len(packed.q_lens)
    for at, name in enumerate(("slots", "positions", "seeds", "top_k")):
        columns[at, :rows] = packed.section(name)
    columns[len(_INT_COLUMNS) :, :rows] = packed.roster.floats[_FLOAT_ROWS].view(np.int32)
    return columns


class DecodeGraphs:
    """The captured decode steps of one model. Launch thread only."""

    def __init__(
        self,
        model: CausalLM,
        attention: Attention,
        sampler: Sampler,
        relay: Relay,
        *,
        sizes: list[int],
        max_pages: int,
        page_size: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._attention = attention
        self._sampler = sampler
        self._relay = relay
        self._page_size = page_size
        self._sizes = sorted(sizes)
        self._rows = DecodeRows(self._sizes[-1], max_pages, device)
        # Of all sizes, and not in the graphs' pool: the next forward would write there while tokens are still
        # copied to the host.
        self._logits = torch.empty(self._sizes[-1], model.spec.vocab_size, device=device)
        self._tokens = torch.empty(self._sizes[-1], dtype=torch.int64, device=device)
        #: by size, and for sampling by size and whether every row is greedy
        self._forwards: dict[int, Graph] = {}
        self._samplings: dict[tuple[int, bool], Graph] = {}
        self._size = 0

    @torch.inference_mode()
    def capture(self, capture: Capture, progress: Callable[[int, int], None] | None = None) -> None:
        """Capture all sizes, on padding alone. ``progress`` is called with (done, total)."""
        for done, size in enumerate(reversed(self._sizes), 1):
            self._forwards[size] = capture(partial(self._forward, size))
            for greedy in (True, False):
                self._samplings[size, greedy] = capture(partial(self._sampling, size, greedy))
            if progress is not None:
                progress(done, len(self._sizes))

    def hold(self, packed: Packed) -> bool:
        """Whether a step can be a replay."""
        return packed.decodes_only and len(packed.q_lens) <= self._sizes[-1]

    def forward(self, packed: Packed, send: Callable[[npt.NDArray[np.int64]], torch.Tensor]) -> torch.Tensor:
        """Logits of the step's rows, float32 [R, V], valid until the next forward."""
        rows = len(packed.q_lens)
        self._size = size = self._sizes[bisect_left(self._sizes, rows)]
        try:
            self._rows.update(packed, size, send)
            self._forwards[size].replay()
        except BaseException:
            self._rows.forget()
            raise
        self._rows.moved_on(size)
        return self._logits[:rows]

    def sample(self, packed: Packed) -> torch.Tensor:
        """Tokens of the last forward's step, int64 [R], valid until the next call; the relay has them."""
        self._samplings[self._size, packed.roster.all_greedy].replay()
        return self._tokens[: len(packed.q_lens)]

    def _forward(self, size: int) -> None:
        rows = self._rows
        slots, starts, table = rows.slots[:size], rows.starts[:size], rows.table[:size]
        live = (slots > 0).to(torch.int64)
        input_ids = torch.empty_like(slots)
        self._relay.gather(input_ids, slots, size)
        page = table.gather(1, (starts // self._page_size).unsqueeze(1)).squeeze(1)
        row = torch.arange(size + 1, device=slots.device)
        batch = Batch(
            input_ids=input_ids,
            positions=starts.clone(),
            slot_mapping=(page * self._page_size + starts % self._page_size) * live,
            cu_q=row,
            kv_len=(starts + 1) * live,
            block_table=table,
            logits_rows=row[:-1],
            q_lens=[1] * size,
            # Lengths are known to the device alone: kernels that ask the host cannot be captured.
            kv_lens=[],
            num_decodes=size,
        )
        self._logits[:size].copy_(self._model.forward(batch, self._attention))
        starts += live

    def _sampling(self, size: int, greedy: bool) -> None:
        """Sample from logits whose rows have moved on already: they stand where the token will."""
        rows = self._rows
        neutral = torch.ones(size, device=self._logits.device)
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
                all_greedy=greedy,
                any_top_k=True,
                any_top_p=True,
                any_min_p=True,
                any_penalty=False,
            ),
        )
        self._relay.scatter(rows.slots[:size], tokens)
        self._tokens[:size].copy_(tokens)
