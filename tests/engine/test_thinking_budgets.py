"""Budgets of thought, exact to the token, in every way in which a step can go."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from aioinfer import EngineConfig, InvalidRequest, SamplingParams, Steer, StreamCheckpoint
from aioinfer.engine import Engine
from aioinfer.loop.thinking import ready_processors
from tests.engine.asking import SCHEMA
from tests.engine.conftest import MakeEngine
from tests.engine.simulation import settle
from tests.engine.test_logits_processors import PROMPT, Counting, asked, next_one, wanted
from tests.engine.test_transparency import retract_every
from tests.server.chats import add_tags
from tests.server.conftest import copy_that_reads_tools
from tests.tiers import SECONDS, grid, rest
from tests.toys import ToyTokenizer

OPEN, CLOSE, CALL = 20, 21, 22
QWEN3 = {"reasoning_parser": "qwen3"}


class ThinkingTokenizer(ToyTokenizer):
    """Some tokens are tags, so that thoughts begin and end wherever the model has them."""

    def __init__(self) -> None:
        super().__init__()
        for token, text in {OPEN: "<think>", CLOSE: "</think>", 23: ".", 24: "\n"}.items():
            self._pieces[token] = text

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        while text:
            pieces = (each for each in (OPEN, CLOSE) if text.startswith(self._pieces[each]))
            token = next(pieces, None)
            ids += super().encode(text[0]) if token is None else [token]
            text = text[1 if token is None else len(self._pieces[token]) :]
        return ids


THINKING = ThinkingTokenizer()
#: as many tags as there can be thoughts: more likely than other tokens
BIAS = {OPEN: 3.0, CLOSE: 2.0}


def budget(tokens: int, **fields: Any) -> SamplingParams:
    return asked(thinking_budget=tokens, logit_bias=BIAS, **fields)


def expected(params: SamplingParams, prompt: Sequence[int]) -> list[int]:
    ready = ready_processors(params, THINKING, prompt, "qwen3")
    processors = (*ready, *params.logits_processors)
    return wanted(params.changed(logits_processors=processors), prompt)


@pytest.mark.parametrize("window", [0, 1, 2])
@pytest.mark.parametrize("mode", ["thread", "inline"])
async def test_outputs_have_the_thoughts_of_their_budgets(
    make_engine: MakeEngine, window: int, mode: str
) -> None:
    several = [
        (prompt, budget(tokens, thinking_end=end, thinking_grace=grace, logits_processors=others,
                        logprobs=0 if tokens == 3 else None))
        for prompt in (PROMPT, [*PROMPT, OPEN])
        for tokens in (0, 1, 3, 7, 40)
        for end, grace, others in (("", 0, ()), ("ab", 2, (next_one,)), ("", 4, (Counting(),)))
    ]  # fmt: skip
    settings = {"overlap_steps": window, "launch_mode": mode, "chunk_size": 3, **QWEN3}
    async with make_engine(tokenizer=ThinkingTokenizer, **settings) as engine:
        retract_every(engine, 5)
        streams = [engine.generate(*each) for each in several]
        results = await asyncio.gather(*streams)
        await settle(engine)
    changed = 0
    for (prompt, params), result in zip(several, results, strict=True):
        assert result.token_ids == expected(params, prompt)
        without = params.changed(thinking_budget=None)
        changed += result.token_ids != wanted(without, prompt)
    assert changed > 5


@pytest.mark.parametrize("tokens", range(8))
async def test_the_tokens_before_the_end_of_the_budget_are_those_without_one(
    make_engine: MakeEngine, tokens: int
) -> None:
    cut = 0
    async with make_engine(tokenizer=ThinkingTokenizer, **QWEN3) as engine:
        for number in range(30, 50):
            free, bound = [
                (await engine.generate([number, OPEN], asked(max_tokens=12, thinking_budget=most))).token_ids
                for most in (None, tokens)
            ]
            if CLOSE in free[:tokens]:
                natural = free.index(CLOSE) + 1
                assert bound[:natural] == free[:natural]
                continue
            cut += 1
            if OPEN in free[:1]:  # the opening tag again is no token of the thought
                continue
            assert bound[: tokens + 1] == [*free[:tokens], CLOSE]
            assert len(bound) == len(free) == 12
    assert cut > 10


async def test_drafts_are_verified_behind_the_budget(make_engine: MakeEngine) -> None:
    prompt, params = [*PROMPT, OPEN], budget(9, max_tokens=40, thinking_end="abc")
    ids = expected(params, prompt)
    settings = {"speculation": "lookup", "adaptive_drafts": False, "overlap_steps": 1, **QWEN3}
    async with make_engine(tokenizer=ThinkingTokenizer, **settings) as engine:
        for prediction in (ids, wanted(params.changed(thinking_budget=None), prompt)):
            result = await engine.generate(prompt, params.changed(prediction=tuple(prediction)))
            assert result.token_ids == ids
        stats = engine.stats()
        await settle(engine)
    assert stats.accepted_tokens > 0


async def test_every_cut_goes_on_with_what_is_left_of_the_budget(make_engine: MakeEngine) -> None:
    prompt, params = [*PROMPT, OPEN], budget(4, max_tokens=16, thinking_end="abc", thinking_grace=1)
    settings = {"tokenizer": ThinkingTokenizer, **QWEN3}
    async with make_engine(**settings) as engine, make_engine(**settings, overlap_steps=2) as other:
        stream = engine.generate(prompt, params)
        await stream.accepted()
        cuts = [stream.checkpoint()]
        async for _ in stream:
            if not stream.done:
                cuts.append(stream.checkpoint())
        ids = stream.result().token_ids
        assert ids == expected(params, prompt)
        for number, cut in enumerate(cuts):
            there = StreamCheckpoint.from_json(cut.to_json())
            assert (await other.restore(there, request_id=f"cut-{number}")).token_ids == ids
    assert len(cuts) > 2


async def test_who_has_no_thoughts_is_refused_and_nobody_else(make_engine: MakeEngine) -> None:
    for settings in ({}, {"tokenizer": None, **QWEN3}):
        async with make_engine(**settings) as engine:
            with pytest.raises(InvalidRequest, match="thinking_budget: the model has no format of reasoning"):
                await engine.generate(PROMPT, asked(thinking_budget=3))
            assert (await engine.generate(PROMPT, asked())).token_ids == wanted(asked())
            await settle(engine)


async def test_an_application_steers_while_it_reads(make_engine: MakeEngine) -> None:
    steer = Steer()
    async with make_engine() as engine:
        free = (await engine.generate(PROMPT, asked(max_tokens=60))).token_ids
        again = [each for each in free[10:] if each in free[:10]]
        streams = [engine.generate(PROMPT, asked(steer, max_tokens=60)) for _ in range(2)]
        read, told = list[int](), 0
        async for chunk in streams[0]:
            read += chunk.token_ids
            # A chunk has all tokens that came since the last one.
            if not told and len(read) >= 10:
                steer.ban(*([each] for each in set(free[:10])))
                told = len(read)
        other = await streams[1]
    assert again
    assert read[:told] == free[:told]
    # Those that were in flight when it was told stay.
    assert not {*read[told + 4 :]} & {*free[:10]}
    assert len(read) == len(other.token_ids) == 60


# -- the bundled model ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    """The bundled model, whose template opens a thought as Qwen 3's does, and its tags."""
    directory = copy_that_reads_tools(tmp_path_factory.mktemp("thinker") / "model")
    template = directory / "chat_template.jinja"
    template.write_text(template.read_text() + r"{{ '<think>\n' }}{% if '\n</think>\n\n' in '' %}{% endif %}")
    return directory, add_tags(directory, "<think>", "</think>", special=False)


