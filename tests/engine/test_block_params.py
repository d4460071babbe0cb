"""Parameters on blocks: the same in every way to compute them, and as the plain definition has it."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest

from aioinfer import StreamCheckpoint
from aioinfer.config import EngineConfig
from aioinfer.diffusion.registry import usable_algorithms
from aioinfer.engine import Engine
from aioinfer.errors import ConstraintFailed, InvalidRequest
from aioinfer.execution.launcher import InlineLauncher, ThreadLauncher
from aioinfer.outputs import Result
from aioinfer.params import DiffusionParams, SamplingParams
from tests.engine.block_parity import WAYS, Asked, answers
from tests.engine.block_worlds import Plain, check_logprobs, decode
from tests.engine.worlds import ended
from tests.tiers import SECONDS, rest, thinned
from tests.toys import ToyTokenizer
from tests.toys.blocks import ScriptedDevice

SIZE, VOCAB, MASK, LONGEST = 8, 64, 5, 64
#: others move tokens and refuse all of this
ALGORITHMS = usable_algorithms(None)
ALL: dict[str, Any] = {
    "repetition_penalty": 1.4,
    "presence_penalty": 0.7,
    "frequency_penalty": 0.3,
    "logit_bias": {4: 9.0, 7: 5.0, 0: 8.0, 9: -100},
    "allowed_token_ids": range(48),
    "min_tokens": 11,
    "logprobs": 3,
}
KINDS: dict[str, dict[str, Any]] = {
    "neighbour": {"logprobs": 0},
    "repetition": {"repetition_penalty": 1.6},
    "presence": {"presence_penalty": 1.5, "logit_bias": {10: 15.0, 11: 14.0, 12: 13.0}},
    "frequency": {"frequency_penalty": 1.2},
    "rewarded": {"presence_penalty": -2.0, "frequency_penalty": -2.0, "repetition_penalty": 0.5},
    "bias": {"logit_bias": {3: 12.0, 9: 11.0, 0: -100}},
    "allowed": {"allowed_token_ids": range(2, 40)},
    "long at least": {"min_tokens": 11, "logit_bias": {0: 14.0}},
    "unlike": {"top_n_sigma": 1.2, "temperature": 1.5},
    "logprobs": {"logprobs": 4},
    "all": ALL,
    "all drawn": {**ALL, "temperature": 1.0, "top_n_sigma": 2.5, "top_p": 0.95},
}


def make_device(config: EngineConfig, num_pages: int = 160) -> ScriptedDevice:
    return ScriptedDevice(
        num_pages=num_pages,
        page_size=config.page_size,
        num_slots=config.num_slots,
        max_model_len=LONGEST,
        vocab_size=VOCAB,
        mask_token_id=MASK,
        edits=2,
    )


def make_engine(*, num_pages: int = 160, **settings: Any) -> Engine:
    config = EngineConfig(**{"model": "scripted", "page_size": SIZE, **settings})
    launcher = InlineLauncher if config.launch_mode == "inline" else ThreadLauncher
    device = make_device(config, num_pages)
    return Engine(config, launcher=lambda _: launcher(device), tokenizer=lambda _: ToyTokenizer(VOCAB))


def params_of(kind: str, algorithm: str, **options: Any) -> SamplingParams:
    given: dict[str, Any] = {"threshold": 0.9} if "threshold" in algorithm or "conf" in algorithm else {}
    if algorithm == "joint_threshold":
        given["penalty"] = 1.5
    wanted = {"temperature": 0.0, "seed": 7, "max_tokens": 21, "logprobs": 0, **KINDS[kind], **options}
    return SamplingParams(**wanted, diffusion=DiffusionParams(algorithm=algorithm, **given))


def requests() -> list[Asked]:
    """Of every kind and algorithm, prompts that end around a block's end."""
    rng = random.Random(3)
    lengths = itertools.cycle((SIZE + 3, SIZE - 1, SIZE, 3 * SIZE + 1, 1))
    return [
        (
            rng.choices(range(1, VOCAB), k=next(lengths)),
            params_of(kind, algorithm, ignore_eos=number % 3 == 1),
        )
        for number, (kind, algorithm) in enumerate(itertools.product(KINDS, ALGORITHMS))
    ]


