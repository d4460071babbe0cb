"""A small continuous-batching driver: it calls ``CausalLM.forward`` on batches built by hand.

No scheduler, no allocator, no sampler: whatever fails here is the fault of a model or a kernel. Pages are
dealt from a shuffled pool, so that no sequence has neighbouring pages; prompts go in by chunks and mix
with the decodes of earlier sequences.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from aioinfer.model.attention.base import Attention
from aioinfer.model.attention.native_attention import NativeAttention
from aioinfer.model.attention.pool import KVPool
from aioinfer.model.batch import Batch
from aioinfer.model.inspection import LoadOptions
from aioinfer.model.kernels import AttentionBackend, choose_attention, make_attention
from aioinfer.model.loader import load_model
from aioinfer.model.spec import CausalLM, ModelSpec
from aioinfer.model.state import RowStates, StatePool
from tests.compiled import require_native


@dataclass(slots=True)
class Sequence_:
    """One sequence in the driver."""

    ids: list[int]
    prompt_len: int
    arrival: int
    max_new: int
    #: of its adapter
    slot: int = 0
    #: counts the prompts of a run
    number: int = 0
    done: int = 0
    pages: list[int] = field(default_factory=list)
    #: cell with the recurrent state behind the tokens that are done
    cell: int = 0
    #: logits at every position that was computed and asked for, by position
    logits: dict[int, torch.Tensor] = field(default_factory=dict)
    #: and hidden states
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        return len(self.ids) == self.prompt_len + self.max_new


def load(path: Path, *told: Any, **options: Any) -> Any:
    """A model on the CPU, in float32 by default. ``told``: progress and sizes, as of ``load_model``."""
    options = {"dtype": "float32", "device": torch.device("cpu"), **options}
    return load_model(path, LoadOptions(**options), *told)


def make_pool(spec: ModelSpec, num_pages: int, page_size: int, device: torch.device | str = "cpu") -> KVPool:
    return KVPool(
        spec.kv_layers,
        num_pages=num_pages,
        page_size=page_size,
        dtype=spec.dtype,
        device=torch.device(device),
    )


def require(kernels: str) -> None:
    """Skip where such kernels cannot be had: native ones are compiled."""
    if kernels == "native":
        require_native()


def attention_for(
    spec: ModelSpec,
    num_pages: int,
    page_size: int,
    kernels: AttentionBackend = "auto",
    device: torch.device | str = "cpu",
) -> Attention:
    """What goes with a model that was loaded for ``kernels``."""
    where = torch.device(device)
    return make_attention(
        choose_attention(where, spec.head_dims, spec.dtype, kernels, latent=spec.latent),
        spec.kv_layers,
        num_pages=num_pages,
        page_size=page_size,
        dtype=spec.dtype,
        device=where,
    )


def fill(attention: Any, value: float) -> None:
    """Every cell of its pool."""
    native = isinstance(attention, NativeAttention)
    for cells in attention._cells if native else attention._pool.keys + attention._pool.values:
        cells.fill_(value)


def build_batch(
    rows: Sequence[tuple[Sequence[int], int, Sequence[int]]],
    page_size: int,
    *,
    num_decodes: int,
    logits_rows: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
    states: RowStates | None = None,
) -> Batch:
    """A batch of rows ``(ids, start, pages)``; logits of the last token of each row unless told."""
    ids: list[int] = []
    positions: list[int] = []
    cells: list[int] = []
    ends = [0]
    for row_ids, start, pages in rows:
        for offset, token in enumerate(row_ids):
            position = start + offset
            ids.append(token)
            positions.append(position)
            cells.append(pages[position // page_size] * page_size + position % page_size)
        ends.append(len(ids))
    kv_lens = [start + len(row_ids) for row_ids, start, _ in rows]
    width = -(-max(kv_lens) // page_size)
    table = [list(pages[: -(-kv // page_size)]) for (_, _, pages), kv in zip(rows, kv_lens, strict=True)]

    def ints(values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return Batch(
        input_ids=ints(ids),
        positions=ints(positions),
        slot_mapping=ints(cells),
        cu_q=ints(ends),
        kv_len=ints(kv_lens),
        block_table=ints([row + [0] * (width - len(row)) for row in table]),
        logits_rows=ints([end - 1 for end in ends[1:]] if logits_rows is None else list(logits_rows)),
        q_lens=[len(row_ids) for row_ids, _, _ in rows],
        kv_lens=kv_lens,
        num_decodes=num_decodes,
        states=states,
    )


def state_pool(spec: ModelSpec, num_cells: int, device: torch.device | str = "cpu") -> StatePool | None:
    """Cells of recurrent state that hold NaN, for a model that has some."""
    if not spec.states:
        return None
    pool = StatePool(spec.states, num_cells, torch.device(device))
    for tensor in pool.tensors:
        tensor.fill_(float("nan"))
    return pool


def row_states(pool: StatePool | None, cells: Sequence[tuple[int, int]]) -> RowStates | None:
    """Cells to read and to write of each row."""
    if pool is None:
        return None
    read, write = torch.tensor(list(cells), dtype=torch.int64, device=pool.tensors[0].device).T.contiguous()
    return RowStates(pool, read, write)


class Driver:
    """Runs sequences to the end, greedily. ``chunk`` tokens of a prompt go into one step. ``kernels`` as the
    model was loaded."""

    def __init__(
        self,
        model: CausalLM,
        *,
        chunk: int,
        page_size: int = 8,
        num_pages: int = 96,
        seed: int = 0,
        device: torch.device | str = "cpu",
        kernels: AttentionBackend = "auto",
    ) -> None:
        self.model = model
        self.chunk = chunk
        self.page_size = page_size
        self.device = device
        self.attention = attention_for(model.spec, num_pages, page_size, kernels, device)
        # What a freed page holds is its last owner's: it must reach no other.
        fill(self.attention, float("nan"))
        self.free = list(range(1, num_pages + 1))
        self._random = random.Random(seed)
        self._random.shuffle(self.free)
        self.states = state_pool(model.spec, 40, device)
        self.cells = self._random.sample(range(1, 41), 40)

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        max_new: int,
        *,
        gap: int = 0,
        all_logits: bool = False,
        slots: Sequence[int] = (),
    ) -> list[Sequence_]:
        """Sequence i arrives ``i * gap`` steps after the first one. ``slots``: of their adapters."""
        sequences = [
            Sequence_(list(prompt), len(prompt), index * gap, max_new, slot, index)
            for index, (prompt, slot) in enumerate(zip(prompts, slots or [0] * len(prompts), strict=True))
        ]
        step = 0
        while not all(sequence.finished for sequence in sequences):
            here = [seq for seq in sequences if seq.arrival <= step and not seq.finished]
            if here:
                self._step(here, all_logits)
            step += 1
        return sequences

    def finish(self, batch: Batch, order: list[Sequence_]) -> None:
        """Give the batch what else it needs; ``order``: the sequences of its rows."""

    @torch.inference_mode()
    def _step(self, here: list[Sequence_], all_logits: bool) -> None:
        decodes = [seq for seq in here if seq.done >= seq.prompt_len]
        prefills = [seq for seq in here if seq.done < seq.prompt_len]
        order = decodes + prefills
        rows = []
        for seq in order:
            ids = seq.ids[seq.done : seq.done + self.chunk]
            while len(seq.pages) * self.page_size < seq.done + len(ids):
                seq.pages.append(self.free.pop())
            rows.append((ids, seq.done, seq.pages))
        wanted = range(sum(len(ids) for ids, _, _ in rows)) if all_logits else None
        states = row_states(self.states, [self._next_cells(seq) for seq in order])
        batch = build_batch(
            rows,
            self.page_size,
            num_decodes=len(decodes),
            logits_rows=wanted,
            device=self.device,
            states=states,
        )
        if any(seq.slot for seq in order):
            batch.adapter_slots = [seq.slot for seq in order]
            batch.adapters = torch.tensor(batch.adapter_slots, device=self.device)
        if all_logits and self.model.spec.hidden_states:
            batch.hidden_rows = batch.logits_rows
        self.finish(batch, order)
        logits = self.model.forward(batch, self.attention).float()
        at = 0
        for seq, (ids, start, _) in zip(order, rows, strict=True):
            for offset in range(len(ids)) if all_logits else (len(ids) - 1,):
                seq.logits[start + offset] = logits[at].cpu()
                if batch.hidden is not None:
                    seq.hidden[start + offset] = batch.hidden[at].cpu()
                at += 1
            seq.done = start + len(ids)
            if seq.done == len(seq.ids):
                seq.ids.append(int(seq.logits[seq.done - 1].argmax()))
            if seq.finished:
                self.free[:0] = seq.pages

    def _next_cells(self, seq: Sequence_) -> tuple[int, int]:
        """The cell that a row reads, and the one that it writes: the same, or another one."""
        read = seq.cell
        if not read or self._random.random() < 0.5:
            seq.cell = self.cells.pop()
            self.cells[:0] = [read] if read else []
        return read, seq.cell
