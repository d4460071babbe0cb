"""Bad words never come, whatever the window, and other requests do not notice."""

from __future__ import annotations

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


@rest(SECONDS)
async def test_where_nothing_is_left_only_that_request_fails() -> None:
    async with Engine(EngineConfig(threads=1)) as engine:
        beside = engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=24))
        plain = await engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=24))
        everything = [[token] for token in range(256)]
        grammar = Grammar("choice", '["x"]')
        tokenizer = engine.tokenizer
        assert tokenizer is not None
        every = [[token] for token in range(864) if "x" in tokenizer.decode([token])][:256]
        with pytest.raises(errors.InvalidRequest):
            await engine.generate(PROMPT, SamplingParams(grammar=grammar, bad_words=every))
        with pytest.raises(errors.InvalidRequest, match="allowed_token_ids"):
            await engine.generate(
                PROMPT,
                SamplingParams(allowed_token_ids=[1, 2], ignore_eos=True, max_tokens=9, bad_words=everything),
            )
        assert (await beside).token_ids == plain.token_ids
