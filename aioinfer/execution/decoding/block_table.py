"""BlockTable: the blocks of all requests, on the device, from one round to the next.

    step N     records[slot] ──► input ids of the rows ──► model ──► algorithms ──► records[slot]
                                                                         └─────► host, whenever it gets there

Indexed by slot, as the relay is, and for the same reason: the host may learn of a round when the next is
under way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from aioinfer.diffusion.algorithm import Algorithm
from aioinfer.diffusion.block import Block, Rows
from aioinfer.diffusion.proposal import Propose
from aioinfer.diffusion.record import BlockRecords, WordRows
from aioinfer.diffusion.registry import algorithm_class
from aioinfer.execution.decoding.base import Guided, Transfer
from aioinfer.execution.decoding.block_steering import BlockSteering
from aioinfer.execution.grammar_worker import GrammarWorker
from aioinfer.params import DiffusionParams
from aioinfer.scheduling.step import NewRequestData

__all__ = ["AlgorithmRows", "BlockTable", "Round", "Tenant"]


@dataclass(frozen=True, slots=True)
class AlgorithmRows:
    """Block rows [first, last) of a step have this algorithm."""

    algorithm: str
    first: int
    last: int
    #: their slots, for the host to tell one group from another; None: it does not know them
    key: bytes | None
    #: some row has a temperature; some row that has one has a filter, too
    drawn: bool
    filtered: bool
    #: the rows are steered, and their slots are known
    steered: bool = False


@dataclass(frozen=True, slots=True)
class Tenant:
    """A request that has taken a slot, for its algorithm."""

    slot: int
    data: NewRequestData
    params: DiffusionParams


class BlockTable:
    """A record of the slot's block, and what the algorithm of the slot's tenant was asked for."""

    def __init__(
        self,
        num_slots: int,
        records: BlockRecords,
        mask_id: int,
        device: torch.device,
        propose: Propose | None = None,
        edit_ids: tuple[int, int] | None = None,
        grammars: GrammarWorker | None = None,
    ) -> None:
        """``propose``: kernels that propose tokens; None for torch's operations. ``edit_ids``: the model's
        tokens that delete and split. ``grammars``: the threads of searches; None: the caller's."""
        self._num_slots = num_slots
        self.mask_id = mask_id
        self.edit_ids = edit_ids
        self._device = device
        self._propose = propose
        self._records = records
        self._blank = torch.from_numpy(records.blank).to(device)
        #: [slots, words]; a slot that was never taken holds a block that is done, and so does the null slot
        self._table = self._blank.repeat(num_slots + 1, 1)
        records.block(self._table)[0].done.fill_(True)
        self._algorithms: dict[str, _Algorithm] = {}
        self._steering = BlockSteering(records.size, grammars or GrammarWorker(threaded=False))

    @property
    def words(self) -> int:
        """Size of a record."""
        return self._records.words

    @property
    def kernels(self) -> bool:
        """True if kernels propose tokens, without memory as large as the logits."""
        return self._propose is not None

    def prepare(self, algorithms: Sequence[str]) -> None:
        """Make what these have on the device now, and not when the first request asks for them."""
        for name in algorithms:
            self._of(name)

    def begin(
        self, slots: torch.Tensor, records: torch.Tensor, tenants: Sequence[Tenant], transfer: Transfer
    ) -> None:
        """Requests take slots: their first blocks, [A * words], and what they ask for."""
        if not tenants:
            return
        self._table.index_copy_(0, slots, records.view(len(tenants), -1))
        asked: dict[str, list[Tenant]] = {}
        for tenant in tenants:
            self._steering.admit(tenant.slot, tenant.data)
            asked.setdefault(tenant.params.algorithm, []).append(tenant)
        for algorithm in self._algorithms.values():
            algorithm.forget_rows()
        for name, takers in asked.items():
            self._of(name).admit(takers, transfer)

    def _of(self, name: str) -> _Algorithm:
        found = self._algorithms.get(name)
        if found is None:
            algorithm = algorithm_class(name)(self.mask_id, self._propose, self.edit_ids)
            sizes = self._num_slots, self._records.size
            found = self._algorithms[name] = _Algorithm(algorithm, *sizes, self._device)
        return found

    def take(
        self, slots: torch.Tensor, targets: torch.Tensor, pairs: torch.Tensor, *, may_turn: bool
    ) -> Round:
        """The blocks that K rows work on, copied.

        Args:
            slots: [K] int64, no slot twice but the null slot.
            targets: [K] int64, where the row's last block begins.
            pairs: [K] int64, 1 if the row has the slot's block and the next, 0 if it has one.
            may_turn: some block may be final and lie before the target: then its row goes on to the next.
        """
        layout, records = self._records, self._table.index_select(0, slots)
        if not may_turn:
            return Round(slots, records, records[:, : layout.size], None)
        block, _ = layout.block(records)
        turns = block.done & (block.starts < targets)
        turned = torch.where(turns.unsqueeze(1), self._blank, records)
        turned[:, layout.start_word] = torch.where(turns, targets, block.starts)
        paired = pairs > 0
        # A pair that turns commits the old block, with its ids; alone, the row is all about the new one.
        ids = torch.where(paired.unsqueeze(1), block.ids, turned[:, : layout.size])
        return Round(slots, turned, ids, turns & paired)

    def step(self, logits: torch.Tensor, round: Round, groups: Sequence[AlgorithmRows]) -> dict[int, Guided]:
        """Have every row's algorithm write what the forward is good for; the slots then hold the outcome.

        Args:
            logits: [K, B, V].
            round: written to.
            groups: the rows of each algorithm.

        Returns:
            by row that is steered, what its record does not have
        """
        told: dict[int, Guided] = {}
        for group in groups:
            rows = slice(group.first, group.last)
            algorithm, block, state = self.group(round, group)
            mine, guide = logits[rows], None
            if group.steered:
                assert group.key is not None, "the slots of steered rows are known"
                mine = mine.to(torch.float32, copy=True)
                slots = np.frombuffer(group.key, np.int64).tolist()
                guide = self._steering.guide(slots, alone=len(groups) == 1)
            algorithm.step(mine, block, state, drawn=group.drawn, filtered=group.filtered, guide=guide)
            if guide is not None:
                told |= zip(range(group.first, group.last), guide.told(), strict=True)
        self._table.index_copy_(0, round.slots, round.records)
        return told

    def group(self, round: Round, group: AlgorithmRows) -> tuple[Algorithm, Block, Rows]:
        """The algorithm of some rows of a round, their blocks, and what it knows of them."""
        rows = slice(group.first, group.last)
        block, counters = self._records.block(round.records[rows])
        entry = self._of(group.algorithm)
        state = entry.state(round.slots[rows], group.key, counters)
        if round.canvas is not None:
            state["canvas"] = round.canvas[rows]
        return entry.algorithm, block, state

    def blocks(self, records: torch.Tensor) -> tuple[Block, torch.Tensor]:
        """Blocks and counters, as views of records [R, words]."""
        return self._records.block(records)


