"""PieceTokenizer: a vocabulary of given texts, and the outputs that a script of tokens becomes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from aioinfer.text.reasoning import REASONING_PARSERS

#: characters that spell everything else
_CHARACTERS = [chr(each) for each in range(32, 127)] + ["\n", "é", "…"]
#: those of Harmony's openings are tokens each
TAGS = sorted(
    {tag for name, each in REASONING_PARSERS.items() for tag in (*each.tags, each.closing, each.opening)
     if tag in each.tags or name != "harmony"}
)  # fmt: skip
WORDS = [
    "hm",
    " so",
    ".",
    "!\n",
    "\n",
    "\n\n",
    "`",
    "thought",
    "analysis",
    "final",
    "assistant",
    "commentary",
]


class PieceTokenizer:
    """A token per text of ``pieces`` and per character; texts become the longest of them, in order."""

    def __init__(self, pieces: Sequence[str] = (*TAGS, *WORDS), template: str = "") -> None:
        self.pieces = [*dict.fromkeys((*pieces, *_CHARACTERS))]
        self.chat_templates = (template,)
        self._by_length = sorted(range(len(self.pieces)), key=lambda at: -len(self.pieces[at]))

    def encode_part(self, text: str) -> list[int]:
        ids: list[int] = []
        while text:
            ids.append(next(each for each in self._by_length if text.startswith(self.pieces[each])))
            text = text[len(self.pieces[ids[-1]]) :]
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(self.pieces[each] for each in ids)

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id].encode()


def written(processor: Any, script: Iterable[int], *, before: Sequence[int] = ()) -> list[int]:
    """The output of a model that writes ``script``, where the processor forces nothing else.

    What it forces is accepted a token at a time, and a copy goes on in its place after each one.
    """
    output = [*before]
    tokens: Iterator[int] = iter(script)
    nothing = np.zeros(0, np.float32)
    while True:
        first = processor(np.asarray(output, np.int64), nothing)
        assert processor(np.asarray(output, np.int64), nothing) == first
        token = next(tokens, None) if first is None else first[0]
        if token is None:
            return output
        wrong = processor.copy()
        wrong.accept((token + 1) % 5)  # a draft that is thrown away
        processor.accept(token)
        processor = processor.copy()
        output.append(token)
