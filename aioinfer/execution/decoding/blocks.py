"""Blocks: a diffusion model's rows are whole blocks, which live in their slots from round to round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from aioinfer.config import EngineConfig
from aioinfer.diffusion.guide import steered
from aioinfer.diffusion.pins import Pins
from aioinfer.diffusion.proposal import Propose
from aioinfer.diffusion.record import BlockRecords
from aioinfer.diffusion.registry import algorithm_class, algorithm_names, usable_algorithms
from aioinfer.diffusion.state import BlockState
from aioinfer.errors import ConfigError
from aioinfer.execution.decoding.base import Guided, Output, Transfer
from aioinfer.execution.decoding.block_graphs import CapturedBlocks
from aioinfer.execution.decoding.block_table import AlgorithmRows, BlockTable, Round, Tenant
from aioinfer.execution.decoding.canvases import Canvases
from aioinfer.execution.device import StepResult
from aioinfer.execution.grammar_worker import GrammarWorker
from aioinfer.execution.graph_shapes import GraphShape, GraphShapes
from aioinfer.execution.packed import Layout, PackedStep
from aioinfer.execution.warmup import COSTLY, filled_slots
from aioinfer.model.attention.base import Attention
from aioinfer.model.canvas import Canvas
from aioinfer.model.spec import CausalLM, ModelSpec
from aioinfer.model.state import StatePool
from aioinfer.params import DiffusionParams
from aioinfer.sampling.backend import choose_proposing
from aioinfer.sampling.outcomes import BAD_GRAMMAR, NO_TOKEN
from aioinfer.scheduling.step import NO_ROWS, Generating, NewRequestData, Step

__all__ = ["BlockDecoding", "BlockKind", "BlockPacker", "BlockWork", "block_records"]


@dataclass(slots=True)
class BlockWork:
    """Inputs of denoising besides the sections of a step, which are, for K rows with blocks of B positions
    by algorithm: block_slots[K]; targets[K], where the row's last block begins; pairs[K], whether there are
    two, 0 or 1; and block_tokens[K * B], the tokens of the slot's block. Then, for A requests that take a
    slot, begun_slots[A] and begun_records[A * W], see :class:`~aioinfer.diffusion.record.BlockRecords`."""

    #: index of the row of each block row
    rows: list[int]
    groups: list[AlgorithmRows]
    tenants: list[Tenant]
    #: some row may go on to another block than its slot's
    may_turn: bool


def block_records(
    block_size: int, mask_id: int, edit_ids: tuple[int, int] | None = None, *, canvas: bool = False
) -> BlockRecords:
    """Records that can hold the state of every algorithm that a model can have."""
    names = usable_algorithms(edit_ids, canvas=canvas)
    most = max(algorithm_class(name).private(block_size) for name in names)
    return BlockRecords(block_size, mask_id, most)


class BlockPacker:
    """Keeps, by slot, how its tenant's blocks are denoised. See
    :class:`~aioinfer.execution.decoding.base.RowPacker`."""

    def __init__(
        self,
        num_slots: int,
        block_size: int,
        mask_id: int,
        edit_ids: tuple[int, int] | None = None,
        *,
        canvas: bool = False,
    ) -> None:
        """``canvas``: blocks begin right behind the prompt."""
        self._records = block_records(block_size, mask_id, edit_ids, canvas=canvas)
        self._canvas = canvas
        self.unknown_id = mask_id
        #: number of the algorithm in alphabetical order
        first = usable_algorithms(edit_ids, canvas=canvas)[0]
        self._algorithm = np.full(num_slots + 1, algorithm_names().index(first))
        self._drawn = np.zeros(num_slots + 1, np.bool_)
        self._filtered = np.zeros(num_slots + 1, np.bool_)
        self._steered = np.zeros(num_slots + 1, np.bool_)
        #: the slot's block does not begin before this position
        self._reached = np.zeros(num_slots + 1, np.int64)
        #: of the step that is packed next
        self._tenants: list[Tenant] = []
        self._begun: list[npt.NDArray[np.int64]] = []

    def admit(self, new: Mapping[int, NewRequestData]) -> None:
        self._tenants, self._begun = [], []
        for slot, data in new.items():
            params = data.params
            diffusion = params.diffusion or DiffusionParams()
            self._algorithm[slot] = algorithm_names().index(diffusion.algorithm)
            self._drawn[slot] = drawn = params.temperature > 0
            self._filtered[slot] = drawn and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
            self._steered[slot] = steered(params)
            self._tenants.append(Tenant(slot, data, diffusion))
            self._begun.append(self._begin(slot, data))

    def _begin(self, slot: int, data: NewRequestData) -> npt.NDArray[np.int64]:
        """The record of the block that the request begins with, or continues."""
        size, prompt = self._records.size, data.prompt_ids
        known = len(prompt) + len(data.output_ids)
        start = known - (known - len(prompt) * self._canvas) % size
        state = data.resume
        if state is None:
            # A block that begins again has output in it.
            given = [*prompt[start:], *data.output_ids[max(0, start - len(prompt)) :]]
            state = BlockState.unknown(start, given, size, self.unknown_id)
        pins = Pins.of(data.params, len(prompt))
        if pins is not None:
            state = pins.put(state)
        self._reached[slot] = state.start
        return self._records.encode(state, len(prompt), pins)

    def graph_need(self, step: Step) -> GraphShape | None:
        """Steps of nothing but blocks are captured."""
        if self._canvas or any(row.ids or not row.blocks for row in step.prefilling):
            return None
        return GraphShape(step.num_tokens // self._records.size)

    def pack(self, step: Step, layout: Layout) -> tuple[dict[str, npt.NDArray[np.int64]], BlockWork]:
        size, slots, q_len, placement = self._records.size, layout.slots, layout.q_len, layout.placement
        assert q_len is not None, "a step of blocks has no rows of one position"
        blocks = np.concatenate(
            (
                q_len[: step.num_generating] // size,
                np.asarray([row.blocks for row in step.prefilling], np.int64),
            )
        )
        # Rows of one kind next to each other, and for each of their tensors that is a slice.
        order = np.flatnonzero(blocks)
        order = order[np.argsort(self._kinds(slots[order]), kind="stable")]
        own, pairs = slots[order], blocks[order] - 1
        targets = placement.kv_len[order] - size
        first = placement.cu_q[order + 1] - blocks[order] * size
        may_turn = bool((self._reached[own] < targets).any())
        self._reached[own] = targets - pairs * size
        tenants, begun = self._tenants, self._begun
        sections = {
            "block_slots": own,
            "targets": targets,
            "pairs": pairs,
            "block_tokens": (first[:, None] + np.arange(size)).reshape(-1),
            "begun_slots": np.asarray([tenant.slot for tenant in tenants], np.int64),
            "begun_records": np.concatenate(begun) if begun else _NONE,
        }
        return sections, BlockWork(
            rows=order.tolist(),
            groups=self._groups(own),
            tenants=tenants,
            may_turn=may_turn,
        )

    def _kinds(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Of each slot, its algorithm and whether its rows are steered."""
        return 2 * self._algorithm[slots] + self._steered[slots]

    def _groups(self, slots: npt.NDArray[np.int64]) -> list[AlgorithmRows]:
        """Packed block rows, in the order of their kinds."""
        numbers = self._kinds(slots)
        edges = [0, *(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist(), len(slots)]
        drawn, filtered = self._drawn[slots], self._filtered[slots]
        return [
            AlgorithmRows(
                algorithm_names()[numbers[first] // 2],
                first,
                last,
                slots[first:last].tobytes(),
                bool(drawn[first:last].any()),
                bool(filtered[first:last].any()),
                bool(numbers[first] % 2),
            )
            for first, last in pairwise(edges)
            if first < last
        ]


_NONE = np.empty(0, np.int64)


class BlockDecoding:
    """Denoises, and reads nothing back meanwhile unless the device is ``synchronous``. See
    :class:`~aioinfer.execution.decoding.base.Decoding`."""

    def __init__(
        self,
        spec: ModelSpec,
        num_slots: int,
        device: torch.device,
        *,
        synchronous: bool,
        kernels: bool = False,
        grammars: GrammarWorker | None = None,
    ) -> None:
        """``kernels``: tokens are proposed by Triton's, not by torch's operations. ``grammars``: the threads
        of searches; None: the caller's."""
        block_size, mask_id = _block(spec)
        self._spec = spec
        self._device = device
        self._synchronous = synchronous
        self._records: BlockRecords = block_records(block_size, mask_id, spec.edit_token_ids)
        propose: Propose | None = None
        if kernels:
            from aioinfer.diffusion import triton_proposal

            propose = triton_proposal.propose
        edits = spec.edit_token_ids
        self.table = BlockTable(num_slots, self._records, mask_id, device, propose, edits, grammars)
        self._canvases = Canvases(spec, self.table, num_slots, device) if spec.canvas else None
        self.canvas: Canvas | None = None

    def warm_up(self) -> None:
        """Compile the kernels that rounds may need."""
        if not self.table.kernels:
            return
        from aioinfer.diffusion import triton_proposal

        spec, size = self._spec, self._records.size
        triton_proposal.warm_up(size, spec.vocab_size, spec.dtype, self._device)

    def begin(self, packed: PackedStep, transfer: Transfer) -> None:
        if packed.work.tenants:
            begun = [transfer.send(packed.sections[name]) for name in ("begun_slots", "begun_records")]
            self.table.begin(begun[0], begun[1], packed.work.tenants, transfer)

    def gather(
        self, packed: PackedStep, parts: dict[str, torch.Tensor], transfer: Transfer
    ) -> tuple[torch.Tensor, Round]:
        work: BlockWork = packed.work
        self.table.begin(parts["begun_slots"], parts["begun_records"], work.tenants, transfer)
        tokens = parts["block_tokens"]
        round = self.table.take(
            parts["block_slots"], parts["targets"], parts["pairs"], may_turn=work.may_turn
        )
        self.canvas = None
        if self._canvases is not None and work.rows:
            round, self.canvas = self._canvases.take(round, work.groups, parts["positions"], tokens)
        parts["input_ids"].index_copy_(0, tokens, round.ids.reshape(-1))
        if round.behind is None:
            return tokens, round
        # The tokens of the block that each row denoises, [K * B].
        size = self._records.size
        return (tokens.view(-1, size) + (round.behind * size).unsqueeze(1)).view(-1), round

    def step(
        self,
        logits: torch.Tensor,
        packed: PackedStep,
        parts: dict[str, torch.Tensor],
        state: Round,
        transfer: Transfer,
    ) -> Output:
        work: BlockWork = packed.work
        guided: dict[int, Guided] = {}
        if work.rows:
            shape = (len(work.rows), self._records.size, logits.shape[-1])
            guided = self.table.step(logits.view(shape), state, work.groups)
            if self._canvases is not None and self.canvas is not None:
                self._canvases.keep(state, self.canvas)
        records = state.records.view(-1)
        return Output([records] if len(records) else [], guided=guided)

    def again(self, packed: PackedStep, parts: dict[str, torch.Tensor], state: Round, rounds: int) -> bool:
        """No request wants to join, and no block is done."""
        budget = packed.multi_step
        if budget is None or not self._synchronous or budget.interrupted or rounds >= budget.rounds:
            return False
        if self._records.block(state.records)[0].done.any():
            return False
        ids = state.records[:, : self._records.size]
        if self._canvases is not None and self.canvas is not None:
            ids = self._canvases.again(state, packed.work.groups, self.canvas)
        parts["input_ids"].index_copy_(0, parts["block_tokens"], ids.reshape(-1))
        return True

    def read(self, packed: PackedStep, output: Output, copies: Sequence[torch.Tensor]) -> StepResult:
        work: BlockWork = packed.work
        result = StepResult([NO_TOKEN] * len(packed.q_lens), rounds=output.rounds)
        counters = [
            algorithm_class(group.algorithm).private(self._records.size)
            for group in work.groups
            for _ in range(group.first, group.last)
        ]
        for records in copies:
            states = self._records.states(records.view(-1, self._records.words).numpy(), counters)
            for at, told in output.guided.items():
                if any(told.tops):
                    states[at] = replace(states[at], tops=told.tops)
                if told.exhausted:
                    result.tokens[work.rows[at]] = BAD_GRAMMAR
            result.blocks = dict(zip(work.rows, states, strict=True))
        return result

    def captured(
        self,
        model: CausalLM,
        attention: Attention,
        *,
        shapes: GraphShapes,
        max_pages: int,
        page_size: int,
        states: StatePool | None = None,
    ) -> CapturedBlocks:
        assert states is None, "rounds would advance the states of a diffusion model"
        return CapturedBlocks(
            *(model, attention, self.table),
            max_rows=max(shape.rows for shape in shapes),
            max_pages=max_pages,
            page_size=page_size,
            device=self._device,
            warm_up=self.warm_up,
        )


def _block(spec: ModelSpec) -> tuple[int, int]:
    """Positions per block, and the mask's token id."""
    assert spec.block_size is not None, "not a diffusion model"
    assert spec.mask_token_id is not None, "a diffusion model has a mask"
    return spec.block_size, spec.mask_token_id


class BlockKind:
    """Diffusion models. See :class:`~aioinfer.execution.decoding.base.Kind`."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._size, self._mask_id = _block(spec)

    def fit(self, config: EngineConfig) -> EngineConfig:
        """Pages become whole blocks. Raises ConfigError where not even two blocks fit into a step, or one
        into the longest sequence, and for recurrent states: a round cannot be repeated on them."""
        size, spec = self._size, self._spec
        if spec.states:
            raise ConfigError("model: a diffusion model with recurrent state cannot be served")
        if config.step_tokens < 2 * size:
            raise ConfigError(
                f"max_step_tokens is {config.step_tokens}; two blocks of {size} positions must fit"
            )
        if min(config.max_model_len or spec.max_model_len, spec.max_model_len) < size + spec.canvas:
            least = f"a prompt and a canvas of {size}" if spec.canvas else f"a block of {size} positions"
            raise ConfigError(f"max_model_len is less than {least}")
        if spec.canvas:
            return config  # canvases begin anywhere
        return replace(config, page_size=-(-config.positions_per_page // size) * size)

    def rows(self, config: EngineConfig) -> BlockPacker:
        spec = self._spec
        return BlockPacker(
            config.num_slots, self._size, self._mask_id, spec.edit_token_ids, canvas=spec.canvas
        )

    def decoding(self, config: EngineConfig, device: torch.device, grammars: GrammarWorker) -> BlockDecoding:
        synchronous = device.type == "cpu"
        if (config.max_rounds or 1) > 1 and not synchronous:
            raise ConfigError(f"max_rounds is {config.max_rounds}; on {device.type} a step has one round")
        kernels = choose_proposing(device, config.sampling_backend).name == "triton" and not self._spec.canvas
        return BlockDecoding(
            self._spec,
            config.num_slots,
            device,
            synchronous=synchronous,
            kernels=kernels,
            grammars=grammars,
        )

    def graph_shapes(self, config: EngineConfig) -> GraphShapes:
        """Each number up to 8, and then four per doubling. A row is a whole block of tokens, so padding
        counts, and rather by its share than by its number."""
        most = config.round_rows(self._size)
        sizes = {number << shift for shift in range(most.bit_length()) for number in range(1, 9)}
        return GraphShapes(map(GraphShape, {size for size in sizes if size < most} | {most}) if most else ())

    def largest_steps(self, config: EngineConfig, max_len: int) -> Iterator[Step]:
        size = self._size
        rows = min(config.running_requests, config.step_tokens // size)
        length = min(config.step_tokens // rows, max_len) // size * size
        yield Step(-2, NO_ROWS, filled_slots(rows, length, COSTLY, samples=False), rows * length)
        start = min(length, max_len // size * size - size)
        absent: Any = None
        slots, starts = np.arange(1, rows + 1), np.full(rows, start)
        yield Step(-1, Generating([absent] * rows, slots, starts, np.full(rows, size), size), (), rows * size)
