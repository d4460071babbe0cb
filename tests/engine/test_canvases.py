"""DiffusionGemma: a small random model gives what transformers' modules and a plain float64 sampler do, in
every way to compute; and what transformers' own generation does, given the same noise."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSamplerConfig

from aioinfer import Engine, EngineConfig, InvalidRequest
from aioinfer.errors import ConfigError
from aioinfer.outputs import Result
from aioinfer.parallel import Dispatcher
from aioinfer.params import DiffusionParams, SamplingParams
from aioinfer.scheduling.audit import audit, check_idle
from tests.diffusion.renoise_reference import CanvasRow
from tests.engine.block_parity import WAYS, Asked, answers, logprobs
from tests.engine.simulation import settle
from tests.model.canvas_models import CANVAS, VOCAB, PlainCanvas, make_canvas_model
from tests.tiers import SECONDS, grid, rest

#: ids, steps, logprobs, and rounds by canvas
Described = tuple[list[int], list[int], list[float], list[int]]
#: with which canvases of random models, which are sure of nothing, take some rounds and not always as many
SAMPLER: dict[str, Any] = {"entropy_bound": 0.5, "steps": 12, "confidence_threshold": 0.3}
LENGTHS = (1, 3, CANVAS - 1, CANVAS, CANVAS + 1, 2 * CANVAS + 5, 3 * CANVAS)


def ask(length: int, max_tokens: int, seed: int, temperature: float = 1.0, **diffusion: Any) -> Asked:
    prompt = random.Random(seed).choices(range(VOCAB), k=length)
    params = SamplingParams(
        temperature=temperature,
        seed=seed,
        max_tokens=max_tokens,
        ignore_eos=True,
        logprobs=0,
        diffusion=DiffusionParams(algorithm="renoise", **{**SAMPLER, **diffusion}),
    )
    return prompt, params


def requests() -> list[Asked]:
    asked = [
        ask(length, (1, CANVAS, 2 * CANVAS + 3)[at % 3], seed=at) for at, length in enumerate(LENGTHS * 2)
    ]
    others: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.6},
        {"stability_threshold": 0},
        {"stability_threshold": 3},
        {"steps": 1},
        {"steps": 3, "t_min": 0.9, "t_max": 1.5},
        {"entropy_bound": 0.0},
        {"entropy_bound": 100.0, "confidence_threshold": 5.0},
    ]
    return asked + [ask(5 + at, CANVAS + 2, seed=100 + at, **other) for at, other in enumerate(others)]


def describe(plain: PlainCanvas, asked: Asked) -> Described:
    """Canvas after canvas, over a forward of everything each time."""
    prompt, params = asked
    assert params.diffusion is not None
    assert params.max_tokens is not None
    given = {name: getattr(params.diffusion, name) for name in params.diffusion.given()}
    ids, steps, found, rounds = list(prompt), [], [], []
    while len(steps) < params.max_tokens:
        row = CanvasRow(CANVAS, VOCAB, len(ids), params.seed or 0, given, params.temperature)
        context = list(ids)
        row.run(lambda canvas, last, context=context: plain.logits(context, canvas, last))
        ids += row.ids
        steps += row.written_in
        found += row.logprobs
        rounds.append(row.rounds)
    stop = params.max_tokens
    return ids[len(prompt) :][:stop], steps[:stop], found[:stop], rounds


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("canvas")
    return path, make_canvas_model(path)


@pytest.fixture(scope="module")
def described(made: tuple[Path, Any]) -> list[tuple[Asked, Described]]:
    # Canvases read their own last distribution: of some, roundings decide, also those of transformers.
    rounded = [describe(PlainCanvas(made[1]), asked) for asked in requests()]
    exact = [describe(PlainCanvas(made[1], torch.float64), asked) for asked in requests()]
    found = []
    for asked, other, each in zip(requests(), rounded, exact, strict=True):
        if other[:2] == each[:2] and other[2] == pytest.approx(each[2], abs=1e-4):
            found.append((asked, each))
    assert len(found) > 0.8 * len(exact)
    rounds = {count for _, (_, _, _, each) in found for count in each}
    assert len(rounds) > 6, "canvases differ in how long they take"
    return found


def make_engine(path: Path, **settings: Any) -> Engine:
    base: dict[str, Any] = {
        "model": str(path), "dtype": "float32", "device": "cpu", "threads": 1, "num_pages": 800,
        "page_size": 4, "max_model_len": 8 * CANVAS,
    }  # fmt: skip
    return Engine(EngineConfig(**{**base, **settings}))


def check(path: Path, described: list[tuple[Asked, Described]], **settings: Any) -> Any:
    """Answers are as described; returns the engine's counters."""

    async def run() -> tuple[list[Result], Any]:
        async with make_engine(path, **settings) as engine:
            results = await answers(engine, [asked for asked, _ in described])
            assert engine._core is not None
            audit(engine._core.scheduler)
            return results, engine._core.scheduler.queues.counters

    results, counters = asyncio.run(run())
    for result, (asked, (ids, steps, found, _)) in zip(results, described, strict=True):
        assert (result.token_ids, result.step_map, result.finish_reason) == (ids, steps, "length"), asked
        assert logprobs(result) == pytest.approx(found, abs=1e-3, rel=1e-3), asked
    return counters