@pytest.fixture(scope="module")
def expected() -> list[tuple[Asked, Plain]]:
    device, asked = make_device(EngineConfig(page_size=SIZE)), requests()
    return list(zip(asked, decode(device, device.script, asked, LONGEST), strict=True))


def check(results: Sequence[Result], expected: Sequence[tuple[Asked, Plain]]) -> None:
    for result, (asked, plain) in zip(results, expected, strict=True):
        assert result.token_ids == plain.ids, asked
        assert result.step_map == plain.steps, asked
        assert result.logprobs is not None
        check_logprobs(result.logprobs, plain, asked[1])
        assert result.finish_reason == ended(plain.ids, asked[1])[2]


@rest(SECONDS)
def test_what_is_expected_differs_from_what_is_written_without_parameters(
    expected: list[tuple[Asked, Plain]],
) -> None:
    """Each kind says something in some of its requests, so that the others below have something to show."""
    device = make_device(EngineConfig(page_size=SIZE))
    neutral = [
        (
            prompt,
            SamplingParams(temperature=params.temperature, seed=7, max_tokens=21, diffusion=params.diffusion),
        )
        for (prompt, params), _ in expected
    ]
    plain = decode(device, device.script, neutral, LONGEST)
    for first, kind in zip(range(0, len(expected), len(ALGORITHMS)), KINDS, strict=True):
        mine = slice(first, first + len(ALGORITHMS))
        changed = [
            each.ids != other.ids for (_, each), other in zip(expected[mine], plain[mine], strict=True)
        ]
        assert any(changed) or kind in ("neighbour", "logprobs"), kind


@rest(SECONDS)
@pytest.mark.parametrize("way", thinned(WAYS, 2))
def test_every_way_to_compute_blocks_gives_what_is_expected(
    way: str, expected: list[tuple[Asked, Plain]]
) -> None:
    """Neighbours without parameters keep their ids and logprobs to the bit."""

    async def run() -> list[Result]:
        async with make_engine(max_running_requests=48, **WAYS[way]) as engine:
            return await answers(engine, [asked for asked, _ in expected])

    check(asyncio.run(run()), expected)


@rest(SECONDS)
@pytest.mark.parametrize("way", thinned(WAYS, 2))
def test_requests_that_lose_their_slot_go_on_as_if_they_had_not(
    way: str, expected: list[tuple[Asked, Plain]]
) -> None:
    async def run() -> tuple[list[Result], int]:
        some = [asked for asked, _ in expected[::3]]
        settings = {"max_running_requests": 8, "prefix_cache": False, "new_token_ratio": 0.0, **WAYS[way]}
        async with make_engine(num_pages=14, **settings) as engine:
            return await answers(engine, some), engine.stats().retractions

    results, retractions = asyncio.run(run())
    assert retractions > 0
    check(results, expected[::3])


async def checkpoints(prompt: list[int], params: SamplingParams) -> list[StreamCheckpoint]:
    """Of one request, before each of its steps."""
    found: list[StreamCheckpoint] = []
    config = EngineConfig(model="scripted", page_size=SIZE, launch_mode="inline", overlap_steps=0)
    device = make_device(config)
    engine = Engine(
        config, launcher=lambda _: InlineLauncher(device), tokenizer=lambda _: ToyTokenizer(VOCAB)
    )
    async with engine:
        stream = engine.generate(prompt, params)
        device.fault = lambda _: found.append(StreamCheckpoint.from_json(stream.checkpoint().to_json()))
        await stream
    return found


