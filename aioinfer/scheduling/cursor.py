"""Cursor: how far the computation of one sequence has come.

A request holds one cursor. :class:`TokenCursor` moves token by token, :class:`~aioinfer.scheduling.
block_cursor.BlockCursor` block by block. The scheduler, the memory and the policies read both alike::

    computed       KV is written by launched steps up to here
    committed      KV is written by resolved steps up to here
    length         end of what a running request needs pages for: tokens and placeholders, or the block
    known          tokens that the host has read
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from aioinfer.speculation.drafting import DraftSource

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from aioinfer.diffusion.state import BlockState
    from aioinfer.outputs import TokenLogprob
    from aioinfer.scheduling.pooled import Pooled

__all__ = ["Cursor", "PrefillCursor", "TokenCursor"]


class Cursor(ABC):
    """Base of token and block cursors. It refers to the request's lists, not to the request: a
    reference cycle would keep finished requests until the garbage collector runs."""

    __slots__ = (
        "_committed",
        "_computed",
        "_max_length",
        "_output_ids",
        "_prompt_length",
        "column",
        "prefilled",
        "relay_ready",
        "row",
    )

    #: results of rows in flight still count after a retraction
    survives_retraction = True
    #: nothing is generated
    only_prefills = False

    def __init__(self, prompt_length: int, output_ids: list[int], max_length: int) -> None:
        self._prompt_length = prompt_length
        self._output_ids = output_ids
        self._max_length = max_length
        self._computed = 0
        self._committed = 0
        #: row in the batch of generating sequences while it is there, else -1; and by row, the positions
        #: computed by launched steps, where the batch keeps them
        self.row = -1
        self.column: npt.NDArray[np.int64] | None = None
        #: the last prefill chunk has resolved
        self.prefilled = False
        #: the slot holds, or will hold, what the next generating row starts from
        self.relay_ready = False

    @property
    def in_batch(self) -> bool:
        """It has a row in the batch of generating sequences."""
        return self.row >= 0

    @property
    def known(self) -> int:
        """Tokens of the sequence that the host has read."""
        return self._prompt_length + len(self._output_ids)

    @property
    @abstractmethod
    def computed(self) -> int:
        """Positions whose KV is written by launched steps."""

    @property
    @abstractmethod
    def committed(self) -> int:
        """Positions whose KV is written by resolved steps."""

    @property
    def settled(self) -> int:
        """Of these, the positions that no row will write again while the request runs."""
        return self.committed

    @property
    @abstractmethod
    def length(self) -> int:
        """Positions that a running request needs pages for."""

    @property
    def pending(self) -> int:
        """Tokens sampled on the device that the host has not read."""
        return 0

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated, those of launched steps not counted."""
        return self._max_length - self.known - self.pending

    @property
    @abstractmethod
    def reusable(self) -> int:
        """Positions that need not be computed if their KV is in the prefix cache."""

    @property
    @abstractmethod
    def progress(self) -> int:
        """Rises with everything that the host reads of the output."""

    @property
    def resume(self) -> BlockState | None:
        """State besides the tokens from which the device continues in a new slot."""
        return None

    @property
    def step_map(self) -> list[int] | None:
        """By output token, the round of its block that wrote it; None if tokens come one by one."""
        return None

    def prefill_stop(self, *, mixed: bool) -> int:
        """The position at which the prefill of this sequence ends."""
        return self.length

    @abstractmethod
    def chunk(self, start: int, length: int) -> tuple[int, bool, int]:
        """Launch a prefill chunk of ``length`` positions from ``start``; returns how many tokens of it the
        host knows, whether it generates, and how many blocks follow the known tokens."""

    def commit_prefill(self, positions: int, *, last: bool) -> None:
        """A prefill chunk that ends after ``positions`` has resolved."""
        self._committed = positions
        self.prefilled = last

    @abstractmethod
    def restart(self, cached: int) -> None:
        """The KV is gone except for ``cached`` positions; the tokens stay."""

    def rewind(self, computed: int) -> None:
        """Continue from ``computed`` positions of known tokens, as if the slot had just been taken."""
        self._computed = self._committed = computed
        self.relay_ready = self.prefilled = False

    def shorten(self, tokens: int) -> None:  # noqa: B027 - blocks bring what they are
        """Note that a launched row brought ``tokens`` less than it could have."""

    def score(self, stop: int) -> tuple[int, int] | None:
        """Positions up to ``stop`` whose next token of the prompt has to be scored; marks them scored."""
        return None

    def forget_draft(self) -> bool:
        """Forget tokens that other weights made and that are no output yet; whether the caller saw some."""
        return False

    def pool(self, start: int, stop: int) -> tuple[int, int] | None:
        """Positions of [start, stop) whose hidden states are pooled."""
        return None


