"""PoolingWork: hidden states that the rows of a step pool, packed, computed and read.

::

    last, classes   the hidden state of the row's last position      [1]
    cls             that of its first position                       [1]
    mean, tokens    those of all positions of the row                [positions]
    choices         the logits of the row's last position, of which some are read

Which of these a row wants is its request's :class:`~aioinfer.pooling.Pooling`. A step without such rows packs
and computes nothing of this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from aioinfer.pooling import PoolingKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from aioinfer.model.spec import CausalLM
    from aioinfer.scheduling.step import Step

__all__ = ["PoolingWork"]

#: in the order in which their hidden states are packed
_OF_HIDDEN: tuple[PoolingKind, ...] = ("last", "cls", "classes", "mean", "tokens")


@dataclass(slots=True)
class PoolingWork:
    """The pooling of one step. Its tensors are, for each kind that occurs, in this order: the hidden
    states [N, hidden] of "last" and of "cls", the logits [N, classes] of "classes", the sums float64
    [N, hidden] of "mean", the hidden states of "tokens", and the logits of "choices"."""

    #: index and number of positions of the rows of each kind
    rows: dict[PoolingKind, list[tuple[int, int]]]
    #: rows of "choices", and how many logits each reads
    choices: list[tuple[int, int]]

    @classmethod
    def pack(
        cls, step: Step, cu_q: npt.NDArray[np.int64], sections: dict[str, npt.NDArray[np.int64]]
    ) -> PoolingWork:
        """Add sections to a step, and rows after those whose logits are wanted."""
        rows: dict[PoolingKind, list[tuple[int, int]]] = {kind: [] for kind in _OF_HIDDEN}
        wanted: dict[PoolingKind, list[npt.NDArray[np.int64]]] = {kind: [] for kind in _OF_HIDDEN}
        choices: list[tuple[int, int]] = []
        logits_rows: list[int] = []
        ids: list[int] = []
        for index, row in enumerate(step.prefilling, step.num_generating):
            if row.pools is None:
                continue
            assert row.sequence.pooled is not None
            pooling, offset = row.sequence.pooled.pooling, int(cu_q[index]) - row.start
            first, last = row.pools
            if pooling.kind == "choices":
                choices.append((index, len(pooling.token_ids)))
                logits_rows.append(offset + first)
                ids += pooling.token_ids
            else:
                rows[pooling.kind].append((index, last - first))
                wanted[pooling.kind].append(np.arange(offset + first, offset + last))
        found = [part for kind in _OF_HIDDEN for part in wanted[kind]]
        if found:
            sections["hidden_rows"] = np.concatenate(found)
        if choices:
            sections["logits_rows"] = np.concatenate((sections["logits_rows"], logits_rows))
            counts = [count for _, count in choices]
            sections["pooled_logits"] = np.repeat(np.arange(len(choices)), counts)
            sections["pooled_ids"] = np.asarray(ids, np.int64)
        return cls({kind: each for kind, each in rows.items() if each}, choices)

    @property
    def num_tensors(self) -> int:
        """Number of tensors that :meth:`pool` makes."""
        return len(self.rows) + bool(self.choices)

    def pool(
        self,
        hidden: torch.Tensor | None,
        logits: torch.Tensor,
        parts: dict[str, torch.Tensor],
        model: CausalLM,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The logits without those that are pooled, and the tensors. ``hidden``: float32 [H, hidden]."""
        made: list[torch.Tensor] = []
        at = 0
        for kind, rows in self.rows.items():
            assert hidden is not None
            counts = [count for _, count in rows]
            states = hidden[at : at + sum(counts)]
            at += len(states)
            if kind == "mean":
                made.append(_sums(states, counts))
            elif kind == "classes":
                assert model.classifier is not None
                made.append(model.classifier(states))
            else:
                made.append(states)
        if self.choices:
            count = len(logits) - len(self.choices)
            logits, pooled = logits[:count], logits[count:]
            made.append(pooled[parts["pooled_logits"], parts["pooled_ids"]].float())
        return logits, made

    def read(self, copies: Sequence[torch.Tensor]) -> dict[int, npt.NDArray[Any]]:
        """Pooled values by row, from copies of the tensors on the host."""
        found: dict[int, npt.NDArray[Any]] = {}
        tensors = iter(copies)
        for kind, rows in self.rows.items():
            values = next(tensors).numpy()
            if kind == "tokens":
                ends = np.cumsum([count for _, count in rows])[:-1]
                parts = np.split(values, ends)
            else:
                parts = list(values)
            # Copied: none keeps the values of other rows alive.
            found.update((row, part.copy()) for (row, _), part in zip(rows, parts, strict=True))
        if self.choices:
            values = next(tensors).numpy()
            parts = np.split(values, np.cumsum([count for _, count in self.choices])[:-1])
            found.update((row, part.copy()) for (row, _), part in zip(self.choices, parts, strict=True))
        return found


def _sums(states: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Sums of consecutive states, in float64: then a mean hardly depends on how a prompt was cut."""
    import torch

    if states.device.type != "cpu":
        return torch.stack([part.sum(0, dtype=torch.float64) for part in states.split(counts)])
    # By numpy: the threads that torch would start take the cores from the model's.
    parts = np.split(states.numpy(), np.cumsum(counts)[:-1])
    return torch.from_numpy(np.stack([part.sum(0, dtype=np.float64) for part in parts]))
