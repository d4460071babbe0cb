"""Drafters and predictions, of whatever kind: what they do harms no request."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from aioinfer import errors
from aioinfer.params import SamplingParams
from aioinfer.speculation.drafter import DraftRequest
from tests.engine.test_speculation import PROMPT, outputs, toy
from tests.sequences import sequence_of
from tests.speculation.drafters import Guesser
from tests.toys import ToyTokenizer


def test_a_drafter_that_raises_is_asked_no_more_and_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    class Raising:
        calls = 0

        def propose(self, request: DraftRequest, most: int) -> Sequence[int]:
            self.calls += 1
            if request.name == "bad":
                raise ValueError("no idea")
            return Guesser("right", random.Random(0)).propose(request, most)

    drafter = Raising()
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with toy(drafter) as llm:
        keys = [llm.add_request(PROMPT, params) for _ in range(2)]
        sequence_of(llm._open[keys[0]]).drafting.request.name = "bad"  # type: ignore[union-attr]
        sequence_of(llm._open[keys[1]]).drafting.request.name = "0"  # type: ignore[union-attr]
        found: dict[int, Any] = {}
        while llm.has_unfinished():
            found |= llm.step()
    assert [found[key].token_ids for key in keys] == [outputs(20)] * 2
    assert sum("no idea" in str(record.exc_info) for record in caplog.records) == 1


class _Odd:
    """Proposes something odd to every request but the one that is named "good"."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.buffer = np.arange(1, 9)

    def propose(self, request: DraftRequest, most: int) -> Any:
        if request.name == "good":
            return []
        match self.kind:
            case "reused":
                proposed = self.buffer
                self.buffer[:] = -5 if request.name == "late" else self.buffer
                request.name = "late"
                return proposed[:most]
            case "floats":
                return [1.0] * most
            case "cancelled":
                raise asyncio.CancelledError
            case "matched":
                request.matched = "long"  # type: ignore[assignment]
            case "prediction":
                request.prediction = None  # type: ignore[assignment]
        return [1] * most


@pytest.mark.parametrize("kind", ["reused", "floats", "cancelled", "matched", "prediction"])
def test_what_a_drafter_does_harms_no_request(kind: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with toy(_Odd(kind)) as llm:
        keys = [llm.add_request(PROMPT, each) for each in (params, params, replace(params, speculate=False))]
        found: dict[int, Any] = {}
        while llm.has_unfinished():
            found |= llm.step()
    assert [found[key].token_ids for key in keys] == [outputs(20)] * 3


@pytest.mark.parametrize("drafter", [5, lambda request, most: [], object])
def test_what_cannot_propose_is_no_drafter(drafter: Any) -> None:
    with pytest.raises(errors.ConfigError, match="propose"), toy(drafter):
        pass


@pytest.mark.parametrize("kind", ["stop", "stop_regex", "stop_token_ids"])
def test_drafts_behind_a_stop_are_no_accepted_predictions(kind: str) -> None:
    ids = outputs()
    text = ToyTokenizer().decode(ids)
    stops: dict[str, Any] = {
        "stop": {"stop": text[4:7]},
        "stop_regex": {"stop_regex": re.escape(text[4:7])},
        "stop_token_ids": {"stop_token_ids": [ids[4]]},
    }
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, prediction=ids, **stops[kind])
    with toy(max_draft_tokens=15, overlap_steps=0) as llm:
        (result,) = llm.generate([PROMPT], params)
    usage = result.usage
    assert result.finish_reason == "stop"
    assert 0 < usage.accepted_prediction_tokens < usage.completion_tokens <= 8


def test_what_a_drafter_sees_cannot_be_written_to() -> None:
    class Writing:
        def propose(self, request: DraftRequest, most: int) -> Sequence[int]:
            with pytest.raises(ValueError, match="read-only"):
                request.tokens[0] = 1
            seen.append((request.tokens.tolist(), request.prediction.tolist(), request.prompt_length))
            return []

    seen: list[Any] = []
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prediction=[9, 8])
    with toy(Writing(), overlap_steps=0) as llm:
        llm.generate([PROMPT], params)
    assert [tokens for tokens, _, _ in seen] == [[*PROMPT, *outputs(count)] for count in (1, 2)]
    assert {(tuple(prediction), length) for _, prediction, length in seen} == {((9, 8), 5)}


@pytest.mark.parametrize("how", ["engine", "request"])
def test_nothing_is_drafted_where_that_is_switched_off(how: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, speculate=how != "request")
    with toy(speculation="off" if how == "engine" else "lookup") as llm:
        llm.generate([[1, 2, 3, 1, 2, 3]], params)
        assert llm.stats().verified_rows == 0


def test_a_prediction_is_verified_from_the_first_token_on() -> None:
    ids = outputs()
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, prediction=ids)
    with toy(overlap_steps=0) as llm:
        (result,) = llm.generate([PROMPT], params)
        stats = llm.stats()
    assert result.token_ids == ids
    assert stats.steps == 3
    assert (result.usage.accepted_prediction_tokens, result.usage.rejected_prediction_tokens) == (27, 0)


@pytest.mark.parametrize(
    "prediction", [[64], [-1], "x" * 3 + "\ud800", {"a": 1}, {1, 2}, 7, b"ab", [1.5], ["a"], True, [True]]
)
def test_a_prediction_that_makes_no_sense_is_refused_by_name(prediction: Any) -> None:
    with toy() as llm, pytest.raises(errors.InvalidRequest) as caught:
        llm.generate([PROMPT], SamplingParams(prediction=prediction))
    assert caught.value.field == "prediction"


def test_a_prediction_that_is_too_long_is_cut() -> None:
    shared: dict[str, Any] = {"max_tokens": 9, "ignore_eos": True}
    with toy(max_model_len=50, pages=20) as llm:
        (result,) = llm.generate([PROMPT], SamplingParams(**shared, prediction=[5] * 100_000))
        (text,) = llm.generate([PROMPT], SamplingParams(**shared, prediction="a" * 3_000_000))
    assert len(result.token_ids) == len(text.token_ids) == 9
