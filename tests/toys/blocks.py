"""ScriptedDevice: block diffusion without a network, over tainted KV memory.

The model is scripted (:mod:`tests.toys.scripted`); packing, blocks on the device and algorithms are
the real ones. What a block says is a hash of everything before it and of its own ids, and each KV cell
remembers what that was when it was written. So a page, a slot, a block or a round of another request is
an exact failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from aioinfer.config import PAGE_SIZE
from aioinfer.diffusion.block import Block
from aioinfer.diffusion.registry import algorithm_class
from aioinfer.diffusion.state import BlockState
from aioinfer.execution.backends import CpuBackend
from aioinfer.execution.decoding.blocks import BlockDecoding, BlockPacker, block_records
from aioinfer.execution.device import (
    CompletedFlight,
    DeviceInfo,
    DeviceLost,
    Flight,
    Progress,
    StepResult,
)
from aioinfer.execution.packed import PackedStep
from aioinfer.execution.packing import Packer
from aioinfer.execution.runner import Runner
from aioinfer.model.batch import Batch
from aioinfer.model.spec import ModelSpec
from aioinfer.observe.timeline import DeviceLane
from aioinfer.params import DiffusionParams, SamplingParams
from aioinfer.scheduling.step import Row, Step
from tests.diffusion.reference import DELETE, SPLIT
from tests.toys.adapters import NoAdapters
from tests.toys.scripted import ScriptedLogits
from tests.toys.states import TaintError, number_in

__all__ = ["EDITS", "ScriptedDevice", "ScriptedLM", "begin_blocks", "scripted_generate"]

_POISON = -7
#: the tokens that delete and split
EDITS = (DELETE, SPLIT)
_NO_ATTENTION: Any = None


class ScriptedLM:
    """A :class:`~aioinfer.model.spec.CausalLM` on the CPU that keeps its KV itself.

    A cell holds the position that it was written for, and a hash of all tokens before its block and up to its
    end: cells that do not follow from each other, or from what ``expected`` says, belong to
    another sequence.
    """

    classifier: Any = None
    capturable = False
    invariant = True
    adapters = None
    adapter_reason = "it is scripted"
    seconds: Mapping[str, float] = MappingProxyType({})
    updates: Any = None
    encoder: Any = None

    def __init__(self, script: ScriptedLogits, spec: ModelSpec, *, num_pages: int, page_size: int) -> None:
        assert spec.block_size is not None, "not a diffusion model"
        self.spec = spec
        self._script = script
        self._size = spec.block_size
        self._page_size = page_size
        cells = (num_pages + 1) * page_size
        self._position = np.full(cells, -1, np.int64)
        self._before = np.zeros(cells, np.int64)
        self._state = np.zeros(cells, np.int64)
        #: by row of the next forward, the hash of all that its sequence has before it; None if it is
        #: unknown or does not matter. If this is None, no row is checked against it
        self.expected: Sequence[int | None] | None = None

    def forward(self, batch: Batch, attention: Any) -> torch.Tensor:
        """As in CausalLM; needs no attention. Raises TaintError."""
        size = self._size
        if any(length % size for length in (*batch.q_lens, *batch.kv_lens)):
            raise TaintError(f"rows are not of whole blocks: {batch.q_lens} up to {batch.kv_lens}")
        blocks = batch.input_ids.view(-1, size)
        before, state = self._hash(batch, self._script.digest(blocks))
        cells = batch.slot_mapping.numpy()
        # All rows write before any row reads, as in a packed forward.
        self._position[cells] = batch.positions.numpy()
        self._before[cells] = before.repeat(size)
        self._state[cells] = state.repeat(size)
        for row in range(len(batch.q_lens)):
            self._check(batch, row)
        wanted = batch.logits_rows.view(-1, size)[:, 0] // size
        logits = self._script.logits(torch.from_numpy(before)[wanted], blocks[wanted])
        return logits.view(-1, self.spec.vocab_size)

    def page_views(self, page: int) -> list[memoryview]:
        """What the cells of a page hold."""
        cells = slice(page * self._page_size, (page + 1) * self._page_size)
        return [array[cells].data.cast("B") for array in (self._position, self._before, self._state)]

    def replace(self, script: ScriptedLogits) -> None:
        """Another script goes on; what was written before is none of its."""
        self._script = script
        self._position[:] = _POISON

    def spoil(self, packed: PackedStep) -> None:
        """A step failed: the content of its rows' cells is unknown."""
        cells = packed.sections["slot_mapping"]
        self._position[cells] = _POISON
        self._state[cells] = _POISON

    def _hash(self, batch: Batch, digests: torch.Tensor) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Of every block of the step, what comes before it and what comes before the next, int64 [T / B]."""
        size, tables = self._size, batch.block_table.numpy()
        before = torch.zeros(len(digests), dtype=torch.int64)
        state = torch.zeros_like(before)
        lengths = [length // size for length in batch.q_lens]
        first = np.cumsum([0, *lengths])[:-1]
        for row, (length, end) in enumerate(zip(batch.q_lens, batch.kv_lens, strict=True)):
            last = end - length - 1
            if last >= 0:
                cell = tables[row, last // self._page_size] * self._page_size + last % self._page_size
                before[first[row]] = int(self._state[cell])
        # The blocks of a row hang on each other, those of different rows do not.
        for number in range(max(lengths)):
            rows = torch.from_numpy(first[[number < length for length in lengths]] + number)
            state[rows] = self._script.chain(before[rows], digests[rows])
            more = torch.from_numpy(first[[number + 1 < length for length in lengths]] + number)
            before[more + 1] = state[more]
        return before.numpy(), state.numpy()

    def _check(self, batch: Batch, row: int) -> None:
        """A row reads only what its own sequence wrote."""
        expected = None if self.expected is None else self.expected[row]
        if self.expected is not None and expected is None:
            return
        start, end = batch.kv_lens[row] - batch.q_lens[row], batch.kv_lens[row]
        positions = np.arange(end)
        pages = batch.block_table[row].numpy()
        cells = pages[positions // self._page_size] * self._page_size + positions % self._page_size
        if (self._position[cells] != positions).any():
            raise TaintError(f"row {row}: reads KV of other positions than its own")
        state = self._state[cells].reshape(-1, self._size)
        before = self._before[cells].reshape(-1, self._size)
        if (state != state[:, :1]).any() or (before != before[:, :1]).any():
            raise TaintError(f"row {row}: reads a block that was written in pieces")
        if before[0, 0] or (before[1:, 0] != state[:-1, 0]).any():
            raise TaintError(f"row {row}: reads blocks that do not follow each other")
        if expected is not None and start and state[start // self._size - 1, 0] != expected:
            raise TaintError(f"row {row}: reads KV that is not of its own tokens")


class ScriptedDevice(NoAdapters):
    """A device without a model, for block diffusion. Synchronous.

    ``fault`` is called with every step before it is computed and may raise, as a device would; so is
    ``late_fault`` when everything is computed. Cells of a step that failed hold junk, and so does what rows
    behind it bring. The rest is as in :class:`~tests.toys.scripted.ScriptedLogits`.
    """

    synchronous = True

    def __init__(
        self,
        *,
        num_pages: int = 64,
        page_size: int | None = 8,
        num_slots: int = 16,
        max_model_len: int | None = None,
        block_size: int = 8,
        vocab_size: int = 64,
        mask_token_id: int | None = None,
        fault: Callable[[Step], None] | None = None,
        late_fault: Callable[[Step], None] | None = None,
        script_seed: int = 0,
        mean_steps: float = 4.0,
        variation: float = 0.6,
        edits: int = 0,
    ) -> None:
        """``mask_token_id`` is the last token if it is not given."""
        page_size = PAGE_SIZE if page_size is None else page_size
        if page_size % block_size:
            raise ValueError(f"pages of {page_size} positions are not of whole blocks of {block_size}")
        self.page_size = page_size
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.mask_token_id = vocab_size - 1 if mask_token_id is None else mask_token_id
        self._script: dict[str, Any] = {
            "seed": script_seed, "mean_steps": mean_steps, "variation": variation, "edits": edits,
        }  # fmt: skip
        self.script = self.script_of(0)
        self.fault = fault
        self.late_fault = late_fault
        self.lost = False
        self.lane = DeviceLane()
        #: steps, forwards, and rounds of blocks that were computed
        self.steps = self.forwards = self.block_rounds = 0
        capacity = num_pages * page_size
        longest = capacity if max_model_len is None else min(max_model_len, capacity)
        self._max_model_len = longest // block_size * block_size
        self._num_pages = num_pages
        self._num_slots = num_slots

    def open(self, progress: Progress | None = None) -> DeviceInfo:
        spec = ModelSpec(
            *("scripted", 0, (), 0, self.vocab_size, self._max_model_len, torch.float32),
            eos_token_ids=frozenset({0}),
            num_parameters=0,
            block_size=self.block_size,
            mask_token_id=self.mask_token_id,
            edit_token_ids=EDITS,
        )
        self._lm = ScriptedLM(self.script, spec, num_pages=self._num_pages, page_size=self.page_size)
        self._backend = CpuBackend(
            Runner(
                self._lm,
                _NO_ATTENTION,
                BlockDecoding(spec, self._num_slots, torch.device("cpu"), synchronous=True),
                self.lane,
            )
        )
        max_pages = -(-self._max_model_len // self.page_size)
        rows = BlockPacker(self._num_slots, self.block_size, self.mask_token_id, EDITS)
        self._packer = Packer(rows, self._num_slots, max_pages, self.page_size)
        #: by slot, hashes of the tenant's sequence up to the end of each block that is final
        self._final: list[list[int]] = [[] for _ in range(self._num_slots + 1)]
        #: requests that lost a step: what later steps in flight compute for them is junk, and dropped; until
        #: they are admitted again
        self._doomed: set[int] = set()
        self._last_step = 0
        return DeviceInfo(
            vocab_size=self.vocab_size,
            max_model_len=self._max_model_len,
            num_pages=self._num_pages,
            eos_token_ids=spec.eos_token_ids,
            description="scripted",
            page_size=self.page_size,
            page_bytes=24 * self.page_size,
            page_layout="scripted",
            block_size=self.block_size,
            mask_token_id=self.mask_token_id,
            edit_token_ids=EDITS,
            adapter_reason="diffusion models have none",
        )

    def page_views(self, page: int) -> list[memoryview]:
        """As in HostPages."""
        return self._lm.page_views(page)

    def state_views(self, cell: int) -> list[memoryview]:
        raise AssertionError("it has no recurrent state")

    def prepare(self, step: Step) -> tuple[Step, PackedStep]:
        """Pack a step as the host saw it when it planned it."""
        return step, self._packer.pack(step)

    def launch(self, prepared: tuple[Step, PackedStep]) -> Flight:
        step, packed = prepared
        if step.id <= self._last_step:
            raise TaintError(f"step {step.id} was launched after step {self._last_step}")
        self._last_step = step.id
        self.steps += 1
        try:
            if self.fault is not None:
                self.fault(step)
            self._lm.expected = [self._expect(row) for row in step.rows]
            result = self._backend.launch(packed).wait()
            self._note(step, result)
            if self.late_fault is not None:
                self.late_fault(step)
        except BaseException:
            self._lm.spoil(packed)
            self._doomed.update(row.sequence.key for row in step.rows)
            raise
        return CompletedFlight(result)

    def prepare_weights(self, given: Any, go_on: Callable[[], None]) -> ScriptedLogits:
        """As in Device; ``given`` is [("weights", number)]."""
        go_on()
        return self.script_of(number_in(given))

    def script_of(self, weights: int) -> ScriptedLogits:
        """What is written with weights that are a number; 0: with those that it has at first."""
        script = {**self._script, "seed": weights or self._script["seed"]}
        return ScriptedLogits(self.vocab_size, self.mask_token_id, **script)

    def install_weights(self, prepared: ScriptedLogits) -> None:
        """As in Device; no KV of those before may be read."""
        self.script = prepared
        self._lm.replace(prepared)

    def check(self) -> None:
        if self.lost:
            raise DeviceLost("the scripted device was lost")

    def close(self) -> None:
        """Nothing to give back."""

    def _expect(self, row: Row) -> int | None:
        """The hash of everything before a row; None if the row is junk."""
        size, final = self.block_size, self._final[row.slot]
        if row.new_request is not None:
            self._doomed.discard(row.sequence.key)
            known = [*row.new_request.prompt_ids, *row.new_request.output_ids]
            final[:] = self._chain(known[: len(known) // size * size])
        if row.sequence.key in self._doomed:
            return None
        first = row.start // size
        if first > len(final):
            raise TaintError(f"{row.sequence}: block {first} comes before block {len(final)} is final")
        return final[first - 1] if first else 0

    def _note(self, step: Step, result: StepResult) -> None:
        """What has become final is what later rows must find."""
        self.forwards += result.rounds
        self.block_rounds += len(result.blocks) * result.rounds
        rows = step.rows
        for number, state in result.blocks.items():
            row = rows[number]
            final = self._final[row.slot]
            if (
                state.done
                and row.sequence.key not in self._doomed
                and state.start == len(final) * self.block_size
            ):
                final += self._chain(state.ids, final[-1] if final else 0)

    def _chain(self, ids: Sequence[int], before: int = 0) -> list[int]:
        blocks = torch.tensor(list(ids), dtype=torch.int64).view(-1, self.block_size)
        return _chain(self.script, blocks, before)


def _chain(script: ScriptedLogits, blocks: torch.Tensor, before: int = 0) -> list[int]:
    """Hashes of a sequence up to the end of each of some blocks, [N, B]."""
    state, states = torch.tensor([before]), []
    digests = script.digest(blocks)
    for number in range(len(blocks)):
        state = script.chain(state, digests[number])
        states.append(int(state))
    return states


def begin_blocks(given: Sequence[Sequence[int]], starts: Sequence[int], *, size: int, mask_id: int) -> Block:
    """Blocks before their first round, in rows at these positions: each begins with tokens of the prompt."""
    records = block_records(size, mask_id)
    rows = [
        records.encode(BlockState.unknown(start, tokens, size, mask_id), start + len(tokens))
        for tokens, start in zip(given, starts, strict=True)
    ]
    return records.block(torch.from_numpy(np.array(rows, np.int64).reshape(-1, records.words)))[0]


def scripted_rounds(
    script: ScriptedLogits,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    seed: int = 0,
    block_size: int = 8,
    mask_token_id: int = 63,
) -> Iterator[Block]:
    """Every round of one request, block by block without end: one row, no pages, nothing on the way.

    The block is the same object from round to round.
    """
    diffusion = params.diffusion or DiffusionParams()
    algorithm = algorithm_class(diffusion.algorithm)(mask_token_id, None, EDITS)
    whole = len(prompt_ids) // block_size * block_size
    blocks = torch.tensor(list(prompt_ids[:whole]), dtype=torch.int64).view(-1, block_size)
    before = torch.tensor(_chain(script, blocks)[-1:] or [0])
    given = list(prompt_ids[whole:])
    for start in range(whole, 1 << 62, block_size):
        block = begin_blocks([given], [start], size=block_size, mask_id=mask_token_id)
        state = algorithm.init_state([diffusion], [params], [seed], block_size)
        while not block.done:
            logits = script.logits(before, block.ids)
            algorithm.step(logits, block, state, drawn=params.temperature > 0)
            yield block
        before, given = script.chain(before, script.digest(block.ids)), []


@torch.inference_mode()
def scripted_generate(
    script: ScriptedLogits,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    seed: int = 0,
    block_size: int = 8,
    mask_token_id: int = 63,
    eos: int = 0,
    max_length: int = 1 << 30,
) -> list[int]:
    """What any correct engine must generate on a :class:`ScriptedDevice`, computed in the plainest way."""
    stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else {eos})
    if params.max_tokens is not None:
        max_length = min(max_length, len(prompt_ids) + params.max_tokens)
    output: list[int] = []
    rounds = scripted_rounds(
        script, prompt_ids, params, seed=seed, block_size=block_size, mask_token_id=mask_token_id
    )
    for block in rounds:
        if not block.done:
            continue
        for token in block.ids[0, block.editable[0]].tolist():
            if len(prompt_ids) + len(output) == max_length:
                return output
            output.append(token)
            if token in stop_ids:
                return output
    raise AssertionError("blocks do not end")
