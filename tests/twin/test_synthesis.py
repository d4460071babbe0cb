"""Synthesized loads have the moments that were asked for, and repeat with their seed."""

from __future__ import annotations

import itertools
import math
import os
import random
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from aioinfer.errors import ConfigError
from aioinfer.twin.load import ANSWER, CONTENTS, tokens_of
from aioinfer.twin.synthesis import WORKLOADS, Workload, length_distribution, synthesize

MANY = 20_000


def drawn(text: str) -> npt.NDArray[np.int64]:
    rng, draw = random.Random(1), length_distribution(text)
    return np.array([draw(rng) for _ in range(MANY)])


@pytest.mark.parametrize(
    ("text", "mean", "deviation"),
    [
        ("128", 128, 0),
        ("uniform:100:300", 200, 201 / 12**0.5),
        ("lognormal:5:0.5", math.exp(5.125), math.exp(5.125) * math.expm1(0.25) ** 0.5),
        ("exponential:400", 400, 400),
        ("geometric:4", 4, 12**0.5),
        ("geometric:1", 1, 0),
    ],
)
def test_lengths_have_their_moments(text: str, mean: float, deviation: float) -> None:
    lengths = drawn(text)
    assert lengths.mean() == pytest.approx(mean, rel=0.03)
    assert lengths.std() == pytest.approx(deviation, rel=0.05)
    assert lengths.min() >= 1


def test_a_lognormal_length_is_cut_off() -> None:
    assert drawn("lognormal:5:1:200").max() == 200


@pytest.mark.parametrize(
    "text",
    [
        *("", "abc", "-1", "nan", "inf", "5:6", "uniform:1", "uniform:9:1", "uniform:-5:5", "normal:1:2"),
        *("lognormal:5", "lognormal:5:-1", "lognormal:5:1:9:9", "lognormal:99:1"),
        *("geometric:0.5", "exponential:0"),
    ],
)
def test_what_is_no_distribution_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a length distribution"):
        length_distribution(text)


@pytest.mark.parametrize("burstiness", [0.0, 0.5, 1.0, 3.0])
def test_arrivals_have_their_rate_and_burstiness(burstiness: float) -> None:
    sessions = synthesize(Workload(rate=4.0, burstiness=burstiness, requests=MANY), 1)
    at = [each.at for each in sessions]
    gaps = np.diff(at)
    assert (len(at), at[0]) == (MANY, 0.0)
    assert gaps.mean() == pytest.approx(1 / 4, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness, rel=0.05, abs=1e-9)


def test_a_load_ends_after_its_requests_or_seconds() -> None:
    spec = Workload(rate=10.0, turns="3", requests=100)
    sessions = list(synthesize(spec, 1))
    assert [len(each.turns) for each in sessions] == [3] * 33 + [1]
    timed = list(synthesize(replace(spec, requests=None, seconds=5.0), 1))
    assert 4.0 < timed[-1].at < 5.0
    assert timed[:33] == sessions[:33]
    assert {each.at for each in synthesize(replace(spec, rate=math.inf), 1)} == {0.0}


def test_a_turn_has_what_is_new_behind_the_conversation() -> None:
    spec = Workload(prompt_tokens="50", turns="3", think_ms="1500", system_tokens="200", requests=6)
    first, second = synthesize(spec, 1)
    assert [each.pieces for each in first.turns] == [((1, 200), (2, 50)), ((3, 50),), ((4, 50),)]
    assert second.turns[0].pieces == ((1, 200), (5, 50))
    assert [each.think for each in first.turns] == [0.0, 1.5, 1.5]
    assert (first.name, second.name) == ("0", "1")


def test_sessions_share_a_few_system_prompts() -> None:
    spec = Workload(system_prompts=4, system_tokens="uniform:100:900", requests=400)
    found = [each.turns[0].pieces for each in synthesize(spec, 1)]
    shared, own = zip(*found, strict=True)
    assert {content for content, _ in shared} == {1, 2, 3, 4}
    assert len(set(shared)) == 4, "each has one length"
    assert len({content for content, _ in own}) == 400
    assert all(ANSWER < content < CONTENTS for pieces in found for content, _ in pieces)
    assert len(tokens_of(found[0])) == sum(tokens for _, tokens in found[0])


