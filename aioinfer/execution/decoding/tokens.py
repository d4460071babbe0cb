"""Tokens: every row that samples gets one token, which the relay carries into the slot's next row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from aioinfer.config import EngineConfig
from aioinfer.execution.decoding.base import Output, Transfer
from aioinfer.execution.decoding.draft_model import DraftForward, DraftModel, draft_forwards
from aioinfer.execution.decoding.head_drafter import HeadDrafter, HeadPacker, HeadWork
from aioinfer.execution.decoding.holding import Holding, hold
from aioinfer.execution.decoding.relay import Relay
from aioinfer.execution.decoding.sampling_metadata import FLOAT_FIELDS, SamplingMetadata, SamplingTable
from aioinfer.execution.decoding.token_graphs import CapturedTokens
from aioinfer.execution.device import StepResult
from aioinfer.execution.grammar_worker import GrammarRow, GrammarWorker
from aioinfer.execution.graph_shapes import GraphShape, GraphShapes, mixed_shapes
from aioinfer.execution.packed import Layout, PackedStep
from aioinfer.execution.paging import Tables
from aioinfer.execution.steering import SteeredRow, advance, awake
from aioinfer.execution.warmup import COSTLY, SCORED, filled_slots
from aioinfer.model.attention.base import Attention
from aioinfer.model.canvas import Canvas
from aioinfer.model.spec import CausalLM, ModelSpec
from aioinfer.model.state import StatePool
from aioinfer.observe.timeline import now
from aioinfer.outputs import TokenLogprob
from aioinfer.sampling.batch import FilterRows, PenaltyReset, SamplingBatch
from aioinfer.sampling.logprobs import Logprobs, score
from aioinfer.sampling.outcomes import BAD_LOGITS, NO_TOKEN
from aioinfer.sampling.sampler import Sampler
from aioinfer.sampling.verification import DraftRows, Drafts
from aioinfer.scheduling.step import NO_ROWS, Generating, NewRequestData, Step

__all__ = ["TokenDecoding", "TokenKind", "TokenPacker", "TokenWork"]

#: the sampling rows of which drafts were drawn on the device, and these drafts, int64 [D] each
_Drawn: TypeAlias = "tuple[torch.Tensor, torch.Tensor] | None"
_Ints: TypeAlias = npt.NDArray[np.int64]
_Held = TypeVar("_Held", GrammarRow, SteeredRow)
_NO_SCORES = np.empty(0, np.int64)


@dataclass(slots=True)
class TokenWork:
    """Inputs of sampling besides the sections of a step, which are, for S sampling rows and E scored
    positions: logits_rows[S + E], sample_slots[S], sample_positions[S], seeds[S], top_k[S], banned_rows and
    banned_ids, score_ids[E], and bias_rows, bias_ids and bias_bits, the bits of a float32.

    A row that verifies k drafts has 1 + k sampling rows, and the section ``verified`` has the indices of the
    tokens with which such rows begin."""

    #: index in the step of each sampling row
    sample_rows: list[int]
    sampling: SamplingMetadata
    penalty_resets: list[PenaltyReset]
    #: rows whose sampling waits for a mask, and those whose logits processors are called
    grammars: list[GrammarRow]
    steered: list[SteeredRow]
    #: (row, number of scored positions, how many of the likeliest tokens)
    scores: list[tuple[int, int, int]]
    num_banned: int
    score_ids: _Ints
    #: of the rows that verify drafts; None if there are none
    drafts: DraftRows | None = None
    #: of a draft model
    draft_forwards: Sequence[DraftForward] = ()
    #: of a draft head
    head: HeadWork | None = None
    #: of a step that a captured one computes: pages of the first rows that sample, all that bring no drafts
    tables: Tables | None = None

    @property
    def plain(self) -> bool:
        """Sampling needs no more than seeds, temperatures and filters."""
        sampling = self.sampling
        return not (
            self.drafts is not None
            or sampling.any_penalty
            or sampling.logprobs
            or self.scores
            or self.grammars
            or self.steered
            or self.penalty_resets
            or sampling.allowed is not None
            or sampling.filters
            or self.num_banned
            or len(sampling.biases[0])
        )

    @property
    def top(self) -> int:
        """Likeliest tokens wanted at most; -1 if no logprob is wanted."""
        return max((count[-1] for count in (*self.sampling.logprobs, *self.scores)), default=-1)


class TokenPacker:
    """Keeps the sampling parameters of each slot. See
    :class:`~aioinfer.execution.decoding.base.RowPacker`."""

    unknown_id = 0

    def __init__(self, num_slots: int) -> None:
        self._table = SamplingTable(num_slots)
        self.head: HeadPacker | None = None
        #: by slot, those that no packed step has yet
        self._resets: dict[int, PenaltyReset] = {}

    def admit(self, new: Mapping[int, NewRequestData]) -> None:
        if self.head is not None:
            self.head.admit(new)
        for slot, data in new.items():
            reset = self._table.admit(slot, data)
            if reset is not None:
                self._resets[slot] = reset

    def graph_need(self, step: Step) -> GraphShape | None:
        generating, prefilling = step.generating, step.prefilling
        # Those of a draft model read what its own forwards have drawn; the others read more than samples, or
        # start from more than a state.
        if (
            generating.draft_inputs
            or generating.replays is not None
            or any(row.scores or row.pools for row in prefilling)
        ):
            return None
        decodes = generating.num_decodes
        chunks = step.num_rows - decodes
        sampled = sum(row.samples for row in prefilling)
        sampled += sum(1 + len(drafts) for drafts in generating.drafts)
        return GraphShape(decodes, step.num_tokens - decodes, max(chunks, sampled))

    def pack(self, step: Step, layout: Layout) -> tuple[dict[str, _Ints], TokenWork]:
        slots, cu_q, kv_len = layout.slots, layout.placement.cu_q, layout.placement.kv_len
        sample_slots, sample_positions, logits_rows = slots, kv_len, cu_q[:-1]
        sample_rows = list(range(len(slots)))
        drafts: DraftRows | None = None
        if layout.q_len is not None:
            sample_rows = sample_rows[: step.num_generating]
            sample_rows += [at for at, row in enumerate(step.prefilling, step.num_generating) if row.samples]
            behind = np.zeros(len(sample_rows), np.int64)
            if step.generating.drafts:
                given = step.generating.drafts
                drafts = DraftRows.of(step.generating.num_decodes, given, len(sample_rows))
                sample_rows = np.asarray(sample_rows)[drafts.rows].tolist()
                behind = drafts.behind
            sample_slots, sample_positions = slots[sample_rows], kv_len[sample_rows] - behind
            logits_rows = cu_q[1:][sample_rows] - 1 - behind
        sampling = self._table.metadata(sample_slots)
        score_rows, score_ids, scores = _scores(step, cu_q)
        banned_rows, banned_ids = sampling.banned(sample_positions)
        bias_rows, bias_ids, bias_bits = sampling.biases
        sections = {
            "logits_rows": np.concatenate((logits_rows, score_rows)) if len(score_rows) else logits_rows,
            "sample_slots": sample_slots,
            "sample_positions": sample_positions,
            "seeds": sampling.seeds,
            "top_k": sampling.top_k,
            "banned_rows": banned_rows,
            "banned_ids": banned_ids,
            "score_ids": score_ids,
            "bias_rows": bias_rows,
            "bias_ids": bias_ids,
            "bias_bits": bias_bits,
        }
        if drafts is not None:
            sections["verified"] = cu_q[step.generating.num_decodes : step.num_generating]
        of_rows = partial(_held_rows, step, sample_rows, sample_positions, drafts)
        grammars, steered = of_rows(GrammarRow, sampling.grammars), of_rows(SteeredRow, sampling.steered)
        forwards: Sequence[DraftForward] = ()
        head, first = None, [] if drafts is None else drafts.first
        if self.head is not None:
            head = self.head.pack(step, layout, first)
        elif step.generating.draft_inputs:
            forwards = draft_forwards(step, layout, first)
        tables: Tables | None = None
        if layout.shape is not None:
            still = len(sample_slots) if drafts is None else step.generating.num_decodes
            tables = layout.tables.of(sample_slots[:still])
        # A step that cannot be packed leaves its resets to the next one.
        resets, self._resets = list(self._resets.values()), {}
        return sections, TokenWork(
            *(sample_rows, sampling, resets, grammars, steered, scores, len(banned_ids), score_ids, drafts),
            draft_forwards=forwards,
            head=head,
            tables=tables,
        )


def _held_rows(
    step: Step,
    sample_rows: Sequence[int],
    sample_positions: _Ints,
    rows: DraftRows | None,
    kind: Callable[..., _Held],
    states: Sequence[tuple[int, object]],
) -> list[_Held]:
    """Rows of a step that have something to wait for before they sample, one for each row with a state."""
    found: list[_Held] = []
    for at, state in states:
        row = sample_rows[at]
        drafts: Sequence[int] = ()
        number = row - step.generating.num_decodes
        if rows is not None and 0 <= number < len(rows.first):
            if at != rows.first[number]:
                continue  # the row is there by its first position
            drafts = step.generating.drafts[number]
        known = row >= step.num_generating
        found.append(kind(at, state, int(sample_positions[at]), known, drafts))
    return found


def _scores(step: Step, cu_q: _Ints) -> tuple[_Ints, _Ints, list[tuple[int, int, int]]]:
    """Token rows whose next token is to be scored, these tokens, and the rows they belong to."""
    if all(row.scores is None for row in step.prefilling):
        return _NO_SCORES, _NO_SCORES, []
    rows: list[int] = []
    ids: list[int] = []
    scores: list[tuple[int, int, int]] = []
    for index, row in enumerate(step.prefilling, step.num_generating):
        if row.scores is None:
            continue
        first, last = row.scores
        offset = int(cu_q[index]) - row.start
        rows += range(offset + first, offset + last)
        targets, images = row.sequence.prompt_ids[first + 1 : last + 1], row.sequence.output.images
        ids += targets if images is None else images.shown(targets)
        scores.append((index, last - first, row.sequence.params.prompt_logprobs or 0))
    return np.asarray(rows, np.int64), np.asarray(ids, np.int64), scores


class TokenDecoding:
    """Samples. See :class:`~aioinfer.execution.decoding.base.Decoding`."""

    canvas: Canvas | None = None

    def __init__(self, sampler: Sampler, relay: Relay, grammars: GrammarWorker) -> None:
        self.sampler = sampler
        self.relay = relay
        self.grammars = grammars
        self.draft_model: DraftModel | None = None
        self.head: HeadDrafter | None = None

    def warm_up(self) -> None:
        self.sampler.warm_up()

    def begin(self, packed: PackedStep, transfer: Transfer) -> None:
        """Counts of penalties are reset where tokens are sampled."""
        work: TokenWork = packed.work
        if work.drafts is not None and work.grammars:
            # Their masks are made while the forward runs.
            self.grammars.look_ahead(work.grammars)

    def gather(
        self, packed: PackedStep, parts: dict[str, torch.Tensor], transfer: Transfer
    ) -> tuple[torch.Tensor, _Drawn]:
        work: TokenWork = packed.work
        self.relay.gather(parts["input_ids"], parts["slots"], packed.num_decodes, parts.get("verified"))
        self.begin(packed, transfer)
        drawn: _Drawn = None
        forwards = work.draft_forwards if work.head is None else work.head.forwards
        batch = _sampling_batch(work, parts, transfer) if forwards else None
        if work.head is not None and self.head is not None:
            drawn = self.head.draw(work.head, parts["input_ids"], batch, transfer)
        elif batch is not None and self.draft_model is not None:
            drawn = self.draft_model.draw(forwards, parts["input_ids"], batch, transfer)
        return parts["logits_rows"], drawn

    def again(self, packed: PackedStep, parts: dict[str, torch.Tensor], state: Any, rounds: int) -> bool:
        return False

    def step(
        self,
        logits: torch.Tensor,
        packed: PackedStep,
        parts: dict[str, torch.Tensor],
        state: _Drawn,
        transfer: Transfer,
    ) -> Output:
        work: TokenWork = packed.work
        masked: float | None = None
        count = len(work.sample_rows)
        scores = self._scores(logits[count:], parts["score_ids"], work.top)
        if not count:
            # A first chunk of a prompt: what it says of its request must not be lost.
            self.sampler.reset(work.penalty_resets)
            return Output(scores)
        logits = logits[:count].float()
        logprobs: Logprobs | None = None
        if work.sampling.logprobs:
            # As they are before biases and masks.
            asked = transfer.send(np.asarray([row for row, _ in work.sampling.logprobs], np.int64))
            logprobs = self.sampler.logprobs(logits[asked], work.top)
        processors, sampling = self.sampler.logits_processors, _sampling_batch(work, parts, transfer)
        if len(parts["bias_rows"]):
            processors.add_biases_(logits, parts["bias_rows"], parts["bias_ids"], parts["bias_bits"])
        held = Holding()
        steered = awake(work.steered) if work.steered else []
        if work.grammars or steered:
            transfer.await_last_result()
            held = hold(
                *(logits, work.grammars, steered),
                len(logits) if work.drafts is None else len(set(work.sample_rows)),
                worker=self.grammars,
                operations=processors,
                transfer=transfer,
            )
            masked = now()
        if work.sampling.allowed is not None:
            rows, masks = work.sampling.allowed
            processors.apply_masks_(logits, transfer.send(rows), transfer.send(masks))
        last = sampling.slots
        if work.drafts is None:
            tokens = self.sampler.sample(logits, sampling)
        else:
            drafts = _drafts(work, held.usable, transfer)
            if state is not None:
                drafts.expected[state[0]] = state[1]
            tokens, last = self.sampler.verify(logits, sampling, drafts)
        if held.outcomes:
            at, values = transfer.send(np.asarray([*held.outcomes.items()], np.int64).T)
            tokens[at] = values
        self.relay.scatter(last, tokens)
        if logprobs is not None:
            sampled = [logprobs.of(tokens[asked]), logprobs.top_ids, logprobs.top]
            scores = [torch.cat(each) for each in zip(sampled, scores, strict=True)] if scores else sampled
        return Output([tokens, *scores], held.forced, held.steered, masked=masked)

    def _scores(self, logits: torch.Tensor, ids: torch.Tensor, top: int) -> list[torch.Tensor]:
        """Tensors of the scored positions, in the order of :func:`_read_logprobs`; none without scores."""
        return [*score(self.sampler.logprobs, logits, ids, top)] if len(ids) else []

    def read(self, packed: PackedStep, output: Output, copies: Sequence[torch.Tensor]) -> StepResult:
        """Read the result; from here on the grammars compute what they allow next."""
        work: TokenWork = packed.work
        values = [copy.tolist() for copy in copies]
        tokens: list[int] = values.pop(0) if work.sample_rows else []
        result = StepResult([NO_TOKEN] * len(packed.q_lens))
        if work.drafts is None:
            for row, token in zip(work.sample_rows, tokens, strict=True):
                result.tokens[row] = token
        else:
            _read_runs(result, work, work.drafts, tokens)
        result.forced = {work.sample_rows[at]: ids for at, ids in output.forced.items()}
        if values:
            _read_logprobs(result, work, tokens, *values)
        if work.grammars:
            self.grammars.advance(work.grammars, tokens, output.steered)
        if work.steered:
            advance(work.steered, tokens, output.forced)
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
    ) -> CapturedTokens:
        return CapturedTokens(
            *(model, attention, self.sampler, self.relay),
            shapes=shapes,
            max_pages=max_pages,
            page_size=page_size,
            states=states,
        )


def _drafts(work: TokenWork, usable: Mapping[int, int], transfer: Transfer) -> Drafts:
    assert work.drafts is not None
    levels = work.drafts.levels() if work.sampling.any_penalty else []
    return Drafts(
        transfer.send(work.drafts.start),
        transfer.send(work.drafts.cut(usable)),
        [transfer.send(level) for level in levels],
    )


def _read_runs(result: StepResult, work: TokenWork, drafts: DraftRows, tokens: Sequence[int]) -> None:
    """Tokens of rows, some of which have several: up to the first that is void."""
    verified = frozenset(drafts.first)
    run: list[int] = []
    for at, (row, token) in enumerate(zip(work.sample_rows, tokens, strict=True)):
        if at == drafts.start[at]:
            result.tokens[row] = token
            if at in verified:
                run = result.runs[row] = [token]
        elif token != NO_TOKEN:
            run.append(token)


def _read_logprobs(
    result: StepResult,
    work: TokenWork,
    tokens: list[int],
    chosen: list[float],
    top_ids: list[list[int]],
    top: list[list[float]],
) -> None:
    """Logprobs of sampled tokens come first, then those of scored positions."""
    entries = iter(zip(chosen, top_ids, top, strict=True))

    def entry(token: int, count: int) -> TokenLogprob:
        logprob, ids, values = next(entries)
        likeliest = tuple(zip(ids[:count], values[:count], strict=True)) if count else ()
        return TokenLogprob(token, logprob, likeliest)

    for sampled, count in work.sampling.logprobs:
        # Outcomes and void tokens have logprobs, too, which are never read.
        found = entry(tokens[sampled], count)
        if tokens[sampled] >= 0:
            result.logprobs.setdefault(work.sample_rows[sampled], []).append(found)
    ids = iter(work.score_ids.tolist())
    for row, number, count in work.scores:
        scored = result.prompt_logprobs[row] = [entry(next(ids), count) for _ in range(number)]
        if any(math.isnan(each.logprob) for each in scored):
            result.tokens[row] = BAD_LOGITS


def _sampling_batch(work: TokenWork, parts: dict[str, torch.Tensor], transfer: Transfer) -> SamplingBatch:
    sampling = work.sampling
    banned = bool(work.num_banned)
    return SamplingBatch(
        slots=parts["sample_slots"],
        positions=parts["sample_positions"],
        seeds=parts["seeds"],
        top_k=parts["top_k"],
        **dict(zip(FLOAT_FIELDS, transfer.send(sampling.floats), strict=True)),
        all_greedy=sampling.all_greedy,
        any_top_k=sampling.any_top_k,
        any_top_p=sampling.any_top_p,
        any_min_p=sampling.any_min_p,
        any_penalty=sampling.any_penalty,
        wide_nucleus=sampling.wide_nucleus,
        wide_top_k=sampling.wide_top_k,
        banned_rows=parts["banned_rows"] if banned else None,
        banned_ids=parts["banned_ids"] if banned else None,
        penalty_resets=work.penalty_resets,
        filters=[
            FilterRows(name, transfer.send(rows), transfer.send(values))
            for name, rows, values in sampling.filters
        ],
    )


class TokenKind:
    """Autoregressive models. See :class:`~aioinfer.execution.decoding.base.Kind`."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec

    def fit(self, config: EngineConfig) -> EngineConfig:
        return config

    def rows(self, config: EngineConfig) -> TokenPacker:
        return TokenPacker(config.num_slots)

    def decoding(self, config: EngineConfig, device: torch.device, grammars: GrammarWorker) -> TokenDecoding:
        sampler = Sampler(
            config.num_slots,
            self._spec.vocab_size,
            device,
            config.sampling_backend,
            invariant=config.deterministic,
        )
        return TokenDecoding(sampler, Relay(config.num_slots, device), grammars)

    def graph_shapes(self, config: EngineConfig) -> GraphShapes:
        """Shapes of decodes, in steps of 8 rows and finer for small batches, and of chunks beside them."""
        most = config.graph_rows
        # A model that gives no tokens never decodes, and what it pools is no part of a captured step.
        if not (most and self._spec.generates):
            return GraphShapes()
        sizes = {size for size in (1, 2, 4, *range(8, most, 8)) if size < most} | {most}
        # A recurrent state goes through a chunk position by position, for which its length must be known.
        tokens = 0 if self._spec.states else config.graph_tokens
        return GraphShapes([*map(GraphShape, sizes), *mixed_shapes(most if config.mixed else 1, tokens)])

    def largest_steps(self, config: EngineConfig, max_len: int) -> Iterator[Step]:
        rows = config.running_requests
        length = max(1, min(config.step_tokens // rows, max_len - 1))
        if self._spec.generates:
            scored = filled_slots(rows, length, SCORED, samples=True, scored=True)
            yield Step(-3, NO_ROWS, scored, rows * length)
        yield Step(-2, NO_ROWS, filled_slots(rows, length, COSTLY, samples=True), rows * length)
        absent: Any = None
        generating = Generating([absent] * rows, np.arange(1, rows + 1), np.full(rows, length))
        yield Step(-1, generating, (), rows)
