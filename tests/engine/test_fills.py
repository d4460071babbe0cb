"""``fill``: templates of text on every model, of token ids on diffusion models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from aioinfer.client.filling import Filled
from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.errors import InvalidRequest
from aioinfer.execution.launcher import ThreadLauncher
from aioinfer.llm import LLM
from aioinfer.parallel import Dispatcher
from aioinfer.params import DiffusionParams, SamplingParams
from tests.toys import ToyDevice, ToyTokenizer
from tests.toys.blocks import ScriptedDevice

#: the toy's vocabulary has letters only
TEXT = "das{name}lebt{city}xyz"
IDS = [None, None, 20, 21, None, 22, None, None, None]
HOT = SamplingParams(temperature=1.0, seed=3)


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    ("no hole", {}, "template"),
    ("{} a", {}, "template"),
    ("{a} b {a}", {}, "template"),
    ("{a}{b}", {}, "template"),
    ("{a} }", {}, "template"),
    ("{a.b}", {}, "template"),
    ("{a}", {"holes": {"b": 3}}, "holes"),
    ("{a}", {"holes": {"a": 0}}, "holes.a"),
    ("{a}", {"holes": {"a": []}}, "holes.a"),
    ("{a}", {"holes": {"a": "(("}}, "template"),
    ("x" * 2050 + "{a}", {}, "template"),
    ("abcdefg{a}", {"params": SamplingParams(max_tokens=4)}, "template"),
    ("{a}", {"params": SamplingParams(stop="x")}, "stop"),
    ("{a}", {"params": SamplingParams(grammar={"type": "object"})}, "grammar"),
    ("\ud800{a}", {}, "template"),
    ("{a}", {"holes": {"a": ["b", "\ud800"]}}, "holes.a"),
    ("{a}", {"holes": {"a": "[^\udc00]"}}, "holes.a"),
    (None, {}, "template"),
    ([1, 2], {}, "template"),
    ([], {}, "template"),
    ([None, "a"], {}, "template"),
    ([None, True], {}, "template"),
    ([None, 64], {}, "template"),
    ([None, 63], {}, "template"),  # the mask
    ([None, 0], {}, "template"),  # the end
    ([None] * 2041, {}, "template"),
    ([None, 1], {"holes": {}}, "holes"),
    ([None, 1], {"params": SamplingParams(max_tokens=3)}, "max_tokens"),
    ([None, 1], {"params": SamplingParams(min_tokens=1)}, "min_tokens"),
    ([None, 1], {"params": SamplingParams(bad_words=["a"])}, "bad_words"),
]


def make(kind: str, **settings: Any) -> Engine:
    config = EngineConfig(model="toy", page_size=8, num_pages=256, **settings)
    devices: dict[str, Callable[[], Any]] = {
        "tokens": lambda: ToyDevice(num_pages=256, page_size=8, num_slots=config.num_slots),
        "blocks": lambda: ScriptedDevice(num_pages=256, page_size=8, num_slots=config.num_slots),
    }
    return Engine(
        config, launcher=lambda _: ThreadLauncher(devices[kind]()), tokenizer=lambda _: ToyTokenizer()
    )


def check_text(found: Filled, **most: int) -> None:
    assert isinstance(found.holes, dict)
    assert found.text == TEXT.format(**found.holes)
    assert found.finish_reason == "stop"
    for name, hole in found.holes.items():
        assert 1 <= len(hole) <= most.get(name, 80)


@pytest.mark.parametrize("kind", ["tokens", "blocks"])
async def test_a_text_is_filled_in_by_every_model(kind: str) -> None:
    async with make(kind) as engine:
        for params in (SamplingParams(temperature=0), HOT):
            check_text(await engine.fill("hallo", TEXT, params, holes={"name": 7, "city": 3}), name=7, city=3)
        chosen = await engine.fill(
            "hallo", TEXT, HOT, holes={"name": "[abc]{2,9}", "city": ["rom", "oslo", "bern"]}
        )
        assert set(chosen.holes["name"]) <= set("abc")  # type: ignore[call-overload]
        assert chosen.holes["city"] in ("rom", "oslo", "bern")  # type: ignore[call-overload]
        check_text(chosen)


@pytest.mark.parametrize("kind", ["tokens", "blocks"])
async def test_a_filled_text_is_streamed(kind: str) -> None:
    async with make(kind) as engine, engine.fill("hallo", TEXT, HOT, holes={"name": 9, "city": 9}) as stream:
        text = "".join([chunk.text async for chunk in stream])
        found = await stream
    assert found.text == text
    check_text(found, name=9, city=9)


async def test_token_ids_are_filled_in_and_holes_have_no_end() -> None:
    async with make("blocks") as engine:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(engine.fill([7] * length, IDS, SamplingParams(temperature=1.5, seed=seed)))
                for length in (1, 7, 8, 12)
                for seed in range(8)
            ]
        for task in tasks:
            found = task.result()
            assert found.finish_reason == "stop"
            assert 0 not in found.token_ids
            first, second, third = found.holes
            assert found.token_ids == [*first, 20, 21, *second, 22, *third]
            assert found.usage.completion_tokens == len(IDS)


async def test_what_is_wholly_pinned_is_prefilled_and_nothing_is_computed_twice() -> None:
    """Blocks of 8: the prompt's, three of pins, and one with a hole of two, whose last round is its end."""
    params = SamplingParams(temperature=0, diffusion=DiffusionParams(threshold=1.0))
    async with make("blocks", overlap_steps=0, prefix_cache=False) as engine:
        found = await engine.fill([7] * 8, [*[20] * 24, *[None] * 2, *[21] * 6], params)
        stats = engine.stats()
    assert found.token_ids[:24] == [20] * 24
    assert found.token_ids[26:] == [21] * 6
    # The first block is known, but the device finds that out: one row. The second row has the others.
    assert (stats.forwards, stats.rounds) == (3, 3)
    assert stats.prefill_tokens + stats.decode_tokens == 8 + 8 + (16 + 8) + 8


