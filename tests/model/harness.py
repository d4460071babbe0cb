"""A small continuous-batching driver: it calls ``CausalLM.forward`` on batches built by hand.

No scheduler, no allocator, no sampler: whatever fails here is the fault of a model or a kernel. Pages are
dealt from a shuffled pool, so that no sequence has neighbouring pages; prompts go in by chunks and mix
with the decodes of earlier sequences.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from aioinfer.model.attention.backend import AttentionBackend, choose_attention, make_attention
from aioinfer.model.attention.base import Attention
from aioinfer.model.attention.native_attention import NativeAttention
from aioinfer.model.attention.pool import KVPool
from aioinfer.model.batch import Batch
from aioinfer.model.spec import CausalLM, ModelSpec
from tests.compiled import require_native


@dataclass(slots=True)
class Sequence_:
    """One sequence in the driver."""

    ids: list[int]
    prompt_len: int
    arrival: int
    max_new: int
    done: int = 0
    pages: list[int] = field(default_factory=list)
    #: logits at every position that was computed and asked for, by position
    logits: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        return len(self.ids) == self.prompt_len + self.max_new


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
        choose_attention(where, spec.head_dims, spec.dtype, kernels),
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
    )


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
        self.free = list(range(1, num_pages + 1))
        random.Random(seed).shuffle(self.free)

    def run(
        self, prompts: Sequence[Sequence[int]], max_new: int, *, gap: int = 0, all_logits: bool = False
    ) -> list[Sequence_]:
        """Sequence i arrives ``i * gap`` steps after the first one."""
        sequences = [
            Sequence_(list(prompt), len(prompt), index * gap, max_new) for index, prompt in enumerate(prompts)
        ]
        step = 0
        while not all(sequence.finished for sequence in sequences):
            here = [seq for seq in sequences if seq.arrival <= step and not seq.finished]
            if here:
                self._step(here, all_logits)
            step += 1
        return sequences

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
        batch = build_batch(
            rows, self.page_size, num_decodes=len(decodes), logits_rows=wanted, device=self.device
        )
        logits = self.model.forward(batch, self.attention).float()
        at = 0
        for seq, (ids, start, _) in zip(order, rows, strict=True):
            for offset in range(len(ids)) if all_logits else (len(ids) - 1,):
                seq.logits[start + offset] = logits[at].cpu()
                at += 1
            seq.done = start + len(ids)
            if seq.done == len(seq.ids):
                seq.ids.append(int(seq.logits[seq.done - 1].argmax()))
            if seq.finished:
                self.free[:0] = seq.pages