CHAT: Any = [{"role": "user", "content": "Tell me a story."}]


@rest(SECONDS)
@pytest.mark.parametrize("window", grid([1], [0, 2]))
@pytest.mark.parametrize("settings", [{"sampling_backend": "native"}, {"sampling_backend": "torch"},
                                      {"speculation": "lookup", "adaptive_drafts": False},
                                      # what is decided takes too long for a step, which voids its drafts
                                      {"speculation": "lookup", "adaptive_drafts": False,
                                       "grammar_patience": 0}])  # fmt: skip
async def test_a_model_thinks_as_long_as_it_may(
    thinker: tuple[Path, dict[str, int]], window: int, settings: dict[str, Any]
) -> None:
    directory, tags = thinker
    config = EngineConfig(
        model=str(directory),
        dtype="float32",
        threads=1,
        overlap_steps=window,
        reasoning_parser="auto",
        **settings,
    )
    async with Engine(config) as engine:
        assert engine.tokenizer is not None
        closing = engine.tokenizer.encode_part("\n</think>\n\n")
        assert tags["</think>"] in closing
        for wish in ({"temperature": 0}, {"temperature": 1.2, "seed": 3, "presence_penalty": 0.5}):
            params = SamplingParams(
                max_tokens=30, ignore_eos=True, logit_bias={tags["</think>"]: -100}, **wish
            )
            free = (await engine.chat(CHAT, params)).result.token_ids
            for tokens in (0, 1, 5, 12, 26, 29, 30, 31):
                answer = await engine.chat(CHAT, params.changed(thinking_budget=tokens))
                bound = answer.result.token_ids
                assert bound[:tokens] == free[: min(tokens, 30)]
                text = engine.tokenizer.decode(free[:tokens])
                forced = closing[text.endswith("\n") :]
                assert bound[tokens : tokens + len(forced)] == forced[: max(0, 30 - tokens)]
                if tokens <= 26:  # the tag is whole
                    assert (answer.reasoning or "") == text.strip("\n")
                    assert answer.usage.reasoning_tokens <= tokens


@rest(SECONDS)
async def test_json_follows_a_thought_that_is_cut(thinker: tuple[Path, dict[str, int]]) -> None:
    directory, tags = thinker
    config = EngineConfig(model=str(directory), dtype="float32", threads=1, reasoning_parser="qwen3")
    async with Engine(config) as engine:
        for window in (3, 8):
            params = SamplingParams(
                temperature=0, max_tokens=200, grammar=SCHEMA, thinking_budget=window,
                thinking_end=" So:", logit_bias={tags["</think>"]: -100},
            )  # fmt: skip
            found = await engine.chat(CHAT, params)
            assert found.reasoning is not None
            assert found.reasoning.endswith(" So:")
            assert found.content is not None
            assert found.content.startswith("{")
            assert found.finish_reason == "stop"
            assert tags["</think>"] in found.result.token_ids
        with pytest.raises(InvalidRequest, match="thinking_budget: cannot be combined"):
            await engine.generate("A pet:", params)