@rest(SECONDS)
@pytest.mark.parametrize("way", grid(["everything"], [way for way in WAYS if way != "everything"]))
def test_canvases_are_those_of_a_plain_sampler_in_every_way(
    way: str, made: tuple[Path, Any], described: list[tuple[Asked, Described]]
) -> None:
    check(made[0], 2 * described, max_running_requests=32, **WAYS[way])


@rest(SECONDS)
@pytest.mark.parametrize(
    "settings",
    grid(
        [{"max_running_requests": 3, "chunk_size": 5}],
        [
            {"max_running_requests": 1},
            {"prefix_cache": False, "page_size": 16, "overlap_steps": 2},
            {"max_step_tokens": 2 * CANVAS, "max_running_requests": 8, "overlap_steps": 1},
            {"page_size": 3, "mixed": False, "overlap_steps": 0},
        ],
    ),
    ids=str,
)
def test_so_they_are_in_chunks_and_on_pages_of_any_size(
    settings: dict[str, Any], made: tuple[Path, Any], described: list[tuple[Asked, Described]]
) -> None:
    check(made[0], described, **settings)


@rest(SECONDS)
@pytest.mark.parametrize("overlap", grid([1], [0, 2]))
def test_a_request_that_is_retracted_begins_its_canvas_again(
    overlap: int, made: tuple[Path, Any], described: list[tuple[Asked, Described]]
) -> None:
    long = [each for each in described if len(each[1][0]) > 2 * CANVAS]
    counters = check(
        made[0], 3 * long, num_pages=16, prefix_cache=False, overlap_steps=overlap, max_running_requests=8
    )
    assert counters.retractions


@rest(SECONDS)
def test_requests_that_leave_take_nothing_with_them(
    made: tuple[Path, Any], described: list[tuple[Asked, Described]]
) -> None:
    """Those beside them get theirs, and pages and slots come back."""
    rng = random.Random(4)

    async def leave(engine: Engine, asked: Asked, chunks: int) -> None:
        stream = engine.generate(*asked)
        async with stream:
            for _ in range(chunks):
                await anext(stream, None)

    async def run() -> list[Result]:
        settings = {"num_pages": 40, "max_running_requests": 6, "overlap_steps": 2}
        async with make_engine(made[0], **settings) as engine:
            leaving = [
                asyncio.ensure_future(leave(engine, asked, rng.randrange(3))) for asked, _ in 2 * described
            ]
            found = await answers(engine, [asked for asked, _ in described])
            await asyncio.gather(*leaving)
            await settle(engine)
            assert engine._core is not None
            check_idle(engine._core.scheduler)
            return found

    for result, (asked, (ids, steps, _, _)) in zip(asyncio.run(run()), described, strict=True):
        assert (result.token_ids, result.step_map) == (ids, steps), asked


