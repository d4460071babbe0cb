"""ShortConv: a causal convolution of each channel by itself, over a few positions.

Its state is the inputs in front of the next position, as many as the convolution looks back. It mixes
positions by itself, gated on both sides (LFM2: arXiv 2511.23404), or in front of the gated delta rule.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from aioinfer.model.batch import Batch
from aioinfer.model.linear import Linear
from aioinfer.model.mixers.base import MixerStep
from aioinfer.model.rope import Rope
from aioinfer.model.state import RowStates, StateShape

__all__ = ["LONGEST", "CausalConv", "ShortConv", "states_before"]

#: the most positions of a convolution that native kernels compute
LONGEST = 8


def states_before(states: RowStates, index: int, rows: slice) -> torch.Tensor:
    """The states [rows, *shape] that some rows of a step start from, in memory of their own; ``index`` is
    that of the tensor in a cell."""
    cells, read = states.pool.tensors[index], states.read[rows]
    found = cells.index_select(0, read)
    # Not a product: what was written to the null cell may be anything.
    empty = (read == 0).view(-1, *[1] * (found.dim() - 1))
    return found.masked_fill_(empty, 0)


@dataclass(slots=True, kw_only=True)
class CausalConv:
    """The convolution alone. Its state is [size - 1, channels] in the model's dtype, the oldest input
    first."""

    #: [size, channels] float32, the oldest input's first
    weight: torch.Tensor
    #: [channels] float32, or None
    bias: torch.Tensor | None = None
    #: index of its state in a cell
    state: int

    @property
    def size(self) -> int:
        """Positions that an output depends on, its own included."""
        return len(self.weight)

    def state_shape(self, dtype: torch.dtype) -> StateShape:
        """``dtype``: the model's."""
        channels = self.weight.shape[1]
        return StateShape((self.size - 1, channels), dtype, channels)

    def __call__(self, inputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        """[T, channels] to the results of all positions that the rows go through, see
        :meth:`~aioinfer.model.state.RowStates.extend`; rounded to the inputs' dtype. Writes the state of all
        rows.

        Rows of a step that only decodes are computed by operations on tensors alone, which a CUDA graph can
        capture.
        """
        states = batch.states
        assert states is not None, "a step of a model with recurrent state has cells"
        inputs, (decodes, lengths) = states.extend(self.state, inputs, batch), states.lengths(batch)
        results = []
        if decodes:
            windows = self._windows(inputs[:decodes, None], states, slice(0, decodes), 1)
            results.append((windows.float() * self.weight).sum(1))
        at = decodes
        for row, (count, kept) in enumerate(lengths, decodes):
            window = self._windows(inputs[None, at : at + count], states, slice(row, row + 1), kept)[0]
            # [size, channels] -> [channels, 1, size], over [channels, size - 1 + count]
            result = F.conv1d(window.float().T, self.weight.T[:, None], groups=window.shape[1])
            results.append(result.T)
            at += count
        result = torch.cat(results) if len(results) > 1 else results[0]
        return (result if self.bias is None else result + self.bias).to(inputs.dtype)

    def _windows(self, inputs: torch.Tensor, states: RowStates, rows: slice, kept: int) -> torch.Tensor:
        """The inputs [R, n, channels] of some rows with those in front of them, [R, size - 1 + n, channels];
        the last up to the first ``kept`` inputs become the rows' states."""
        windows = torch.cat((states_before(states, self.state, rows), inputs), dim=1)
        states.pool.tensors[self.state].index_copy_(
            0, states.write[rows], windows[:, kept : kept + self.size - 1].contiguous()
        )
        return windows


@dataclass(slots=True, kw_only=True)
class ShortConv:
    """``out(c * conv(b * x))`` with b, c and x from one projection (LFM2).

    See :class:`~aioinfer.model.mixers.base.Mixer`.
    """

    #: hidden to b, c and x: [T, 3 * hidden]
    into: Linear
    conv: CausalConv
    out: Linear

    @property
    def rope(self) -> Rope | None:
        return None

    def __call__(self, normed: torch.Tensor, step: MixerStep) -> torch.Tensor:
        b, c, x = self.into(normed).chunk(3, dim=-1)
        states = step.batch.states
        assert states is not None, "a step of a model with recurrent state has cells"
        return self.out(c * states.own(self.conv(b * x, step.batch), step.batch))
