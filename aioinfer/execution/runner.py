"""Runner: a packed step through relay, model and sampler, on whatever device the tensors are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from aioinfer.execution.device import StepResult
from aioinfer.execution.grammar_worker import Constraints, GrammarRow, GrammarWorker
from aioinfer.execution.graphs import DecodeGraphs
from aioinfer.execution.packing import FLOAT_FIELDS, SECTIONS, Packed
from aioinfer.execution.relay import Relay
from aioinfer.model.attention.base import Attention
from aioinfer.model.batch import Batch
from aioinfer.model.spec import CausalLM
from aioinfer.observe.timeline import DeviceLane, now
from aioinfer.sampling.batch import SamplingBatch
from aioinfer.sampling.logprobs import Logprobs
from aioinfer.sampling.sampler import Sampler

__all__ = ["Runner", "Sampled", "Transfer"]


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step leaves on the device for the host to read."""

    #: int64 [S], or None if no row samples
    tokens: torch.Tensor | None
    #: of the rows and positions that asked for them, with ``chosen``, float32 [N]
    logprobs: Logprobs | None = None
    chosen: torch.Tensor | None = None
    #: by sampling row, tokens that follow without having been sampled
    forced: dict[int, list[int]] = field(default_factory=dict)
    #: seconds on the timeline's clock: the host began, was through with the forward, had the masks, and ended
    times: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)

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


class Transfer(Protocol):
    """Between host and device, for one step."""

    def send(self, array: npt.NDArray[Any], /) -> torch.Tensor:
        """An array of the host on the device, enqueued behind everything before."""

    def await_last_result(self) -> None:
        """Wait until the host has read the result of the step before."""


