"""Packing: a Step becomes one flat int64 buffer and one float32 buffer.

It runs on the loop's thread right after planning, so that it overlaps with the step on the device; the
launch thread then makes one tensor of each buffer (one host-to-device copy on CUDA) and slices it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aioinfer.execution.device import StepResult
from aioinfer.execution.grammar_worker import GrammarRow
from aioinfer.execution.paging import PageTables, Tables
from aioinfer.execution.sampling_metadata import FLOAT_FIELDS, SamplingMetadata, SamplingTable
from aioinfer.outputs import TokenLogprob
from aioinfer.sampling.batch import PenaltyReset
from aioinfer.sampling.outcomes import NO_TOKEN
from aioinfer.scheduling.step import Step

__all__ = ["FLOAT_FIELDS", "SECTIONS", "Packed", "Packer"]

#: what ``Packed.ints`` holds, one after the other
SECTIONS = (
    *("input_ids", "positions", "slot_mapping", "cu_q", "kv_len", "slots", "block_table"),
    *("logits_rows", "sample_slots", "sample_positions", "seeds", "top_k", "banned_rows", "banned_ids"),
    *("score_ids", "bias_rows", "bias_ids", "bias_bits"),
)
_AT = {name: at for at, name in enumerate(SECTIONS)}


@dataclass(slots=True)
class Packed:
    """A step as arrays. Sizes: T tokens, R rows, S sampling rows, P pages of the longest row, K bans.

    ``ints`` holds input_ids[T], positions[T], slot_mapping[T], cu_q[R + 1], kv_len[R], slots[R],
    block_table[R * P], then of the sampling rows logits_rows[S], sample_slots[S], sample_positions[S],
    seeds[S], top_k[S], banned_rows[K], banned_ids[K], score_ids[E], and bias_rows[B], bias_ids[B] and
    bias_bits[B], the bits of a float32.

    ``logits_rows`` has E entries more, of positions that do not sample and whose next token, ``score_ids``,
    is known and to be scored.
    """

    ints: npt.NDArray[np.int64]
    #: length of each section
    sizes: tuple[int, ...]
    step_id: int
    num_decodes: int
    num_pages: int
    q_lens: list[int]
    kv_lens: list[int]
    #: index of the row behind each sampling row
    sample_rows: list[int]
    #: what the sampling rows ask for
    sampling: SamplingMetadata
    penalty_resets: list[PenaltyReset]
    #: rows whose sampling waits for a mask
    grammars: list[GrammarRow]
    #: (row, number of scored positions, how many of the likeliest tokens)
    scores: list[tuple[int, int, int]]
    #: instead of ``block_table``, which has no rows then, for a step that captured decodes may compute
    tables: Tables | None = None

    def section(self, name: str) -> npt.NDArray[np.int64]:
        """One of ``SECTIONS``, flat."""
        at = _AT[name]
        start = sum(self.sizes[:at])
        return self.ints[start : start + self.sizes[at]]

    @property
    def decodes_only(self) -> bool:
        """Every row computes one token, which waits in its relay cell, and samples the next."""
        return self.num_decodes == len(self.q_lens)

    @property
    def plain(self) -> bool:
        """Sampling needs no more than seeds, temperatures and filters."""
        sampling = self.sampling
        return not (
            sampling.any_penalty
            or sampling.logprobs
            or self.scores
            or self.grammars
            or self.penalty_resets
            or sampling.allowed is not None
            or len(self.section("banned_ids"))
            or len(sampling.biases[0])
        )

    @property
    def top(self) -> int:
        """Likeliest tokens wanted at most; -1 if no logprob is wanted."""
        return max((count[-1] for count in (*self.sampling.logprobs, *self.scores)), default=-1)

    def result(
        self,
        tokens: list[int],
        forced: dict[int, list[int]],
        logprobs: list[float],
        top_ids: list[list[int]],
        top: list[list[float]],
    ) -> StepResult:
        """Lay what the sampling rows brought out over all rows, and the logprobs, those of sampled tokens
        first and then those of scored positions."""
        spread = [NO_TOKEN] * len(self.q_lens)
        for row, token in zip(self.sample_rows, tokens, strict=True):
            spread[row] = token
        result = StepResult(spread, {self.sample_rows[at]: ids for at, ids in forced.items()})
        at = 0

        def entry(token: int, count: int) -> TokenLogprob:
            nonlocal at
            likeliest = tuple(zip(top_ids[at][:count], top[at][:count], strict=True)) if count else ()
            found = TokenLogprob(token, logprobs[at], likeliest)
            at += 1
            return found

        for sampled, count in self.sampling.logprobs:
            result.logprobs[self.sample_rows[sampled]] = entry(tokens[sampled], count)
        ids = iter(self.section("score_ids").tolist())
        for row, number, count in self.scores:
            result.prompt_logprobs[row] = [entry(next(ids), count) for _ in range(number)]
        return result


_NO_SCORES = np.empty(0, np.int64)


class Packer:
    """Keeps, by slot, what rows do not repeat: page tables and sampling parameters.

    ``graph_rows``: steps of so many decodes and nothing else are computed by captured decodes, which know
    most of the page tables already.
    """

    __slots__ = ("_graph_rows", "_sampling_table", "_tables")

    def __init__(self, num_slots: int, max_pages: int, page_size: int, graph_rows: int = 0) -> None:
        self._graph_rows = graph_rows
        self._tables = PageTables(num_slots, max_pages, page_size)
        self._sampling_table = SamplingTable(num_slots)

    def pack(self, step: Step) -> Packed:
        """Pack steps in the order of their ids, each once."""
        decodes, prefills = step.decodes, step.prefills
        resets = [
            self._sampling_table.admit(row.slot, row.admission)
            for row in prefills
            if row.admission is not None
        ]
        for slot, first, pages in decodes.tables:
            self._tables.extend(slot, first, pages)
        self._tables.update(prefills)
        slots, starts, q_len, q_lens = decodes.slots, decodes.starts, None, [1] * len(decodes)
        if prefills:
            slots = np.concatenate((slots, [row.slot for row in prefills]))
            starts = np.concatenate((starts, [row.start for row in prefills]))
            q_lens += [row.length for row in prefills]
            q_len = np.asarray(q_lens, np.int64)
        return self._lay_out(step, slots, starts, q_len, q_lens, resets)

    def _lay_out(
        self,
        step: Step,
        slots: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64],
        q_len: npt.NDArray[np.int64] | None,
        q_lens: list[int],
        resets: list[PenaltyReset | None],
    ) -> Packed:
        """The sections and the buffers they lie in. ``q_len`` is None where all rows have length 1."""
        captured = q_len is None and len(slots) <= self._graph_rows
        placement = self._tables.place(slots, starts, q_len, with_tables=not captured)
        cu_q, kv_len, tables = placement.cu_q, placement.kv_len, placement.block_table
        sample_slots, sample_positions, logits_rows = slots, kv_len, cu_q[:-1]
        sample_rows = list(range(len(q_lens)))
        if q_len is not None:
            sample_rows = sample_rows[: step.num_decodes]
            sample_rows += [at for at, row in enumerate(step.prefills, step.num_decodes) if row.samples]
            sample_slots, sample_positions = slots[sample_rows], kv_len[sample_rows]
            logits_rows = cu_q[1:][sample_rows] - 1
        sampling = self._sampling_table.metadata(sample_slots)
        score_rows, score_ids, scores = self._scores(step, cu_q)
        sections = (
            self._input_ids(step, cu_q),
            placement.positions,
            placement.slot_mapping,
            cu_q,
            kv_len,
            slots,
            tables.reshape(-1),
            np.concatenate((logits_rows, score_rows)) if len(score_rows) else logits_rows,
            sample_slots,
            sample_positions,
            sampling.seeds,
            sampling.top_k,
            *sampling.banned(sample_positions),
            score_ids,
            *sampling.biases,
        )
        return Packed(
            ints=np.concatenate(sections),
            sizes=tuple(len(section) for section in sections),
            step_id=step.id,
            num_decodes=step.num_decodes,
            num_pages=tables.shape[1],
            q_lens=q_lens,
            kv_lens=placement.kv_lens,
            sample_rows=sample_rows,
            sampling=sampling,
            penalty_resets=[reset for reset in resets if reset is not None],
            grammars=[
                GrammarRow(row, state, int(sample_positions[row]), row >= step.num_decodes)
                for row, state in sampling.grammars
            ],
            scores=scores,
            tables=self._tables.of(slots) if captured else None,
        )

    def _input_ids(self, step: Step, cu_q: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Known ids in place; 0 where the relay will fill in."""
        ids = np.zeros(step.num_tokens, np.int64)
        for at, row in enumerate(step.prefills, step.num_decodes):
            assert row.ids is not None, "a prefill row knows its tokens"
            ids[cu_q[at] : cu_q[at + 1]] = row.ids
        return ids

    def _scores(
        self, step: Step, cu_q: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], list[tuple[int, int, int]]]:
        """Token rows whose next token is to be scored, these tokens, and whose they are."""
        if all(row.scores is None for row in step.prefills):
            return _NO_SCORES, _NO_SCORES, []
        rows: list[int] = []
        ids: list[int] = []
        scores: list[tuple[int, int, int]] = []
        for index, row in enumerate(step.prefills, step.num_decodes):
            if row.scores is None:
                continue
            first, last = row.scores
            offset = int(cu_q[index]) - row.start
            rows += range(offset + first, offset + last)
            ids += row.request.prompt_ids[first + 1 : last + 1]
            scores.append((index, last - first, row.request.params.prompt_logprobs or 0))
        return np.asarray(rows, np.int64), np.asarray(ids, np.int64), scores