@rest(SECONDS)
@pytest.mark.parametrize("algorithm", ["low_confidence", "joint_threshold"])
async def test_a_checkpoint_goes_on_elsewhere_with_counts_and_alternatives(
    algorithm: str, expected: list[tuple[Asked, Plain]]
) -> None:
    """Cut after every round, also amid a block, with tokens that are known and are no output yet."""
    first, by = ALGORITHMS.index(algorithm), len(ALGORITHMS)
    of_kind = dict(zip(KINDS, expected[first::by], strict=True))
    found = 0
    async with make_engine(diffusion_mode="sync") as elsewhere:
        for kind in ("all", "all drawn", "logprobs", "repetition"):
            (prompt, params), plain = of_kind[kind]
            saved = await checkpoints(prompt, params)
            found += sum(each.block is not None and any(each.block.tops) for each in saved)
            results = await asyncio.gather(*(_restored(elsewhere, each) for each in saved))
            check(results, [((prompt, params), plain)] * len(saved))
    assert found > 0, "no block was left with alternatives of tokens that are no output"


async def _restored(engine: Engine, saved: StreamCheckpoint) -> Result:
    return await engine.restore(saved)


async def test_a_stop_string_may_begin_in_one_block_and_end_in_the_next() -> None:
    """In every way; and before ``min_tokens`` it is text, as a pattern is."""
    prompt = [9] * (SIZE - 3)
    plain = params_of("neighbour", "low_confidence", ignore_eos=True)
    device = make_device(EngineConfig(page_size=SIZE))
    (found,) = decode(device, device.script, [(prompt, plain)], LONGEST)
    pieces = [ToyTokenizer(VOCAB).decode([token]) for token in found.ids]
    assert all(pieces[9:13]), "tokens around the end of the second block have texts"
    across = "".join(pieces[9:13])
    assert "".join(pieces).find(across) == len("".join(pieces[:9]))
    for field, stop in (("stop", across), ("stop_regex", re.escape(across))):
        params = plain.changed(**{field: (stop,)})
        late = params.changed(min_tokens=14)
        for way in WAYS.values():
            async with make_engine(**way) as engine:
                stopped, whole = await answers(engine, [(prompt, params), (prompt, late)])
            assert (stopped.token_ids, stopped.finish_reason) == (found.ids[:13], "stop")
            assert (stopped.text, stopped.stop_reason) == ("".join(pieces[:9]), stop)
            assert (whole.token_ids, whole.text) == (found.ids, "".join(pieces))


@rest(SECONDS)
async def test_bad_words_are_in_no_output_whatever_the_way(expected: list[tuple[Asked, Plain]]) -> None:
    """Words of one token and of two, of which the first one is known before or after the second."""
    asked = []
    for algorithm in ALGORITHMS:
        for seed in range(3):
            prompt = [seed + 2] * (SIZE - seed)
            device = make_device(EngineConfig(page_size=SIZE))
            plain = params_of("neighbour", algorithm, ignore_eos=True)
            (found,) = decode(device, device.script, [(prompt, plain)], LONGEST)
            words = [tuple(found.ids[at : at + 2]) for at in (0, 6, 12)] + [tuple(found.ids[9:10])]
            asked.append((prompt, plain.changed(bad_words=tuple(words))))
    before: list[list[int]] = []
    for way in WAYS.values():
        async with make_engine(max_running_requests=16, **way) as engine:
            results = await answers(engine, asked)
        ids = [result.token_ids for result in results]
        for (_, params), tokens in zip(asked, ids, strict=True):
            for word in params.bad_words:
                places = range(len(tokens) - len(word) + 1)
                assert all(tuple(tokens[at : at + len(word)]) != word for at in places)
            assert len(tokens) == 21
        assert before in ([], ids)
        before = ids


