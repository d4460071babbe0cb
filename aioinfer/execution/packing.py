"""Packing: a Step becomes one flat int64 buffer and one float32 buffer.

It runs on the loop's thread right after planning, so that it overlaps with the step on the device; the
launch thread then makes one tensor of each buffer (one host-to-device copy on CUDA) and slices it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aioinfer.execution.device import StepResult
from aioinfer.execution.masks import GrammarRow
from aioinfer.outputs import TokenLogprob
from aioinfer.sampling.batch import PenaltyReset
from aioinfer.scheduling.step import NO_TOKEN, Admission, Row, Step

__all__ = ["FLOAT_FIELDS", "Packed", "Packer"]

#: order of the per-row parameters in ``Packed.floats``
FLOAT_FIELDS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


@dataclass(slots=True)
class Packed:
    """A step as arrays. Sizes: T tokens, R rows, S sampling rows, P pages of the longest row, K bans.

    ``ints`` holds, one after the other: input_ids[T], positions[T], slot_mapping[T], cu_q[R + 1],
    kv_len[R], slots[R], block_table[R * P], then of the sampling rows logits_rows[S], sample_slots[S],
    sample_positions[S], seeds[S], top_k[S], banned_rows[K], banned_ids[K], score_ids[E], and
    bias_rows[B], bias_ids[B] and bias_bits[B], the bits of a float32.

    ``logits_rows`` has E entries more, of positions that do not sample and whose next token, ``score_ids``,
    is known and to be scored.
    """

    ints: npt.NDArray[np.int64]
    #: [len(FLOAT_FIELDS), S]
    floats: npt.NDArray[np.float32]
    sizes: tuple[int, ...]
    step_id: int
    num_decodes: int
    num_pages: int
    q_lens: list[int]
    kv_lens: list[int]
    #: index of the row behind each sampling row
    sample_rows: list[int]
    all_greedy: bool
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool
    any_penalty: bool
    penalty_resets: list[PenaltyReset]
    #: rows whose sampling waits for a mask
    grammars: list[GrammarRow]
    #: (sampling row, mask) where only some tokens are allowed; masks as of grammars
    allowed: list[tuple[int, npt.NDArray[np.int32]]]
    #: (sampling row, how many of the likeliest tokens) where logprobs are wanted
    logprobs: list[tuple[int, int]]
    #: (row, number of scored positions, how many of the likeliest tokens)
    scores: list[tuple[int, int, int]]

    @property
    def top(self) -> int:
        """Likeliest tokens wanted at most; -1 if no logprob is wanted."""
        return max((count[-1] for count in (*self.logprobs, *self.scores)), default=-1)

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

        for sampled, count in self.logprobs:
            result.logprobs[self.sample_rows[sampled]] = entry(tokens[sampled], count)
        end = len(self.ints) - sum(self.sizes[-3:])
        ids = iter(self.ints[end - self.sizes[-4] : end].tolist())
        for row, number, count in self.scores:
            result.prompt_logprobs[row] = [entry(next(ids), count) for _ in range(number)]
        return result


_NONE = np.empty(0, np.int64)


class Packer:
    """Keeps, by slot, what rows do not repeat: page tables and sampling parameters."""

    __slots__ = (
        "_allowed",
        "_bias",
        "_constrained",
        "_floats",
        "_logprobs",
        "_min_length",
        "_page_size",
        "_params",
        "_seeds",
        "_tables",
        "_top_k",
    )

    def __init__(self, num_slots: int, max_pages: int, page_size: int) -> None:
        self._page_size = page_size
        self._tables = np.zeros((num_slots + 1, max_pages), np.int64)
        self._floats = np.zeros((len(FLOAT_FIELDS), num_slots + 1), np.float32)
        self._top_k = np.zeros(num_slots + 1, np.int64)
        self._seeds = np.zeros(num_slots + 1, np.int64)
        #: sequences shorter than this may not end yet
        self._min_length = np.zeros(num_slots + 1, np.int64)
        #: slots whose tenant has a grammar
        self._constrained = np.zeros(num_slots + 1, np.bool_)
        #: by slot, of the few whose tenants have them: biased ids with the bits of their bias, and the mask
        #: of allowed tokens
        self._bias: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = {}
        self._allowed: dict[int, npt.NDArray[np.int32]] = {}
        #: by slot, likeliest tokens wanted beside each sampled one; -1: no logprobs at all
        self._logprobs = np.full(num_slots + 1, -1, np.int64)
        self._params: list[Admission | None] = [None] * (num_slots + 1)

    def pack(self, step: Step) -> Packed:
        """Pack steps in the order of their ids, each once."""
        decodes, prefills = step.decodes, step.prefills
        resets = [self._admit(row) for row in prefills if row.admission is not None]
        for slot, first, pages in decodes.tables:
            self._tables[slot, first : first + len(pages)] = pages
        for row in prefills:
            if row.new_pages:
                first = row.first_new_page
                self._tables[row.slot, first : first + len(row.new_pages)] = row.new_pages
        slots = _columns(decodes.slots, [row.slot for row in prefills])
        starts = _columns(decodes.starts, [row.start for row in prefills])
        q_len = _columns(np.ones(len(decodes), np.int64), [row.length for row in prefills])
        sampling = np.ones(len(slots), np.bool_)
        sampling[len(decodes) :] = [row.samples for row in prefills]
        cu_q = np.zeros(len(slots) + 1, np.int64)
        np.cumsum(q_len, out=cu_q[1:])
        kv_len = starts + q_len
        # Position of each token: its row's start plus its offset in the row.
        row_of = np.repeat(np.arange(len(slots)), q_len)
        positions = np.arange(step.num_tokens) - cu_q[row_of] + starts[row_of]
        pages_of = self._tables[slots[row_of], positions // self._page_size]
        slot_mapping = pages_of * self._page_size + positions % self._page_size
        num_pages = -(-int(kv_len.max()) // self._page_size)
        tables = self._tables[slots, :num_pages]
        # Entries beyond a row's own pages may be another tenant's: they become the junk page.
        owned = -(-kv_len // self._page_size)
        tables[np.arange(num_pages) >= owned[:, None]] = 0
        return self._finish(
            step, slots, q_len, cu_q, kv_len, positions, slot_mapping, tables, sampling, resets
        )

    def _finish(
        self,
        step: Step,
        slots: npt.NDArray[np.int64],
        q_len: npt.NDArray[np.int64],
        cu_q: npt.NDArray[np.int64],
        kv_len: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        slot_mapping: npt.NDArray[np.int64],
        tables: npt.NDArray[np.int64],
        sampling: npt.NDArray[np.bool_],
        resets: list[PenaltyReset | None],
    ) -> Packed:
        """Lay the sections out in the two buffers."""
        sample_slots = slots[sampling]
        sample_positions = kv_len[sampling]
        top_k = self._top_k[sample_slots]
        floats = self._floats[:, sample_slots]
        score_rows, score_ids, scores = self._scores(step, cu_q)
        banned_rows, banned_ids = self._banned(sample_slots, sample_positions)
        sections = (
            self._input_ids(step, cu_q),
            positions,
            slot_mapping,
            cu_q,
            kv_len,
            slots,
            tables.reshape(-1),
            np.concatenate((cu_q[1:][sampling] - 1, score_rows)),
            sample_slots,
            sample_positions,
            self._seeds[sample_slots],
            top_k,
            banned_rows,
            banned_ids,
            score_ids,
            *self._biases(sample_slots),
        )
        temperature, top_p, min_p, repetition, presence, frequency = floats
        any_penalty = bool((repetition != 1).any() or presence.any() or frequency.any())
        return Packed(
            ints=np.concatenate(sections),
            floats=floats,
            sizes=tuple(len(section) for section in sections),
            step_id=step.id,
            num_decodes=step.num_decodes,
            num_pages=tables.shape[1],
            q_lens=q_len.tolist(),
            kv_lens=kv_len.tolist(),
            sample_rows=np.flatnonzero(sampling).tolist(),
            all_greedy=not (temperature.any() or any_penalty),
            any_top_k=bool(top_k.any()),
            any_top_p=bool((top_p < 1).any()),
            any_min_p=bool(min_p.any()),
            any_penalty=any_penalty,
            penalty_resets=[reset for reset in resets if reset is not None],
            grammars=self._grammar_rows(sample_slots, sample_positions, step.num_decodes),
            allowed=[
                (index, self._allowed[slot])
                for index, slot in enumerate(sample_slots.tolist())
                if slot in self._allowed
            ]
            if self._allowed
            else [],
            logprobs=[
                (index, int(self._logprobs[sample_slots[index]]))
                for index in np.flatnonzero(self._logprobs[sample_slots] >= 0).tolist()
            ],
            scores=scores,
        )

    def _input_ids(self, step: Step, cu_q: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Known ids in place; 0 where the relay will fill in."""
        ids = np.zeros(step.num_tokens, np.int64)
        for row, start in zip(step.prefills, cu_q[step.num_decodes :].tolist(), strict=False):
            assert row.ids is not None, "a prefill row knows its tokens"
            ids[start : start + row.length] = row.ids
        return ids

    def _admit(self, row: Row) -> PenaltyReset | None:
        """A request takes a slot: remember its parameters."""
        admission = row.admission
        assert admission is not None
        params, slot = admission.params, row.slot
        self._params[slot] = admission
        self._seeds[slot] = admission.seed
        self._logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self._bias.pop(slot, None)
        self._allowed.pop(slot, None)
        if params.logit_bias:
            values = np.fromiter(params.logit_bias.values(), np.float32)
            ids = np.fromiter(params.logit_bias, np.int64)
            self._bias[slot] = (ids, values.view(np.int32).astype(np.int64))
        if params.allowed_token_ids is not None:
            self._allowed[slot] = _mask(params.allowed_token_ids)
        self._constrained[slot] = admission.grammar is not None
        self._top_k[slot] = max(params.top_k, 0)
        self._min_length[slot] = len(admission.prompt_ids) + params.min_tokens
        self._floats[:, slot] = [getattr(params, name) for name in FLOAT_FIELDS]
        self._tables[slot] = 0
        if not params.penalised:
            return None
        return PenaltyReset(slot, admission.prompt_ids, admission.output_ids)

    def _biases(self, slots: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], ...]:
        """Rows, ids and bits of all biases of a step."""
        if not self._bias:
            return _NONE, _NONE, _NONE
        found = [
            (np.full(len(bias[0]), index), *bias)
            for index, slot in enumerate(slots.tolist())
            if (bias := self._bias.get(slot)) is not None
        ]
        if not found:
            return _NONE, _NONE, _NONE
        return tuple(np.concatenate(parts) for parts in zip(*found, strict=True))

    def _scores(
        self, step: Step, cu_q: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], list[tuple[int, int, int]]]:
        """Token rows whose next token is to be scored, these tokens, and whose they are."""
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

    def _grammar_rows(
        self, slots: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], num_decodes: int
    ) -> list[GrammarRow]:
        rows: list[GrammarRow] = []
        for index in np.flatnonzero(self._constrained[slots]).tolist():
            admission = self._params[slots[index]]
            assert admission is not None
            assert admission.grammar is not None
            known = index >= num_decodes
            rows.append(GrammarRow(index, admission.grammar, int(positions[index]), known))
        return rows

    def _banned(
        self, slots: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(sampling row, token id) pairs of end tokens that come too early for min_tokens."""
        rows: list[int] = []
        ids: list[int] = []
        for index in np.flatnonzero(positions < self._min_length[slots]).tolist():
            admission = self._params[slots[index]]
            assert admission is not None
            rows += [index] * len(admission.stop_ids)
            ids += sorted(admission.stop_ids)
        return np.asarray(rows, np.int64), np.asarray(ids, np.int64)


def _mask(ids: Sequence[int]) -> npt.NDArray[np.int32]:
    """Bits of these tokens; as long as the largest needs."""
    words = np.zeros(max(ids) // 32 + 1, np.uint32)
    tokens = np.asarray(ids, np.int64)
    np.bitwise_or.at(words, tokens // 32, np.uint32(1) << (tokens % 32).astype(np.uint32))
    return words.view(np.int32)


def _columns(decodes: npt.NDArray[np.int64], prefills: list[int]) -> npt.NDArray[np.int64]:
    return np.concatenate((decodes, np.asarray(prefills, np.int64))) if prefills else decodes
