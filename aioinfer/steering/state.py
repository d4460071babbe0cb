"""SteeringState: the logits processors of one request, and the tokens that they have seen."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, NamedTuple, cast

import numpy as np

from aioinfer.steering.processors import Forced, Ids, Logits, LogitsProcessor, Stateful, waits

__all__ = ["Answer", "Question", "SteeringState", "checked"]

#: tokens that a processor may force at once
_MOST_FORCED = 4096
#: room for output tokens at first
_ROOM = 256


class Question(NamedTuple):
    """What the processors of a row that waits are to decide; nobody else reads or writes the arrays."""

    ids: Ids
    logits: Logits


class Answer(NamedTuple):
    """The logits that they left."""

    position: int
    logits: Logits


class SteeringState:
    """The processors of a request, where its output is.

    The thread of the device owns it, but while the request waits for an answer: then the loop does, and rows
    that are in flight meanwhile find it ``unsampled``.

    Attributes:
        unsampled: its newest row sampled nothing, so rows launched after it have no input token.
        failed: what a processor raised.
        idle_until: the next position at which they may decide something.
        late: its processors are not called in a step: they are coroutines, or slow.
        batch: of its only processor, which has no state: decides for all rows that have it.
        question: for the loop, of the row that waits.
        answer: for the next row.
    """

    __slots__ = (
        *("_accepted", "_count", "_drowsy", "_ids", "_origin", "_prompt_length", "_stateful", "processors"),
        *("answer", "batch", "failed", "idle_until", "late", "question", "unsampled"),
    )

    def __init__(
        self,
        processors: Sequence[LogitsProcessor],
        prompt_ids: Sequence[int],
        output_ids: Sequence[int] = (),
        *,
        late: bool | None = None,
    ) -> None:
        """``processors`` are copied where they have a state, which is that of an empty output. What they
        raise meanwhile ends the request at its next position."""
        self._origin = self.processors = tuple(processors)
        self._stateful = [isinstance(each, Stateful) for each in processors]
        self._prompt_length = self._accepted = len(prompt_ids)
        self._count = len(prompt_ids) + len(output_ids)
        self._ids = np.empty(self._count + _ROOM, np.int64)
        self._ids[: self._accepted] = prompt_ids
        self._ids[self._accepted : self._count] = output_ids
        self.late = any(map(waits, processors)) if late is None else late
        self.idle_until = self._prompt_length
        self.batch: Callable[[list[Ids], list[Logits]], Sequence[Any]] | None = None
        self.unsampled = self._drowsy = False
        self.failed: BaseException | None = None
        self.question: Question | None = None
        self.answer: Answer | None = None
        try:
            self.processors = self._copies(self._origin)
            if len(processors) == 1 and not self._stateful[0]:
                self.batch = getattr(processors[0], "batch", None)
            #: all of them say how long they are idle
            self._drowsy = all(hasattr(each, "idle") for each in processors)
            self.rest()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # panics of libraries in Rust are no Exceptions
            self.failed = error

    def restarted(self, output_ids: Sequence[int]) -> SteeringState:
        """Another state for the same output, of which only ``output_ids`` are left. This one may still be in
        use by the device; what was asked or answered for the same position holds."""
        prompt = self._ids[: self._prompt_length]
        other = SteeringState(self._origin, cast("Sequence[int]", prompt), output_ids, late=self.late)
        if self._count == other._count:
            other.question, other.answer = self.question, self.answer
        return other

    @property
    def position(self) -> int:
        """Tokens of prompt and output: the position of the token that is decided next."""
        return self._count

    @property
    def coroutines(self) -> bool:
        """Some of the processors are coroutines."""
        return any(map(waits, self._origin))

    def extend(self, tokens: Sequence[int]) -> None:
        """The output has these tokens, too."""
        self._write(tokens)
        self._count += len(tokens)

    def ids(self, drafts: Sequence[int] = ()) -> Ids:
        """The tokens so far, and ``drafts`` behind them; valid until the next call. Read-only."""
        if drafts:
            self._write(drafts)
        view = self._ids[: self._count + len(drafts)]
        view.flags.writeable = False
        return view

    def rest(self) -> None:
        """They have decided nothing behind the tokens that they have seen."""
        if self._drowsy:
            self.idle_until = self._accepted + min(
                each.idle for each in cast("Sequence[Any]", self.processors)
            )

    def at(self, drafts: Sequence[int]) -> tuple[LogitsProcessor, ...]:
        """The processors behind the tokens so far, or as they would be behind ``drafts``, too."""
        if any(self._stateful):
            self._accept(self.processors, self._ids[self._accepted : self._count].tolist())
        self._accepted = self._count
        if not (drafts and any(self._stateful)):
            return self.processors
        copies = self._copies(self.processors)
        self._accept(copies, drafts)
        return copies

    def ask(self, logits: Logits) -> None:
        """Leave the decision of this position to the loop."""
        ids = self.ids().copy()
        ids.flags.writeable = False
        self.question = Question(ids, logits.copy())

    def forget(self) -> None:
        """What was asked or answered is of no use: other weights compute the logits of this position."""
        self.question = self.answer = None

    def _write(self, tokens: Sequence[int]) -> None:
        end = self._count + len(tokens)
        if end > len(self._ids):
            self._ids = np.concatenate((self._ids[: self._count], np.empty(end + _ROOM, np.int64)))
        self._ids[self._count : end] = tokens

    def _copies(self, processors: Sequence[Any]) -> tuple[LogitsProcessor, ...]:
        pairs = zip(processors, self._stateful, strict=True)
        return tuple(each.copy() if stateful else each for each, stateful in pairs)

    def _accept(self, processors: Sequence[Any], tokens: Sequence[int]) -> None:
        for each in compress(processors, self._stateful):
            for token in tokens:
                each.accept(token)


def checked(forced: Forced, vocab_size: int) -> list[int]:
    """The tokens that a processor forces, perhaps none. Raises TypeError, ValueError."""
    if forced is None:
        return []
    tokens = [*forced]
    if len(tokens) > _MOST_FORCED:
        raise ValueError(f"a logits processor forces {len(tokens)} tokens: {_MOST_FORCED} at most")
    found = [operator.index(token) for token in tokens]
    if found and not 0 <= min(found) <= max(found) < vocab_size:
        raise ValueError(f"a logits processor returned {found}; the model has {vocab_size} tokens")
    return found
