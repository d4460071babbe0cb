"""Runner: computes packed steps with a model and its decoding, on the device of the tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from aioinfer.execution.decoding.base import Decoding, Output, Transfer
from aioinfer.execution.decoding.head_drafter import HeadDrafter
from aioinfer.execution.device import StepResult
from aioinfer.execution.features import FeatureStore
from aioinfer.execution.graph_shapes import GraphShape
from aioinfer.execution.graphs import StepGraphs
from aioinfer.execution.packed import PackedStep
from aioinfer.model.attention.base import Attention
from aioinfer.model.batch import Batch
from aioinfer.model.spec import CausalLM
from aioinfer.model.state import RowStates, StatePool
from aioinfer.observe.timeline import DeviceLane, now
from aioinfer.sampling.outcomes import BAD_LOGITS
from aioinfer.scheduling.step import Encoding

__all__ = ["Runner", "check_ids"]


class Runner:
    """Computes steps in the order of their launch. Launch thread only, except for :meth:`read`."""

    def __init__(
        self,
        model: CausalLM,
        attention: Attention,
        decoding: Decoding,
        lane: DeviceLane | None = None,
        states: StatePool | None = None,
        head: HeadDrafter | None = None,
    ) -> None:
        """``states``: of a model with recurrent state; ``head``: drafts for it."""
        self.head = head
        self.features = None if model.encoder is None else FeatureStore(model.encoder)
        self.model = model
        self.attention = attention
        self.decoding = decoding
        self.states = states
        self.lane = DeviceLane() if lane is None else lane
        #: steps that are replayed, once they are captured
        self.graphs: StepGraphs | None = None

    def warm_up(self) -> None:
        """Compile what must not wait for the first step. Reads back from the device."""
        self.decoding.warm_up()

    @torch.inference_mode()
    def run(self, packed: PackedStep, transfer: Transfer) -> Output:
        """Enqueue one step. Raises ValueError, before anything is enqueued, for ids that no token has."""
        start = now()
        if packed.encoding is not None:
            return self._encode(packed.encoding, start)
        if not packed.decodes_only:
            check_ids(packed.sections["input_ids"], self.model.spec.vocab_size)
        if packed.shape is not None:
            return self._replay(packed, packed.shape, transfer, start)
        parts = packed.sections.split(transfer.send(packed.sections.ints))
        logits_rows, state = self.decoding.gather(packed, parts, transfer)
        batch = _batch(packed, parts, logits_rows)
        batch.canvas = self.decoding.canvas
        if packed.features:
            assert self.features is not None, "a model without an encoder gets no images"
            batch.features = self.features.features(parts["feature_rows"], packed.features)
        if self.states is not None:
            slots = parts["slots"]
            read, write = parts.get("state_read", slots), parts.get("state_write", slots)
            batch.states = RowStates(
                *(self.states, read, write), packed.sections["slots"], packed.replays, packed.kept
            )
        rounds = 0
        if self.head is not None:
            batch.places = self.head.places
        while True:
            logits = self.model.forward(batch, self.attention)
            if self.head is not None:
                self.head.keep(packed.work.head, batch, transfer)
            forward = now()
            pooled: list[torch.Tensor] = []
            if packed.pooling is not None:
                logits, pooled = packed.pooling.pool(batch.hidden, logits, parts, self.model)
            output = self.decoding.step(logits, packed, parts, state, transfer)
            rounds += 1
            if not self.decoding.again(packed, parts, state, rounds):
                break
        output.rounds = rounds
        output.tensors += pooled
        if packed.watched:
            assert batch.hidden is not None, "a model without hidden states is not asked for any"
            output.tensors.append(~batch.hidden[-len(packed.watched) :].isfinite().all(1))
        output.times = (start, forward, output.masked or forward, now())
        return output

    def _encode(self, encoding: Encoding, start: float) -> Output:
        assert self.features is not None, "a model without an encoder gets no images"
        self.features.encode(encoding)
        end = now()
        return Output([], times=(start, end, end, end))

    def _replay(self, packed: PackedStep, shape: GraphShape, transfer: Transfer, start: float) -> Output:
        graphs = self.graphs
        assert graphs is not None, "the step was packed for graphs that are not there"
        self.decoding.begin(packed, transfer)
        graphs.forward(packed, shape, transfer.send)
        forward = now()
        output = graphs.finish(packed)
        if output is None:
            # The rows ask for more than what was captured.
            parts = packed.sections.split(transfer.send(packed.sections.ints))
            output = self.decoding.step(graphs.logits(packed), packed, parts, None, transfer)
        if packed.watched:
            chunks = np.asarray(packed.watched, np.int64) - packed.num_decodes
            output.tensors.append(graphs.broken[transfer.send(chunks)])
        output.times = (start, forward, output.masked or forward, now())
        return output

    def read(self, packed: PackedStep, output: Output, copies: Sequence[torch.Tensor]) -> StepResult:
        """The result of a step from copies of its tensors, which are on the host by now."""
        start = now()
        if packed.encoding is not None:
            return StepResult([])
        pooling, count = packed.pooling, len(copies) - bool(packed.watched)
        if pooling is not None:
            count -= pooling.num_tensors
        result = self.decoding.read(packed, output, copies[:count])
        if pooling is not None:
            result.pooled = pooling.read(copies[count : count + pooling.num_tensors])
        if packed.watched:
            for row in np.asarray(packed.watched)[copies[-1].numpy()].tolist():
                result.tokens[row] = BAD_LOGITS
        self.lane.add("copy", packed.step_id, start, now())
        return result


def check_ids(ids: npt.NDArray[np.int64], vocab_size: int) -> None:
    """Raise ValueError for ids that no token has: a device that looks one up is lost, or worse."""
    # Without a sign, negative ids are large.
    if len(ids) and int(ids.view(np.uint64).max()) >= vocab_size:
        bad = ids[(ids < 0) | (ids >= vocab_size)]
        raise ValueError(f"input_ids: there is no token {bad[0]}, the model has {vocab_size}")


def _batch(packed: PackedStep, parts: dict[str, torch.Tensor], logits_rows: torch.Tensor) -> Batch:
    return Batch(
        input_ids=parts["input_ids"],
        positions=parts["positions"],
        slot_mapping=parts["slot_mapping"],
        cu_q=parts["cu_q"],
        kv_len=parts["kv_len"],
        block_table=parts["block_table"].view(-1, packed.num_pages),
        logits_rows=logits_rows,
        q_lens=packed.q_lens,
        kv_lens=packed.kv_lens,
        num_decodes=packed.num_decodes,
        adapters=parts.get("adapters"),
        adapter_slots=packed.adapter_slots,
        hidden_rows=parts.get("hidden_rows"),
        rotary=None if "rotary" not in parts else parts["rotary"].view(3, -1),
        ends=parts.get("ends"),
    )
