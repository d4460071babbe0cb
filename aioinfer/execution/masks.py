"""Masks: what grammars allow next, worked out while the device computes the next forward.

::

    launch thread   ── sample N ──┐                 forward N+1 ──── collect ─ sample N+1 ─►
    mask thread                   └─ accept, fill the masks of all rows ─┘

Sampling waits for the mask of exactly that request and position, and only steps with such rows wait.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from aioinfer.text.grammar import GrammarState

__all__ = ["GrammarRow", "Masks"]

#: row among those that sample, state, position of the token to sample
GrammarRow = tuple[int, GrammarState, int]


class Masks:
    """One worker for all grammars of a device. Its thread starts with the first grammar."""

    def __init__(self, *, threaded: bool = True) -> None:
        self._threaded = threaded
        self._changed = threading.Condition()
        self._inbox: SimpleQueue[list[tuple[GrammarState, int, int]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def advance(self, rows: Sequence[GrammarRow], tokens: Sequence[int]) -> None:
        """These rows sampled these ``tokens`` (of all sampling rows): prepare the masks that follow."""
        work = [(state, position, tokens[at]) for at, state, position in rows if tokens[at] >= 0]
        if not work:
            return
        if not self._threaded:
            self._work(work)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="aioinfer-masks", daemon=True)
            self._thread.start()
        self._inbox.put(work)

    def advance_step(
        self, rows: Sequence[GrammarRow], sample_rows: Sequence[int], tokens: Sequence[int]
    ) -> None:
        """The same from the tokens of all rows of a step."""
        if rows:
            self.advance(rows, [tokens[row] for row in sample_rows])

    def collect(self, rows: Sequence[GrammarRow]) -> tuple[npt.NDArray[np.int32], list[int]]:
        """Wait for the masks of ``rows``.

        Returns:
            int32 [len(rows), words], and the sampling rows whose outputs cannot go on; their masks allow
            everything.
        """
        table = np.empty((len(rows), len(rows[0][1].mask)), np.int32)
        failed = []
        with self._changed:
            for index, (at, state, position) in enumerate(rows):
                while not (state.failed is not None or state.position >= position):
                    self._changed.wait()
                if state.failed is None and state.position != position:
                    state.failed = f"its grammar is at position {state.position}, not {position}"
                if state.failed is None:
                    table[index] = state.mask
                else:
                    table[index] = -1
                    failed.append(at)
        return table, failed

    def close(self) -> None:
        """Let the thread end. Idempotent."""
        if self._thread is not None:
            self._inbox.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (work := self._inbox.get()) is not None:
            self._work(work)
            del work

    def _work(self, work: list[tuple[GrammarState, int, int]]) -> None:
        """Accept tokens and fill masks, one call for all rows of a step with the same backend."""
        groups: dict[int, list[GrammarState]] = {}
        for state, position, token in work:
            if state.failed is None and state.position == position and not state.matcher.accept(token):
                state.failed = state.matcher.error or f"its grammar does not allow token {token}"
            groups.setdefault(id(state.backend), []).append(state)
        for states in groups.values():
            going = [state for state in states if state.failed is None]
            masks = [np.zeros_like(state.mask) for state in going]
            try:
                if going:
                    going[0].backend.fill([state.matcher for state in going], masks)
            except Exception as error:
                for state in going:
                    state.failed = f"its grammar failed: {error}"
            with self._changed:
                for state, mask in zip(going, masks, strict=True):
                    state.mask = mask
                    if state.failed is None and not mask.any():
                        state.failed = state.matcher.error or "its grammar allows no token here"
                    state.position += 1
                self._changed.notify_all()
