"""Searches of the rows of a round: a slow one sits out, a broken one fails, and the others go on."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch

from aioinfer.diffusion.paths import Allowed, BlockRow, Path, Search, WhichToken
from aioinfer.diffusion.proposal import Asked
from aioinfer.execution.decoding.path_turns import Found, PathTurns, Seeker
from aioinfer.execution.grammar_worker import GrammarWorker
from aioinfer.text.grammar import GrammarState, Matcher

VOCAB, SIZE, PATIENCE = 40, 4, 0.05


class Masks:
    """A backend that allows one token, after something has happened."""

    def __init__(self, token: int, gate: threading.Event | None = None, error: BaseException | None = None):
        self.token = token
        self.gate = gate
        self.error = error
        self.threads: list[str] = []

    def fill(self, matchers: Sequence[Matcher], masks: Sequence[npt.NDArray[np.int32]]) -> None:
        self.threads.append(threading.current_thread().name)
        if self.gate is not None:
            self.gate.wait()
        if self.error is not None:
            raise self.error
        for mask in masks:
            mask[self.token // 32] = 1 << self.token % 32


class NoMatcher:
    def copy(self) -> NoMatcher:
        return self


@dataclass
class AskAll:
    """Asks for each position; its state is that of ``backend``."""

    state: GrammarState
    error: BaseException | None = None

    def take(self, start: int, ids: Sequence[int], known: Sequence[bool]) -> None: ...

    def search(self, row: BlockRow) -> Search:
        tokens = []
        for at in range(len(row.ids)):
            answer = yield WhichToken(at, self.state.matcher)
            assert isinstance(answer, Allowed)
            tokens.append(answer.token)
            yield None
            if self.error is not None:
                raise self.error
        return Path(tokens, [1.0] * len(tokens))


def seek(backend: Masks, error: BaseException | None = None) -> Seeker:
    state = GrammarState(backend, NoMatcher(), 0, VOCAB)  # type: ignore[arg-type]
    return Seeker(AskAll(state, error))


def row(start: int = 0) -> BlockRow:
    none = [-1] * SIZE
    return BlockRow(start, none, [False] * SIZE, [0] * SIZE, [0.5] * SIZE, none, [0.0] * SIZE)


def find(turns: PathTurns, seekers: Sequence[Seeker], *, start: int = 0, alone: bool = False) -> list[Found]:
    count = len(seekers)
    greedy = {name: torch.zeros(count) for name in ("temperature", "top_p", "min_p")}
    greedy |= {name: torch.zeros(count, dtype=torch.int64) for name in ("top_k", "seed")}
    zeros = torch.zeros(count, dtype=torch.int64)
    positions = torch.zeros(count, SIZE, dtype=torch.int64)
    asked = Asked(positions, zeros, greedy, positions == 0, mask_id=VOCAB - 1, drawn=False)
    rows = {at: (seeker, row(start)) for at, seeker in enumerate(seekers)}
    found = turns.find(rows, torch.zeros(count, SIZE, VOCAB), asked, alone=alone)
    return [found[at] for at in range(count)]


@pytest.fixture
def worker() -> GrammarWorker:
    return GrammarWorker(PATIENCE)


def test_a_slow_search_sits_out_and_delays_no_other(worker: GrammarWorker) -> None:
    turns, gate = PathTurns(worker), threading.Event()
    slow, quick = Masks(3, gate), Masks(5)
    seekers = [seek(quick), seek(slow), seek(quick)]
    found = find(turns, seekers)
    assert [each.late for each in found] == [False, True, False]
    assert found[0] == found[2] == Found(Path([5] * SIZE, [1.0] * SIZE))
    assert [each.late for each in find(turns, seekers)] == [False, True, False]
    gate.set()
    while (last := find(turns, seekers, alone=True)[1]).late:
        pass
    assert last.path == Path([3] * SIZE, [1.0] * SIZE)
    assert slow.threads[-1].startswith("aioinfer-masks-slow")
    worker.close()


def test_more_slow_searches_than_threads_hold_no_round_up(worker: GrammarWorker) -> None:
    turns, gate = PathTurns(worker), threading.Event()
    seekers = [*(seek(Masks(3, gate)) for _ in range(9)), seek(Masks(5))]
    assert all(each.late for each in find(turns, seekers)[:-1])
    assert all(each.late for each in find(turns, seekers)[:-1])
    gate.set()
    paths: list[Path | None] = [None] * len(seekers)
    while None in paths:
        for at, found in enumerate(find(turns, seekers, alone=True)):
            paths[at] = paths[at] or found.path
    assert [path and path.tokens[0] for path in paths] == [3] * 9 + [5]
    worker.close()


def test_a_path_that_comes_late_is_not_used_for_another_block(worker: GrammarWorker) -> None:
    turns, gate = PathTurns(worker), threading.Event()
    slow = seek(Masks(3, gate))
    assert find(turns, [slow])[0].late
    abandoned = slow.late
    gate.set()
    found = find(turns, [slow], start=SIZE)[0]
    assert slow.late is not abandoned or not found.late
    worker.close()


@pytest.mark.parametrize("where", ["mask", "search"])
def test_what_raises_fails_its_own_row(worker: GrammarWorker, where: str) -> None:
    class Panic(BaseException):
        """As libraries in Rust raise."""

    turns, panic = PathTurns(worker), Panic("at the worst")
    bad = seek(Masks(3, error=panic)) if where == "mask" else seek(Masks(3), panic)
    good = seek(Masks(5))
    found = find(turns, [bad, good])
    assert found == [Found(None), Found(Path([5] * SIZE, [1.0] * SIZE))]
    assert bad.search.state.broken
    assert bad.search.state.failed is not None
    assert "at the worst" in bad.search.state.failed
    assert good.search.state.failed is None
    worker.close()


def test_a_search_that_takes_too_much_processor_time_fails(
    worker: GrammarWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioinfer.execution.decoding.path_turns.MOST_SECONDS", -1.0)
    turns, seeker = PathTurns(worker), seek(Masks(3))
    assert find(turns, [seeker]) == [Found(None)]
    worker.close()


def test_without_patience_all_paths_come_late_and_are_the_same() -> None:
    worker = GrammarWorker(0.0)
    turns, seekers = PathTurns(worker), [seek(Masks(3)), seek(Masks(5))]
    paths: list[Path | None] = [None, None]
    while None in paths:
        for at, found in enumerate(find(turns, seekers)):
            if not found.late:
                paths[at] = found.path
    assert paths == [Path([3] * SIZE, [1.0] * SIZE), Path([5] * SIZE, [1.0] * SIZE)]
    worker.close()