@rest(SECONDS)
def test_prompts_and_finished_canvases_are_found_in_the_prefix_cache(
    made: tuple[Path, Any], described: list[tuple[Asked, Described]]
) -> None:
    (prompt, params), (ids, steps, _, _) = max(described, key=lambda each: len(each[1][0]) + len(each[0][0]))

    async def run() -> None:
        async with make_engine(made[0]) as engine:
            first, again = await engine.generate(prompt, params), await engine.generate(prompt, params)
            longer = await engine.generate(prompt + ids[:CANVAS], params)
            assert first.token_ids == again.token_ids == ids
            assert again.usage.cached_tokens == len(prompt) // 4 * 4
            assert longer.usage.cached_tokens == (len(prompt) + CANVAS) // 4 * 4
            # The same noise, at the same positions behind the same tokens.
            assert longer.token_ids[: len(ids) - CANVAS] == ids[CANVAS:]
            assert longer.step_map is not None
            assert longer.step_map[: len(ids) - CANVAS] == steps[CANVAS:]

    asyncio.run(run())


# -- transformers' own generation ------------------------------------------------------------------


class Noise:
    """What torch draws in transformers' generation, from the noise that the engine has, for one sequence."""

    def __init__(self, start: int, seed: int) -> None:
        self.row = CanvasRow(CANVAS, VOCAB, start, seed, {})
        self.drawn = 0

    def multinomial(self, probs: torch.Tensor, num_samples: int) -> torch.Tensor:
        # Before what this round is renewed with.
        assert num_samples == 1
        lines = probs.double().log()
        self.drawn += 1
        return torch.tensor([[self.row.draw(at, lines[at])] for at in range(CANVAS)])

    def randint(self, low: int, high: int, size: tuple[int, int], device: Any) -> torch.Tensor:
        assert (low, high, tuple(size)) == (0, VOCAB, (1, CANVAS))
        if not self.drawn:
            return torch.tensor([[self.row.noise(at, 2**31 - 2) for at in range(CANVAS)]])
        found = torch.tensor([[self.row.noise(at, 2**31 - 1) for at in range(CANVAS)]])
        self.row.rounds += 1
        return found


@pytest.fixture
def noise(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Noise]]:
    current: list[Noise] = []
    monkeypatch.setattr(
        torch, "multinomial", lambda *given, **named: current[-1].multinomial(*given, **named)
    )
    monkeypatch.setattr(torch, "randint", lambda *given, **named: current[-1].randint(*given, **named))
    yield current
    monkeypatch.undo()


def generated(
    model: Any, prompt: list[int], seed: int, noise: list[Noise], **given: Any
) -> tuple[list[int], int]:
    """Three canvases by transformers' own generation, and its decoder's forwards."""
    context, forwards = list(prompt), 0
    for _ in range(3):
        noise.append(Noise(len(context), seed))
        ids = torch.tensor([context])
        out = model.generate(ids, max_new_tokens=CANVAS, pad_token_id=None, eos_token_id=None, **given)
        context = out.sequences[0].tolist()
        forwards += noise[-1].drawn
    return context[len(prompt) :], forwards


