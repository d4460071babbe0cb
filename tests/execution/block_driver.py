"""A small scheduler of blocks that takes every liberty a real one may take, and what must come of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from aioinfer.diffusion.state import BlockState
from aioinfer.execution.device import Flight
from aioinfer.params import DiffusionParams, SamplingParams
from aioinfer.sampling.outcomes import NO_TOKEN
from aioinfer.scheduling.step import NO_ROWS, MultiStepBudget, NewRequestData, Row, Step
from tests.diffusion import reference
from tests.toys.scripted import ScriptedLogits

Launch = Callable[[Step], Flight]
#: [B, V] of a block, from the tokens before it and its own
Logits = Callable[[list[int], list[int]], torch.Tensor]


@dataclass
class Driven:
    """One request, and what is known of it on the host."""

    key: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    slot: int
    pages: list[int]
    #: final tokens
    known: list[int] = field(default_factory=list)
    #: where the slot's block begins, and what was last read of it
    at: int = 0
    state: BlockState | None = None
    #: positions whose KV is final when all rows in flight are done
    reached: int = 0
    #: pages that the device knows of; None before the slot is taken
    told: int | None = None
    #: every state that was reported, in order, and the rounds of its step
    reported: list[tuple[BlockState, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.known = list(self.prompt)
        self.handle: Any = SimpleNamespace(key=self.key)


class Driver:
    """Plans rows at random, as far ahead of what it has read as told."""

    def __init__(self, launch: Launch, requests: list[Driven], size: int, page_size: int, seed: int) -> None:
        self.launch = launch
        self.requests = requests
        self.size = size
        self.page_size = page_size
        self.rng = random.Random(seed)
        self.step = 0
        self.flights: list[tuple[list[tuple[Driven, Row]], Flight]] = []
        #: what a step may raise, and how often one did
        self.fails_with: type[Exception] | None = None
        self.failures = 0
        #: what rows were like: known ids, blocks, a final block in the slot, first in the slot
        self.kinds: set[tuple[bool, int, bool, bool]] = set()
        for request in requests:
            request.at = len(request.prompt) // size * size

    def run(
        self,
        blocks: int,
        *,
        ahead: int = 0,
        rounds: int = 1,
        move: Callable[[Driven], None] | None = None,
    ) -> None:
        """Until every request has so many blocks more than its prompt. ``move`` takes one somewhere else."""
        while waiting := [each for each in self.requests if each.at // self.size < self._end(each, blocks)]:
            self._launch(self.rng.sample(waiting, self.rng.randint(1, len(waiting))), rounds)
            while len(self.flights) > ahead:
                self._read()
            if move is not None and not self.flights and self.rng.random() < 0.3:
                self._retract(self.rng.choice(self.requests), move)
        while self.flights:
            self._read()

    def _end(self, request: Driven, blocks: int) -> int:
        return len(request.prompt) // self.size + blocks

    def _launch(self, requests: list[Driven], rounds: int) -> None:
        self.step += 1
        planned = [(request, self._row(request)) for request in requests]
        single = all(row.blocks == 1 and not row.ids for _, row in planned)
        rows = tuple(row for _, row in planned)
        multi_step = MultiStepBudget(rounds) if single and rounds > 1 else None
        step = Step(self.step, NO_ROWS, rows, sum(row.length for row in rows), multi_step)
        try:
            self.flights.append((planned, self.launch(step)))
        except Exception as error:
            if self.fails_with is None or not isinstance(error, self.fails_with):
                raise
            self._start_over(requests)

    def _start_over(self, requests: list[Driven]) -> None:
        """A step failed. What was launched before counts, what is launched behind does not."""
        self.failures += 1
        while self.flights:
            self._read()
        for request in requests:
            if request.told is not None and self.rng.random() < 0.5:
                self._launch_in_vain(request)
            request.told, request.reached = None, 0
            request.at, request.state = len(request.known) // self.size * self.size, None
            if request.reported and not request.reported[-1][0].done:
                request.state = request.reported[-1][0]

    def _launch_in_vain(self, request: Driven) -> None:
        """A row that was planned before its request's last step was known to have failed."""
        self.step += 1
        row = self._make(request, request.at, 0, 1)
        try:
            self.launch(Step(self.step, NO_ROWS, (row,), row.length)).wait()
        except Exception as error:
            if self.fails_with is None or not isinstance(error, self.fails_with):
                raise

    def _unread(self, request: Driven) -> bool:
        return any(each is request and row.blocks for planned, _ in self.flights for each, row in planned)

    def _row(self, request: Driven) -> Row:
        """Any row that is right whatever the flights bring."""
        size, rng, at = self.size, self.rng, request.at
        start, ids, final = at, 0, request.state is not None and request.state.done
        if self._unread(request):
            # Nobody knows yet whether the block is final: this row finds out.
            blocks = 2
        elif request.reached < at:
            start = request.reached
            ids = rng.randint(1, (at - start) // size)
            blocks = rng.choice([0, 1, 2]) if start + ids * size == at else 0
        elif not final:
            blocks = rng.choice([1, 2])
        elif request.reached == at:
            # To commit: known ids, with or without the next block; the block as it is; or with the next one.
            ids, blocks = rng.choice([(1, 0), (1, 1), (0, 1), (0, 2)])
        else:
            start, blocks = rng.choice([(at, 2), (at + size, 1)])
        self.kinds.add((bool(ids), blocks, final, request.told is None))
        row = self._make(request, start, ids, blocks)
        end = row.kv_length - (size if blocks else 0)
        if final or ids:
            request.reached = max(request.reached, row.start + ids * size, at + size if final else 0)
        if final and blocks and end > at:
            request.at, request.state = end, None
        return row

    def _make(self, request: Driven, start: int, ids: int, blocks: int) -> Row:
        admission = None
        if request.told is None:
            output = request.known[len(request.prompt) : max(request.at, len(request.prompt))]
            admission = NewRequestData(
                *(request.params, request.seed, frozenset(), request.prompt, output), resume=request.state
            )
        first, length = request.told or 0, (ids + blocks) * self.size
        needed = max(first, -(-(start + length) // self.page_size))
        request.told = needed
        return Row(
            *(request.handle, request.slot, start, length, request.known[start : start + ids * self.size]),
            samples=False,
            new_pages=request.pages[first:needed],
            first_new_page=first,
            new_request=admission,
            blocks=blocks,
        )

    def _read(self) -> None:
        planned, flight = self.flights.pop(0)
        result = flight.wait()
        assert result.tokens == [NO_TOKEN] * len(planned)
        assert set(result.blocks) == {number for number, (_, row) in enumerate(planned) if row.blocks}
        for number, state in result.blocks.items():
            request, _ = planned[number]
            request.reported.append((state, result.rounds))
            request.at, request.state = state.start, state
            if not state.done:
                continue
            request.known[state.start :] = state.ids
            if not state.changed:
                request.reached = max(request.reached, state.start + self.size)
            if self._unread(request):
                request.at, request.state = state.start + self.size, None
                request.reached = request.at

    def _retract(self, request: Driven, move: Callable[[Driven], None]) -> None:
        """It loses slot and pages, and comes back elsewhere."""
        if request.told is None:
            return
        if request.state is not None and request.state.done:
            request.at, request.state = request.at + self.size, None
        request.told, request.reached = None, 0
        move(request)


def scripted(script: ScriptedLogits, size: int) -> Logits:
    """Of a scripted model, hashing all from the start."""

    def logits(prefix: list[int], ids: list[int]) -> torch.Tensor:
        before = torch.zeros(1, dtype=torch.int64)
        for digest in script.digest(torch.tensor(prefix, dtype=torch.int64).view(-1, size)):
            before = script.chain(before, digest)
        return script.logits(before, torch.tensor([ids]))[0]

    return logits


def check(request: Driven, logits: Logits, size: int, mask_id: int, tolerance: float = 1e-4) -> None:
    """What was reported is what the plain reference does, round for round, and nothing is left out."""
    diffusion = request.params.diffusion or DiffusionParams()
    given = {name: getattr(diffusion, name) for name in diffusion.given()}
    sampling = {name: getattr(request.params, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    prefix = request.prompt[: len(request.prompt) // size * size]
    row = reference.Row(
        *(diffusion.algorithm, request.prompt[len(prefix) :], size, mask_id, len(prefix), given),
        sampling={**sampling, "seed": request.seed},
    )
    for state, rounds in request.reported:
        if state.start > row.start:
            assert row.done, "went on from a block that was not final"
            prefix = prefix + row.ids
            row = reference.Row(
                *(diffusion.algorithm, [], size, mask_id, row.start + size, given), sampling=row.sampling
            )
        assert state.start == row.start
        for _ in range(rounds):
            row.step(logits(prefix, row.ids))
        for name in ("ids", "known", "written_in", "rounds", "done", "changed", "failed"):
            assert getattr(state, name) == getattr(row, name), (name, row.start, row.rounds)
        # Behind it, the memory of joint_threshold_indel, which shows in what is written.
        assert state.private[:1] == ((row.post_edits,) if "joint" in diffusion.algorithm else ())
        torch.testing.assert_close(
            torch.tensor(state.logprobs), torch.tensor(row.logprobs), rtol=tolerance, atol=tolerance
        )
