"""PathTurns: the searches for paths of the rows of a round, side by side, in turns.

::

    launch thread   forward ── search ─ ask ─┐        ┌─ answer ── search ─ ... ── choose, write ─► forward
    mask thread                              └─ masks ┘
    slow threads                               a search that has taken long, to its end

Each turn answers one question of every row that has one: one call for their masks, one proposal for their
logits. Where the newest mask of a grammar was quick, the launch thread makes the next by itself; the first
one that is not quick is the last of those. A row whose search takes longer than the patience *sits out*:
the round writes nothing in it and does not count, while its search goes on apart from the others, with the
logits that it has. The path is used when it is there. So no id depends on how long a search takes, and no
row waits for that of another.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from aioinfer.diffusion.block import Rows
from aioinfer.diffusion.paths import (
    Allowed,
    BlockRow,
    Path,
    PathSearch,
    Search,
    Weights,
    WhichToken,
    WhichWeights,
)
from aioinfer.diffusion.proposal import Asked, propose, weigh
from aioinfer.execution.decoding.block_adjustments import filtered
from aioinfer.execution.grammar_worker import GrammarWorker
from aioinfer.sampling.filters import floors
from aioinfer.sampling.logits_processors import apply_masks_
from aioinfer.text.grammar import MOST_SECONDS, QUICK_MASK, GrammarState

__all__ = ["Found", "PathTurns", "Seeker"]


@dataclass(slots=True, eq=False)
class Seeker:
    """The search of one request, the further filters of its tokens, and what of it goes on apart."""

    search: PathSearch
    filters: Mapping[str, float] = field(default_factory=dict)
    late: _Going | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """The outcome of one row: there is none yet (``late``), or ``path``; None: there is no path."""

    path: Path | None
    late: bool = False


@dataclass(slots=True, eq=False)
class _Going:
    """One search under way. ``at``: its row in the logits."""

    at: int
    seeker: Seeker
    row: BlockRow
    logits: torch.Tensor
    asked: Asked
    steps: Search
    question: WhichToken | WhichWeights | None = None
    #: of the question
    mask: npt.NDArray[np.int32] | None = None
    path: Path | None = None
    #: there is a path, or none; of one that is late, its thread is done with it, too
    done: bool = False
    finished: bool = False
    #: seconds it has taken
    seconds: float = 0.0

    @property
    def state(self) -> GrammarState:
        return self.seeker.search.state

    @property
    def late(self) -> bool:
        return self.seeker.late is self

    def own(self) -> None:
        """Keep what is needed of the round."""
        part = slice(self.at, self.at + 1)
        own = _of_row(self.asked, part)
        lowered = own.lowered
        self.logits = _copy(self.logits[part])
        self.asked = replace(
            own,
            positions=_copy(own.positions),
            rounds=_copy(own.rounds),
            sampling={name: _copy(column) for name, column in own.sampling.items()},
            wanted=_copy(own.wanted),
            lowered=None if lowered is None else (_copy(lowered[0]), _copy(lowered[1])),
        )
        self.at = 0

    def step(self, answer: Allowed | Weights | None = None) -> None:
        """Up to the next question, or the end."""
        began, used = time.monotonic(), time.thread_time()
        try:
            self.question, self.mask = self.steps.send(answer), None
        except StopIteration as ended:
            self.path, self.done = ended.value, True
        except BaseException as error:  # panics of Rust libraries are not Exceptions
            self.fail(error)
        self._charge(began, used)

    def fill(self) -> None:
        """Make the mask of the question."""
        question, state = self.question, self.state
        assert isinstance(question, WhichToken)
        began, used = time.monotonic(), time.thread_time()
        mask = np.zeros(-(-state.vocab_size // 32), np.int32)
        try:
            state.backend.fill([question.matcher], [mask])
        except BaseException as error:  # panics of Rust libraries are not Exceptions
            self.fail(error)
        self.take(mask, time.monotonic() - began)
        self._charge(began, used)

    def take(self, mask: npt.NDArray[np.int32], seconds: float) -> None:
        """Take a mask that was made in so many seconds."""
        question = self.question
        assert isinstance(question, WhichToken)
        for token in question.but:
            mask.view(np.uint32)[token // 32] &= np.uint32(0xFFFFFFFF ^ (1 << token % 32))
        self.mask = mask
        self.state.quick = seconds < QUICK_MASK

    def answer(self) -> Allowed | Weights | None:
        """The answer to the question."""
        question = self.question
        if isinstance(question, WhichWeights):
            return self._weights(question)
        if question is None:
            return None
        if self.mask is None:
            self.fill()
        return _allowed([self])[0]

    def _weights(self, question: WhichWeights) -> Weights:
        device, at = self.logits.device, slice(self.at, self.at + 1)
        tokens = torch.from_numpy(question.tokens).to(device)
        proposed = torch.tensor(self.row.tokens, device=device)
        own = _of_row(self.asked, at)
        logprobs, noise, free = weigh(self.logits[at], own, tokens, proposed)
        filters = noise is not None and (self.asked.filtered or self.seeker.filters)
        return Weights(
            logprobs.cpu().numpy(),
            None if noise is None else noise.cpu().numpy(),
            None if free is None else free.cpu().numpy(),
            _Kept(own.sampling, self.seeker.filters) if filters else None,
        )

    def fail(self, error: BaseException) -> None:
        self.state.fail(f"its grammar failed: {error}")
        self.path, self.done = None, True

    def _charge(self, began: float, used: float) -> None:
        self.seconds += time.monotonic() - began
        state = self.state
        state.charge(time.thread_time() - used, 1)
        if state.overtime > MOST_SECONDS:
            self.path, self.done = None, True


class _Kept:
    """Which tokens the filters of a request keep, as in :func:`~aioinfer.diffusion.proposal.propose`."""

    def __init__(self, sampling: Rows, further: Mapping[str, float]) -> None:
        self._sampling = {name: column.cpu() for name, column in sampling.items()}
        self._further = further

    def __call__(self, logprobs: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
        line = torch.from_numpy((logprobs - logprobs.max()).astype(np.float32)).unsqueeze(0)
        if self._further:
            left = filtered(line * self._sampling["temperature"], [self._further])
            line = line.masked_fill(left == -torch.inf, -torch.inf)
        top_k, top_p, min_p = (self._sampling[name] for name in ("top_k", "top_p", "min_p"))
        kept: npt.NDArray[np.bool_] = (line >= floors(line, top_k, top_p, min_p))[0].numpy()
        return kept


def _copy(column: torch.Tensor) -> torch.Tensor:
    return column.to("cpu", copy=True)


def _of_row(asked: Asked, row: slice) -> Asked:
    lowered = asked.lowered
    return replace(
        asked,
        positions=asked.positions[row],
        rounds=asked.rounds[row],
        sampling={name: column[row] for name, column in asked.sampling.items()},
        wanted=asked.wanted[row],
        lowered=None if lowered is None else (lowered[0][row], lowered[1][row]),
    )


class _Fill:
    """The masks of a turn, made one after the other on a thread, as each may take long or panic."""

    def __init__(self, turns: PathTurns, asking: Sequence[_Going]) -> None:
        self.turns = turns
        self.waiting = deque(asking)
        self.current: _Going | None = None
        #: when that began
        self.since = time.monotonic()

    @property
    def done(self) -> bool:
        return self.current is None and not self.waiting

    def run(self) -> None:
        while True:
            with self.turns.changed:
                before, self.current = self.current, self.waiting.popleft() if self.waiting else None
                self.since = time.monotonic()
                if self.current is None:
                    self.turns.changed.notify_all()
            if before is not None and before.late:
                self.turns.go_on_apart(before)
            if self.current is None:
                return
            self.current.fill()

    def fail(self, error: BaseException) -> None:
        with self.turns.changed:
            for each in (*([self.current] if self.current else []), *self.waiting):
                each.fail(error)
                each.finished = True
            self.current = None
            self.waiting.clear()
            self.turns.changed.notify_all()


class _Apart:
    """The rest of a search, on a thread of its own."""

    def __init__(self, turns: PathTurns, going: _Going) -> None:
        self.turns = turns
        self.going = going

    def run(self) -> None:
        going = self.going
        with torch.inference_mode():
            while not going.done:
                try:
                    answer = going.answer()
                except BaseException as error:
                    going.fail(error)
                else:
                    if not going.done:
                        going.step(answer)
        going.seeker.search.state.slow = going.seconds > self.turns.patience
        self._finish()

    def _finish(self) -> None:
        with self.turns.changed:
            self.going.finished = True
            self.turns.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        self.going.fail(error)
        self._finish()


class PathTurns:
    """Launch thread only, but for what its searches do apart."""

    def __init__(self, worker: GrammarWorker) -> None:
        self._worker = worker
        self.changed = threading.Condition()

    @property
    def patience(self) -> float:
        """Seconds that a round waits for one row."""
        return self._worker.patience

    def find(
        self,
        rows: Mapping[int, tuple[Seeker, BlockRow]],
        logits: torch.Tensor,
        asked: Asked,
        *,
        alone: bool,
    ) -> dict[int, Found]:
        """The outcome of each row, by its index in ``logits``. ``alone``: no other row of the step waits, so
        that where all are late there is time to wait for one."""
        going: list[_Going] = []
        for at, (seeker, row) in rows.items():
            if seeker.late is None or not _same(seeker.late.row, row):
                seeker.late = None
                going.append(_Going(at, seeker, row, logits, asked, seeker.search.search(row)))
        slow = [each for each in going if each.state.slow]
        quick = [each for each in going if not each.state.slow]
        for each in slow:
            self._go_apart(each)
        self._turns(quick)
        late = [seeker for seeker, _ in rows.values() if seeker.late is not None]
        if alone and late and len(late) == len(rows):
            with self.changed:
                self.changed.wait_for(lambda: any(map(_finished, late)), self.patience)
        found = {each.at: Found(each.path) for each in quick if not each.late}
        for at, (seeker, _) in rows.items():
            if (under_way := seeker.late) is not None:
                found[at] = Found(under_way.path, late=not under_way.finished)
                if under_way.finished:
                    seeker.late = None
        return found

    def _turns(self, going: list[_Going]) -> None:
        for each in going:
            each.step()
        while going := [each for each in going if not each.done and not each.late]:
            for each in going:
                if each.seconds > self.patience:
                    self._go_apart(each)
            self._turn([each for each in going if not each.late])

    def _turn(self, going: list[_Going]) -> None:
        """Answer a question of each, unless it takes too long."""
        self._fill([each for each in going if isinstance(each.question, WhichToken)])
        ready = [each for each in going if not each.done and not each.late]
        asking = [each for each in ready if isinstance(each.question, WhichToken)]
        answers = dict(zip(map(id, asking), _allowed(asking), strict=True))
        for each in ready:
            each.step(answers[id(each)] if id(each) in answers else each.answer())

    def _fill(self, asking: Sequence[_Going]) -> None:
        """Have the masks made. One that takes longer than the patience goes on apart."""
        _fill_here([each for each in asking if each.state.quick])
        asking = [each for each in asking if each.mask is None]
        while asking:
            fill = _Fill(self, asking)
            self._worker.call(fill, slow=False)
            asking = ()
            with self.changed:
                while not fill.done:
                    left = fill.since + self.patience - time.monotonic()
                    if left > 0:
                        self.changed.wait(left)
                        continue
                    if fill.current is None:
                        # No thread has come to it: all are stuck.
                        for each in fill.waiting:
                            self._is_late(each)
                        break
                    self._is_late(fill.current)
                    asking = tuple(fill.waiting)
                    fill.waiting.clear()
                    break

    def _is_late(self, going: _Going) -> None:
        going.own()
        going.seeker.late = going

    def _go_apart(self, going: _Going) -> None:
        self._is_late(going)
        self.go_on_apart(going)

    def go_on_apart(self, going: _Going) -> None:
        """On any thread: have the rest of a search that is late done."""
        self._worker.call(_Apart(self, going), slow=True)


def _fill_here(asking: Sequence[_Going]) -> None:
    """Make masks that are expected to be quick, where a thread would cost more than they do. Where that
    raises, none is made: a thread finds out whose fault it is."""
    backends: dict[int, list[_Going]] = {}
    for each in asking:
        backends.setdefault(id(each.state.backend), []).append(each)
    for group in backends.values():
        began, state = time.monotonic(), group[0].state
        masks = [np.zeros(-(-state.vocab_size // 32), np.int32) for _ in group]
        matchers = [each.question.matcher for each in group if isinstance(each.question, WhichToken)]
        try:
            state.backend.fill(matchers, masks)
        except BaseException:  # panics of Rust libraries are not Exceptions
            continue
        seconds = (time.monotonic() - began) / len(group)
        for each, mask in zip(group, masks, strict=True):
            each.seconds += seconds
            each.take(mask, seconds)


def _same(one: BlockRow, other: BlockRow) -> bool:
    """A path of the one is one of the other."""
    return (one.start, one.ids, one.known) == (other.start, other.ids, other.known)


def _finished(seeker: Seeker) -> bool:
    return seeker.late is not None and seeker.late.finished


def _allowed(asking: Sequence[_Going]) -> list[Allowed]:
    """The likeliest or the drawn token of those that each row's mask allows."""
    if not asking:
        return []
    logits, asked = asking[0].logits, asking[0].asked
    device = logits.device
    places = [each.question.at for each in asking if isinstance(each.question, WhichToken)]
    rows, at = (torch.tensor(each, device=device) for each in ([each.at for each in asking], places))
    lines = logits[rows, at]
    masks = torch.from_numpy(np.stack([each.mask for each in asking if each.mask is not None])).to(device)
    apply_masks_(lines, torch.arange(len(lines), device=device), masks)
    lines = filtered(lines, [each.seeker.filters for each in asking])
    # Of greedy rows, nothing but their logits counts.
    mine = _of_rows(asked, rows, at) if asked.drawn or asked.lowered is not None else asked
    best = propose(lines.unsqueeze(1), replace(mine, entropy=False))
    found = zip(best.tokens[:, 0].tolist(), best.valid[:, 0].tolist(), best.confidence.tolist(), strict=True)
    return [Allowed(token if good else -1, sure) for token, good, (sure,) in found]


def _of_rows(asked: Asked, rows: torch.Tensor, at: torch.Tensor) -> Asked:
    """What was asked, for one position of each of some rows."""
    lowered = asked.lowered
    return replace(
        asked,
        positions=asked.positions[rows, at].unsqueeze(1),
        rounds=asked.rounds[rows],
        sampling={name: column[rows] for name, column in asked.sampling.items()},
        wanted=torch.ones_like(rows, dtype=torch.bool).unsqueeze(1),
        lowered=None if lowered is None else (lowered[0][rows, at].unsqueeze(1), lowered[1][rows]),
    )
