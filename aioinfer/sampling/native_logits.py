"""The functions of :mod:`aioinfer.sampling.logits_processors`, penalties and logprobs, in C++ for a CPU
(``logits_processors.hpp`` and ``logprobs.hpp``).

Where torch's operations go over whole rows, masks and penalties write to the tokens that are concerned, with
the same outcome to the bit. Logprobs are within rounding of torch's, and a function of their own row.
"""

from __future__ import annotations

import torch

from aioinfer.native.bindings import ThreadPool
from aioinfer.sampling import logits_processors

__all__ = ["NativeLogits", "NativeLogprobs"]


class NativeLogits:
    """See :class:`~aioinfer.sampling.logits_processors.LogitsProcessors`, and for penalties
    :func:`~aioinfer.sampling.triton_logits.penalise`."""

    __slots__ = ("_team",)

    # Single tokens are no work.
    add_biases_ = staticmethod(logits_processors.add_biases_)
    ban_ = staticmethod(logits_processors.ban_)

    def __init__(self, team: ThreadPool) -> None:
        self._team = team

    def apply_masks_(self, logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
        """See :func:`~aioinfer.sampling.logits_processors.apply_masks_`; tokens of a row are contiguous."""
        rows, masks = rows.contiguous(), masks.contiguous()
        self._team.kernels.call(
            "apply_masks", self._team.handle, logits.data_ptr(), logits.shape[1], logits.stride(0),
            len(rows), rows.data_ptr(), masks.data_ptr(), masks.shape[1],
        )  # fmt: skip

    def penalise(
        self,
        logits: torch.Tensor,
        counts: torch.Tensor,
        row_of: torch.Tensor,
        slots: torch.Tensor,
        penalties: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        in_prompt: int,
    ) -> torch.Tensor:
        """See :func:`aioinfer.sampling.triton_logits.penalise`."""
        rows, vocab = logits.shape
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        out = torch.empty((rows, vocab), dtype=torch.float32)
        columns = [column.contiguous() for column in (slots, *penalties)]
        self._team.kernels.call(
            "penalise", self._team.handle, logits.data_ptr(), rows, vocab, logits.stride(0),
            counts.data_ptr(), row_of.data_ptr(), *(column.data_ptr() for column in columns),
            in_prompt, out.data_ptr(),
        )  # fmt: skip
        return out


class NativeLogprobs:
    """See :class:`~aioinfer.sampling.logprobs.Logprobs`."""

    __slots__ = ("_logits", "_totals", "top", "top_ids")

    def __init__(self, team: ThreadPool, logits: torch.Tensor, top: int) -> None:
        """``logits``: [N, V] float32, kept. ``top``: likeliest tokens to report, 0 for none."""
        self._logits = logits.contiguous()
        rows, vocab = logits.shape
        top = min(top, vocab)
        self._totals = torch.empty((2, rows), dtype=torch.float32)
        self.top = torch.empty((rows, top), dtype=torch.float32)
        self.top_ids = torch.empty((rows, top), dtype=torch.int64)
        team.kernels.call(
            "logprobs", team.handle, self._logits.data_ptr(), vocab, vocab, rows, top,
            self._totals.data_ptr(), self.top.data_ptr(), self.top_ids.data_ptr(),
        )  # fmt: skip

    def of(self, tokens: torch.Tensor) -> torch.Tensor:
        """See :class:`~aioinfer.sampling.logprobs.Logprobs`."""
        chosen = self._logits.gather(1, tokens.clamp(min=0).unsqueeze(1)).squeeze(1)
        return chosen - self._totals[0] - self._totals[1]
