"""Runner: a packed step through relay, model and sampler, on whatever device the tensors are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from aioinfer.execution.device import StepResult
from aioinfer.execution.masks import Constraints, GrammarRow, Masks
from aioinfer.execution.packing import Packed
from aioinfer.execution.relay import Relay
from aioinfer.model.attention.base import Attention
from aioinfer.model.batch import Batch
from aioinfer.model.spec import CausalLM
from aioinfer.observe.timeline import DeviceLane, now
from aioinfer.sampling.batch import SamplingBatch
from aioinfer.sampling.logprobs import Logprobs
from aioinfer.sampling.masks import add_biases_, apply_masks_
from aioinfer.sampling.sampler import Sampler

__all__ = ["Runner", "Sampled"]


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step leaves on the device for the host to read."""

    #: int64 [S], or None if no row samples
    tokens: torch.Tensor | None
    #: of the rows and positions that asked for them, with ``chosen``, float32 [N]
    logprobs: Logprobs | None
    chosen: torch.Tensor | None
    #: by sampling row, tokens that follow without having been sampled
    forced: dict[int, list[int]] = field(default_factory=dict)

    def tensors(self) -> list[torch.Tensor]:
        """Everything that has to be copied; read back by :meth:`result` in the same order."""
        found = [] if self.tokens is None else [self.tokens]
        if self.logprobs is not None and self.chosen is not None:
            found += [self.chosen, self.logprobs.top_ids, self.logprobs.top]
        return found

    def result(self, packed: Packed, copies: Sequence[torch.Tensor]) -> StepResult:
        """The step's result from host copies of :meth:`tensors`."""
        values = [copy.tolist() for copy in copies]
        tokens = [] if self.tokens is None else values.pop(0)
        chosen, top_ids, top = values or ([], [], [])
        return packed.result(tokens, self.forced, chosen, top_ids, top)


class Runner:
    """Computes steps in the order of their launch. Launch thread only."""

    __slots__ = ("_attention", "_lane", "_model", "_relay", "_sampler", "masks")

    def __init__(
        self,
        model: CausalLM,
        attention: Attention,
        sampler: Sampler,
        relay: Relay,
        masks: Masks,
        lane: DeviceLane | None = None,
    ) -> None:
        self.masks = masks
        self._lane = DeviceLane() if lane is None else lane
        self._model = model
        self._attention = attention
        self._sampler = sampler
        self._relay = relay

    @torch.inference_mode()
    def run(
        self,
        packed: Packed,
        ints: torch.Tensor,
        floats: torch.Tensor,
        before_masks: Callable[[], object] | None = None,
    ) -> Sampled:
        """One step; ``ints`` and ``floats`` are ``packed``'s buffers on the device.

        ``before_masks`` is called after the forward and before waiting for masks.
        """
        start = now()
        batch, slots, sampling, score_ids, biases = _unpack(packed, ints, floats)
        self._relay.gather(batch.input_ids, slots, batch.num_decodes)
        logits = self._model.forward(batch, self._attention)
        forward = mask = now()
        count = len(packed.sample_rows)
        logprobs = _logprobs(logits, packed) if packed.top >= 0 else None
        if not count:
            # A first chunk of a prompt: what it says of its request must not be lost.
            self._sampler.reset(packed.penalty_resets)
            self._lane.step(packed.step_id, start, forward, mask, now())
            return Sampled(None, logprobs, None if logprobs is None else logprobs.of(score_ids))
        logits = logits[:count]
        if len(biases[0]):
            add_biases_(logits, *biases)
        if packed.roster.allowed is not None:
            _apply(logits, *packed.roster.allowed)
        constraints = None
        if packed.grammars:
            if before_masks is not None:
                before_masks()
            constraints = self._constrain(logits, packed.grammars)
            mask = now()
        tokens = self._sampler.sample(logits, sampling)
        forced = {} if constraints is None else constraints.forced
        if constraints is not None and constraints.outcomes:
            at, outcomes = torch.tensor([*constraints.outcomes.items()], device=tokens.device).T
            tokens[at] = outcomes
        self._relay.scatter(sampling.slots, tokens)
        self._lane.step(packed.step_id, start, forward, mask, now())
        if logprobs is None:
            return Sampled(tokens, None, None, forced)
        wanted = tokens[[row for row, _ in packed.roster.logprobs]]
        return Sampled(tokens, logprobs, logprobs.of(torch.cat((wanted, score_ids))), forced)

    def read(self, packed: Packed, sampled: Sampled, tensors: Sequence[torch.Tensor]) -> StepResult:
        """The result of a step from its ``tensors``, which are on the host by now. What its grammars allow
        next is being worked out from here on."""
        start = now()
        result = sampled.result(packed, tensors)
        self._lane.add("copy", packed.step_id, start, now())
        self.masks.advance_step(packed.grammars, packed.sample_rows, result.tokens)
        return result

    def _constrain(self, logits: torch.Tensor, grammars: Sequence[GrammarRow]) -> Constraints:
        """Apply the masks of this step, which were made while its forward ran."""
        found = self.masks.collect(grammars, len(logits))
        _apply(logits, np.asarray([row.at for row in grammars]), found.masks)
        return found


def _apply(logits: torch.Tensor, rows: npt.NDArray[np.int64], masks: npt.NDArray[np.int32]) -> None:
    device = logits.device
    apply_masks_(logits, torch.from_numpy(rows).to(device), torch.from_numpy(masks).to(device))


def _logprobs(logits: torch.Tensor, packed: Packed) -> Logprobs:
    """Of the sampling rows that want them, then of the scored positions."""
    rows = [row for row, _ in packed.roster.logprobs]
    rows += range(len(packed.sample_rows), len(logits))
    return Logprobs(logits[rows], packed.top)


def _unpack(
    packed: Packed, ints: torch.Tensor, floats: torch.Tensor
) -> tuple[Batch, torch.Tensor, SamplingBatch, torch.Tensor, list[torch.Tensor]]:
    """Views of the buffers' sections; see :class:`~aioinfer.execution.packing.Packed`."""
    bounds = list(itertools.accumulate(packed.sizes, initial=0))
    parts = [ints[start:stop] for start, stop in itertools.pairwise(bounds)]
    input_ids, positions, slot_mapping, cu_q, kv_len, slots, tables = parts[:7]
    logits_rows, sample_slots, sample_positions, seeds, top_k, banned_rows, banned_ids = parts[7:14]
    score_ids, *biases = parts[14:]
    batch = Batch(
        input_ids=input_ids,
        positions=positions,
        slot_mapping=slot_mapping,
        cu_q=cu_q,
        kv_len=kv_len,
        block_table=tables.view(-1, packed.num_pages),
        logits_rows=logits_rows,
        q_lens=packed.q_lens,
        kv_lens=packed.kv_lens,
        num_decodes=packed.num_decodes,
    )
    temperature, top_p, min_p, repetition, presence, frequency = floats
    roster = packed.roster
    sampling = SamplingBatch(
        slots=sample_slots,
        positions=sample_positions,
        seeds=seeds,
        temperature=temperature,
        top_p=top_p,
        min_p=min_p,
        top_k=top_k,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        all_greedy=roster.all_greedy,
        any_top_k=roster.any_top_k,
        any_top_p=roster.any_top_p,
        any_min_p=roster.any_min_p,
        any_penalty=roster.any_penalty,
        banned_rows=banned_rows if len(banned_rows) else None,
        banned_ids=banned_ids if len(banned_ids) else None,
        penalty_resets=packed.penalty_resets,
    )
    return batch, slots, sampling, score_ids, biases
