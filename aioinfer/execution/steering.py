"""Steering rows: the logits processors of a step's rows decide after its forward, before it samples.

::

    forward N ── logits ──┬─ plain processors change the rows, or force tokens ──── sample N
                          └─ coroutines: the rows are copied for the loop, ASKED ─► loop/answers.py

What is forced or asked samples nothing, and the rows launched after it have no input and are void: as of
grammars, see :mod:`aioinfer.execution.grammar_worker`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np

from aioinfer.sampling.outcomes import ASKED, BAD_PROCESSOR, DEFERRED, FORCED
from aioinfer.steering.processors import Forced, Ids, Logits, LogitsProcessor
from aioinfer.steering.state import SteeringState, checked

__all__ = ["Steered", "SteeredRow", "advance", "awake", "decide", "steer"]


class SteeredRow(NamedTuple):
    """A row of a step whose request has logits processors; fields as of a
    :class:`~aioinfer.execution.grammar_worker.GrammarRow`."""

    at: int
    state: SteeringState
    position: int
    known: bool
    drafts: Sequence[int] = ()


@dataclass(slots=True)
class Steered:
    """What the processors of a step have decided."""

    #: among the rows that sample: what stands for their token
    outcomes: dict[int, int] = field(default_factory=dict)
    #: the tokens of those that are ``FORCED``
    forced: dict[int, list[int]] = field(default_factory=dict)
    #: of each row that verifies drafts, how many of its positions may sample
    usable: dict[int, int] = field(default_factory=dict)


#: one decision per position
_Decide: TypeAlias = "Callable[[Sequence[_Position]], Sequence[Any]]"


class _Position(NamedTuple):
    """A position that samples: of a row, behind some of its drafts."""

    row: SteeredRow
    offset: int
    ids: Ids
    logits: Logits


def awake(rows: Sequence[SteeredRow]) -> list[SteeredRow]:
    """Those whose processors may decide something or have decided it late, or that have no input."""
    return [
        row
        for row in rows
        if row.position + len(row.drafts) >= row.state.idle_until
        or row.state.unsampled
        or row.state.answer is not None
    ]


def steer(
    rows: Sequence[SteeredRow],
    lines: Mapping[int, Logits] | Sequence[Logits],
    *,
    patience: float,
    outcomes: Mapping[int, int],
    usable: Mapping[int, int],
) -> Steered:
    """Have the processors of ``rows``, all of them awake, decide.

    Args:
        lines: by sampling row its logits, float32 [V], which are changed in place.
        patience: seconds that the processors of a position may take; slower ones are called later.
        outcomes: of rows that sample nothing for another reason.
        usable: of rows with drafts, how many positions may sample for another reason.
    """
    found = Steered()
    positions: list[_Position] = []
    for row in rows:
        state = row.state
        void = state.unsampled and not row.known
        state.unsampled = True
        if row.at in outcomes:
            continue
        if void:
            found.outcomes[row.at] = DEFERRED
            continue
        if state.position != row.position and state.failed is None:
            state.failed = RuntimeError(f"logits processors are at {state.position}, not {row.position}")
        if state.failed is not None:
            found.outcomes[row.at] = BAD_PROCESSOR
        elif not np.isfinite(lines[row.at].max()):
            state.unsampled = False  # the model has failed, which sampling finds out
            found.usable[row.at] = 1
        elif (answer := state.answer) is not None and answer.position == row.position:
            lines[row.at][:] = answer.logits
            state.answer, state.unsampled = None, False
            found.usable[row.at] = 1
        elif state.late:
            state.ask(lines[row.at])
            found.outcomes[row.at] = ASKED
        else:
            state.unsampled = False
            last = min(len(row.drafts), usable.get(row.at, len(row.drafts) + 1) - 1)
            for offset in range(last + 1):
                ids, line = state.ids(row.drafts[:offset]), lines[row.at + offset]
                if offset and not np.isfinite(line.max()):
                    found.usable[row.at] = offset
                    break
                positions.append(_Position(row, offset, ids, line))
    _decide_all(positions, patience, found)
    # Nothing is sampled behind the drafts of a row that samples nothing itself.
    found.usable |= dict.fromkeys(found.outcomes, 1)
    return found


def _decide_all(positions: Sequence[_Position], patience: float, found: Steered) -> None:
    batches: dict[int, tuple[_Decide, list[_Position]]] = {}
    for each in positions:
        state = each.row.state
        if state.batch is not None:
            key = id(state.processors[0])
            batches.setdefault(key, (partial(_together, state.batch), []))[1].append(each)
        else:
            _settle([each], _singly, patience, found)
    for call, members in batches.values():
        _settle(members, call, patience, found)


def _together(
    batch: Callable[[list[Ids], list[Logits]], Sequence[Any]], positions: Sequence[_Position]
) -> Any:
    return batch([each.ids for each in positions], [each.logits for each in positions])


def _singly(positions: Sequence[_Position]) -> Sequence[Any]:
    return [
        decide(each.row.state.at(each.row.drafts[: each.offset]), each.ids, each.logits) for each in positions
    ]


def decide(processors: Sequence[LogitsProcessor], ids: Ids, logits: Logits) -> list[int]:
    """What plain processors force, the first that does; perhaps nothing. Raises what they do, and as
    :func:`~aioinfer.steering.state.checked`."""
    for each in processors:
        if forced := checked(cast("Forced", each(ids, logits)), len(logits)):
            return forced
    return []


def _settle(positions: Sequence[_Position], call: _Decide, patience: float, found: Steered) -> None:
    """Note what processors decide of positions, or raise."""
    began = time.monotonic()
    try:
        decisions = [checked(forced, len(positions[0].logits)) for forced in call(positions)]
        if len(decisions) != len(positions):
            raise ValueError(f"{len(decisions)} decisions of a logits processor for {len(positions)} rows")
        for each in positions:
            if not each.offset:
                each.row.state.rest()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # panics of libraries in Rust are no Exceptions
        for each in positions:
            _fail(each, error, found)
        return
    slow = time.monotonic() - began > patience * len(positions)
    for each, forced in zip(positions, decisions, strict=True):
        row = each.row
        row.state.late = row.state.late or slow
        if forced and each.offset:
            _cut(each, found)
        elif forced:
            found.outcomes[row.at], found.forced[row.at] = FORCED, forced
            row.state.unsampled = True
        elif not np.isfinite(each.logits.max()):
            _fail(each, ValueError("a logits processor left no finite maximum of the logits"), found)


def _fail(position: _Position, error: BaseException, found: Steered) -> None:
    if position.offset:
        _cut(position, found)  # the following row finds out
    else:
        state = position.row.state
        found.outcomes[position.row.at] = BAD_PROCESSOR
        state.failed, state.unsampled = error, True


def _cut(position: _Position, found: Steered) -> None:
    """Sample up to the position before one behind drafts: what is decided there is for the following row."""
    at = position.row.at
    found.usable[at] = min(found.usable.get(at, position.offset), position.offset)


def advance(rows: Sequence[SteeredRow], tokens: Sequence[int], forced: Mapping[int, Sequence[int]]) -> None:
    """These rows sampled these ``tokens`` (of all sampling rows), or had these ``forced``."""
    for row in rows:
        if row.at in forced:
            row.state.extend(forced[row.at])
            continue
        # Behind a row that sampled nothing, and a draft that was wrong, there are no tokens.
        row.state.extend([*takewhile(_sampled, tokens[row.at : row.at + 1 + len(row.drafts)])])


def _sampled(token: int) -> bool:
    return token >= 0