class Runner:
    """Computes steps in the order of their launch. Launch thread only."""

    __slots__ = ("_model", "attention", "graphs", "lane", "masks", "relay", "sampler")

    def __init__(
        self,
        model: CausalLM,
        attention: Attention,
        sampler: Sampler,
        relay: Relay,
        masks: GrammarWorker,
        lane: DeviceLane | None = None,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self.masks = masks
        self.graphs = graphs
        self.lane = DeviceLane() if lane is None else lane
        self._model = model
        self.attention = attention
        self.sampler = sampler
        self.relay = relay

    def warm_up(self) -> None:
        """Have the sampler's kernels compiled."""
        self.sampler.warm_up()

    @torch.inference_mode()
    def run(self, packed: Packed, link: Transfer) -> Sampled:
        """One step."""
        start = now()
        if self.graphs is not None and self.graphs.hold(packed):
            self.graphs.forward(packed, link.send)
            if packed.plain:
                forward = now()
                tokens = self.graphs.sample(packed)
                return Sampled(tokens, times=(start, forward, forward, now()))
            logits = self.graphs.logits(packed)
            inputs = _unpack(packed, link.send)
        else:
            inputs = _unpack(packed, link.send)
            self.relay.gather(inputs.batch.input_ids, inputs.slots, inputs.batch.num_decodes)
            logits = self._model.forward(inputs.batch, self.attention).float()
        return self._sample(packed, inputs, logits, link, start)

    def _sample(
        self, packed: Packed, inputs: _Inputs, logits: torch.Tensor, link: Transfer, start: float
    ) -> Sampled:
        """What the rows ask for, of whatever kind, from the logits of a step that began at ``start``."""
        forward = mask = now()
        count = len(packed.sample_rows)
        logprobs = self._logprobs(logits, packed, link) if packed.top >= 0 else None
        if not count:
            # A first chunk of a prompt: what it says of its request must not be lost.
            self.sampler.reset(packed.penalty_resets)
            chosen = None if logprobs is None else logprobs.of(inputs.score_ids)
            return Sampled(None, logprobs, chosen, times=(start, forward, mask, now()))
        logits = logits[:count]
        if len(inputs.biases[0]):
            self.sampler.logits_processors.add_biases_(logits, *inputs.biases)
        if packed.sampling.allowed is not None:
            rows, masks = packed.sampling.allowed
            self.sampler.logits_processors.apply_masks_(logits, link.send(rows), link.send(masks))
        found = None
        if packed.grammars:
            link.await_last_result()
            found = self._constrain(logits, packed.grammars, link)
            mask = now()
        tokens = self.sampler.sample(logits, inputs.sampling)
        if found is not None and found.outcomes:
            at, outcomes = link.send(np.asarray([*found.outcomes.items()], np.int64).T)
            tokens[at] = outcomes
        self.relay.scatter(inputs.sampling.slots, tokens)
        chosen = None
        if logprobs is not None:
            asked = link.send(np.asarray([row for row, _ in packed.sampling.logprobs], np.int64))
            chosen = logprobs.of(torch.cat((tokens[asked], inputs.score_ids)))
        forced = {} if found is None else found.forced
        return Sampled(tokens, logprobs, chosen, forced, (start, forward, mask, now()))

    def _logprobs(self, logits: torch.Tensor, packed: Packed, link: Transfer) -> Logprobs:
        """Of the sampling rows that want them, then of the scored positions."""
        rows = [row for row, _ in packed.sampling.logprobs]
        rows += range(len(packed.sample_rows), len(logits))
        return self.sampler.logprobs(logits[link.send(np.asarray(rows, np.int64))], packed.top)

    def read(self, packed: Packed, sampled: Sampled, tensors: Sequence[torch.Tensor]) -> StepResult:
        """The result of a step from its ``tensors``, which are on the host by now. What its grammars allow
        next is being worked out from here on."""
        start = now()
        result = sampled.result(packed, tensors)
        self.lane.add("copy", packed.step_id, start, now())
        self.masks.advance_step(packed.grammars, packed.sample_rows, result.tokens)
        return result

    def _constrain(self, logits: torch.Tensor, grammars: Sequence[GrammarRow], link: Transfer) -> Constraints:
        """Apply the masks of this step, which were made while its forward ran."""
        found = self.masks.collect(grammars, len(logits))
        rows = np.asarray([row.at for row in grammars], np.int64)
        self.sampler.logits_processors.apply_masks_(logits, link.send(rows), link.send(found.masks))
        return found


class _Inputs(NamedTuple):
    """A step's arrays on the device."""

    batch: Batch
    slots: torch.Tensor
    sampling: SamplingBatch
    score_ids: torch.Tensor
    biases: list[torch.Tensor]


def _unpack(packed: Packed, send: Callable[[npt.NDArray[Any]], torch.Tensor]) -> _Inputs:
    """Views of the buffers' sections; see :class:`~aioinfer.execution.packing.Packed`."""
    parts = dict(zip(SECTIONS, send(packed.ints).split(packed.sizes), strict=True))
    wanted = packed.sampling
    batch = Batch(
        **{name: parts[name] for name in ("input_ids", "positions", "slot_mapping", "cu_q", "kv_len")},
        block_table=parts["block_table"].view(-1, packed.num_pages),
        logits_rows=parts["logits_rows"],
        q_lens=packed.q_lens,
        kv_lens=packed.kv_lens,
        num_decodes=packed.num_decodes,
    )
    sampling = SamplingBatch(
        slots=parts["sample_slots"],
        positions=parts["sample_positions"],
        seeds=parts["seeds"],
        top_k=parts["top_k"],
        **dict(zip(FLOAT_FIELDS, send(wanted.floats), strict=True)),
        all_greedy=wanted.all_greedy,
        any_top_k=wanted.any_top_k,
        any_top_p=wanted.any_top_p,
        any_min_p=wanted.any_min_p,
        any_penalty=wanted.any_penalty,
        banned_rows=parts["banned_rows"] if len(parts["banned_rows"]) else None,
        banned_ids=parts["banned_ids"] if len(parts["banned_ids"]) else None,
        penalty_resets=packed.penalty_resets,
    )
    biases = [parts[name] for name in ("bias_rows", "bias_ids", "bias_bits")]
    return _Inputs(batch, parts["slots"], sampling, parts["score_ids"], biases)