async def test_filters_look_at_what_bad_words_leave() -> None:
    """Also where they would leave the bad word alone; logprobs are those of the model."""
    options = {"temperature": 1.0, "top_n_sigma": 0.01, "ignore_eos": True, "max_tokens": 2 * SIZE}
    params = params_of("neighbour", "factor", **options)
    device = make_device(EngineConfig(page_size=SIZE))
    (plain,) = decode(device, device.script, [([9] * SIZE, params)], LONGEST)
    async with make_engine() as engine:
        bad = params.changed(bad_words=((plain.ids[0],), tuple(plain.ids[3:5])))
        found = await engine.generate([9] * SIZE, bad)
        greedy = params.changed(top_n_sigma=0.0, temperature=0.0)
        free = await engine.generate([9] * SIZE, greedy)
        absent = next(token for token in range(VOCAB) if token not in (*free.token_ids, MASK))
        alone = await engine.generate([9] * SIZE, greedy.changed(bad_words=((absent, absent),)))
    assert len(found.token_ids) == 2 * SIZE
    assert plain.ids[0] not in found.token_ids
    # A word that is never proposed changes nothing.
    assert (alone.token_ids, alone.logprobs, alone.step_map) == (free.token_ids, free.logprobs, free.step_map)


async def test_a_fork_leaves_tokens_ahead_that_its_own_parameters_exclude() -> None:
    """Those of a block that is not done, which were written under the parameters of its parent."""
    prompt, parent = [9] * SIZE, params_of("logprobs", "static_steps", max_tokens=SIZE, ignore_eos=True)
    allowed = parent.changed(allowed_token_ids=tuple(range(20, 40)))
    found: list[Result] = []
    config = EngineConfig(model="scripted", page_size=SIZE, launch_mode="inline", overlap_steps=0)
    device = make_device(config)
    engine = Engine(
        config, launcher=lambda _: InlineLauncher(device), tokenizer=lambda _: ToyTokenizer(VOCAB)
    )
    async with engine:
        stream = engine.generate(prompt, parent)
        forks = []

        def fork(_: Any) -> None:
            if not stream.done and len(forks) < 2 * SIZE:
                kept = len(stream.checkpoint().token_ids)
                forks.append((kept, stream.fork(params=allowed)[0]))

        device.fault = fork
        await stream
        found = [await forked for _, forked in forks]
    assert any(kept for kept, _ in forks)
    for (kept, _), result in zip(forks, found, strict=True):
        assert all(20 <= token < 40 for token in result.token_ids[kept:])


async def test_where_nothing_is_allowed_the_constraints_are_named() -> None:
    device = make_device(EngineConfig(page_size=SIZE))
    engine = Engine(
        EngineConfig(model="scripted", page_size=SIZE),
        launcher=lambda _: ThreadLauncher(device),
        tokenizer=lambda _: ToyTokenizer(VOCAB),
    )
    async with engine:
        forward = device._lm.forward

        def without_9(*given: Any) -> Any:
            logits = forward(*given)
            logits[:, 9] = -float("inf")
            return logits

        device._lm.forward = without_9  # type: ignore[method-assign]
        with pytest.raises(ConstraintFailed, match="no token is allowed") as refused:
            await engine.generate([1, 2], params_of("neighbour", "factor", allowed_token_ids=[9]))
        assert refused.value.fields == ("allowed_token_ids",)
        assert (await engine.generate([1, 2], params_of("all", "factor"))).token_ids


@pytest.mark.parametrize(
    ("options", "field", "message"),
    [
        ({"thinking_budget": 3}, "thinking_budget", "a diffusion model writes blocks in any order"),
        ({"logits_processors": [lambda *_: None]}, "logits_processors", "a diffusion model writes blocks"),
        ({"prompt_logprobs": 0}, "prompt_logprobs", "a diffusion model predicts masked tokens"),
        ({"allowed_token_ids": [MASK]}, "allowed_token_ids", "allows the mask only"),
        ({"allowed_token_ids": [MASK, 0], "min_tokens": 1}, "allowed_token_ids", "min_tokens 1 excludes"),
    ],
)
async def test_what_no_block_can_obey_is_refused_by_name(
    options: dict[str, Any], field: str, message: str
) -> None:
    async with make_engine() as engine:
        with pytest.raises(InvalidRequest, match=message) as refused:
            await engine.generate([1, 2], SamplingParams(max_tokens=4, **options))
        assert refused.value.field == field
        assert engine.stats().admitted == 0
