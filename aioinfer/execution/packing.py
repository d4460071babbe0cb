"""Packing: a Step becomes one flat int64 buffer, and the further inputs of its decoding.

It runs on the loop's thread right after planning, so that it overlaps with the step on the device; the
launch thread then makes one tensor of the buffer (one host-to-device copy on CUDA) and splits it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from aioinfer.execution.decoding.base import RowPacker
from aioinfer.execution.features import ImagePacker
from aioinfer.execution.graph_shapes import GraphShapes
from aioinfer.execution.packed import Layout, PackedStep, Sections
from aioinfer.execution.paging import PageTables
from aioinfer.execution.pooling import PoolingWork
from aioinfer.images.support import ImageSupport
from aioinfer.scheduling.step import UNDRAWN, RowFeatures, Step

__all__ = ["Packer"]

_NO_GRAPHS = GraphShapes()


class Packer:
    """Keeps, by slot, what rows do not repeat: page tables and adapters here, parameters in ``rows``.

    ``graphs``: steps that have room in one of these are computed by captured steps, which know most of the
    page tables of decodes already. ``states``: the model has recurrent state. ``hidden``: it gives hidden
    states, and rows that sample nothing are checked by these. ``images``: it reads images.
    """

    def __init__(
        self,
        rows: RowPacker,
        num_slots: int,
        max_pages: int,
        page_size: int,
        graphs: GraphShapes = _NO_GRAPHS,
        *,
        states: bool = False,
        hidden: bool = False,
        images: ImageSupport | None = None,
    ) -> None:
        self._rows = rows
        self._images = None if images is None else ImagePacker(images, num_slots)
        self._image_token = 0
        if images is not None:
            self._image_token = images.token_id if images.filler_id is None else images.filler_id
        self._graphs = graphs
        self._states = states
        self._hidden = hidden
        self._tables = PageTables(num_slots, max_pages, page_size)
        #: by slot, the slot of its tenant's adapter; and whether any has ever had one
        self._adapters = np.zeros(num_slots + 1, np.int64)
        self._adapted = False

    def pack(self, step: Step) -> PackedStep:
        """Pack steps in the order of their ids, each once."""
        if step.encoding is not None:
            return PackedStep.of_encoder(step.id, step.encoding)
        generating, prefilling = step.generating, step.prefilling
        new = dict(generating.new_requests)
        new |= {row.slot: row.new_request for row in prefilling if row.new_request is not None}
        self._rows.admit(new)
        for slot, data in new.items():
            self._adapters[slot] = data.adapter
            self._adapted |= data.adapter > 0
            if self._images is not None:
                self._images.admit(slot, data)
        self._tables.update(new, (*generating.tables, *(row.table_update for row in prefilling)))
        layout = self._layout(step)
        placement = layout.placement
        own, work = self._rows.pack(step, layout)
        replays, kept = None, None
        if self._states:
            if prefilling:
                own |= _states(step)
            if generating.drafts or generating.replays is not None:
                replays, kept = _replays(step, layout)
        if layout.adapters is not None:
            own["adapters"] = layout.adapters
        pooling = None
        if any(row.pools is not None for row in prefilling):
            pooling = PoolingWork.pack(step, placement.cu_q, own)
        features: list[RowFeatures] = []
        if self._images is not None:
            given, features = self._images.pack(step, layout.slots, placement.cu_q, placement.positions)
            own |= given
        watched = _watched(step) if self._hidden else []
        if watched:
            pooled = own.get("hidden_rows", np.empty(0, np.int64))
            own["hidden_rows"] = np.concatenate((pooled, placement.cu_q[1:][watched] - 1))
        return PackedStep(
            sections=Sections(
                {
                    "input_ids": self._input_ids(step, placement.cu_q),
                    "positions": placement.positions,
                    "slot_mapping": placement.slot_mapping,
                    "cu_q": placement.cu_q,
                    "kv_len": placement.kv_len,
                    "slots": layout.slots,
                    "block_table": placement.block_table.reshape(-1),
                    **own,
                }
            ),
            step_id=step.id,
            num_decodes=generating.num_decodes,
            num_pages=placement.block_table.shape[1],
            q_lens=[1] * len(layout.slots) if layout.q_len is None else layout.q_len.tolist(),
            kv_lens=placement.kv_lens,
            work=work,
            shape=layout.shape,
            multi_step=step.multi_step,
            adapter_slots=None if layout.adapters is None else layout.adapters.tolist(),
            pooling=pooling,
            watched=watched,
            features=features,
            replays=replays,
            kept=kept,
        )

    def _layout(self, step: Step) -> Layout:
        generating, prefilling = step.generating, step.prefilling
        slots, starts, q_len = generating.slots, generating.starts, generating.lengths
        if prefilling:
            first = np.ones(len(slots), np.int64) if q_len is None else q_len
            slots = np.concatenate((slots, [row.slot for row in prefilling]))
            starts = np.concatenate((starts, [row.start for row in prefilling]))
            q_len = np.concatenate((first, [row.length for row in prefilling]))
        adapters = self._adapters[slots] if self._adapted else None
        if adapters is not None and not adapters.any():
            adapters = None
        # Graphs were captured without adapters and images.
        eager = adapters is not None or (
            self._images is not None and self._images.needs_own_step(step, slots)
        )
        need = None if eager else self._rows.graph_need(step)
        shape = None if need is None else self._graphs.fit(need)
        tabled = 0 if shape is None else generating.num_decodes
        placement = self._tables.place(slots, starts, q_len, first=tabled)
        return Layout(slots, starts, q_len, placement, shape, self._tables, adapters)

    def _input_ids(self, step: Step, cu_q: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Known ids in place; elsewhere the slot on the device has them, or nothing."""
        ids = np.full(step.num_tokens, self._rows.unknown_id, np.int64)
        generating = step.generating
        for at, drafts in enumerate(generating.drafts, generating.num_decodes):
            first = int(cu_q[at]) + 1
            ids[first : first + len(drafts)] = self._rows.unknown_id if drafts[0] == UNDRAWN else drafts
        for at, row in enumerate(step.prefilling, step.num_generating):
            first = int(cu_q[at])
            ids[first : first + len(row.ids)] = row.ids
            if row.features:
                known = ids[first : first + len(row.ids)]
                known[known < 0] = self._image_token
        return ids


def _watched(step: Step) -> list[int]:
    return [
        at for at, row in enumerate(step.prefilling, step.num_generating) if not (row.samples or row.blocks)
    ]


def _states(step: Step) -> dict[str, npt.NDArray[np.int64]]:
    """Cells of recurrent state; those of generating rows are the cells of their slots."""
    slots, rows = step.generating.slots, step.prefilling
    return {
        "state_read": np.concatenate((slots, [row.state_read for row in rows])),
        "state_write": np.concatenate((slots, [row.state_write for row in rows])),
    }


def _replays(step: Step, layout: Layout) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Where the stashed inputs of each row begin and end, and how many of its own positions its state
    includes."""
    generating, rows = step.generating, len(layout.slots)
    replays = np.zeros(rows + 1, np.int64)
    if generating.replays is not None:
        replays[1 : 1 + len(generating)] = generating.replays
    kept = np.ones(rows, np.int64) if layout.q_len is None else layout.q_len.copy()
    kept[generating.num_decodes : len(generating)] = 1
    return replays.cumsum(), kept
