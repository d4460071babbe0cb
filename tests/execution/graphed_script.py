"""The scripted device with its rounds captured: the model as one kernel, everything around it as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from aioinfer.execution.decoding.blocks import BlockDecoding, BlockPacker
from aioinfer.execution.device import DeviceInfo, Flight
from aioinfer.execution.graph_shapes import GraphShape, GraphShapes
from aioinfer.execution.graphs import StepGraphs
from aioinfer.execution.packed import PackedStep
from aioinfer.execution.packing import Packer
from aioinfer.execution.runner import Runner
from aioinfer.model.batch import Batch
from aioinfer.scheduling.step import Step
from tests.execution.recording import Recording, launch, record
from tests.toys.blocks import EDITS, ScriptedDevice, ScriptedLM

CPU = torch.device("cpu")
SIZES = [2, 7]


class ReplayedLM(ScriptedLM):
    """The scripted model as a kernel that can be captured: looks at its batch when it is launched."""

    capturable = True
    invariant = True
    seconds: Mapping[str, float] = MappingProxyType({})

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        #: the step's row behind each block row of the graph
        self.order: list[int] = []
        #: may raise when the forward has written and not yet read
        self.fault: Callable[[], None] | None = None

    def forward(self, batch: Batch, attention: Any) -> torch.Tensor:
        if batch.kv_lens:
            return super().forward(batch, attention)
        logits = torch.empty(len(batch.logits_rows), self.spec.vocab_size)
        recording = _get_current_dispatch_mode()
        if isinstance(recording, Recording):
            launch(recording, lambda: self._replay(batch, logits))
        return logits

    def _replay(self, batch: Batch, logits: torch.Tensor) -> None:
        """Rows of one sequence become one row, as the scripted model knows them; padding must be such."""
        logits.fill_(float("nan"))
        size, ends = self._size, batch.kv_len.tolist()
        cells = batch.slot_mapping.view(-1, size)
        assert batch.cu_q.tolist() == [size * at for at in range(len(ends) + 1)]
        assert all((cells[at] < size).all() for at, end in enumerate(ends) if not end), "padding is junk"
        rows: list[list[int]] = []
        owners: dict[int, int] = {}
        for at in (at for at, end in enumerate(ends) if end):
            first = owners.setdefault(int(batch.block_table[at, 0]), at)
            if first == at:
                rows.append([at])
            else:
                next(each for each in rows if each[0] == first).append(at)
        if not rows:
            return
        order = [at for members in rows for at in members]
        where = {at: number for number, at in enumerate(order)}
        asked = (batch.logits_rows.view(-1, size)[:, 0] // size).tolist()
        live = [at for at, number in enumerate(asked) if number in where]
        expected = self.expected
        if expected is not None:
            self.expected = [expected[at] for at in self.order]
        merged = Batch(
            input_ids=batch.input_ids.view(-1, size)[order].view(-1),
            positions=batch.positions.view(-1, size)[order].view(-1),
            slot_mapping=cells[order].view(-1),
            cu_q=torch.empty(0),
            kv_len=torch.empty(0),
            block_table=batch.block_table[[members[0] for members in rows]],
            logits_rows=torch.tensor([where[asked[at]] * size for at in live]).repeat_interleave(size),
            q_lens=[len(members) * size for members in rows],
            kv_lens=[ends[members[-1]] for members in rows],
            num_decodes=0,
        )
        shape = (-1, size, self.spec.vocab_size)
        logits.view(shape)[live] = super().forward(merged, None).view(shape)
        self.expected = expected
        if self.fault is not None:
            self.fault()


class GraphedScript(ScriptedDevice):
    """The scripted device with its rounds captured."""

    def __init__(self, *, sizes: list[int] = SIZES, kernels: bool = False, **options: Any) -> None:
        """``kernels``: Triton's propose tokens, in its interpreter."""
        super().__init__(**options)
        self._sizes, self._kernels = sizes, kernels
        self.graphs: StepGraphs | None = None

    def open(self, progress: Any = None) -> DeviceInfo:
        info = super().open(progress)
        self._lm = self.lm = ReplayedLM(
            self.script, self._lm.spec, num_pages=self._num_pages, page_size=self.page_size
        )
        self._backend._runner = self.runner = self.graphed(synchronous=True)
        rows = BlockPacker(self._num_slots, self.block_size, self.mask_token_id, EDITS)
        pages = self._max_model_len // self.page_size
        self._packer = Packer(rows, self._num_slots, pages, self.page_size, self._shapes)
        return info

    @property
    def _shapes(self) -> GraphShapes:
        return GraphShapes(map(GraphShape, self._sizes))

    def graphed(self, capture: Any = None, *, synchronous: bool) -> Runner:
        """A runner that replays."""
        decoding = BlockDecoding(
            self.lm.spec, self._num_slots, CPU, synchronous=synchronous, kernels=self._kernels
        )
        runner = Runner(self.lm, None, decoding, self.lane)  # type: ignore[arg-type]
        if not self._sizes:
            return runner
        captured = decoding.captured(
            *(self.lm, None),  # type: ignore[arg-type]
            shapes=self._shapes,
            max_pages=self._max_model_len // self.page_size,
            page_size=self.page_size,
        )
        self.graphs = StepGraphs(captured, self._shapes)
        self.graphs.capture(capture or record)
        runner.graphs = self.graphs
        return runner

    def launch(self, prepared: tuple[Step, PackedStep]) -> Flight:
        self.lm.order = prepared[1].work.rows
        return super().launch(prepared)

    @property
    def forwards_replayed(self) -> int:
        if self.graphs is None:
            return 0
        return sum(graph.replays for graph in self.graphs._forwards.values() if isinstance(graph, Recording))

    @property
    def steps_replayed(self) -> dict[str, int]:
        """By kind of variant."""
        assert self.graphs is not None
        found: dict[str, int] = {}
        for (_, variant), graph in self.graphs._steps.items():
            assert isinstance(variant, tuple)
            assert isinstance(graph, Recording)
            found[variant[1]] = found.get(variant[1], 0) + graph.replays
        return found
