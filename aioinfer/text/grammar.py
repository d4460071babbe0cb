"""Grammars: the tokens that may come next, independent of the backend that computes them.

A backend compiles a :class:`~aioinfer.params.Grammar` once and creates one :class:`Matcher` per request.
:class:`GrammarState` is a matcher together with the mask of the position it has reached::

    sampled token ──► accept ──► mask for the position after it ──► sampler of the next step

Backends: :mod:`aioinfer.text.guidance`, :mod:`aioinfer.text.bad_words`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from aioinfer.errors import InvalidRequest
from aioinfer.ledger import ByteCache
from aioinfer.text.closed_answers import ClosedAnswers
from aioinfer.text.grammar_spec import Grammar

__all__ = ["Compiled", "Compiler", "GrammarBackend", "GrammarState", "LookAhead", "Matcher", "TokenBounds"]

#: bytes of compiled grammars that are kept for requests to come
_MOST_KEPT = 64 << 20
#: Bytes by which a kept grammar may grow, as its states are made when outputs reach them; beyond these it is
#: compiled again.
_MOST_GROWN = 16 << 20
#: maximum forced tokens appended at once; the others follow after the next sampled token
_MOST_FORCED = 256
#: The maximum sum of tokens that the matcher works out for them: for each, it tokenizes the rest of the
#: forced text. llguidance does so with the interpreter's lock held, 1000 tokens in a millisecond.
_MOST_TOKENIZED = 16_384
#: Seconds of a mask, at most, after which forced tokens are asked for. The mask finds the forced text, too,
#: without the interpreter's lock: where that takes long, it would take half as long again with the lock held.
_LONG_MASK = 0.02
#: Seconds of processor time that a grammar may take per token, and in all beyond that.
_PER_TOKEN, MOST_SECONDS = 0.005, 2.0
#: Seconds: where a mask took less, the next one is made where it is needed. To have a thread make it takes as
#: long as some of them.
QUICK_MASK = 0.0005


class Matcher(Protocol):
    """The position of one output in a grammar. Used by one thread at a time; its methods never raise."""

    def accept(self, token: int) -> bool:
        """Advance by ``token``. False if the grammar does not allow it; the matcher stays in error then."""

    def advance(self, tokens: Sequence[int]) -> int:
        """Advance by the first of ``tokens``, as many as the grammar allows, and return their number. A token
        that it does not allow is no error."""

    @property
    def stopped(self) -> bool:
        """The output is complete and only an end token may follow, or there was an error."""

    @property
    def error(self) -> str | None:
        """The error, if any: a token that is not allowed, a limit that was reached."""

    def forced(self) -> list[int]:
        """The longest sequence of next tokens without an alternative."""

    def copy(self) -> Matcher:
        """A matcher at the same position, for another output."""


class Compiled(Matcher, Protocol):
    """A matcher at the start. Its copies share its states with it."""

    @property
    def size(self) -> int:
        """Bytes of what was compiled, at most."""

    @property
    def grown(self) -> int:
        """Bytes of the states that its copies have added, at most."""


class GrammarBackend(Protocol):
    """Compiles grammars for one vocabulary. Its methods may be called from several threads."""

    def compile(self, grammar: Grammar) -> Compiled:
        """A matcher at the start. Raises InvalidRequest for a malformed or too large grammar."""

    def fill(self, matchers: Sequence[Matcher], masks: Sequence[npt.NDArray[np.int32]]) -> None:
        """Write the mask of each matcher, int32 [vocab_size / 32]: bit ``token % 32`` of word ``token // 32``
        is set if the token may come next. One call for all matchers, which releases the GIL."""


class TokenBounds:
    """The tokens that a request allows at a position, whatever the tokens before it: ``allowed`` only, and no
    ``ends`` before position ``until`` of the sequence."""

    __slots__ = ("_early", "_late", "_until")

    def __init__(
        self,
        vocab_size: int,
        *,
        allowed: Sequence[int] | None = None,
        ends: Iterable[int] = (),
        until: int = 0,
    ) -> None:
        bits = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
        bits[: vocab_size if allowed is None else 0] = True
        bits[list(allowed or ())] = True
        self._late = _packed(bits)
        bits[list(ends)] = False
        self._early = _packed(bits)
        self._until = until

    def restrict(self, mask: npt.NDArray[np.int32], position: int) -> None:
        """Clear the bits of tokens that are not allowed at ``position``, in place."""
        np.bitwise_and(mask, self._at(position), out=mask)

    def allow(self, token: int, position: int) -> bool:
        """``token`` is allowed at ``position``."""
        return bool(self._at(position)[token // 32] >> (token % 32) & 1)

    def _at(self, position: int) -> npt.NDArray[np.int32]:
        return self._early if position < self._until else self._late


@dataclass(slots=True)
class LookAhead:
    """Drafts of an output, and the masks after them."""

    #: position of the first draft in the sequence
    position: int
    drafts: Sequence[int]
    #: the masks after the first drafts; None: not known yet
    masks: list[npt.NDArray[np.int32]] | None = None


@dataclass(slots=True, eq=False)
class GrammarState:
    """A request's matcher, and the mask of the position that it has reached.

    Written and read under the lock of :class:`~aioinfer.execution.grammar_worker.GrammarWorker`.
    """

    backend: GrammarBackend
    matcher: Matcher
    #: position in the sequence of the token that ``mask`` is for
    position: int
    vocab_size: int
    #: a shorter run of forced tokens is sampled like other tokens; 0: every run is
    least_forced: int = 0
    #: further limits of the tokens; None: none
    bounds: TokenBounds | None = None
    _: KW_ONLY
    #: a shorter run is wanted as a draft
    suggests: bool = False
    #: the matcher and the position of the first output token
    origin: Matcher = field(init=False)
    begin: int = field(init=False)
    mask: npt.NDArray[np.int32] = field(init=False)
    #: all that it allows, where those are some texts
    closed: ClosedAnswers | None = None
    #: the model's tokens that end an output, which alone may follow a complete one
    ends: frozenset[int] = frozenset()
    #: output tokens to accept before the mask can be computed; None: none
    missed: Sequence[int] | None = None
    #: why the output cannot continue
    failed: str | None = None
    #: that is an error of the backend or the engine, and not of the request
    broken: bool = False
    #: forced tokens before ``position``, which are appended without sampling
    forced: list[int] = field(default_factory=list)
    #: the position where a run that was too long to be forced is short enough
    force_from: int = 0
    #: a token was sampled, and the mask after it is not computed yet
    at_work: bool = False
    #: its masks take long: steps do not wait for them
    slow: bool = False
    #: its newest mask took less time than to have a thread make it
    quick: bool = False
    #: its newest row sampled nothing, so rows launched after it have no input token
    unsampled: bool = False
    #: the drafts that the next row to sample verifies, if there are any
    ahead: LookAhead | None = None
    #: seconds of processor time that its tokens took beyond what each may take
    overtime: float = 0.0
    #: a position and the tokens that will be there: forced, but fewer than ``least_forced``. Replaced as
    #: a whole, so that any thread may read it
    suggested: tuple[int, Sequence[int]] = (0, ())
    #: held by the thread that uses ``matcher``
    _using: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.origin, self.begin = self.matcher.copy(), self.position
        self.mask = np.zeros(-(-self.vocab_size // 32), np.int32)

    def start(self) -> GrammarState:
        """Compute the first mask; returns this state.

        Runs of ``least_forced`` or more forced tokens are appended without sampling. Raises InvalidRequest if
        no first token is allowed; a dead end after forced tokens fails the output later.
        """
        began, used = time.monotonic(), time.thread_time()
        self._fill()
        seconds = time.monotonic() - began
        self.quick = seconds < QUICK_MASK
        if self.follow(self.mask, seconds):
            self._fill()
        self.charge(time.thread_time() - used, 1)
        if self.failed is not None:
            raise InvalidRequest("grammar", self.failed)
        if self.matcher.error is not None or not self.mask.any():
            if not self.forced:
                raise InvalidRequest("grammar", self.matcher.error or "allows no output")
            self.failed = self.matcher.error or self.dead_end
        return self

    def _fill(self) -> None:
        self.backend.fill([self.matcher], [self.mask])
        self.restrict(self.mask)

    def restarted(self, output_ids: Sequence[int]) -> GrammarState:
        """Another state for the same output, of which only ``output_ids`` are left. They are accepted before
        its next mask is computed. This state may still be in use by the worker."""
        return GrammarState(
            *(self.backend, self.origin.copy(), self.begin, self.vocab_size, self.least_forced, self.bounds),
            suggests=self.suggests,
            closed=self.closed,
            ends=self.ends,
            missed=tuple(output_ids),
            overtime=self.overtime,
        )

    @property
    def dead_end(self) -> str:
        """Why an empty mask ends the output."""
        return f"no token is allowed after {self.position - self.begin} tokens of the output"

    def restrict(self, mask: npt.NDArray[np.int32]) -> None:
        """Apply the bounds to the backend's mask for ``position``."""
        if self.bounds is not None:
            self.bounds.restrict(mask, self.position)

    def accept(self, tokens: Sequence[int]) -> None:
        """Advance by ``tokens``."""
        try:
            with self._using:
                for token in tokens:
                    if not self.matcher.accept(token):
                        self._refused(token)
                        return
                    self.position += 1
        except BaseException as error:  # panics of Rust libraries are not Exceptions
            self.fail(f"its grammar failed: {error}")

    def look_ahead(self, ahead: LookAhead) -> list[npt.NDArray[np.int32]]:
        """The masks after each of the drafts, up to the first that is not allowed; none if the matcher is at
        another position. It does not move."""
        masks: list[npt.NDArray[np.int32]] = []
        try:
            with self._using:
                if self.failed is not None or self.position != ahead.position:
                    return masks
                matcher = self.matcher.copy()
            for at, token in enumerate(ahead.drafts, ahead.position):
                allowed = self.bounds is None or self.bounds.allow(token, at)
                if not (allowed and matcher.accept(token)):
                    break
                mask = np.zeros_like(self.mask)
                self.backend.fill([matcher], [mask])
                if self.bounds is not None:
                    self.bounds.restrict(mask, at + 1)
                if matcher.error is not None or not mask.any():
                    break  # the following row finds out
                masks.append(mask)
        except BaseException:  # panics of Rust libraries are not Exceptions
            pass  # it shows where the tokens are accepted
        return masks

    def fail(self, reason: str) -> None:
        """End the output for an error of the backend or the engine."""
        self.failed, self.broken = reason, True

    def _refused(self, token: int) -> None:
        if (error := self.matcher.error) is not None:
            self.failed = error
        else:
            self.fail(f"its grammar does not allow token {token}")

    def charge(self, seconds: float, tokens: int) -> None:
        """Note the processor time that ``tokens`` took; the output fails when that is too much in all."""
        self.overtime += max(0.0, seconds - _PER_TOKEN * tokens)
        if self.overtime > MOST_SECONDS and self.failed is None:
            said = f"has taken more than {MOST_SECONDS:g} seconds of processor time"
            self.failed = f"{said}: it is ambiguous or too large"

    def follow(self, mask: npt.NDArray[np.int32], seconds: float) -> bool:
        """Advance by the forced tokens, if the run has ``least_forced`` or more; whether it did. ``mask`` is
        that of its position, which took ``seconds``; a mask of one token is what forced tokens begin with."""
        if not (self.least_forced or self.suggests) or self.position < self.force_from:
            return False
        if seconds > _LONG_MASK or np.count_nonzero(mask) != 1:
            return False
        before = self.position
        try:
            with self._using:
                self._follow()
        except BaseException as error:  # panics of Rust libraries are not Exceptions
            self.fail(f"its grammar failed: {error}")
        return self.position > before

    def _follow(self) -> None:
        ahead = self.matcher.forced()
        if not self.least_forced or len(ahead) < self.least_forced:
            self.suggested = (self.position, ahead)
            return
        if (excess := len(ahead) - _MOST_TOKENIZED // self.least_forced) > 0:
            # Masks of one token lead through it as well, and they are made without the interpreter's lock.
            self.force_from = self.position + excess
            return
        forced: list[int] = []
        left = _MOST_TOKENIZED - len(ahead)
        # One at a time: after a token, the forced text can have another tokenization than before it.
        while ahead and len(forced) < _MOST_FORCED:
            token = ahead[0]
            if self.bounds is not None and not self.bounds.allow(token, self.position + len(forced)):
                break  # a dead end, which the empty mask after the other tokens reports
            if not self.matcher.accept(token):
                self._refused(token)
                return
            forced.append(token)
            if left < len(ahead):
                break
            ahead = self.matcher.forced()
            left -= len(ahead)
        self.forced = forced
        self.position += len(forced)


def _packed(bits: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    return np.packbits(bits, bitorder="little").view(np.int32)


class Compiler:
    """Compiles on the calling thread, each grammar once, even if several threads need it at the same time.

    Compiled grammars and refusals are kept, in a bounded number of bytes: a malformed one is compiled once.
    """

    def __init__(self, backend: GrammarBackend) -> None:
        self.backend = backend
        self._lock = threading.Lock()
        self._kept: ByteCache[Grammar, Compiled | InvalidRequest] = ByteCache("grammars", _MOST_KEPT)
        self._under_way: dict[Grammar, Future[Compiled | InvalidRequest]] = {}

    def matcher(self, grammar: Grammar) -> Matcher:
        """A matcher for a new output. Raises InvalidRequest."""
        with self._lock:
            found = self._kept.get(grammar)
            if found is not None and not isinstance(found, InvalidRequest) and found.grown > _MOST_GROWN:
                found = None
            future = known = self._under_way.get(grammar)
            if found is None and known is None:
                future = self._under_way[grammar] = Future()
        if found is None:
            assert future is not None
            if known is None:
                self._compile(grammar, future)
            found = future.result()
        self._keep(grammar, found)
        if isinstance(found, InvalidRequest):
            raise InvalidRequest(found.field, found.message)
        return found.copy()

    def forget(self, grammar: Grammar) -> None:
        """Remove a grammar from the cache."""
        self._kept.forget(grammar)

    def _keep(self, grammar: Grammar, found: Compiled | InvalidRequest) -> None:
        """Keep it, or keep it as what it takes by now."""
        size = 1024 if isinstance(found, InvalidRequest) else found.size + found.grown
        self._kept.put(grammar, found, size + sys.getsizeof(grammar.text))

    def _compile(self, grammar: Grammar, future: Future[Compiled | InvalidRequest]) -> None:
        found: Compiled | InvalidRequest
        try:
            try:
                found = self.backend.compile(grammar)
            except InvalidRequest as refused:
                found = InvalidRequest(refused.field, refused.message)  # without its traceback
            self._keep(grammar, found)
            future.set_result(found)
        except BaseException as error:  # panics of Rust libraries are not Exceptions
            future.set_exception(error)
        finally:
            with self._lock:
                del self._under_way[grammar]
