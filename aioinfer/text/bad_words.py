"""Bad words: sequences of tokens that an output must not contain.

A word is excluded by masking its last token whenever the output ends with the tokens before it, as in vLLM,
TensorRT-LLM and transformers. Words are compared as tokens, so other tokenizations of a word pass. The mask
depends on the newest tokens, so a request with bad words has a matcher, like one with a grammar; if it has
both, this matcher wraps the grammar's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from aioinfer.errors import InvalidRequest
from aioinfer.text.grammar import Compiled, GrammarBackend, Matcher
from aioinfer.text.grammar_spec import Grammar
from aioinfer.text.tokenizer import Tokenizer

__all__ = ["BadWordsBackend", "BadWordsMatcher", "spell"]


def spell(words: Iterable[str | Sequence[int]], tokenizer: Tokenizer | None) -> list[Sequence[int]]:
    """The token sequences of ``words``; a text has one at the start of an output and one after a space.

    Raises InvalidRequest.
    """
    spellings: list[Sequence[int]] = []
    for word in words:
        if not isinstance(word, str):
            spellings.append(word)
        elif tokenizer is None:
            raise InvalidRequest("bad_words", "the engine has no tokenizer: give sequences of token ids")
        else:
            spellings += (tokenizer.encode_part(text) for text in {word, " " + word.lstrip()})
    return [spelling for spelling in spellings if spelling]


class BadWordsMatcher:
    """Excludes the tokens that would complete a bad word after the newest tokens of one output."""

    __slots__ = ("_backend", "_banned", "_inner", "_newest")

    def __init__(
        self, words: Sequence[Sequence[int]], backend: GrammarBackend | None, inner: Matcher | None
    ) -> None:
        """``inner`` and ``backend``: matcher and backend of the request's grammar, or None."""
        #: tokens before the last one -> last tokens
        self._banned: dict[tuple[int, ...], list[int]] = {}
        for word in words:
            *before, last = word
            self._banned.setdefault(tuple(before), []).append(last)
        self._newest: deque[int] = deque(maxlen=max(map(len, self._banned), default=0))
        self._backend = backend
        self._inner = inner

    def accept(self, token: int) -> bool:
        if self._inner is not None and not self._inner.accept(token):
            return False
        self._newest.append(token)
        return True

    def advance(self, tokens: Sequence[int]) -> int:
        for at, token in enumerate(tokens):
            if token in self.banned() or (self._inner is not None and not self._inner.advance([token])):
                return at
            self._newest.append(token)
        return len(tokens)

    @property
    def stopped(self) -> bool:
        return self._inner is not None and self._inner.stopped

    @property
    def error(self) -> str | None:
        return None if self._inner is None else self._inner.error

    def forced(self) -> list[int]:
        """The tokens that the grammar forces, if the first is not banned. Valid for one token at a time."""
        ahead = [] if self._inner is None else self._inner.forced()
        return [] if ahead and ahead[0] in self.banned() else ahead

    def copy(self) -> BadWordsMatcher:
        other = BadWordsMatcher((), self._backend, None if self._inner is None else self._inner.copy())
        other._banned, other._newest = self._banned, self._newest.copy()
        return other

    def banned(self) -> list[int]:
        """The tokens that would complete a bad word now."""
        newest = tuple(self._newest)
        return [
            token
            for length in range(len(newest) + 1)
            for token in self._banned.get(newest[len(newest) - length :], ())
        ]

    def fill(self, mask: npt.NDArray[np.int32]) -> None:
        """Write the mask: the tokens that the grammar allows, except those that complete a bad word."""
        if self._inner is None or self._backend is None:
            mask.fill(-1)
        else:
            self._backend.fill([self._inner], [mask])
        tokens = np.asarray(self.banned(), np.int64)
        tokens = tokens[tokens < 32 * len(mask)]
        bits = ~(np.uint32(1) << (tokens % 32).astype(np.uint32))
        np.bitwise_and.at(mask.view(np.uint32), tokens // 32, bits)


class BadWordsBackend:
    """Fills the masks of :class:`BadWordsMatcher`. It compiles nothing."""

    def compile(self, grammar: Grammar) -> Compiled:
        raise InvalidRequest("grammar", "cannot be compiled from bad words")

    def fill(self, matchers: Sequence[Matcher], masks: Sequence[npt.NDArray[np.int32]]) -> None:
        for matcher, mask in zip(matchers, masks, strict=True):
            assert isinstance(matcher, BadWordsMatcher)
            matcher.fill(mask)
