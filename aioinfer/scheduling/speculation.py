"""Speculation: which drafts the rows of a step verify, and what that has brought.

A draft costs a position of the step and brings a token if it is right. So many are verified that the step is
expected to bring the most tokens per second: from what steps of a size take (:class:`SizeCosts`), and from
how many drafts of a request were right lately (:class:`Drafting`). That may be none.
"""

from __future__ import annotations

import logging
import operator
from collections import abc
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from aioinfer.scheduling.step import UNDRAWN, DraftInput
from aioinfer.scheduling.step_time import StepTime
from aioinfer.speculation.drafter import Drafter
from aioinfer.speculation.drafting import Drafting, DraftSource

if TYPE_CHECKING:
    from aioinfer.scheduling.sequence import Sequence
    from aioinfer.scheduling.step import Generating, Step

__all__ = ["FEW", "STASHED", "Speculation"]

_log = logging.getLogger("aioinfer")

#: requests per request that verifies drafts from which on the others do not wait for it
FEW = 8
#: what verifying must promise to bring in tokens per second, as a factor, before it is worth a try
_WORTH = 1.03
#: number of steps in which a request is asked once for drafts that are not expected to pay, and after which
#: steps with drafts are hoped to be a little faster than they were
_PROBE = 16
#: what asking a drafter takes, in seconds, and the share of a step that may go into it
_ASKING = 1e-5
_ASKING_SHARE = 0.02
#: where not all are asked and no drafts are worth it, number of steps of which one asks at all
_LONGEST_PAUSE = 16
#: steps with drafts, one behind the other, after which what steps without take is measured again, which is
#: what drafts are judged by; the first of the two in which it is still waits to be planned
_REFRESH = 64
_PLAIN = 2
#: steps for which a request whose drafts were verified is asked before others: overlap takes it out of one
_WARM = 3
#: drafts that are less likely than this to be right are never verified
_LEAST = 0.02
#: number of equal tokens before a draft that say more than fewer do
_LONG = 4
#: positions of a slot whose hidden states are kept for a draft head; drafts of a row are fewer than half
STASHED = 32
#: number of steps between two looks for requests whose hidden states are to be made into entries, and how
#: many of them are worth that
_LOOKS = 4
_ENOUGH = 12
#: numbers of drafts that are looked at to see whether any would pay
_SOME = (1, 3, 7, 15)
#: how many of them are expected to be right, by the chance of each one after right ones
_EXPECTED = [
    (chance, [chance * (1 - chance**count) / (1 - chance) for count in _SOME])
    for chance in (_LEAST, 0.05, *(tenth / 10 for tenth in range(1, 10)), 0.95, 0.99)
]