@rest(SECONDS)
def test_ids_and_rounds_are_those_of_transformers_generate(tmp_path: Path, noise: list[Noise]) -> None:
    given = {"max_denoising_steps": 12, "confidence_threshold": 0.3, "t_min": 0.4, "t_max": 0.8}
    asked = [ask(5 + 4 * seed, 3 * CANVAS, seed) for seed in range(6)]
    model = make_canvas_model(tmp_path)
    model.set_experts_implementation("eager")
    # The engine takes its defaults from here.
    sampler = {"sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.5}}
    (tmp_path / "generation_config.json").write_text(json.dumps(given | sampler))
    by_type = []
    for dtype in (torch.float32, torch.float64):
        model.to(dtype)
        sampling = {**given, "sampler_config": EntropyBoundSamplerConfig(0.5)}
        by_type.append(
            [generated(model, prompt, seed, noise, **sampling) for seed, (prompt, _) in enumerate(asked)]
        )
    # Roundings decide some of them.
    same = [seed for seed in range(6) if by_type[0][seed] == by_type[1][seed]]
    assert len(same) >= 3

    async def run() -> tuple[list[Result], int]:
        settings: dict[str, Any] = {"overlap_steps": 0, "max_rounds": 1, "launch_mode": "inline"}
        async with make_engine(tmp_path, **settings) as engine:
            streams = [
                engine.generate(
                    asked[seed][0], SamplingParams(seed=seed, max_tokens=3 * CANVAS, ignore_eos=True)
                )
                for seed in same
            ]
            assert engine._core is not None
            return await asyncio.gather(*streams), engine._core.scheduler.queues.counters.rounds

    results, rounds = asyncio.run(run())
    assert [result.token_ids for result in results] == [by_type[0][seed][0] for seed in same]
    # Two canvases of three are read by the encoder, in rows of their own.
    assert rounds == sum(by_type[0][seed][1] + 2 for seed in same)


# -- what callers see ------------------------------------------------------------------------------


@rest(SECONDS)
def test_a_canvas_streams_as_a_whole_and_its_drafts_are_the_likeliest_tokens(
    made: tuple[Path, Any], described: list[tuple[Asked, Described]]
) -> None:
    (prompt, params), (ids, _, _, _) = next(each for each in described if max(each[1][3]) > 3)
    assert params.diffusion is not None

    async def run() -> None:
        diffusion = DiffusionParams(
            algorithm="renoise", draft=True, **{name: getattr(params.diffusion, name) for name in SAMPLER}
        )
        asked = SamplingParams(
            seed=params.seed, max_tokens=params.max_tokens, ignore_eos=True, diffusion=diffusion
        )
        drafts, pieces = 0, []
        async with make_engine(made[0], max_rounds=1, overlap_steps=0) as engine:
            async for chunk in engine.generate(prompt, asked):
                if chunk.token_ids:
                    pieces.append(chunk.token_ids)
                if chunk.draft is not None:
                    drafts += 1
                    assert None not in chunk.draft.token_ids
        assert [token for piece in pieces for token in piece] == ids
        assert all(len(piece) % CANVAS == 0 for piece in pieces[:-1])
        assert drafts >= 1

    asyncio.run(run())


async def test_a_checkpoint_between_canvases_goes_on_in_another_engine(made: tuple[Path, Any]) -> None:
    prompt, params = ask(6, 3 * CANVAS, seed=3)
    async with make_engine(made[0], max_rounds=1) as engine, make_engine(made[0]) as other:
        whole = await engine.generate(prompt, params)
        stream = engine.generate(prompt, params)
        async for chunk in stream:
            assert len(chunk.token_ids) % CANVAS == 0
            break
        checkpoint = stream.checkpoint()
        await stream.aclose()
        assert 0 < len(checkpoint.token_ids) < 3 * CANVAS
        assert checkpoint.block is None
        restored = await other.restore(checkpoint)
    assert (restored.token_ids, restored.step_map) == (whole.token_ids, whole.step_map)


async def test_without_a_seed_and_a_temperature_replicas_give_what_an_engine_gives(
    made: tuple[Path, Any],
) -> None:
    params = SamplingParams(max_tokens=2 * CANVAS, temperature=0, ignore_eos=True)
    async with make_engine(made[0]) as engine:
        alone = await engine.generate([1, 2, 3], params)
    async with Dispatcher([make_engine(made[0]), make_engine(made[0])]) as dispatcher:
        found = await dispatcher.generate([1, 2, 3], params)
    assert (found.token_ids, found.step_map) == (alone.token_ids, alone.step_map)


def test_an_output_that_goes_on_keeps_the_tokens_that_it_has(made: tuple[Path, Any]) -> None:
    prompt, params = ask(6, 2 * CANVAS, seed=3)
    plain = PlainCanvas(made[1], torch.float64)

    async def run() -> tuple[list[int], list[int], list[int]]:
        async with make_engine(made[0]) as engine:
            stream = engine.generate(prompt, params)
            whole = await stream
            (at_end,), (within,) = (stream.fork(1, at=at, params=params) for at in (CANVAS, CANVAS + 3))
            return whole.token_ids, (await at_end).token_ids, (await within).token_ids

    whole, at_end, within = asyncio.run(run())
    assert at_end == whole
    given = whole[CANVAS : CANVAS + 3]
    context = prompt + whole[:CANVAS]
    row = CanvasRow(CANVAS, VOCAB, len(context), 3, SAMPLER, given=given)
    row.run(lambda canvas, last: plain.logits(context, canvas, last))
    assert within == whole[: CANVAS + 3] + row.ids[3:]


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("algorithm", {"diffusion": DiffusionParams(algorithm="low_confidence")}),
        ("threshold", {"diffusion": DiffusionParams(threshold=0.5)}),
        ("top_k", {"top_k": 5}),
        ("top_p", {"top_p": 0.5}),
        ("presence_penalty", {"presence_penalty": 1.0}),
        ("logit_bias", {"logit_bias": {3: 1.0}}),
        ("bad_words", {"bad_words": [[5]]}),
        ("min_tokens", {"min_tokens": 2}),
        ("logprobs", {"logprobs": 2}),
    ],
)
def test_parameters_that_a_canvas_has_not_are_refused(
    field: str, given: dict[str, Any], made: tuple[Path, Any]
) -> None:
    async def run() -> None:
        async with make_engine(made[0]) as engine:
            with pytest.raises(InvalidRequest) as caught:
                await engine.generate([1, 2], SamplingParams(max_tokens=4, **given))
            assert caught.value.field == field

    asyncio.run(run())


