"""Planted bugs of speculation: each is found by what tests it."""

from __future__ import annotations

import random
from collections import abc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from aioinfer.execution.decoding import tokens as decoding
from aioinfer.execution.decoding.sampling_metadata import SamplingMetadata
from aioinfer.execution.grammar_worker import GrammarWorker
from aioinfer.loop.core import Core
from aioinfer.sampling import sampler as sampling
from aioinfer.sampling.verification import DraftRows, accepted
from aioinfer.scheduling.queues import RequestQueues
from aioinfer.scheduling.sequence import Sequence
from aioinfer.scheduling.speculation import Speculation
from aioinfer.scheduling.token_batch import TokenBatch
from aioinfer.text.grammar import GrammarState, LookAhead
from tests.engine.test_speculation import alike, compare
from tests.engine.test_speculative_models import Asked, Known, asked, run
from tests.model.harness import require
from tests.tiers import PLANTED_BUG, nightly

Patch = pytest.MonkeyPatch
_SYMPTOMS = (Exception, pytest.fail.Exception)


# -- on the toy device ---------------------------------------------------------------------------------


def runs_end_with_their_step(patch: Patch) -> None:
    """Only the last token of a run is looked at: what lies behind an end is kept."""

    def append(self: Sequence, token: int) -> Any:
        self.output_ids.append(token)
        return None

    patch.setattr(Sequence, "append", append)


def positions_are_not_given_back(patch: Patch) -> None:
    """A row counts with all its drafts, however many were right."""

    def shorten(self: RequestQueues, request: Sequence, tokens: int) -> None:
        request.cursor.shorten(0)

    patch.setattr(RequestQueues, "shorten", shorten)


def rows_follow_drafts_in_flight(patch: Patch) -> None:
    original = TokenBatch.launch

    def launch(self: TokenBatch, step_id: int, without: Any, most: int) -> Any:
        self.verifying[:] = 0
        self._num_verifying = 0
        return original(self, step_id, without, most)

    patch.setattr(TokenBatch, "may_plan", lambda self, *, in_flight: True)
    patch.setattr(TokenBatch, "launch", launch)


def drafts_reach_beyond_the_longest_output(patch: Patch) -> None:
    original = Speculation.drafts

    def drafts(self: Speculation, requests: abc.Sequence[Sequence], starts: Any, room: int) -> Any:
        lengths = [request.max_length for request in requests]
        for request in requests:
            request.max_length += 2
        found = original(self, requests, starts, room)
        for request, length in zip(requests, lengths, strict=True):
            request.max_length = length
        return found

    patch.setattr(Speculation, "drafts", drafts)


def drafts_are_not_looked_at(patch: Patch) -> None:
    """Ids that the model does not have reach the device."""
    original = Speculation.__init__

    def make(self: Speculation, drafter: Any, vocab_size: int, most: int, **settings: Any) -> None:
        original(self, drafter, 1 << 40, most, **settings)

    patch.setattr(Speculation, "__init__", make)


def placeholders_count_as_known(patch: Patch) -> None:
    """Drafts begin where the token in flight is: harmless by the rule, and a waste; so with a check that is
    off."""

    def resolved(
        self: TokenBatch, index: int, step: Any, token: int, outcome: Any, queues: RequestQueues
    ) -> Any:
        drafts = step.generating.drafts[index - step.generating.num_decodes]
        if token >= 0 and index in outcome.runs:
            # As if drafts needed no check.
            outcome.runs[index] = [*drafts, outcome.runs[index][-1]]
        return original(self, index, step, token, outcome, queues)

    original = TokenBatch._resolve_verified
    patch.setattr(TokenBatch, "_resolve_verified", resolved)


def only_the_first_logprob_is_kept(patch: Patch) -> None:
    original = Core._record_logprobs

    def record(self: Core, step: Any, result: Any, advanced: Any) -> Any:
        result.logprobs = {row: found[:1] for row, found in result.logprobs.items()}
        return original(self, step, result, advanced)

    patch.setattr(Core, "_record_logprobs", record)


@nightly(PLANTED_BUG)
@pytest.mark.parametrize(
    "bug",
    [
        runs_end_with_their_step,
        positions_are_not_given_back,
        rows_follow_drafts_in_flight,
        drafts_reach_beyond_the_longest_output,
        drafts_are_not_looked_at,
        placeholders_count_as_known,
        only_the_first_logprob_is_kept,
    ],
)
def test_planted_bugs_are_found_on_the_toy_device(bug: Callable[[Patch], None], monkeypatch: Patch) -> None:
    bug(monkeypatch)
    with pytest.raises(_SYMPTOMS):
        for seed in range(400):
            compare(seed)


# -- on a model ----------------------------------------------------------------------------------------


