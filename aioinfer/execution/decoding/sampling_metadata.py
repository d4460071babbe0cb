"""SamplingMetadata: what the requests of a step's sampling rows ask for.

It depends only on the requests that sample, which are the same in most consecutive steps: so it is kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from aioinfer.params import SamplingParams
from aioinfer.sampling.batch import WIDE_TOP_K, PenaltyReset
from aioinfer.scheduling.step import NewRequestData
from aioinfer.steering.state import SteeringState
from aioinfer.text.grammar import GrammarState

__all__ = ["FLOAT_FIELDS", "SamplingMetadata", "SamplingTable", "token_mask"]

#: order of the per-row parameters in ``SamplingMetadata.floats``
FLOAT_FIELDS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_Ints: TypeAlias = npt.NDArray[np.int64]
_Floats: TypeAlias = npt.NDArray[np.float32]
_NONE = np.empty(0, np.int64)
_KNOWN = 4


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """Sampling parameters of S rows."""

    #: int64 [S]
    seeds: _Ints
    top_k: _Ints
    #: float32 [len(FLOAT_FIELDS), S]
    floats: _Floats
    all_greedy: bool
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool
    any_penalty: bool
    #: see :class:`~aioinfer.sampling.batch.SamplingBatch`
    wide_nucleus: bool
    wide_top_k: bool
    #: rows, ids and bits of float32 of all biases, int64 [B] each
    biases: tuple[_Ints, _Ints, _Ints]
    #: rows where only some tokens are allowed, int64 [G], and their masks as of grammars, int32 [G, words]
    allowed: tuple[_Ints, npt.NDArray[np.int32]] | None
    #: name, rows (int64 [R]) and values (float32 [R]) of each filter of aioinfer.sampling.further_filters
    filters: list[tuple[str, _Ints, _Floats]]
    #: (row, how many of the likeliest tokens) where logprobs are wanted
    logprobs: list[tuple[int, int]]
    #: (row, state) where there is a grammar
    grammars: list[tuple[int, GrammarState]]
    #: (row, state) where there are logits processors
    steered: list[tuple[int, SteeringState]]
    #: (row, length of the sequence before which it may not end, ids that end it) where there is one
    unending: list[tuple[int, int, list[int]]]

    def banned(self, positions: _Ints) -> tuple[_Ints, _Ints]:
        """(row, token id) pairs of end tokens that come too early for ``min_tokens``."""
        if not self.unending:
            return _NONE, _NONE
        rows: list[int] = []
        ids: list[int] = []
        for row, length, ends in self.unending:
            if positions[row] < length:
                rows += [row] * len(ends)
                ids += ends
        return np.asarray(rows, np.int64), np.asarray(ids, np.int64)


class SamplingTable:
    """Keeps, by slot, what its tenant asks for."""

    def __init__(self, num_slots: int) -> None:
        self._floats = np.zeros((len(FLOAT_FIELDS), num_slots + 1), np.float32)
        self._top_k = np.zeros(num_slots + 1, np.int64)
        self._seeds = np.zeros(num_slots + 1, np.int64)
        #: likeliest tokens wanted beside each sampled one; -1: no logprobs at all
        self._logprobs = np.full(num_slots + 1, -1, np.int64)
        self._tenants: list[NewRequestData | None] = [None] * (num_slots + 1)
        #: of the few that have them: biased ids with the bits of their bias, and the mask of allowed tokens
        self._bias: dict[int, tuple[_Ints, _Ints]] = {}
        self._allowed: dict[int, npt.NDArray[np.int32]] = {}
        #: further filters by name
        self._filters: dict[int, dict[str, float]] = {}
        #: metadata by the slots of their rows
        self._known: OrderedDict[bytes, SamplingMetadata] = OrderedDict()

    def admit(self, slot: int, data: NewRequestData) -> PenaltyReset | None:
        """A request takes a slot. What the counts of penalties must know of it, if anything."""
        self._known.clear()
        params, before = data.params, self._tenants[slot]
        self._tenants[slot] = data
        self._seeds[slot] = data.seed
        self._logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self._top_k[slot] = max(params.top_k, 0)
        self._floats[:, slot] = [getattr(params, name) for name in FLOAT_FIELDS]
        self._mark(slot, params)
        if params.penalised:
            return PenaltyReset(slot, data.prompt_ids, data.output_ids)
        if before is not None and before.params.penalised:
            return PenaltyReset(slot, penalised=False)
        return None

    def _mark(self, slot: int, params: SamplingParams) -> None:
        self._bias.pop(slot, None)
        self._allowed.pop(slot, None)
        self._filters.pop(slot, None)
        if filters := params.further_filters:
            self._filters[slot] = filters
        if params.logit_bias:
            values = np.fromiter(params.logit_bias.values(), np.float32)
            ids = np.fromiter(params.logit_bias, np.int64)
            self._bias[slot] = (ids, values.view(np.int32).astype(np.int64))
        if params.allowed_token_ids is not None:
            self._allowed[slot] = token_mask(params.allowed_token_ids)

    def metadata(self, slots: _Ints) -> SamplingMetadata:
        """Metadata of rows with these slots, int64 [S]."""
        key = slots.tobytes()
        metadata = self._known.get(key)
        if metadata is None:
            metadata = self._known[key] = self._make(slots)
            if len(self._known) > _KNOWN:
                self._known.popitem(last=False)
        return metadata

    def _make(self, slots: _Ints) -> SamplingMetadata:
        # Taken like this, each parameter's values lie next to each other.
        floats, top_k = self._floats.take(slots, axis=1), self._top_k[slots]
        temperature, top_p, min_p, repetition, presence, frequency = floats
        drawn = temperature > 0
        any_penalty = bool((repetition != 1).any() or presence.any() or frequency.any())
        logprobs = self._logprobs[slots]
        grammars: list[tuple[int, GrammarState]] = []
        steered: list[tuple[int, SteeringState]] = []
        unending: list[tuple[int, int, list[int]]] = []
        for row, slot in enumerate(slots.tolist()):
            tenant = self._tenants[slot]
            assert tenant is not None, "no request was admitted to this slot"
            if tenant.grammar is not None:
                grammars.append((row, tenant.grammar))
            if tenant.steering is not None:
                steered.append((row, tenant.steering))
            if tenant.params.min_tokens:
                length = len(tenant.prompt_ids) + tenant.params.min_tokens
                unending.append((row, length, sorted(tenant.stop_ids)))
        return SamplingMetadata(
            seeds=self._seeds[slots],
            top_k=top_k,
            floats=floats,
            all_greedy=not drawn.any(),
            any_top_k=bool(top_k.any()),
            any_top_p=bool((top_p < 1).any()),
            any_min_p=bool(min_p.any()),
            any_penalty=any_penalty,
            wide_nucleus=bool((drawn & (top_k == 0) & (top_p < 1)).any()),
            wide_top_k=bool((drawn & (top_k > WIDE_TOP_K)).any()),
            biases=self._biases(slots),
            allowed=self._masks(slots),
            filters=self._further(slots),
            logprobs=[(row, int(logprobs[row])) for row in np.flatnonzero(logprobs >= 0).tolist()],
            grammars=grammars,
            steered=steered,
            unending=unending,
        )

    def _further(self, slots: _Ints) -> list[tuple[str, _Ints, _Floats]]:
        if not self._filters:
            return []
        found: dict[str, dict[int, float]] = {}
        for row, slot in enumerate(slots.tolist()):
            for name, value in self._filters.get(slot, {}).items():
                found.setdefault(name, {})[row] = value
        return [
            (name, np.fromiter(rows, np.int64), np.fromiter(rows.values(), np.float32))
            for name, rows in sorted(found.items())
        ]

    def _masks(self, slots: _Ints) -> tuple[_Ints, npt.NDArray[np.int32]] | None:
        found = {row: self._allowed[slot] for row, slot in enumerate(slots.tolist()) if slot in self._allowed}
        if not found:
            return None
        masks = np.zeros((len(found), max(map(len, found.values()))), np.int32)
        for mask, words in zip(masks, found.values(), strict=True):
            mask[: len(words)] = words
        return np.fromiter(found, np.int64), masks

    def _biases(self, slots: _Ints) -> tuple[_Ints, _Ints, _Ints]:
        found = [
            (np.full(len(bias[0]), row), *bias)
            for row, slot in enumerate(slots.tolist())
            if (bias := self._bias.get(slot)) is not None
        ]
        if not found:
            return _NONE, _NONE, _NONE
        rows, ids, bits = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return rows, ids, bits


def token_mask(ids: Sequence[int]) -> npt.NDArray[np.int32]:
    """Bits of these tokens; as long as the largest needs."""
    words = np.zeros(max(ids) // 32 + 1, np.uint32)
    tokens = np.asarray(ids, np.int64)
    np.bitwise_or.at(words, tokens // 32, np.uint32(1) << (tokens % 32).astype(np.uint32))
    return words.view(np.int32)