class Speculation:
    """Decides how many drafts to verify. ``adaptive``: verify as many drafts as pay; else all that are
    proposed."""

    __slots__ = (
        *("_behind", "_catch_up", "_decodes", "_drafter", "_first", "_hot", "_length", "_most", "_pause"),
        *("_head_most", "_hopes", "_in_a_row", "_turn", "_usual", "_verified", "_verifies", "_vocab_size"),
        *("adaptive", "draft_recurrent", "draft_unit", "head", "overlap"),
    )

    def __init__(
        self,
        drafter: Drafter,
        vocab_size: int,
        most: int,
        *,
        adaptive: bool = True,
        overlap: bool = True,
        catch_up: int = 0,
        draft_unit: int = 1,
        draft_length: int = 0,
        draft_recurrent: bool = False,
        head: bool = False,
        head_most: int | None = None,
        times: StepTime | None = None,
    ) -> None:
        """``most``: drafts of a row at most. ``overlap``: steps are planned before the last one has been
        read, without the few rows that verified drafts in it. ``catch_up``: with a draft model on the device,
        positions that it may compute for one request in a step; it drafts where there is no prediction.
        0: there is none. ``draft_length``: positions that it knows. ``draft_recurrent``: its state takes in
        no drafts. ``head``: a draft head does, which drafts ``head_most`` tokens of a row at most, where no
        match of the drafter's does better. ``times``: the engine's."""
        self._drafter = drafter
        self._vocab_size = vocab_size
        #: a draft head is there
        self.head = head
        self._most = most if not head else min(most, STASHED // 2 - 1)
        self._head_most = self._most if head_most is None else head_most
        if head:
            catch_up = STASHED // 2
        self.adaptive = adaptive
        self.overlap = overlap
        self._turn = self._hopes = 0
        #: the row that is asked next, and when drafts of requests were verified lately, which go first
        self._first = 0
        self._hot: dict[int, int] = {}
        #: where not all rows are asked: steps from one that asks some to the next one that does
        self._pause = 1
        self._catch_up = catch_up // draft_unit * draft_unit
        #: what drafts come from where there is no prediction
        self._usual = DraftSource.MODEL if catch_up else DraftSource.TEXT
        #: positions that the draft model drafts at a time: of a diffusion model, a block
        self.draft_unit = draft_unit
        self._length = draft_length // draft_unit * draft_unit
        self.draft_recurrent = draft_recurrent
        #: that the draft model has to catch up with before it can draft for it
        self._behind: Sequence | None = None
        #: of steps without and with drafts: only the latter are waited for before another one is planned
        times = StepTime(0.0) if times is None else times
        self._decodes, self._verifies = times.decodes, times.verifies
        #: positions and seconds of the last step, if it had drafts
        self._verified: tuple[int, float] | None = None
        #: steps that had drafts, up to the newest one
        self._in_a_row = 0

    def drafts(
        self, sequences: abc.Sequence[Sequence], starts: abc.Sequence[int], room: int
    ) -> dict[int, abc.Sequence[int]]:
        """The drafts of the next step by row, for rows of ``requests`` that begin at ``starts``; at most
        ``room`` in all. Few rows have any."""
        self._turn += 1
        self._behind = None
        if not sequences or room <= 0:
            return {}
        if self.adaptive and not self._decodes:
            return {}  # what a step without drafts takes is learned first
        if self.adaptive and self._in_a_row >= _REFRESH:
            self._decodes.doubt()
            self._in_a_row = (self._in_a_row + 1) % (_REFRESH + _PLAIN)
            return {}
        asked = self._asked(sequences)
        least = self._least_chance(len(sequences)) if asked and self.adaptive else 0.0
        proposals: dict[int, tuple[Drafting, abc.Sequence[int]]] = {}
        for row in asked:
            sequence, start, drafting = sequences[row], starts[row], sequences[row].drafting
            if drafting is None or drafting.failed:
                continue
            most = min(self._most, room, sequence.max_length - start - 2)
            if most <= 0 or (
                sequence.grammar is None
                and self._best(drafting) < least
                and (self._turn + sequence.key) % _PROBE
            ):
                continue
            ids = self._proposal(sequence, drafting, start, most)
            if len(ids):
                proposals[row] = (drafting, ids)
        if not self.adaptive:
            return _in_turn({row: ids for row, (_, ids) in proposals.items()}, room)
        chosen = self._worthwhile(proposals, len(sequences), room)
        self._in_a_row = self._in_a_row + 1 if chosen else 0
        self._hot.update((sequences[row].key, self._turn) for row in chosen)
        if asked:
            self._pause = 1 if chosen else min(2 * self._pause, _LONGEST_PAUSE)
        return chosen

    def draft_inputs(self, decodes: Generating) -> list[DraftInput]:
        """Inputs of a draft model in a step with these rows, whose drafts were chosen."""
        found: list[DraftInput] = []
        if not self._catch_up:
            return found
        for row, drafts in enumerate(decodes.drafts, decodes.num_decodes):
            if drafts[0] == UNDRAWN:
                sequence, start = decodes.sequences[row], int(decodes.starts[row])
                assert sequence.drafting is not None
                if self.head:
                    found.append(_entries(sequence, sequence.drafting, start, row))
                    continue
                first = sequence.drafting.computed
                found.append(DraftInput(sequence.kv.slot, first, sequence.known_ids(first, start), row))
        if self.head:
            return [*found, *self._waiting(decodes, {each.row for each in found})]
        behind = self._behind
        if behind is not None and behind.drafting is not None and behind.cursor.in_batch:
            first = behind.drafting.computed
            stop = min(first + self._catch_up, (behind.known - 1) // self.draft_unit * self.draft_unit)
            found.append(DraftInput(behind.kv.slot, first, behind.known_ids(first, stop), -1))
            behind.drafting.computed = stop
        return found

    def prefilled(self, sequence: Sequence, length: int) -> None:
        """The last chunk, up to ``length``, has resolved: a draft head has entries of all positions but the
        last."""
        if self.head and sequence.drafting is not None:
            sequence.drafting.computed = length - 1

    def verified(self, drafting: Drafting, start: int, drafted: int, tokens: int) -> None:
        """A row that began at ``start`` and verified drafts of the draft model has brought so many tokens."""
        if self.head:
            return  # its entries of drafts are made anew, of the model's hidden states
        # The last draft was not computed, and of the others those are of use that were right; none of them
        # where the draft model has a state.
        right = 0 if self.draft_recurrent else min(tokens, drafted) - 1
        drafting.computed = start + 1 + right

    def _waiting(self, decodes: Generating, but: Collection[int]) -> list[DraftInput]:
        """The requests of other rows ``but`` these of which many hidden states wait to become entries."""
        found: list[DraftInput] = []
        if self._turn % _LOOKS:
            return found
        for row, start in enumerate(decodes.starts.tolist()):
            sequence = decodes.sequences[row]
            drafting, stop = sequence.drafting, min(start, sequence.known - 1)
            if drafting is None or row in but or not drafting.computed:
                continue
            if sequence.cursor.in_batch and stop - drafting.computed >= _ENOUGH:
                found.append(_entries(sequence, drafting, stop + 1, -1))
        return found

    def observe(self, step: Step, seconds: float) -> None:
        """A step took so long, the time included in which the device waited for it to be planned."""
        verified, self._verified = self._verified, None
        positions = 0 if step.prefilling or seconds <= 0 else step.num_tokens
        drafts = bool(step.generating.drafts)
        if verified is not None:
            if positions and not drafts:
                # It was planned when the drafts had been read: the time that this took is theirs.
                waited = max(0.0, seconds - self._decodes.of(positions))
                verified = (verified[0], verified[1] + waited)
            self._verifies.observe(*verified)
        elif positions and not drafts and step.generating.replays is None:
            self._decodes.observe(positions, seconds)
        if positions and drafts:
            self._verified = (positions, seconds)

    def _best(self, drafting: Drafting) -> float:
        """The largest chance that a first draft may have."""
        best = drafting.best(self._usual)
        return max(best, drafting.best(DraftSource.TEXT)) if self.head else best

    # -- inside ---------------------------------------------------------------------------------

    def _asked(self, sequences: abc.Sequence[Sequence]) -> Collection[int]:
        """The rows that are asked for drafts: all, or as many as a short step of many rows has time for.
        Those whose drafts were verified last go first, the others in turn. None in a pause."""
        rows = len(sequences)
        if not self.adaptive:
            return range(rows)
        asks = int(_ASKING_SHARE / _ASKING * self._decodes.of(rows)) + 1
        if asks >= rows:
            return range(rows)
        if self._turn % self._pause:
            return ()
        hot = self._hot = {key: turn for key, turn in self._hot.items() if self._turn - turn <= _WARM}
        again = [row for row, sequence in enumerate(sequences) if sequence.key in hot] if hot else []
        again = again[: asks * 3 // 4]
        first, count = self._first % rows, asks - len(again)
        self._first = (first + count) % rows
        return dict.fromkeys([*again, *(row % rows for row in range(first, first + count))])

    def _proposal(self, sequence: Sequence, drafting: Drafting, start: int, most: int) -> abc.Sequence[int]:
        """Drafts for the positions after ``start``, whose own token the host may not know yet."""
        pending = start + 1 - sequence.known
        if sequence.grammar is not None:
            position, forced = sequence.grammar.suggested
            if known := forced[max(0, start + 1 - position) :][:most] if position <= start + 1 else ():
                drafting.source = DraftSource.GRAMMAR
                return known
        drafting.request.extend(sequence.output_ids)
        # A copy: the drafter may write to its own again.
        ids: list[int] = []
        try:
            for proposed in self._drafter.propose(drafting.request, most + pending)[pending : most + pending]:
                token = operator.index(proposed)
                # After an end there is nothing to verify.
                if not 0 <= token < self._vocab_size or token in sequence.stop_ids:
                    break
                ids.append(token)
            drafting.source = DraftSource.PREDICTION if drafting.request.predicted else DraftSource.TEXT
            if 0 < drafting.request.matched < _LONG and not drafting.request.predicted:
                drafting.source = DraftSource.SHORT
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # panics of libraries in Rust are no Exceptions
            drafting.failed = True
            _log.error("%s: its drafter raised, and proposes nothing more", sequence, exc_info=error)
            return ()
        if self._catch_up and not drafting.request.predicted:
            if self.head and ids and drafting.rate >= drafting.rate_of(DraftSource.MODEL):
                return ids
            return self._undrawn(sequence, drafting, start, most) or (ids if self.head else ())
        return ids

    def _undrawn(self, sequence: Sequence, drafting: Drafting, start: int, most: int) -> abc.Sequence[int]:
        """Drafts of a draft model, if it can make any now: masks and logits processors would have to know
        them."""
        drafting.computed -= drafting.computed % self.draft_unit
        missing = start - drafting.computed
        most = min(most, self._length - start)
        if sequence.grammar is not None or start > sequence.known or most <= 0:
            return ()
        if sequence.steering is not None and start + 1 + most >= sequence.steering.idle_until:
            return ()
        if self.head:
            if not drafting.computed:
                return ()  # no chunk has resolved since it came
            drafting.source = DraftSource.MODEL
            return [UNDRAWN] * min(most, self._head_most)
        if missing > self._catch_up:
            self._behind = self._behind or sequence
            return ()
        drafting.source = DraftSource.MODEL
        if self.draft_unit > 1:
            most = min(most, self.draft_unit - (start + 1) % self.draft_unit)
        return [UNDRAWN] * most

    def _least_chance(self, rows: int) -> float:
        """The probability with which a draft must be right for any number of them to pay."""
        token = self._decodes.of(rows) / rows
        needed = [self._verifies.of(rows + count) / token - rows for count in _SOME]
        for chance, tokens in _EXPECTED:
            if any(map(operator.gt, tokens, needed)):
                return chance
        return 1.0

    def _worthwhile(
        self, proposals: Mapping[int, tuple[Drafting, abc.Sequence[int]]], rows: int, room: int
    ) -> dict[int, abc.Sequence[int]]:
        """The likeliest drafts, as many as make the step bring the most tokens per second."""
        chances: list[tuple[float, int]] = []
        for row, (drafting, ids) in proposals.items():
            chance = 1.0
            for _ in ids:
                chance *= drafting.rate
                if chance < _LEAST:
                    break
                chances.append((chance, row))
        # Of one row, a later draft is never likelier than an earlier one.
        chances.sort(key=lambda each: -each[0])
        best, most, tokens = 0, _WORTH * rows / self._decodes.of(rows), float(rows)
        verifying: set[int] = set()
        for count, (chance, row) in enumerate(chances[:room], 1):
            tokens += chance
            verifying.add(row)
            # Few miss the step behind, and the one token that it would have brought each.
            missed = len(verifying) if self.overlap and len(verifying) * FEW < rows else 0
            if (rate := (tokens - missed) / self._verifies.of(rows + count)) > most:
                best, most = count, rate
        if proposals and not best and self._turn >= self._hopes:
            self._verifies.hope()
            self._hopes = self._turn + _PROBE
        counts: dict[int, int] = {}
        for _, row in chances[:best]:
            counts[row] = counts.get(row, 0) + 1
        for row, (drafting, _) in proposals.items():
            if row not in counts:
                drafting.unused()
        return {row: proposals[row][1][:count] for row, count in counts.items()}


def _in_turn(proposals: Mapping[int, abc.Sequence[int]], room: int) -> dict[int, abc.Sequence[int]]:
    """As far as there is room."""
    chosen: dict[int, abc.Sequence[int]] = {}
    for row, ids in proposals.items():
        if room <= 0:
            break
        chosen[row] = ids[:room]
        room -= len(chosen[row])
    return chosen


def _entries(sequence: Sequence, drafting: Drafting, start: int, row: int) -> DraftInput:
    """The entries of a draft head that a request lacks up to position ``start``, whose own token may be known
    on the device only: the tokens behind the positions. Hidden states that were kept too long ago are
    gone."""
    first = max(min(drafting.computed, start - 1), start - STASHED // 2)
    drafting.computed = start if row >= 0 else start - 1
    return DraftInput(sequence.kv.slot, first, sequence.known_ids(first + 1, start), row)