async def test_templates_are_refused_by_their_name(made: tuple[Path, Any]) -> None:
    async with make_engine(made[0]) as engine:
        with pytest.raises(InvalidRequest) as caught:
            await engine.fill([1, 2], [None, 5, None])
    assert caught.value.field == "template"


def test_there_is_room_for_whole_canvases_only(made: tuple[Path, Any]) -> None:
    async def run() -> None:
        params = SamplingParams(ignore_eos=True, seed=1)
        async with make_engine(made[0], max_model_len=3 * CANVAS + 3) as engine:
            for length, canvases in ((3, 3), (4, 2), (2 * CANVAS + 3, 1)):
                result = await engine.generate([1] * length, params)
                assert (len(result.token_ids), result.finish_reason) == (canvases * CANVAS, "length")
            with pytest.raises(InvalidRequest, match="context length"):
                await engine.generate([1] * (2 * CANVAS + 4), SamplingParams(max_tokens=1))

    asyncio.run(run())


def test_an_output_goes_on_only_where_a_canvas_has_room(made: tuple[Path, Any]) -> None:
    async def run() -> None:
        params = SamplingParams(ignore_eos=True, seed=1)
        async with make_engine(made[0], max_model_len=3 * CANVAS) as engine:
            stream = engine.generate([1] * 5, params)
            whole = (await stream).token_ids
            assert len(whole) == 2 * CANVAS
            (fork,) = stream.fork(at=2 * CANVAS - 2, then=[7])
            assert len((await fork).token_ids) == 2 * CANVAS
            for at, then, field in ((2 * CANVAS, [], "at"), (2 * CANVAS - 1, [7], "then")):
                with pytest.raises(InvalidRequest, match="no room") as caught:
                    stream.fork(at=at, then=then)
                assert caught.value.field == field
            begun = engine.generate([1] * 5, params)
            await begun.accepted()
            kept = dataclasses.replace(begun.checkpoint(), token_ids=tuple(whole), step_map=(0,) * len(whole))
            await begun.aclose()
            with pytest.raises(InvalidRequest, match="no room"):
                await engine.restore(kept)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention_backend": "native"}, "canvases are computed by torch"),
        ({"quantization": "int8"}, "quantization"),
        ({"diffusion_algorithm": "low_confidence"}, "not for this model"),
        ({"diffusion_threshold": 0.5}, "threshold"),
        ({"deterministic": True}, "deterministic"),
        ({"max_model_len": CANVAS}, "a prompt and a canvas of 8"),
    ],
)
def test_settings_that_canvases_have_not_are_refused(
    settings: dict[str, Any], message: str, made: tuple[Path, Any]
) -> None:
    async def run() -> None:
        async with make_engine(made[0], **settings):
            pass

    with pytest.raises(ConfigError, match=message):
        asyncio.run(run())


async def test_renoise_is_refused_by_models_of_masks() -> None:
    async with Engine(EngineConfig(model="tiny-diffusion", max_model_len=64)) as engine:
        params = SamplingParams(max_tokens=4, diffusion=DiffusionParams(algorithm="renoise"))
        with pytest.raises(InvalidRequest, match="renoise is not for this model"):
            await engine.generate([1, 2], params)