async def test_a_row_in_flight_is_the_commit_of_the_block_before_pins() -> None:
    """Blocks of 8, each written in one round. Another row is behind the first: it is not in vain."""
    params = SamplingParams(temperature=0, diffusion=DiffusionParams(threshold=0.0))
    async with make("blocks", overlap_steps=1, prefix_cache=False) as engine:
        await engine.fill([7] * 8, [*[None] * 8, 20, *[None] * 7], params)
        stats = engine.stats()
    assert stats.prefill_tokens + stats.decode_tokens == (8 + 8) + 8 + 8


async def test_it_takes_fewer_forwards_than_writing_all() -> None:
    params = SamplingParams(temperature=0, diffusion=DiffusionParams(threshold=1.0))
    template = [20, 21, None, 22, 23, 24, None, 25] * 3
    async with make("blocks", overlap_steps=0) as engine:
        await engine.fill([7] * 8, template, params)
        filled = engine.stats().forwards
        await engine.generate(
            [9] * 8, SamplingParams(max_tokens=24, ignore_eos=True, diffusion=params.diffusion)
        )
        assert filled < (engine.stats().forwards - filled) / 3


async def test_a_template_that_cannot_be_filled_is_refused_by_name() -> None:
    async with make("blocks") as engine:
        for template, options, field in REFUSED:
            with pytest.raises(InvalidRequest) as caught:
                await engine.fill([1] * 8, template, **options)
            assert caught.value.field == field, template
            assert (caught.value.code == "context_length_exceeded") == (len(template or "") > 2000), template
        assert engine.stats().admitted == 0


async def test_an_autoregressive_model_refuses_token_ids() -> None:
    async with make("tokens") as engine:
        with pytest.raises(InvalidRequest, match="autoregressive"):
            await engine.fill([1], [None, 1])


async def test_a_template_stays_where_an_output_is_cut() -> None:
    params = SamplingParams(temperature=0, template=IDS, max_tokens=len(IDS), ignore_eos=True)
    async with make("blocks") as engine:
        stream = engine.generate([7] * 5, params)
        whole = await stream
        (fork,) = stream.fork(at=3)
        assert (await fork).token_ids[2:6:3] == [20, 22]
        assert (await fork).token_ids[:3] == whole.token_ids[:3]
        with pytest.raises(InvalidRequest) as caught:
            stream.fork(at=2, then=[21])
        assert caught.value.field == "then"


async def test_a_dispatcher_fills() -> None:
    async with make("blocks") as engine:
        wanted = await engine.fill([7] * 5, IDS, HOT)
    async with Dispatcher([make("blocks"), make("blocks")]) as dispatcher:
        found = await dispatcher.fill([7] * 5, IDS, HOT)
        assert found.holes == wanted.holes
        check_text(await dispatcher.fill("hallo", TEXT, HOT))


def call_llm() -> Filled:
    def device(config: EngineConfig) -> Any:
        return ScriptedDevice(num_pages=64, page_size=8, num_slots=config.num_slots)

    config = EngineConfig(model="toy", page_size=8)
    with LLM(config, device=device, tokenizer=lambda _: ToyTokenizer()) as llm:
        return llm.fill([7] * 5, IDS)


def test_an_llm_fills() -> None:
    assert [len(hole) for hole in call_llm().holes] == [2, 1, 3]


async def test_other_threads_fill() -> None:
    async with make("blocks") as engine:
        remote = engine.threadsafe()
        found = await asyncio.to_thread(lambda: remote.fill([7] * 5, IDS).result())
        assert [len(hole) for hole in found.holes] == [2, 1, 3]
        check_text(await remote.fill("hallo", TEXT, HOT))
