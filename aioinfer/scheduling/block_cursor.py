"""BlockCursor: how far a sequence has come that a diffusion model generates block by block."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from aioinfer.scheduling.cursor import Cursor

if TYPE_CHECKING:
    from aioinfer.diffusion.pins import Pins
    from aioinfer.diffusion.state import BlockState

__all__ = ["BlockCursor", "RowInFlight"]

#: weight of the newest round in a request's pace
_NEWEST = 0.5
#: A block is expected to be done when a round at this multiple of the pace would finish it. A block
#: computed in vain costs as many positions as a commit in a row of its own, and that one costs a round on
#: top.
_BOLDNESS = 1.5


class RowInFlight(NamedTuple):
    """The positions of a launched row with blocks that has not resolved."""

    start: int
    stop: int


class BlockCursor(Cursor):
    """Positions of a running request, blocks between bars::

        prompt_ids            output_ids
        |-----------|---------:-|-----------|--:????????|     length = the end of the block
        |-------- committed ----------------|                 KV written over final tokens, resolved

    All tokens before ``block_start`` are final. The block there is denoised: its rounds are rows, at most two
    of which are in flight, and ``block`` is what the newest resolved one left of it. Where tokens that are
    written stay, the output reaches into the block as far as it is known without a gap.

    A block with pins (:mod:`aioinfer.diffusion.pins`) is one that the device cannot begin by itself: the
    request goes there by way of the queue, with the block that is done as known tokens of its next row.
    Canvases begin right behind the prompt. What the device has of one is lost with the slot: it begins again.
    """

    __slots__ = (
        "_canvas",
        "_pace",
        "_pins",
        "_step_map",
        "block",
        "block_size",
        "drafts",
        "flights",
        "monotone",
    )

    # The rounds are computed again from the last that was read.
    survives_retraction = False

    def __init__(
        self,
        prompt_length: int,
        output_ids: list[int],
        max_length: int,
        *,
        block_size: int,
        monotone: bool,
        drafts: bool = False,
        pins: Callable[[int], Pins | None] = lambda _: None,
        canvas: bool = False,
    ) -> None:
        """``monotone``: a token that is written stays. ``drafts``: the caller wants to see what may
        change. ``pins``: those of an output behind a prompt of this length. ``canvas``: blocks are
        canvases."""
        super().__init__(prompt_length, output_ids, max_length)
        self.block_size = block_size
        self.monotone = monotone
        self.drafts = drafts
        self._pins = pins(prompt_length)
        self._canvas = canvas
        #: of the block that the newest resolved round was for; None before its first, and where rounds do not
        #: continue it
        self.block: BlockState | None = None
        #: oldest first
        self.flights: deque[RowInFlight] = deque()
        self._step_map: list[int] = []
        self._pace: float | None = None

    # -- how far it is --------------------------------------------------------------------------

    @property
    def block_start(self) -> int:
        """The start of the first block that is not final, as far as is known."""
        return self.known - (self.known - self._prompt_length * self._canvas) % self.block_size

    @property
    def computed(self) -> int:
        return max(self._computed, self._committed)

    @property
    def length(self) -> int:
        return self.block_start + self.block_size

    @property
    def resume(self) -> BlockState | None:
        return self.block

    @property
    def step_map(self) -> list[int]:
        return self._step_map

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

    @property
    def settled(self) -> int:
        # A block that is done may be computed once more, beside the next one or while that waits.
        block = self.block
        return self.committed if block is None or not block.done else min(self.committed, block.start)

    def prefill_stop(self, *, mixed: bool) -> int:
        # The first round of a request may ride on its last prompt chunk, if that is whole blocks.
        return self.length if mixed and not self._canvas else self.block_start

    def chunk(self, start: int, length: int) -> tuple[int, bool, int]:
        known = self.block_start
        blocks = int(start + length > known)
        self._computed = min(start + length, known)
        if blocks:
            self.flights.append(RowInFlight(start, start + length))
        return length - blocks * self.block_size, blocks > 0, blocks

    def restart(self, cached: int) -> None:
        self.rewind(cached)

    def rewind(self, computed: int) -> None:
        """The block continues from its newest state that was read."""
        super().rewind(computed)
        self.flights.clear()
        block = self.block
        if block is not None and (self._canvas or block.done or block.start != self.block_start):
            self.block = None

    def forget_draft(self) -> bool:
        """Begin the block again, with the output in it."""
        self.block = None
        return self.drafts

    @property
    def under_way(self) -> BlockState | None:
        """The newest state of the block that is not done, if it has one."""
        block = self.block
        if block is None or self._canvas or block.done or block.start != self.block_start:
            return None
        return block

    def take_up(self, step_map: Sequence[int], block: BlockState | None) -> None:
        """Go on with an output that was begun elsewhere: its rounds, and the block that is not done."""
        self._step_map += step_map
        self.block = block

    # -- rounds ---------------------------------------------------------------------------------

    @property
    def mid_block(self) -> bool:
        """Some of the block is known, or will be when what is in flight has landed, and some is not."""
        return bool(self.flights) or (self.block is not None and not self.block.done)

    @property
    def uncommitted(self) -> bool:
        """The block is done, and a forward over its final tokens is still owed."""
        return self.block is not None and self.block.done and self._committed < self.block_start

    def next_round(self, *, fused: bool, hold: bool, pace: float) -> tuple[int, int] | None:
        """Start and number of blocks of the next row, while one may be in flight; None if waiting is better.

        ``fused``: the last forward over a block and the first over the next may be one. ``hold``: do not go
        to the next block now. ``pace``: tokens that a round writes, if nothing is known of this request's.
        """
        size, start = self.block_size, self.block_start
        done = self.block is not None and self.block.done
        if self.requeues:
            return None  # when what is in flight has landed: it commits the block
        if done and hold:
            return start - size, 1
        if not self.flights:
            if not done or self._committed >= start:
                return start, 1
            return (start - size, 2) if fused else (start - size, 1)
        (row,) = self.flights
        if row.stop <= start:
            return start, 1  # the row in flight commits what came before
        # The result of the row in flight is not known yet. The row after it continues the same block, and is
        # its commit if the block is done by then; or it has a second block, which is then not void.
        if not self._ends_soon(start, pace):
            return start, 1
        if start + size >= self._max_length or self._shaped(start + size):
            return None  # probably nothing more has to be computed, or not by the device alone
        return (start, 2) if fused else (start, 1)

    def _ends_soon(self, start: int, pace: float) -> bool:
        """The round in flight probably leaves the block at ``start`` done."""
        block = self.block
        begun = block is not None and block.start == start and not block.done
        masked = self._masked(start, block if begun else None)
        if not self.monotone:
            return masked == 0  # a round that changes nothing comes last
        return masked <= _BOLDNESS * (pace if self._pace is None else self._pace)

    def observe(self, state: BlockState) -> int | None:
        """A round has resolved; call this before its tokens join the output. Returns how many tokens it
        wrote; None if the block had been done before."""
        before = self.block if self.block is not None and self.block.start == state.start else None
        # The row, or one before it, computed everything that comes before the block.
        self._committed = max(self._committed, state.start)
        if state.done and not state.changed:
            self._committed = state.start + self.block_size
        written, masked = None, self._masked(state.start, before)
        if not (masked == 0 if before is None else before.done):
            written = masked - self._masked(state.start, state)
            self._pace = written if self._pace is None else self._pace + _NEWEST * (written - self._pace)
        self.block = state
        return written

    def _masked(self, start: int, block: BlockState | None) -> int:
        """Positions of the block at ``start`` that are to be written; ``block``: its newest state."""
        if self._pins is None:
            given = min(self.block_size, max(0, self._prompt_length - start))
            return self.block_size - (given if block is None else sum(block.known))
        writable = self._pins.writable(start, self.block_size)
        return (
            sum(writable) if block is None else sum(writable) - sum(map(int.__and__, writable, block.known))
        )

    def _shaped(self, start: int) -> bool:
        """The block at ``start`` has pins, or an end."""
        return self._pins is not None and self._pins.shapes(start, self.block_size)

    @property
    def requeues(self) -> bool:
        """The block is done, and only the host knows how the next one begins."""
        return self.block is not None and self.block.done and self._shaped(self.block.start + self.block_size)

    def take_known(self) -> Iterator[tuple[int, float, tuple[tuple[int, float], ...]]]:
        """The block's final tokens that are no output yet, with their logprobs and alternatives, and the pins
        that follow. The caller appends each to the output before it takes the next, and may stop."""
        block = self.block
        assert block is not None
        for at in range(self.known - block.start, self.block_size):
            if not (block.done or (self.monotone and block.known[at])):
                return
            self._step_map.append(block.written_in[at])
            yield block.ids[at], block.logprobs[at], block.tops[at] if block.tops else ()
        while self._pins is not None and (pin := self._pins.at(self.known)) is not None:
            self._step_map.append(-1)
            yield pin, 0.0, ()

    def draft(self, stop_ids: Collection[int]) -> tuple[list[int | None], list[int | None], int] | None:
        """Tokens of the block beyond the output and the rounds that wrote them, None for unknown ones, and
        how many of the tokens have a text; None if there is no block under way.

        It ends where the output would: at its greatest length, or with the first end token that is known,
        whatever is unknown before it.
        """
        block = self.block
        if not self.drafts or block is None or block.start != self.block_start:
            return None
        first, last = self.known - block.start, self._max_length - block.start
        # Of a canvas, the likeliest tokens of the last round.
        known = ([True] * self.block_size if self._canvas and block.rounds else block.known)[first:last]
        tokens, rounds = _where(known, block.ids[first:last]), _where(known, block.written_in[first:last])
        end = next((at for at, token in enumerate(tokens) if token in stop_ids), len(tokens))
        return tokens[: end + 1], rounds[: end + 1], end


def _where(known: Sequence[bool], values: Sequence[int]) -> list[int | None]:
    return [value if there else None for value, there in zip(values, known, strict=True)]