def every_position_has_the_noise_of_the_last(patch: Patch) -> None:
    original = DraftRows.of

    def of(num_before: int, drafts: Any, num_rows: int) -> DraftRows:
        found = original(num_before, drafts, num_rows)
        found.behind[:] = 0
        return found

    patch.setattr(decoding.DraftRows, "of", of)


def the_token_behind_a_wrong_draft_counts(patch: Patch) -> None:
    def one_more(tokens: torch.Tensor, drafts: Any) -> Any:
        counts, last = accepted(tokens, drafts)
        same_row = drafts.start[1:] == drafts.start[:-1]
        counts[1:] |= last[:-1] & same_row
        return counts, last

    patch.setattr(sampling, "accepted", one_more)


def the_relay_gets_the_first_token(patch: Patch) -> None:
    def first(tokens: torch.Tensor, drafts: Any) -> Any:
        counts, _ = accepted(tokens, drafts)
        return counts, drafts.start == torch.arange(len(tokens))

    patch.setattr(sampling, "accepted", first)


def penalties_do_not_see_the_drafts_before(patch: Patch) -> None:
    patch.setattr(DraftRows, "levels", lambda self: [])


def penalties_count_what_was_drafted(patch: Patch) -> None:
    def by_level(self: Any, logits: Any, batch: Any, drafts: Any) -> torch.Tensor:
        tokens: torch.Tensor = original(self, logits, batch, drafts)
        self._penalties.record(batch, drafts.expected)
        return tokens

    original = sampling.Sampler._by_level
    patch.setattr(sampling.Sampler, "_by_level", by_level)


def end_tokens_are_banned_at_the_first_position_only(patch: Patch) -> None:
    original = SamplingMetadata.banned

    def banned(self: SamplingMetadata, positions: Any) -> Any:
        rows, ids = original(self, positions)
        again = np.diff(self.seeds, prepend=-1) == 0  # a row with the parameters of the one before
        return rows[~again[rows]], ids[~again[rows]]

    patch.setattr(SamplingMetadata, "banned", banned)


def masks_are_those_of_the_position_before(patch: Patch) -> None:
    original = GrammarWorker._decide_drafts

    def decide(self: GrammarWorker, row: Any, first: int, found: Any) -> None:
        original(self, row, first, found)
        count = found.usable[row.at]
        found.masks[first + 1 : first + count] = found.masks[first : first + count - 1].copy()

    patch.setattr(GrammarWorker, "_decide_drafts", decide)


def masks_that_are_missing_allow_everything(patch: Patch) -> None:
    original = GrammarWorker._decide_drafts

    def decide(self: GrammarWorker, row: Any, first: int, found: Any) -> None:
        original(self, row, first, found)
        found.usable[row.at] = 1 + len(row.drafts)

    patch.setattr(GrammarWorker, "_decide_drafts", decide)
    # As if they were always late.
    patch.setattr(GrammarState, "look_ahead", lambda self, ahead: [])


def looking_ahead_moves_the_grammar(patch: Patch) -> None:
    original = GrammarState.look_ahead

    def look(self: GrammarState, ahead: LookAhead) -> Any:
        found = original(self, ahead)
        if found:
            self.matcher.accept(ahead.drafts[0])
        return found

    patch.setattr(GrammarState, "look_ahead", look)


@pytest.fixture(scope="module")
def wanted() -> tuple[list[Asked], list[Any]]:
    require("native")
    requests = [each for sampler in ("warm", "penalised", "hot") for each in asked(40, sampler)]
    return requests, run(requests, retract=False, speculation="off")


@nightly(PLANTED_BUG)
@pytest.mark.native
@pytest.mark.parametrize(
    "bug",
    [
        every_position_has_the_noise_of_the_last,
        the_token_behind_a_wrong_draft_counts,
        the_relay_gets_the_first_token,
        penalties_do_not_see_the_drafts_before,
        penalties_count_what_was_drafted,
        end_tokens_are_banned_at_the_first_position_only,
        masks_are_those_of_the_position_before,
        masks_that_are_missing_allow_everything,
        looking_ahead_moves_the_grammar,
    ],
)
def test_planted_bugs_are_found_on_a_model(
    bug: Callable[[Patch], None], wanted: tuple[list[Asked], list[Any]], monkeypatch: Patch
) -> None:
    requests, results = wanted
    bug(monkeypatch)
    with pytest.raises(_SYMPTOMS):
        for kind in ("oracle", "stale", "random"):
            known = Known(kind, [result.token_ids for result in results], 512)
            most = random.Random(0).choice([3, 8])
            found = run(requests, retract=False, drafter=known, max_draft_tokens=most)
            for one, other in zip(found, results, strict=True):
                alike(one, other)