def test_a_session_ends_before_its_context_is_full() -> None:
    spec = Workload(prompt_tokens="60", output_tokens="40", turns="9", requests=18)
    assert [len(each.turns) for each in synthesize(replace(spec, context_tokens=350), 1)] == [3] * 6
    assert {len(each.turns) for each in synthesize(replace(spec, context_tokens=50), 1)} == {1}


def test_another_rate_gives_the_same_sessions() -> None:
    chat = WORKLOADS["chat"]
    slow, fast = (list(synthesize(replace(chat, rate=rate), 5)) for rate in (1.0, 4.0))
    assert [each.turns for each in slow] == [each.turns for each in fast]
    assert [each.at for each in slow] == pytest.approx([4 * each.at for each in fast])


def test_a_load_repeats_with_its_seed() -> None:
    def load(seed: int) -> list[object]:
        return list(synthesize(WORKLOADS["agentic"], seed))

    assert load(1) == load(1) != load(2)


def test_processes_make_the_same_bytes() -> None:
    program = (
        "import sys; from aioinfer.twin.synthesis import *\n"
        "for name, spec in WORKLOADS.items(): print(name, *synthesize(spec, 7))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            stdout=subprocess.PIPE,
            check=True,
        ).stdout
        for seed in (1, 2)
    }
    assert len(found) == 1


def test_sessions_are_made_when_asked_for() -> None:
    endless = synthesize(Workload(seconds=1e15), 1)
    assert len(list(itertools.islice(endless, 3))) == 3


def test_agents_have_the_published_moments() -> None:
    """Of GitHub Copilot's agents: 30.9 calls a session, prompts of 67.8 k tokens and outputs of 527."""
    sessions = list(synthesize(replace(WORKLOADS["agentic"], requests=MANY), 1))
    prompts, outputs = [], []
    for session in sessions:
        used = 0
        for turn in session.turns:
            used += sum(tokens for _, tokens in turn.pieces)
            prompts.append(used)
            outputs.append(turn.output_tokens)
            used += turn.output_tokens
        assert used <= 200_000
    assert len(prompts) / len(sessions) == pytest.approx(30.9, rel=0.1)
    assert np.mean(prompts) == pytest.approx(67_800, rel=0.1)
    assert np.mean(outputs) == pytest.approx(527, rel=0.05)


def test_chats_have_the_published_moments() -> None:
    """Of ShareGPT: prompts of 161 tokens and outputs of 338; of LMSYS-Chat-1M: two turns."""
    sessions = list(synthesize(replace(WORKLOADS["chat"], requests=MANY), 1))
    turns = [turn for session in sessions for turn in session.turns]
    assert len(turns) / len(sessions) == pytest.approx(2, rel=0.05)
    assert np.mean([turn.pieces[-1][1] for turn in turns]) == pytest.approx(161, rel=0.05)
    assert np.mean([turn.output_tokens for turn in turns]) == pytest.approx(338, rel=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 0}, "rate: 0 is out of range"),
        ({"rate": math.nan}, "rate: nan is"),
        ({"burstiness": -1}, "burstiness: -1 is"),
        ({"turns": "many"}, "turns: not a length distribution: 'many'"),
        ({"think_ms": "-1"}, "think_ms: not a length"),
        ({"system_prompts": 0}, "system_prompts: 0 is"),
        ({"context_tokens": 0}, "context_tokens: 0 is"),
        ({"requests": 0}, "requests: 0 is"),
        ({"seconds": -1.0}, "seconds: -1.0 is"),
        ({"requests": None}, "requests: needed unless"),
        ({"requests": None, "seconds": math.inf}, "requests: needed unless"),
        ({"requests": None, "seconds": 1, "rate": math.inf}, "requests: needed unless"),
    ],
)
def test_a_workload_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Workload(**{"requests": 1, **options})