@dataclass(frozen=True, slots=True)
class Round:
    """The blocks of K rows in one forward."""

    #: [K] int64
    slots: torch.Tensor
    #: [K, words] int64
    records: torch.Tensor
    #: [K, B] int64: what the forward reads in the place of the slot's block
    ids: torch.Tensor
    #: [K] bool: the logits that are wanted are those of the next block; None: of no row
    behind: torch.Tensor | None
    #: [K, B] int64: canvases, which their algorithm writes to; None in a model without
    canvas: torch.Tensor | None = None


class _Algorithm:
    """An algorithm that some request has asked for, and what each slot's tenant wants of it."""

    def __init__(self, algorithm: Algorithm, num_slots: int, size: int, device: torch.device) -> None:
        self.algorithm = algorithm
        self._size = size
        columns = {name: str(column.dtype) for name, column in algorithm.init_state([], [], []).items()}
        self._layout = WordRows(
            {
                name: (dtype.removeprefix("torch."), None)
                for name, dtype in {"slot": "int64", **columns}.items()
                if name not in (*algorithm.counters, "history")
            }
        )
        self._table = torch.zeros(num_slots + 1, self._layout.words, dtype=torch.int64, device=device)
        #: by the slots of their rows: it depends only on the requests there, which are mostly the same as
        #: before
        self._known: OrderedDict[bytes, Rows] = OrderedDict()

    def forget_rows(self) -> None:
        """Some slot has a new tenant."""
        self._known.clear()

    def admit(self, tenants: Sequence[Tenant], transfer: Transfer) -> None:
        """Write the parameters of new requests to their slots."""
        state = self.algorithm.init_state(
            [tenant.params for tenant in tenants],
            [tenant.data.params for tenant in tenants],
            [tenant.data.seed for tenant in tenants],
        )
        state["slot"] = torch.tensor([tenant.slot for tenant in tenants])
        words = torch.zeros(len(tenants), self._layout.words, dtype=torch.int64)
        for name, column in self._layout.views(words).items():
            column.copy_(state[name])
        sent = transfer.send(words.numpy())
        self._table.index_copy_(0, sent[:, self._layout.first_word("slot")], sent)

    def state(self, slots: torch.Tensor, key: bytes | None, counters: torch.Tensor) -> Rows:
        """Parameters of rows with these slots, [R]; ``key`` tells the host which they are. ``counters``
        [R, C] are written to."""
        known = None if key is None else self._known.get(key)
        if known is None:
            known = self._layout.views(self._table.index_select(0, slots))
            if key is not None:
                self._remember(key, known)
        own = self.algorithm
        found = known | {name: counters[:, at] for at, name in enumerate(own.counters)}
        if own.history:
            # A view: it is written to. Another algorithm may have more counters.
            first, rest = len(own.counters), self._size * own.history
            found["history"] = counters[:, first : first + rest].unflatten(1, (self._size, own.history))
        return found

    def _remember(self, key: bytes, rows: Rows) -> None:
        self._known[key] = rows
        if len(self._known) > _KNOWN_ROWS:
            self._known.popitem(last=False)


_KNOWN_ROWS = 4
