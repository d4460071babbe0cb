"""OutputText: the text side of one request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class OutputText:
    def __init__(self, detokenizer: Any, stop: Sequence[str] = (), include_stop: bool = False) -> None:
        self.detokenizer = detokenizer
        self.enabled = detokenizer is not None
        self.pieces: list[str] = []
        self.stop = tuple(stop)
        self.include_stop = include_stop
        self.held = ""
        self.done = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def _emit(self, s: str) -> None:
        if s:
            self.pieces.append(s)

    def push(self, token: int) -> str | None:
        if self.detokenizer is None or self.done:
            return None
        self.held += self.detokenizer.push(token)
        hits = [(self.held.find(s) + len(s), self.held.find(s), s) for s in self.stop if s in self.held]
        if hits:
            end, at, s = min(hits)
            self._emit(self.held[: end if self.include_stop else at])
            self.done = True
            return s
        keep = max((n for s in self.stop for n in range(1, len(s)) if self.held.endswith(s[:n])), default=0)
        self._emit(self.held[: len(self.held) - keep])
        self.held = self.held[len(self.held) - keep :]
        return None

    def finish(self) -> None:
        if not self.done and self.detokenizer is not None:
            self.done = True
            self._emit(self.held + self.detokenizer.finish())
