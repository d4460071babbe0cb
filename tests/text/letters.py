"""A detokenizer that needs no tokenizer."""

from __future__ import annotations

from collections.abc import Sequence


class Letters:
    """Token n is the n-th letter; ``finish`` returns a tail."""

    def __init__(self, tail: str = "") -> None:
        self.tail = tail

    def push(self, token_id: int) -> str:
        return "abcdefgh"[token_id]

    def peek(self, token_ids: Sequence[int], *, apart: bool = False) -> str:
        return "".join("abcdefgh"[token] for token in token_ids)

    def finish(self) -> str:
        tail, self.tail = self.tail, ""
        return tail
