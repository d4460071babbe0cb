"""ToyDevice: a hash "model" over tainted KV memory, which turns any mix-up into an exact failure.

The next token is a hash of all tokens before it, so a page, slot or placeholder of another request
changes the output with near certainty. And before it computes, the toy checks what it is about to
read: every KV cell must hold the right position of exactly the reader's own tokens, whichever row wrote them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aioinfer.config import PAGE_SIZE
from aioinfer.execution.device import CompletedFlight, DeviceInfo, DeviceLost, Progress, StepResult
from aioinfer.execution.grammar_worker import GrammarRow, GrammarWorker
from aioinfer.execution.steering import SteeredRow, awake, steer
from aioinfer.images.support import ImageSupport
from aioinfer.observe.timeline import DeviceLane, now
from aioinfer.params import SamplingParams
from aioinfer.sampling.outcomes import ASKED, BAD_LOGITS, DEFERRED, FORCED, NO_TOKEN
from aioinfer.scheduling.step import NewRequestData, Row, Step
from aioinfer.testing.fake_device import logprob as toy_logprob
from tests.toys.adapters import ToyAdapter, ToyAdapters
from tests.toys.features import ToyFeatures
from tests.toys.pooling import beginning, mix, pool
from tests.toys.states import TaintError, ToyStates, number_in
from tests.toys.tokenizer import ToyTokenizer

__all__ = ["TaintError", "ToyDevice", "ToyTokenizer", "toy_generate", "toy_logprob"]

_POISON = -7


def _next_token(state: int, tenant: NewRequestData, output_index: int, vocab_size: int) -> int:
    """The token that the toy model samples after a sequence whose hash is ``state``."""
    seed = 0 if tenant.params.greedy else tenant.seed
    token = mix(state, seed) % vocab_size
    while output_index < tenant.params.min_tokens and token in tenant.stop_ids:
        token = (token + 1) % vocab_size
    return token


def toy_generate(
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    seed: int = 0,
    vocab_size: int = 64,
    eos: int = 0,
    max_length: int = 1 << 30,
    adapter: int = 0,
    weights: int = 0,
    begun: Sequence[int] = (),
) -> list[int]:
    """What any correct engine must generate on a :class:`ToyDevice`, computed in the plainest way: by
    ``weights``, behind the output that has ``begun``. ``adapter``: the key of the request's
    :class:`~tests.toys.adapters.ToyAdapter`."""
    stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else {eos})
    tenant = NewRequestData(params, seed, stop_ids, prompt_ids, ())
    state = beginning(weights) ^ adapter
    for token in (*prompt_ids, *begun):
        state = mix(state, token)
    output = [*begun]
    if params.max_tokens is not None:
        max_length = min(max_length, len(prompt_ids) + params.max_tokens)
    while len(prompt_ids) + len(output) < max_length:
        token = _next_token(state, tenant, len(output), vocab_size)
        output.append(token)
        if token in stop_ids:
            break
        state = mix(state, token)
    return output


class ToyDevice:
    """A device without a model. Synchronous; needs numpy only.

    ``fault`` is called with every step before it is computed and may raise, as a device would; so is
    ``late_fault`` when everything is computed and sampled. What failed is never simply missing: cells of its
    rows hold junk, and so does what rows behind bring. ``defer`` is called with every row that samples: None
    lets it, otherwise so many tokens follow unsampled, perhaps 0. With ``snapshots`` the model has a
    recurrent state, of which so many can be kept; it must be right wherever a row starts from it.
    ``max_adapters``: slots for adapters, each of which makes another model. ``images``: it reads images,
    whose words are a part of the hash.
    """

    synchronous = True

    def __init__(
        self,
        *,
        num_pages: int = 64,
        page_size: int | None = 4,
        num_slots: int = 16,
        max_model_len: int | None = None,
        vocab_size: int = 64,
        fault: Callable[[Step], None] | None = None,
        late_fault: Callable[[Step], None] | None = None,
        defer: Callable[[Row], int | None] | None = None,
        snapshots: int | None = None,
        max_adapters: int = 0,
        images: ImageSupport | None = None,
    ) -> None:
        self._images = images
        self.page_size = page_size = PAGE_SIZE if page_size is None else page_size
        self.vocab_size = vocab_size
        self.fault = fault
        self.late_fault = late_fault
        self.defer = defer
        self.lost = False
        self._num_pages = num_pages
        capacity = num_pages * page_size
        self._max_model_len = capacity if max_model_len is None else min(max_model_len, capacity)
        self._num_slots = num_slots
        self._snapshots = snapshots
        self._max_adapters = max_adapters
        self.masks = GrammarWorker(threaded=False)
        self.lane = DeviceLane()
        self.steps = 0
        self._reset()

    def _reset(self) -> None:
        """Fresh memory, as after opening."""
        cells = (self._num_pages + 1) * self.page_size
        self._position = np.full(cells, -1, np.int64)
        #: hash of the whole sequence up to the token in this cell
        self._state = np.zeros(cells, np.int64)
        #: by slot, what the cells of the tenant's sequence must hold
        self._expected: list[list[int]] = [[] for _ in range(self._num_slots + 1)]
        self._tables: list[list[int]] = [[] for _ in range(self._num_slots + 1)]
        self._tenants: list[NewRequestData | None] = [None] * (self._num_slots + 1)
        self._relay = [_POISON] * (self._num_slots + 1)
        #: requests that lost a step: what later steps in flight compute for them is junk, and dropped; until
        #: they are admitted again
        self._doomed: set[int] = set()
        #: requests whose newest row sampled nothing: rows behind it are junk until one brings its tokens
        self._void: set[int] = set()
        self._last_step = 0
        self.adapters = ToyAdapters(self._max_adapters)
        #: what the model's weights are: it writes another text for each
        self.weights = 0
        self._states = None if self._snapshots is None else ToyStates(self._num_slots, self._snapshots)
        self.features = None if self._images is None else ToyFeatures(self._images)

    def open(self, progress: Progress | None = None) -> DeviceInfo:
        self._reset()
        return DeviceInfo(
            vocab_size=self.vocab_size,
            max_model_len=self._max_model_len,
            num_pages=self._num_pages,
            eos_token_ids=frozenset({0}),
            description="toy",
            page_bytes=16 * self.page_size,
            page_layout="toy",
            hidden_size=3,
            num_snapshots=self._snapshots,
            max_adapters=self._max_adapters,
            images=self._images,
            adapter_reason="" if self._max_adapters else "this toy has none",
        )

    def prepare_adapter(self, path: Path) -> ToyAdapter:
        return ToyAdapter.read(path)

    def install_adapter(self, slot: int, adapter: ToyAdapter) -> None:
        self.adapters.install(slot, adapter)

    def remove_adapter(self, slot: int) -> None:
        self.adapters.remove(slot)

    def prepare(self, step: Step) -> _Prepared:
        """Keep the page tables as the host saw them when it planned the step."""
        tables = []
        rows = step.rows
        for row in rows:
            table = self._tables[row.slot]
            if row.new_request is not None:
                table.clear()
            if row.new_pages:
                if row.first_new_page > len(table):
                    raise TaintError(f"{row.sequence}: page {row.first_new_page} comes after a gap")
                table[row.first_new_page : row.first_new_page + len(row.new_pages)] = row.new_pages
            tables.append(table.copy())
        return _Prepared(step, rows, tables)

    def launch(self, prepared: _Prepared) -> CompletedFlight:
        step = prepared.step
        if step.id <= self._last_step:
            raise TaintError(f"step {step.id} was launched after step {self._last_step}")
        self._last_step = step.id
        self.steps += 1
        start = now()
        self.adapters.enter(prepared.rows)
        try:
            self.adapters.check(prepared.rows)
            if self.fault is not None:
                self.fault(step)
            if step.encoding is not None:
                assert self.features is not None, "a toy that reads no images is to encode some"
                self.features.encode(step.encoding)
            result = self._compute(prepared)
            if self.late_fault is not None:
                self.late_fault(step)
        except BaseException:
            self._spoil(prepared)
            raise
        self.lane.step(step.id, start, start, start, now())
        return CompletedFlight(result)

    def _compute(self, prepared: _Prepared) -> StepResult:
        # All rows write before any row samples, as in a packed forward.
        rows = prepared.rows
        if self._states is not None:
            self._states.check(rows)
        states = [self._write(row, table) for row, table in zip(rows, prepared.tables, strict=True)]
        result = StepResult([])
        for index, (row, state) in enumerate(zip(rows, states, strict=True)):
            forced: list[int] = []
            run = self._run(row, state, forced)
            result.tokens.append(run[0])
            if row.drafts:
                result.runs[index] = run
            if forced:
                result.forced[index] = forced
            tenant = self._tenants[row.slot]
            assert tenant is not None
            if tenant.params.logprobs is not None and run[0] >= 0:
                first = row.kv_length - len(row.drafts)
                found = [toy_logprob(at, token) for at, token in enumerate(run, first) if token >= 0]
                result.logprobs[index] = found
        for index, (row, state) in enumerate(zip(rows, states, strict=True)):
            tenant = self._tenants[row.slot]
            assert tenant is not None
            if row.pools is not None:
                assert row.sequence.pooled is not None
                hashes = self._hashes(row, state, *row.pools)
                result.pooled[index] = pool(row.sequence.pooled.pooling, hashes)
            if row.scores is not None:
                ids = [-1] * len(tenant.prompt_ids) if self._doomed_row(row) else tenant.prompt_ids
                result.prompt_logprobs[index] = [
                    toy_logprob(at + 1, ids[at + 1]) for at in range(*row.scores)
                ]
        return result

    def _hashes(self, row: Row, state: Sequence[int], first: int, last: int) -> Sequence[int]:
        """Of the row's sequence, up to each of the positions [first, last)."""
        if self._doomed_row(row):
            return [mix(state[-1], at) for at in range(first, last)]
        return self._expected[row.slot][first:last]

    def _spoil(self, prepared: _Prepared) -> None:
        """A step failed: how far it came is unknown."""
        if prepared.step.encoding is not None and self.features is not None:
            self.features.spoil(prepared.step.encoding)
        for row, table in zip(prepared.rows, prepared.tables, strict=True):
            self._doomed.add(row.sequence.key)
            if row.new_request is not None:
                self._tenants[row.slot] = row.new_request
            self._write_junk(row, table)

    def _doomed_row(self, row: Row) -> bool:
        return row.sequence.key in self._doomed

    def prepare_weights(self, given: Any, go_on: Callable[[], None]) -> int:
        """As in Device; ``given`` is [("weights", number)]."""
        go_on()
        return number_in(given)

    def install_weights(self, prepared: int) -> None:
        """As in Device; no KV of those before is of any use."""
        self.weights = prepared
        if self._states is not None:
            self._states.beginning = beginning(prepared)

    def page_views(self, page: int) -> list[memoryview]:
        """As in HostPages: what the cells of a page hold, and how it is tainted."""
        cells = slice(page * self.page_size, (page + 1) * self.page_size)
        return [array[cells].data.cast("B") for array in (self._position, self._state)]

    def state_views(self, cell: int) -> list[memoryview]:
        assert self._states is not None
        return [self._states.cells[cell].data.cast("B")]

    def check(self) -> None:
        if self.lost:
            raise DeviceLost("the toy device was lost")

    def close(self) -> None:
        """Nothing to give back."""

    def _write(self, row: Row, table: list[int]) -> list[int]:
        """Write a row's KV; returns the hashes of its sequence up to those of its positions that sample."""
        expected = self._expected[row.slot]
        if row.new_request is not None:
            self._doomed.discard(row.sequence.key)
            self._tenants[row.slot] = row.new_request
            self._relay[row.slot] = _POISON
            expected.clear()
            self._extend(row, expected, [*row.sequence.prompt_ids, *row.new_request.output_ids][: row.start])
        if self._doomed_row(row) or (not row.ids and row.sequence.key in self._void):
            return [self._write_junk(row, table)] * (1 + len(row.drafts))
        if self.features is not None:
            self.features.check(row)
        self._void.discard(row.sequence.key)
        ids = row.ids or [*self._read_relay(row), *row.drafts]
        if len(ids) != row.length or row.length < 1:
            raise TaintError(f"{row.sequence}: {len(ids)} ids for {row.length} positions")
        if len(expected) != row.start:
            raise TaintError(f"{row.sequence}: position {row.start} comes after {len(expected)} others")
        if row.kv_length > len(table) * self.page_size:
            raise TaintError(f"{row.sequence}: no page for position {row.kv_length - 1}")
        pages = np.asarray(table, np.int64)
        positions = np.arange(row.kv_length)
        cells = pages[positions // self.page_size] * self.page_size + positions % self.page_size
        if self._states is not None:
            self._states.read(row, expected)
        read = cells[: row.start]
        if (self._position[read] != positions[: row.start]).any() or (
            self._state[read] != np.asarray(expected, np.int64)
        ).any():
            raise TaintError(f"{row.sequence}: reads KV that is not of its own tokens")
        self._extend(row, expected, ids)
        self._position[cells[row.start :]] = positions[row.start :]
        self._state[cells[row.start :]] = expected[row.start :]
        if self._states is not None:
            self._states.write(row, expected)
        return expected[-1 - len(row.drafts) :]

    def _write_junk(self, row: Row, table: list[int]) -> int:
        """What a row without anything to go on from does to its own cells, and what it samples from."""
        if row.kv_length > len(table) * self.page_size:
            raise TaintError(f"{row.sequence}: no page for position {row.kv_length - 1}")
        for at in range(row.start, row.kv_length):
            self._state[table[at // self.page_size] * self.page_size + at % self.page_size] = _POISON
        if self._states is not None:
            self._states.spoil(row)
        return mix(mix(row.sequence.key, row.start), self._last_step)

    def _extend(self, row: Row, states: list[int], ids: Sequence[int]) -> None:
        state = states[-1] if states else beginning(self.weights) ^ self.adapters.key(row.slot)
        for token in ids:
            if token >= self.vocab_size or (token < 0 and self.features is None):
                raise TaintError(f"{row.sequence}: {token} is not a token")
            state = mix(state, token)
            states.append(state)

    def _read_relay(self, row: Row) -> list[int]:
        token = self._relay[row.slot]
        self._relay[row.slot] = _POISON
        if token == _POISON:
            raise TaintError(f"{row.sequence}: its relay cell was never written")
        return [token]

    def _sample(self, row: Row, state: int, forced: list[int], constraint: _Constraint | None) -> int:
        """The next token of a row; ``forced`` gets the row's tokens if they are not sampled."""
        if not row.samples:
            return NO_TOKEN
        tenant = self._tenants[row.slot]
        if tenant is None:
            raise TaintError(f"{row.sequence}: its slot was never admitted")
        if row.sequence.key in self._void:
            if constraint is not None and not self._doomed_row(row):
                constraint.check_void()
            return DEFERRED
        if self._doomed_row(row) and state % 4 < 2:
            return BAD_LOGITS if state % 4 else min(tenant.stop_ids, default=0)
        follow = None if self.defer is None else self.defer(row)
        if follow is not None:
            forced += _follow(row, state, tenant, follow, self.vocab_size)
            token = FORCED if follow else DEFERRED
            if constraint is not None:
                constraint.defer()
        elif constraint is None:
            token = self._next(row, state, tenant)
        else:
            token = self._constrained(constraint, forced)
        if token in (ASKED, DEFERRED, FORCED):
            self._void.add(row.sequence.key)
            return token
        self._relay[row.slot] = token
        if token < 0:
            # The request has ended with this; what is in flight for it already is junk.
            self._doomed.add(row.sequence.key)
        return token

    def _run(self, row: Row, states: list[int], forced: list[int]) -> list[int]:
        """What a row samples: as long as the tokens are its drafts, and the one behind. Other drafts were
        never part of the sequence."""
        tenant = self._tenants[row.slot]
        first = row.length - len(row.drafts)
        parts = (
            [replace(row, length=first + at, drafts=()) for at in range(len(states))] if row.drafts else [row]
        )
        constraint = None
        if row.samples and tenant is not None and (tenant.grammar or tenant.steering):
            lines = [self._line(*part, tenant) for part in zip(parts, states[-len(parts) :], strict=True)]
            constraint = _Constraint(self.masks, tenant, row, lines)
        run: list[int] = []
        for offset, (part, state) in enumerate(zip(parts, states[-len(parts) :], strict=True)):
            if offset and constraint is not None and offset >= constraint.usable:
                break
            run.append(self._sample(part, state, forced, constraint))
            if offset == len(row.drafts) or run[-1] != row.drafts[offset]:
                break
        if constraint is not None:
            constraint.sampled(run, forced)
        if row.drafts:
            expected = self._expected[row.slot]
            del expected[row.start + first + len(run) - 1 :]
        return run

    def _line(self, row: Row, state: int, tenant: NewRequestData) -> npt.NDArray[np.float32]:
        """The logits of a position: of its token the largest."""
        line = np.zeros(self.vocab_size, np.float32)
        line[self._next(row, state, tenant)] = 1.0
        return line

    def _constrained(self, constraint: _Constraint, forced: list[int]) -> int:
        """The likeliest token; from there on the first one that the grammar allows."""
        found = constraint.next(forced)
        if isinstance(found, int):
            return found
        line, mask = found
        token = int(line.argmax())
        while mask is not None and not mask[token // 32] >> (token % 32) & 1:
            token = (token + 1) % self.vocab_size
        return token

    def _next(self, row: Row, state: int, tenant: NewRequestData) -> int:
        """The token of a row, of a sequence with this hash, if nothing constrains it."""
        return _next_token(state, tenant, row.output_index, self.vocab_size)


def _follow(row: Row, state: int, tenant: NewRequestData, count: int, vocab_size: int) -> list[int]:
    """The next tokens, as they would have been sampled."""
    tokens: list[int] = []
    for index in range(count):
        tokens.append(_next_token(state, tenant, row.output_index + index, vocab_size))
        state = mix(state, tokens[-1])
    return tokens


class _Constraint:
    """The masks and the logits of a row with a grammar or logits processors, position by position."""

    def __init__(
        self, worker: GrammarWorker, tenant: NewRequestData, row: Row, lines: list[npt.NDArray[np.float32]]
    ) -> None:
        self._worker, self._lines = worker, lines
        rest = row.kv_length - len(row.drafts), bool(row.ids), row.drafts
        self._grammars = [GrammarRow(0, tenant.grammar, *rest)] if tenant.grammar else []
        self._steered = [SteeredRow(0, tenant.steering, *rest)] if tenant.steering else []
        self._masks: npt.NDArray[np.int32] | None = None
        self._outcomes: dict[int, int] = {}
        self._given: dict[int, list[int]] = {}
        self._begun = False
        self._next = 0
        #: positions that may sample
        self.usable = 1 + len(row.drafts)

    def next(self, forced: list[int]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32] | None] | int:
        """The logits and the mask of the next position; an outcome if it samples nothing."""
        if not self._begun:
            self._begun = True
            self._begin(forced)
        if self._outcomes:
            return self._outcomes[0]
        at, self._next = self._next, self._next + 1
        return self._lines[at], None if self._masks is None else self._masks[at]

    def check_void(self) -> None:
        """The states of a row without an input know that."""
        if not isinstance(found := self.next([]), int) or found != DEFERRED:
            raise TaintError(f"{self._grammars} {self._steered}: a row without an input samples: {found}")

    def defer(self) -> None:
        """The row does not sample."""
        for bound in self._grammars:
            bound.state.unsampled = True
        for steered in self._steered:
            steered.state.unsampled = True

    def _begin(self, forced: list[int]) -> None:
        usable: dict[int, int] = {}
        if self._grammars:
            found = self._worker.collect(self._grammars, 1)
            self._masks, self._outcomes, usable = found.masks, found.outcomes, found.usable
            forced += found.forced.get(0, [])
        if self._steered:
            patience = self._worker.patience
            wanted = steer(
                awake(self._steered), self._lines, patience=patience, outcomes=self._outcomes, usable=usable
            )
            self._worker.skip(self._grammars, wanted.outcomes)
            self._outcomes, self._given = self._outcomes | wanted.outcomes, wanted.forced
            forced += self._given.get(0, [])
            usable = {0: min([self.usable, *usable.values(), *wanted.usable.values()])}
        self.usable = usable.get(0, self.usable)

    def sampled(self, run: list[int], forced: list[int]) -> None:
        """The row has brought these tokens and outcomes, or tokens that are ``forced``."""
        if self._begun:
            self._worker.advance(self._grammars, run, self._given)
        for row in self._steered:
            row.state.extend([*(token for token in run if token >= 0), *forced])


@dataclass(frozen=True, slots=True)
class _Prepared:
    step: Step
    rows: list[Row]
    tables: list[list[int]]
