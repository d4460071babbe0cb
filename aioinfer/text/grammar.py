"""Grammars: which tokens may come next, whoever works it out.

A backend compiles a :class:`~aioinfer.params.Grammar` once and gives every request a :class:`Matcher` of its
own. :class:`GrammarState` is a matcher together with the mask it is ready for::

    sampled token ──► accept ──► mask for the position after it ──► sampler of the next step

Backends: :mod:`aioinfer.text.guidance`, :mod:`aioinfer.text.bad_words`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from aioinfer.errors import InvalidRequest
from aioinfer.text.grammar_spec import Grammar

__all__ = ["Compiler", "GrammarBackend", "GrammarState", "Matcher"]

_KNOWN_GRAMMARS = 256
#: tokens taken at once; more of them come after the next one that is sampled
_MOST_FORCED = 256


class Matcher(Protocol):
    """One output's place in a grammar. Used by one thread at a time; its methods never raise."""

    def accept(self, token: int) -> bool:
        """The output goes on with ``token``. False if the grammar does not allow that, now and ever after."""

    @property
    def stopped(self) -> bool:
        """The output is complete and nothing but an end token may follow, or there was an error."""

    @property
    def error(self) -> str | None:
        """What went wrong, if something did: a token that was not allowed, a limit that was reached."""

    def forced(self) -> list[int]:
        """The tokens that must come next, as far as there is no choice."""

    def copy(self) -> Matcher:
        """The same place in the same grammar, for another output."""


class GrammarBackend(Protocol):
    """Compiles grammars for one vocabulary. Its methods may be called from several threads."""

    def compile(self, grammar: Grammar) -> Matcher:
        """A matcher at the start. Raises InvalidRequest for what is no grammar, or too large a one."""

    def fill(self, matchers: Sequence[Matcher], masks: Sequence[npt.NDArray[np.int32]]) -> None:
        """Write the mask of each matcher: bit ``token % 32`` of word ``token // 32`` is set if the token
        may come next. One call for all, which lets other threads run meanwhile."""


class GrammarState:
    """A request's matcher, and the mask of the one position that it is ready for.

    Written and read under the lock of :class:`~aioinfer.execution.grammar_worker.Masks`.
    """

    __slots__ = (
        "at_work",
        "backend",
        "begin",
        "failed",
        "forced",
        "least_forced",
        "mask",
        "matcher",
        "missed",
        "origin",
        "position",
        "slow",
        "unsampled",
    )

    def __init__(
        self,
        backend: GrammarBackend,
        matcher: Matcher,
        position: int,
        vocab_size: int,
        least_forced: int = 0,
    ) -> None:
        self.backend = backend
        self.matcher = matcher
        #: the matcher and the position before anything was accepted
        self.origin, self.begin = matcher.copy(), position
        #: tokens of the output that are to be accepted before there is a mask; None: there is nothing to do
        self.missed: Sequence[int] | None = None
        #: why the output cannot go on
        self.failed: str | None = None
        #: position in the sequence of the token that ``mask`` is for
        self.position = position
        self.mask: npt.NDArray[np.int32] = np.zeros(-(-vocab_size // 32), np.int32)
        #: tokens before ``position`` that the output must have and nobody samples
        self.forced: list[int] = []
        #: fewer forced tokens than this are sampled like any others; 0: all are
        self.least_forced = least_forced
        #: a token was sampled whose mask is not made yet
        self.at_work = False
        #: its masks take long: nobody waits for them
        self.slow = False
        #: its newest row sampled nothing, so that rows launched behind it have no token to go on from
        self.unsampled = False

    @classmethod
    def start(
        cls,
        backend: GrammarBackend,
        matcher: Matcher,
        position: int,
        vocab_size: int,
        least_forced: int = 0,
    ) -> GrammarState:
        """The state of a new output whose first token is at ``position``, ready for it.

        So many tokens or more that leave no choice are taken without sampling them; 0: none are. Raises
        InvalidRequest if there is no first token; that none can follow later is no reason yet.
        """
        state = cls(backend, matcher, position, vocab_size, least_forced)
        state.follow()
        backend.fill([matcher], [state.mask])
        if matcher.error is not None or not state.mask.any():
            if not state.forced:
                raise InvalidRequest("grammar", matcher.error or "allows no output")
            state.failed = matcher.error or "its grammar allows no token here"
        return state

    def restarted(self, output_ids: Sequence[int]) -> GrammarState:
        """A state of its own for the same output, of which only ``output_ids`` are left; whoever wants its
        mask first has to have it accept them. This one may be at work meanwhile."""
        vocab_size = 32 * len(self.mask)
        other = GrammarState(self.backend, self.origin.copy(), self.begin, vocab_size, self.least_forced)
        other.missed = tuple(output_ids)
        return other

    def accept(self, tokens: Sequence[int]) -> None:
        """The output goes on with ``tokens``; whatever must follow the last one, follows."""
        try:
            for token in tokens:
                if not self.matcher.accept(token):
                    self.failed = self.matcher.error or f"its grammar does not allow token {token}"
                    return
                self.position += 1
            self.follow()
        except BaseException as error:  # panics of libraries in Rust are no Exceptions
            self.failed = f"its grammar failed: {error}"

    def follow(self) -> None:
        """Take the tokens that leave no choice, if they are enough to be worth it."""
        forced: list[int] = []
        if not self.least_forced or len(ahead := self.matcher.forced()) < self.least_forced:
            return
        # One at a time: what is forced after a token may be spelled otherwise than it was before it.
        while ahead and len(forced) < _MOST_FORCED:
            token = ahead[0]
            if not self.matcher.accept(token):
                self.failed = self.matcher.error or f"its grammar does not allow token {token}"
                return
            forced.append(token)
            ahead = self.matcher.forced()
        self.forced = forced
        self.position += len(forced)


class Compiler:
    """Compiles on whatever thread it is called, each grammar once, however many ask for it at a time.

    What was compiled is kept, and so is what was refused: a bad grammar costs its sender's time only once.
    """

    def __init__(self, backend: GrammarBackend) -> None:
        self.backend = backend
        self._lock = threading.Lock()
        self._known: OrderedDict[Grammar, Matcher | InvalidRequest] = OrderedDict()
        self._under_way: dict[Grammar, threading.Event] = {}

    def matcher(self, grammar: Grammar) -> Matcher:
        """One for a new output. Raises InvalidRequest."""
        compiled = self._compiled(grammar)
        if isinstance(compiled, InvalidRequest):
            raise InvalidRequest(compiled.field, compiled.message)
        return compiled.copy()

    def forget(self, grammar: Grammar) -> None:
        """Compile it anew the next time."""
        with self._lock:
            self._known.pop(grammar, None)

    def _compiled(self, grammar: Grammar) -> Matcher | InvalidRequest:
        while True:
            with self._lock:
                if (known := self._known.get(grammar)) is not None:
                    self._known.move_to_end(grammar)
                    return known
                other = self._under_way.get(grammar)
                if other is None:
                    self._under_way[grammar] = done = threading.Event()
                    break
            other.wait()
        result: Matcher | InvalidRequest | None = None
        try:
            result = self.backend.compile(grammar)
        except InvalidRequest as refused:
            result = refused
        finally:
            with self._lock:
                del self._under_way[grammar]
                if result is not None:
                    self._known[grammar] = result
                    if len(self._known) > _KNOWN_GRAMMARS:
                        self._known.popitem(last=False)
            done.set()
        return result
