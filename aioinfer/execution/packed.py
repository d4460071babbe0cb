"""PackedStep: a step as named sections of one buffer, and the parts that stay on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from aioinfer.execution.graph_shapes import GraphShape
from aioinfer.execution.paging import PageTables, Placement
from aioinfer.scheduling.step import Encoding, MultiStepBudget, RowFeatures

if TYPE_CHECKING:
    import torch

    from aioinfer.execution.pooling import PoolingWork

__all__ = ["Layout", "PackedStep", "Sections"]


class Sections:
    """Named int64 arrays that travel to the device as one buffer: the one place that knows their order."""

    __slots__ = ("_names", "_sizes", "ints")

    def __init__(self, arrays: Mapping[str, npt.NDArray[np.int64]]) -> None:
        """``arrays``: one-dimensional."""
        self._names = tuple(arrays)
        self._sizes = [len(array) for array in arrays.values()]
        self.ints: npt.NDArray[np.int64] = np.concatenate(list(arrays.values()))

    def __getitem__(self, name: str) -> npt.NDArray[np.int64]:
        """One section, a view."""
        at = self._names.index(name)
        start = sum(self._sizes[:at])
        return self.ints[start : start + self._sizes[at]]

    def get(self, name: str) -> npt.NDArray[np.int64] | None:
        """One section, a view; None if it is not there."""
        return self[name] if name in self._names else None

    def split(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of the sections of ``tensor``, which holds what ``ints`` does."""
        return dict(zip(self._names, tensor.split(self._sizes), strict=True))


@dataclass(frozen=True, slots=True)
class Layout:
    """Places of the R rows of a step, generating ones first."""

    #: int64 [R]
    slots: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    #: int64 [R]: positions of each row; None where all have one
    q_len: npt.NDArray[np.int64] | None
    placement: Placement
    #: of the captured step that computes this one; None: it is not captured
    shape: GraphShape | None
    #: where further positions of its slots lie
    tables: PageTables
    #: int64 [R]: the slot of each row's adapter; None where no row has one
    adapters: npt.NDArray[np.int64] | None = None


@dataclass(slots=True)
class PackedStep:
    """A step as arrays. Sizes: T tokens, R rows, P pages of the longest row.

    ``sections`` holds input_ids[T], positions[T], slot_mapping[T], cu_q[R + 1], kv_len[R], slots[R] and
    block_table[R * P], as in :class:`~aioinfer.model.batch.Batch`, and after them the sections of the
    decoding; and for a model with recurrent state, where a row may have another cell than its slot's,
    state_read[R] and state_write[R]; and adapters[R] if a row has an adapter. Where a captured step computes
    it, the block table is that of the rows after the decodes only.
    """

    sections: Sections
    step_id: int
    #: rows of one position whose token waits in the relay; they come first. Behind them are those that verify
    #: drafts, whose first token waits there, too
    num_decodes: int
    num_pages: int
    q_lens: list[int]
    kv_lens: list[int]
    #: parts of the decoding that are no sections
    work: Any
    #: of the captured step that computes it; None: it is not captured
    shape: GraphShape | None = None
    multi_step: MultiStepBudget | None = None
    #: of a model with recurrent state, where rows verify drafts or come next: int64 [R + 1] and [R], as in
    #: :class:`~aioinfer.model.state.RowStates`
    replays: npt.NDArray[np.int64] | None = None
    kept: npt.NDArray[np.int64] | None = None
    #: the section ``adapters`` on the host; None where no row has an adapter, and the section is not there
    adapter_slots: list[int] | None = None
    #: the pooling of rows; its sections are hidden_rows [H], pooled_logits [L] and pooled_ids [L]
    pooling: PoolingWork | None = None
    #: rows of prompts that sample nothing: the hidden states of their last positions, which attend to all the
    #: others, are the last of hidden_rows, and say whether the row is finite
    watched: Sequence[int] = ()
    #: the features of the tokens in the section feature_rows [F], in their order; and sections ends [T] and
    #: rotary [3 * T] of images
    features: Sequence[RowFeatures] = ()
    #: in place of rows
    encoding: Encoding | None = None

    @classmethod
    def of_encoder(cls, step_id: int, encoding: Encoding) -> Self:
        """A step without rows."""
        return cls(
            Sections({"input_ids": np.empty(0, np.int64)}), step_id, 0, 0, [], [], None, encoding=encoding
        )

    @property
    def decodes_only(self) -> bool:
        """Every row computes one token, which waits in the relay, and samples the next."""
        return self.num_decodes == len(self.q_lens)
