"""BlockRunner: a packed step of a diffusion model, on whatever device the tensors are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from aioinfer.diffusion.record import BlockRecords
from aioinfer.diffusion.registry import algorithm_class
from aioinfer.execution.block_graphs import BlockGraphs
from aioinfer.execution.block_packing import BLOCK_SECTIONS, BlockPacked, block_records
from aioinfer.execution.block_table import BlockTable, Round
from aioinfer.execution.device import StepResult
from aioinfer.execution.runner import Transfer
from aioinfer.model.attention.base import Attention
from aioinfer.model.batch import Batch
from aioinfer.model.spec import CausalLM
from aioinfer.observe.timeline import DeviceLane, now
from aioinfer.sampling.outcomes import NO_TOKEN

__all__ = ["BlockRunner", "Denoised"]


@dataclass(frozen=True, slots=True)
class Denoised:
    """What a step leaves on the device for the host to read."""

    #: [K * words] int64, of the rows that have blocks
    records: torch.Tensor
    #: forwards that it took
    rounds: int
    #: seconds on the timeline's clock: the host began, was through with the forward, and ended; as of Sampled
    times: tuple[float, float, float, float]

    def tensors(self) -> list[torch.Tensor]:
        """Everything that has to be copied."""
        return [self.records] if len(self.records) else []


class BlockRunner:
    """Computes steps in the order of their launch, and reads nothing back meanwhile unless the device is
    ``synchronous``. Launch thread only."""

    __slots__ = ("_model", "_records", "_synchronous", "attention", "graphs", "lane", "table")

    def __init__(
        self,
        model: CausalLM,
        attention: Attention,
        *,
        num_slots: int,
        device: torch.device,
        synchronous: bool,
        lane: DeviceLane | None = None,
    ) -> None:
        spec = model.spec
        assert spec.block_size is not None, "not a diffusion model"
        assert spec.mask_token_id is not None, "a diffusion model has a mask"
        self.attention = attention
        self.graphs: BlockGraphs | None = None
        self.lane = DeviceLane() if lane is None else lane
        self._model = model
        self._synchronous = synchronous
        self._records: BlockRecords = block_records(spec.block_size, spec.mask_token_id)
        self.table = BlockTable(num_slots, self._records, spec.mask_token_id, device)

    def warm_up(self) -> None:
        """There is nothing to compile before the first step."""

    @torch.inference_mode()
    def run(self, packed: BlockPacked, link: Transfer) -> Denoised:
        """One step."""
        start = now()
        if self.graphs is not None and self.graphs.hold(packed):
            if packed.tenants:
                begun = [link.send(packed.section(name)) for name in ("begun_slots", "begun_records")]
                self.table.begin(begun[0], begun[1], packed.tenants, link)
            self.graphs.forward(packed, link.send)
            forward = now()
            return Denoised(self.graphs.step(packed), 1, (start, forward, forward, now()))
        return self._run(packed, link, start)

    def _run(self, packed: BlockPacked, link: Transfer, start: float) -> Denoised:
        parts = dict(
            zip(BLOCK_SECTIONS, torch.split(link.send(packed.ints), list(packed.sizes)), strict=True)
        )
        self.table.begin(parts["begun_slots"], parts["begun_records"], packed.tenants, link)
        tokens = parts["block_tokens"]
        round = self.table.take(parts["slots"], parts["targets"], parts["pairs"], may_turn=packed.may_turn)
        batch = Batch(
            **{name: parts[name] for name in ("input_ids", "positions", "slot_mapping", "cu_q", "kv_len")},
            block_table=parts["block_table"].view(-1, packed.num_pages),
            logits_rows=self._logits_rows(tokens, round),
            q_lens=packed.q_lens,
            kv_lens=packed.kv_lens,
            num_decodes=0,
        )
        ids, rounds = round.ids, 0
        while True:
            batch.input_ids.index_copy_(0, tokens, ids.reshape(-1))
            logits = self._model.forward(batch, self.attention)
            forward = now()
            rounds += 1
            if packed.rows:
                shape = (len(packed.rows), self._records.size, logits.shape[-1])
                self.table.step(logits.view(shape), round, packed.groups)
            if not self._again(packed, rounds, round):
                break
            ids = round.records[:, : self._records.size]
        return Denoised(round.records.view(-1), rounds, (start, forward, forward, now()))

    def _logits_rows(self, tokens: torch.Tensor, round: Round) -> torch.Tensor:
        """The tokens of the block that each row denoises, [K * B]."""
        if round.behind is None:
            return tokens
        size = self._records.size
        return (tokens.view(-1, size) + (round.behind * size).unsqueeze(1)).view(-1)

    def _again(self, packed: BlockPacked, rounds: int, round: Round) -> bool:
        """Whether to go on with the same rows: nobody wants in, and no block is done."""
        horizon = packed.horizon
        if horizon is None or not self._synchronous or horizon.interrupted or rounds >= horizon.rounds:
            return False
        return not self._records.block(round.records)[0].done.any()

    def read(self, packed: BlockPacked, sampled: Denoised, tensors: Sequence[torch.Tensor]) -> StepResult:
        """The result of a step from its ``tensors``, which are on the host by now."""
        start = now()
        result = StepResult([NO_TOKEN] * len(packed.q_lens), rounds=sampled.rounds)
        counters = [
            len(algorithm_class(group.algorithm).counters)
            for group in packed.groups
            for _ in range(group.first, group.last)
        ]
        for records in tensors:
            states = self._records.states(records.view(-1, self._records.words).numpy(), counters)
            result.blocks = dict(zip(packed.rows, states, strict=True))
        self.lane.add("copy", packed.step_id, start, now())
        return result
