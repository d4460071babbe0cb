"""BlockRequest: a sequence that a diffusion model generates block by block."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aioinfer.outputs import Draft, FinishReason, TokenLogprob
from aioinfer.scheduling.request import Request

if TYPE_CHECKING:
    from aioinfer.diffusion.state import BlockState
    from aioinfer.scheduling.step import Row

__all__ = ["BlockRequest"]

#: how much the newest round counts in a request's pace
_NEWEST = 0.5
#: A block is expected to be done when a round at so many times the pace would do. A block computed in vain
#: costs as many positions as a commit that has its own row, and that one costs a round on top.
_BOLDNESS = 1.5


class BlockRequest(Request):
    """Positions of a running request, blocks between bars::

        prompt_ids            output_ids
        |-----------|---------:-|-----------|--:????????|     length = the end of the block
        |-------- committed ----------------|                 KV written over final tokens, resolved
        |-- cached pages ---|-- private pages ----------|     who owns the pages

    All tokens before ``block_start`` are final. The block there is denoised: its rounds are rows, at most two
    of which are in flight, and ``block`` is what the newest resolved one left of it. Where tokens that are
    written stay, ``output_ids`` reaches into the block as far as it is known without a gap.
    """

    __slots__ = ("_pace", "block", "block_size", "draft_version", "flights", "monotone", "step_map")

    def __init__(self, *arguments: Any, block_size: int, monotone: bool, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.block_size = block_size
        #: a token that is written stays
        self.monotone = monotone
        #: of the block that the newest resolved round was for; None before its first, and where rounds do not
        #: go on from it
        self.block: BlockState | None = None
        #: rows with blocks that have not resolved
        self.flights: deque[Row] = deque()
        #: by output token, the round of its block that wrote it
        self.step_map: list[int] = []
        #: rises with every round that is read and leaves a draft, if somebody wants to see it
        self.draft_version: int = 0
        self._pace: float | None = None

    # -- how far it is --------------------------------------------------------------------------

    @property
    def block_start(self) -> int:
        """Where the first block begins that is not final, as far as is known."""
        return self.known // self.block_size * self.block_size

    @property
    def computed(self) -> int:
        return max(self._computed, self._committed)

    @property
    def length(self) -> int:
        return self.block_start + self.block_size

    @property
    def pending(self) -> int:
        return 0

    @property
    def resume(self) -> BlockState | None:
        return self.block

    @property
    def wants_tokens(self) -> bool:
        return self.known < self.max_length

    @property
    def progress(self) -> int:
        rounds = 0 if self.block is None or self.block.done else self.block.rounds
        return (self.known << 32) + rounds

    @property
    def reusable(self) -> int:
        return self.block_start

    @property
    def committed(self) -> int:
        # Of a block in which the output ends, not all tokens are known here. And what a row in flight writes
        # again may turn out as junk, should its step fail.
        return min(self._committed, self.block_start, *(row.start for row in self.flights))

    def rewind(self, computed: int, sampled: int) -> None:
        """As Request's. The block goes on from its newest state that was read."""
        super().rewind(computed, sampled)
        self.flights.clear()
        if self.block is not None and (self.block.done or self.block.start != self.block_start):
            self.block = None

    # -- rounds ---------------------------------------------------------------------------------

    @property
    def drafts(self) -> bool:
        """Somebody wants to see what may still change."""
        return self.params.diffusion is not None and self.params.diffusion.draft

    @property
    def mid_block(self) -> bool:
        """Some of its block is known, or will be when what is in flight has landed, and some is not."""
        return bool(self.flights) or (self.block is not None and not self.block.done)

    @property
    def uncommitted(self) -> bool:
        """Its block is done, and a forward over the final tokens is still owed."""
        return self.block is not None and self.block.done and self._committed < self.block_start

    def next_round(self, *, fused: bool, hold: bool, pace: float) -> tuple[int, int] | None:
        """Start and number of blocks of the next row, while one may be in flight; None if waiting is better.

        ``fused``: the last forward over a block and the first over the next may be one. ``hold``: not to come
        to the next block now. ``pace``: tokens that a round writes, if nothing is known of this request's.
        """
        size, start = self.block_size, self.block_start
        done = self.block is not None and self.block.done
        if done and hold:
            return start - size, 1
        if not self.flights:
            if not done or self._committed >= start:
                return start, 1
            return (start - size, 2) if fused else (start - size, 1)
        (row,) = self.flights
        if row.kv_length <= start:
            return start, 1  # the row in flight commits what came before
        # What comes of it is not known yet. The row behind it goes on with the same block, and if that has
        # got done it is its commit; or it has a second block, which is then not computed in vain.
        if not self._ends_soon(start, pace):
            return start, 1
        if start + size >= self.max_length:
            return None  # likely there is nothing more to compute
        return (start, 2) if fused else (start, 1)

    def _ends_soon(self, start: int, pace: float) -> bool:
        """The round in flight probably leaves the block at ``start`` done."""
        block = self.block
        if block is not None and block.start == start and not block.done:
            masked = self.block_size - sum(block.known)
        else:
            masked = self.block_size - self._given(start)
        if not self.monotone:
            return masked == 0  # a round that changes nothing comes last
        return masked <= _BOLDNESS * (pace if self._pace is None else self._pace)

    def observe(self, state: BlockState) -> int | None:
        """A round has resolved; call it before its tokens join the output. Returns how many tokens it wrote;
        None if the block had been done before."""
        before = self.block if self.block is not None and self.block.start == state.start else None
        # The row, or one before it, has seen whatever comes before the block.
        self._committed = max(self._committed, state.start)
        if state.done and not state.changed:
            self._committed = state.start + self.block_size
        written = None
        if before is None or not before.done:
            known = self._given(state.start) if before is None else sum(before.known)
            written = sum(state.known) - known
            self._pace = written if self._pace is None else self._pace + _NEWEST * (written - self._pace)
        self.block = state
        self.draft_version += int(self.drafts and not state.done)
        return written

    def _given(self, start: int) -> int:
        return min(self.block_size, max(0, len(self.prompt_ids) - start))

    def take_known(self) -> FinishReason | None:
        """Tokens of the block that are final join the output, up to one that ends it; says so then."""
        block = self.block
        assert block is not None
        for at in range(self.known - block.start, self.block_size):
            if not (block.done or (self.monotone and block.known[at])):
                return None
            token = block.ids[at]
            reason = self.append(token)
            self.step_map.append(block.written_in[at])
            if self.params.logprobs is not None:
                self.logprobs.append(TokenLogprob(token, block.logprobs[at]))
            if reason is not None:
                return reason
        return None

    # -- what came of it ------------------------------------------------------------------------

    def draft(self) -> Draft | None:
        """What is known of the block beyond the output, up to where that would end: at its greatest length,
        or with the first end token that is known, whatever is not known before it."""
        block = self.block
        if not self.drafts or block is None or self.finished or block.start != self.block_start:
            return None
        first, last = self.known - block.start, self.max_length - block.start
        known = block.known[first:last]
        tokens = _where(known, block.ids[first:last])
        shown = end = next((at for at, token in enumerate(tokens) if token in self.stop_ids), len(tokens))
        if self.params.include_stop:
            shown += 1
        return Draft(
            len(self.output_ids),
            tuple(tokens[: end + 1]),
            self.text.ahead(tokens[:shown]),
            tuple(_where(known, block.written_in[first:last])[: end + 1]),
        )

    def trim(self, count: int) -> None:
        super().trim(count)
        del self.step_map[count:]


def _where(known: Sequence[bool], values: Sequence[int]) -> list[int | None]:
    return [value if there else None for value, there in zip(values, known, strict=True)]