class TokenCursor(Cursor):
    """A sequence that grows token by token::

        prompt_ids            output_ids     pending
        |---------------------|--------------|--|     length = prompt + output + pending
        |-------- computed ------------------|        KV written by launched steps
        |-------- committed -------------|            KV written by resolved steps

    While the request is in the batch, how far it is computed is a number in the batch's columns.
    """

    __slots__ = (
        *("_first_scored", "_prompt_logprobs", "_sampled", "_scored"),
        *("drafted", "replays", "source", "verifying"),
    )

    def __init__(
        self,
        prompt_length: int,
        output_ids: list[int],
        max_length: int,
        prompt_logprobs: list[TokenLogprob] | None = None,
        first_scored: int = 0,
    ) -> None:
        """``prompt_logprobs``: those that the host has, if they were asked for; ``first_scored``: the first
        position whose next token is scored."""
        super().__init__(prompt_length, output_ids, max_length)
        #: output tokens that launched steps sample, read or not
        self._sampled = 0
        self._prompt_logprobs = prompt_logprobs
        self._first_scored = first_scored
        #: positions whose next token of the prompt has been scored by launched steps
        self._scored = first_scored
        #: the step in flight in which drafts are verified, 0 if there is none, and how many. Until it has
        #: resolved, ``computed`` and ``length`` are upper bounds and no other row is launched
        self.verifying = 0
        self.drafted = 0
        #: drafts of the last row that were right and that a recurrent state does not include yet
        self.replays = 0
        #: and where they come from
        self.source = DraftSource.TEXT

    @property
    def computed(self) -> int:
        return self._computed if self.column is None else int(self.column[self.row])

    @property
    def committed(self) -> int:
        return self.known - 1 if self.prefilled else self._committed

    @property
    def length(self) -> int:
        return self._prompt_length + self._sampled if self.column is None else self.computed + 1

    @property
    def pending(self) -> int:
        return self.length - self.known

    @property
    def progress(self) -> int:
        return self.known

    @property
    def reusable(self) -> int:
        # The last known token is always computed, and so is what precedes a prompt token whose logprob is
        # wanted and missing.
        return self.known - 1 if self._prompt_logprobs is None else min(self._to_score, self.known - 1)

    @property
    def _to_score(self) -> int:
        """The first position whose next token has no logprob that the host has."""
        assert self._prompt_logprobs is not None
        missing = self._first_scored + len(self._prompt_logprobs)
        return missing if missing < self._prompt_length - 1 else self.known

    def chunk(self, start: int, length: int) -> tuple[int, bool, int]:
        samples = start + length == self.length
        self._computed = start + length
        self._sampled = len(self._output_ids) + samples
        return length, samples, 0

    def score(self, stop: int) -> tuple[int, int] | None:
        if self._prompt_logprobs is None:
            return None
        first, last = self._scored, min(stop, self._prompt_length - 1)
        self._scored = max(first, last)
        return (first, last) if first < last else None

    def leave_batch(self, computed: int) -> None:
        """The batch removes the request after launching it up to ``computed``."""
        self._computed = computed
        self._sampled = computed + 1 - self._prompt_length

    def shorten(self, tokens: int) -> None:
        """Note that the row that verifies drafts brought ``tokens`` less than it could have; nothing of the
        request is in flight."""
        self.verifying = 0
        if self.column is not None:
            self.column[self.row] -= tokens
        else:
            self._computed = max(0, self._computed - tokens)
            self._sampled -= tokens

    def restart(self, cached: int) -> None:
        if self._prompt_logprobs is not None:
            self._scored = self._first_scored + len(self._prompt_logprobs)
        sampled = self._sampled
        super().rewind(cached)
        self._sampled = sampled
        self.replays = 0

    def rewind(self, computed: int) -> None:
        super().rewind(computed)
        self._sampled = len(self._output_ids)
        self.verifying = self.replays = 0


class PrefillCursor(TokenCursor):
    """A sequence that does not grow: its prompt is computed, and scored or pooled, and that is all."""

    __slots__ = ("_pooled",)

    # What is pooled of a chunk goes with the chunks before it.
    survives_retraction = False
    only_prefills = True

    def __init__(
        self,
        prompt_length: int,
        output_ids: list[int],
        max_length: int,
        prompt_logprobs: list[TokenLogprob] | None = None,
        first_scored: int = 0,
        pooled: Pooled | None = None,
    ) -> None:
        """``pooled``: what the host has of it, if anything is pooled."""
        super().__init__(prompt_length, output_ids, max_length, prompt_logprobs, first_scored)
        self._pooled = pooled

    @property
    def committed(self) -> int:
        return self._committed

    @property
    def reusable(self) -> int:
        return 0 if self._pooled is not None and self._pooled.pooling.whole else super().reusable

    def chunk(self, start: int, length: int) -> tuple[int, bool, int]:
        self._computed = start + length
        return length, False, 0

    def pool(self, start: int, stop: int) -> tuple[int, int] | None:
        if self._pooled is None:
            return None
        if self._pooled.pooling.whole:
            return start, stop
        if self._pooled.pooling.kind == "cls":
            return (0, 1) if start == 0 else None
        return (stop - 1, stop) if stop == self._prompt_length else None

    def restart(self, cached: int) -> None:
        super().restart(cached)
        if self._pooled is not None:
            self._pooled.restart()

    def rewind(self, computed: int) -> None:
        super().rewind(computed)
        if self._pooled is not None:
            self._pooled.restart()
