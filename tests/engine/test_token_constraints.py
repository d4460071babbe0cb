"""Logit bias, allowed tokens and bad words: on their own rows only, and the same with any window."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from aioinfer import errors
from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.params import Grammar, SamplingParams
from tests.engine.asking import greedy_ids
from tests.tiers import SECONDS, rest

PROMPT = list(range(100, 120))


@rest(SECONDS)
@pytest.mark.parametrize("window", [0, 1, 2])
async def test_biases_and_allowed_tokens_steer_their_own_rows_only(window: Any) -> None:
    async with Engine(EngineConfig(overlap_steps=window, threads=1, dtype="float32")) as engine:
        ids = partial(greedy_ids, engine, PROMPT, max_tokens=8)
        plain = await ids()
        beside = engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        assert await ids(logit_bias={333: 100.0}) == [333] * 8
        assert plain[0] not in await ids(logit_bias={plain[0]: -100.0})
        assert set(await ids(allowed_token_ids=[7, 500, 863])) <= {7, 500, 863}
        assert set(await ids(temperature=5.0, seed=1, allowed_token_ids=[3, 31, 32])) <= {3, 31, 32}
        both = await ids(logit_bias={31: 50.0}, allowed_token_ids=[31, 32], repetition_penalty=2.0)
        assert set(both) <= {31, 32}
        assert (await beside).token_ids == plain
        assert await ids() == plain, "a slot forgets its former tenant's wishes"


def test_what_makes_no_sense_is_refused() -> None:
    for name, value in (
        ("logit_bias", {3: 101}),
        ("logit_bias", {-1: 1}),
        ("logit_bias", {"3": 1}),
        ("logit_bias", [3]),
        ("logit_bias", dict.fromkeys(range(2000), 1.0)),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [1.5]),
    ):
        with pytest.raises(errors.InvalidRequest, match=name):
            SamplingParams(**{name: value})


CAT = Grammar("choice", ["cat"])
#: constraints that allow no first token -> the field that the refusal names
IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"grammar": CAT, "bad_words": ["cat", "c", "ca"]}, "grammar"),
    ({"grammar": CAT, "allowed_token_ids": [500]}, "grammar"),
    ({"bad_words": [[500]], "allowed_token_ids": [500]}, "bad_words"),
    ({"bad_words": [[500]], "allowed_token_ids": [500, 1], "min_tokens": 2}, "bad_words"),
    ({"allowed_token_ids": [1], "min_tokens": 1}, "allowed_token_ids"),
    ({"allowed_token_ids": [500], "stop_token_ids": [500], "min_tokens": 1}, "allowed_token_ids"),
    ({"stop_token_ids": list(range(864)), "min_tokens": 1}, "min_tokens"),
]


@pytest.mark.parametrize(("wishes", "field"), IMPOSSIBLE)
async def test_constraints_that_allow_no_first_token_are_refused_by_name(
    wishes: dict[str, Any], field: str
) -> None:
    async with Engine(EngineConfig(threads=1)) as engine:
        (end,) = engine.info.eos_token_ids
        wishes = {
            name: [end if token == 1 else token for token in value] if name == "allowed_token_ids" else value
            for name, value in wishes.items()
        }
        with pytest.raises(errors.InvalidRequest) as caught:
            await engine.generate(PROMPT, SamplingParams(**wishes, max_tokens=4))
        assert caught.value.field == field
        for name in wishes.keys() - {field}:
            assert name in str(caught.value)


@pytest.mark.parametrize("window", [0, 1, 2])
async def test_a_dead_end_within_an_output_fails_its_request_alone(window: Any) -> None:
    async with Engine(EngineConfig(overlap_steps=window, threads=1, dtype="float32")) as engine:
        ids = partial(greedy_ids, engine, PROMPT, max_tokens=8)
        plain = await ids()
        beside = engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        # After 7, 7 the words exclude all that is allowed.
        stuck = SamplingParams(allowed_token_ids=[7, 500], bad_words=[[500], [7, 7, 7]], max_tokens=8)
        with pytest.raises(errors.ConstraintFailed) as caught:
            await engine.generate(PROMPT, stuck)
        assert caught.value.fields == ("bad_words", "allowed_token_ids")
        assert "after 2 tokens" in str(caught.value)
        stream = engine.generate(PROMPT, stuck)
        with pytest.raises(errors.ConstraintFailed):
            async for _ in stream:
                pass
        # A complete choice must end, and the end is not allowed.
        pieces = engine.tokenizer.encode_part("cat") if engine.tokenizer else []
        unending = SamplingParams(grammar=CAT, allowed_token_ids=pieces, max_tokens=8)
        with pytest.raises(errors.ConstraintFailed) as caught:
            await engine.generate(PROMPT, unending)
        assert caught.value.fields == ("grammar", "allowed_token_ids")
        assert (await beside).token_ids == plain
        assert await ids() == plain


@rest(SECONDS)
@pytest.mark.parametrize("fast_forward", [True, False])
async def test_forced_tokens_obey_the_allowed_ones(fast_forward: bool) -> None:
    async with Engine(EngineConfig(threads=1, fast_forward=fast_forward)) as engine:
        word = "extraordinarily long and without any choice"
        params = SamplingParams(temperature=0, max_tokens=60, grammar=Grammar("choice", [word]))
        free = await engine.generate(PROMPT, params)
        assert free.text == word
        allowed = sorted(set(free.token_ids))
        bound = await engine.generate(PROMPT, replace(params, allowed_token_ids=allowed))
        assert bound.token_ids == free.token_ids
        for missing in free.token_ids[5:-1]:
            try:
                left = [token for token in allowed if token != missing]
                other = await engine.generate(PROMPT, replace(params, allowed_token_ids=left))
            except (errors.ConstraintFailed, errors.InvalidRequest) as error:
                assert "grammar" in str(error)
                assert "allowed_token_ids" in str(error)
            else:
                assert missing not in other.token_ids
                assert other.text == word


async def test_the_least_repetition_penalty_keeps_logits_finite() -> None:
    async with Engine(EngineConfig(threads=1)) as engine:
        for penalty in (0.01, 100.0):
            result = await engine.generate(PROMPT, SamplingParams(repetition_penalty=penalty, max_tokens=8))
            assert len(result.token_ids) <= 8
    with pytest.raises(errors.InvalidRequest, match="repetition_penalty"):
        SamplingParams(repetition_penalty=1e-300)


# -- bad words ---------------------------------------------------------------------------------------------


def contains(ids: list[int], word: list[int]) -> bool:
    return any(ids[at : at + len(word)] == word for at in range(len(ids)))


@rest(SECONDS)
@pytest.mark.parametrize("window", [0, 1, 2])
async def test_bad_words_never_come_and_cost_others_nothing(window: Any) -> None:
    async with Engine(EngineConfig(overlap_steps=window, threads=1, dtype="float32")) as engine:
        ids = partial(greedy_ids, engine, PROMPT, max_tokens=24)
        plain = await ids()
        beside = engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
        for length in (1, 2, 3):
            word = plain[4 : 4 + length]
            other = await ids(bad_words=[word])
            assert not contains(other, word)
            first = next(at for at in range(24) if contains(plain[: at + 1], word))
            assert other[:first] == plain[:first], "only where it would have come"
        # Forbid again and again what comes instead.
        words: list[list[int]] = []
        for _ in range(6):
            words.append((await ids(bad_words=words))[6:8])
        assert len({tuple(word) for word in words}) == 6
        seeded = {"temperature": 1.5, "seed": 3, "bad_words": words}
        assert await ids(**seeded) == await ids(**seeded)
        assert (await beside).token_ids == plain


@rest(SECONDS)
@pytest.mark.parametrize("fast_forward", [True, False])
async def test_a_grammar_and_bad_words_hold_together(fast_forward: bool) -> None:
    async with Engine(EngineConfig(threads=1, fast_forward=fast_forward)) as engine:
        tokenizer = engine.tokenizer
        assert tokenizer is not None
        for seed in range(8):
            params = SamplingParams(
                temperature=1.0,
                seed=seed,
                max_tokens=30,
                grammar=Grammar("regex", "(red|green|blue) (apples|pears)"),
                bad_words=["red", tokenizer.encode_part("blue")],
            )
            output = await engine.generate("Which?", params)
            assert output.text in ("green apples", "green pears") or not output.text.startswith("green")
            spelled = tokenizer.encode_part("red")
            assert not contains(output.token_ids, spelled)
