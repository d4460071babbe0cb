"""Adapters of a running engine: which one a request has, and when slots come back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aioinfer import EngineConfig, StreamCheckpoint, errors
from aioinfer.engine import Engine
from aioinfer.params import SamplingParams
from aioinfer.testing import FakeEngine
from tests.engine.conftest import MakeEngine
from tests.engine.making import make_llm
from tests.parallel.toys import STEP, Toy, virtual
from tests.toys import ToyDevice, toy_generate
from tests.toys.adapters import ToyAdapter, write_toy_adapter

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0)
PROMPT = list(range(1, 30))


@pytest.fixture
def make(tmp_path: Path) -> Callable[[str], Path]:
    """A directory with an adapter of this content."""
    return lambda content: write_toy_adapter(tmp_path / f"of-{content}", content)


Make = Callable[[str], Path]


def wanted(path: Path | None, params: SamplingParams = PARAMS, prompt: list[int] = PROMPT) -> list[int]:
    return toy_generate(prompt, params, adapter=0 if path is None else ToyAdapter.read(path).key)


def registry(engine: Engine) -> Any:
    return engine._core.adapters


async def settled(engine: Toy) -> None:
    """Nothing is in flight, and every slot but those of loaded adapters is empty."""
    await asyncio.sleep(3 * STEP)
    found = registry(engine)
    found.audit()
    assert found.free == found.slots - len(engine.adapters())
    assert len(engine.device.adapters.installed) == len(engine.adapters())


# -- which one a request has ---------------------------------------------------------------------------


@virtual
async def test_one_batch_has_several_adapters_and_none(tmp_path: Path) -> None:
    paths = {name: write_toy_adapter(tmp_path / name, name) for name in ("a", "b", "c")}
    async with Toy() as engine:
        for name, path in paths.items():
            await engine.load_adapter(name, path)
        names = [None, "a", "b", "c", "a", None]
        results = await asyncio.gather(*(engine.generate(PROMPT, PARAMS, adapter=name) for name in names))
        for name, result in zip(names, results, strict=True):
            assert result.token_ids == wanted(None if name is None else paths[name])
        assert [info.name for info in engine.adapters()] == ["a", "b", "c"]
        assert [info.uid for info in engine.adapters()] == [1, 2, 3]
        assert engine.stats().adapters_loaded == 3


@virtual
async def test_a_reloaded_name_never_hits_old_pages(tmp_path: Path) -> None:
    """The same prompt, before and behind a reload of the name, and with the first files again."""
    one, other = (write_toy_adapter(tmp_path / name, name) for name in ("one", "other"))
    async with Toy() as engine:
        for path in (one, other, one):
            await engine.load_adapter("a", path)
            first = await engine.generate(PROMPT, PARAMS, adapter="a")
            again = await engine.generate(PROMPT, PARAMS, adapter="a")
            assert first.token_ids == again.token_ids == wanted(path)
            assert (first.usage.cached_tokens, again.usage.cached_tokens) == (0, 28)
        assert engine.cached_tokens(PROMPT, adapter="a") == 28
        assert engine.cached_tokens(PROMPT) == 0


@virtual
async def test_requests_keep_what_the_name_stood_for_when_they_were_accepted(make: Make) -> None:
    async with Toy(max_running_requests=2, max_step_tokens=64) as engine:
        await engine.load_adapter("a", make("1"))
        before = [engine.generate(PROMPT, PARAMS, adapter="a") for _ in range(5)]  # some run, some wait
        before.append(engine.generate("text, which is tokenized first", PARAMS, adapter="a"))
        await asyncio.sleep(2 * STEP)
        info = await engine.load_adapter("a", make("2"))
        assert (info.uid, info.requests) == (2, 0)
        assert engine.stats().adapters_draining == 1
        behind = engine.generate(PROMPT, PARAMS, adapter="a")
        await engine.unload_adapter("a")
        with pytest.raises(errors.InvalidRequest, match="'a' is not loaded; there are: none"):
            engine.generate(PROMPT, PARAMS, adapter="a")
        for stream in before[:5]:
            assert (await stream).token_ids == wanted(make("1"))
        assert len((await before[5]).token_ids) == 12
        assert (await behind).token_ids == wanted(make("2"))
        await settled(engine)
        assert engine.adapters() == []


@virtual
async def test_a_slot_comes_back_behind_the_last_step_that_could_read_it(make: Make) -> None:
    """A request is ended while steps with its rows are in flight, and its adapter unloaded."""
    async with Toy(overlap_steps=2, plan_late=False) as engine:
        await engine.load_adapter("a", make("1"))
        stream = engine.generate(PROMPT, PARAMS, adapter="a")
        await asyncio.sleep(2.5 * STEP)
        left: list[int] = []
        leaving = registry(engine).when_leaving

        def watched(version: Any) -> None:
            left.append(engine._core.scheduler.memory.pages.last_resolved)
            leaving(version)

        registry(engine).when_leaving = watched
        launched = engine._core.scheduler.queues.last_step
        assert engine.stats().steps_in_flight == 3
        stream.close()
        await engine.unload_adapter("a")
        await settled(engine)
        assert left == [launched], "not at once, and not later than need be"


@virtual
async def test_other_calls_take_an_adapter_too(make: Make) -> None:
    async with Toy() as engine:
        await engine.load_adapter("a", make("1"))
        async with engine.map([PROMPT] * 3, PARAMS, adapter="a") as results:
            assert [each.token_ids async for each in results] == [wanted(make("1"))] * 3
        for stream in engine.choices(PROMPT, PARAMS, n=2, adapter="a"):
            assert (await stream).token_ids == wanted(make("1"))
        message = [{"role": "user", "content": "hello"}]
        with_adapter = await engine.chat(message, PARAMS, adapter="a")
        alone = await engine.chat(message, PARAMS)
        assert with_adapter.result.token_ids != alone.result.token_ids


async def test_an_engine_on_threads_loads_while_it_streams(make_engine: MakeEngine, make: Make) -> None:
    device = ToyDevice(num_pages=512, max_adapters=3)
    async with make_engine(device=device, max_adapters=2) as engine:
        alone = engine.generate(PROMPT, SamplingParams(max_tokens=400, ignore_eos=True, temperature=0))
        for number in range(6):
            await engine.load_adapter("a", make(str(number)))
            found = await engine.generate(PROMPT, PARAMS, adapter="a")
            assert found.token_ids == wanted(make(str(number)))
        threadsafe = engine.threadsafe()
        await asyncio.wrap_future(threadsafe.load_adapter("b", make("b")))
        infos = await asyncio.wrap_future(threadsafe.adapters())
        assert [info.name for info in infos] == ["a", "b"]
        assert (await threadsafe.generate(PROMPT, PARAMS, adapter="b")).token_ids == wanted(make("b"))
        await asyncio.wrap_future(threadsafe.unload_adapter("b"))
        await alone
        assert [info.name for info in engine.adapters()] == ["a"]
        registry(engine).audit()


# -- what is refused -----------------------------------------------------------------------------------


@virtual
async def test_names_and_paths_that_are_none_are_refused(make: Make) -> None:
    names: list[Any] = ["", "  ", "toy", "x" * 257, "a\nb", "a\0", 5, None]
    paths: list[Any] = ["", " ", "a\0b", "x" * 5000, 7, None, b"/tmp"]
    async with Toy() as engine:
        wrong = [("name", name, make("1")) for name in names] + [("path", "a", path) for path in paths]
        for field, name, path in wrong:
            with pytest.raises(errors.InvalidRequest) as refused:
                await engine.load_adapter(name, path)
            assert refused.value.field == field
        with pytest.raises(errors.InvalidRequest, match="'a' is not loaded; there are: none") as unloaded:
            await engine.unload_adapter("a")
        assert (unloaded.value.field, unloaded.value.code) == ("name", "adapter_not_found")
        assert engine.adapters() == []


@virtual
async def test_a_load_that_fails_disturbs_nothing(make: Make, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "adapter_config.json").write_text('{"r": 0}')
    async with Toy() as engine:
        await engine.load_adapter("a", make("1"))
        stream = engine.generate(PROMPT, PARAMS, adapter="a")
        before = engine.adapters()
        for path in (broken, tmp_path / "nothing", make("1") / "adapter_config.json"):
            with pytest.raises(errors.ConfigError):
                await engine.load_adapter("a", path)
        assert engine.adapters()[0].uid == before[0].uid == 1
        assert (await stream).token_ids == wanted(make("1"))
        await settled(engine)


@virtual
async def test_a_device_that_cannot_install_changes_nothing(make: Make) -> None:
    async with Toy() as engine:

        def install(slot: int, adapter: Any) -> None:
            raise RuntimeError("no")

        engine.device.install_adapter = install  # type: ignore[method-assign]
        with pytest.raises(errors.EngineError, match="could not be installed"):
            await engine.load_adapter("a", make("1"))
        await settled(engine)


@virtual
async def test_engines_without_adapters_say_why(make: Make) -> None:
    async with Toy(max_adapters=0) as engine:
        with pytest.raises(errors.ConfigError, match="this toy has none"):
            await engine.load_adapter("a", make("1"))
        with pytest.raises(errors.InvalidRequest, match="adapter: there are none here: this toy has none"):
            engine.generate(PROMPT, adapter="a")


# -- slots ---------------------------------------------------------------------------------------------


@virtual
async def test_no_more_names_than_max_adapters(make: Make) -> None:
    async with Toy(max_adapters=2) as engine:
        await engine.load_adapter("a", make("1"))
        await engine.load_adapter("b", make("2"))
        with pytest.raises(errors.ConfigError, match=r"max_adapters \(2\) adapters are loaded"):
            await engine.load_adapter("c", make("3"))
        await engine.load_adapter("b", make("4"))  # a name that is there can be replaced
        await engine.unload_adapter("a")
        await engine.load_adapter("c", make("3"))
        together = await asyncio.gather(
            *(engine.load_adapter(name, make("5")) for name in "bcd"), return_exceptions=True
        )
        assert [type(each) for each in together[2:]] == [errors.ConfigError]
        await settled(engine)


@virtual
async def test_a_load_waits_for_a_version_that_drains(make: Make) -> None:
    async with Toy(max_adapters=1) as engine:
        await engine.load_adapter("a", make("1"))
        first = engine.generate(PROMPT, PARAMS, adapter="a")
        await engine.load_adapter("a", make("2"))
        second = engine.generate(PROMPT, PARAMS, adapter="a")
        await asyncio.sleep(STEP)
        third = asyncio.ensure_future(engine.load_adapter("a", make("3")))
        await asyncio.sleep(4 * STEP)
        assert not third.done(), "both slots are in use"
        assert engine.adapters()[0].uid == 2
        fourth = asyncio.ensure_future(engine.load_adapter("a", make("4")))
        fourth.cancel()
        assert (await first).token_ids == wanted(make("1"))
        assert (await third).uid == 3
        assert (await second).token_ids == wanted(make("2"))
        await settled(engine)


async def test_a_load_that_is_cancelled_before_it_is_read_is_not_read(
    make_engine: MakeEngine, make: Make
) -> None:
    """With threads: on a virtual loop a read begins at once."""
    device, go_on, read = ToyDevice(num_pages=512, max_adapters=4), threading.Event(), list[str]()
    prepare = device.prepare_adapter

    def slowly(path: Path) -> Any:
        read.append(path.name)
        go_on.wait()
        return prepare(path)

    device.prepare_adapter = slowly  # type: ignore[method-assign]
    async with make_engine(device=device, max_adapters=3) as engine:
        first = asyncio.ensure_future(engine.load_adapter("a", make("1")))
        while not read:
            await asyncio.sleep(0)
        others = [asyncio.ensure_future(engine.load_adapter("b", make("2"))) for _ in range(3)]
        for _ in range(5):
            await asyncio.sleep(0)
        for other in others:
            other.cancel()
        await asyncio.wait(others)
        go_on.set()
        assert (await first).name == "a"
        await engine.load_adapter("c", make("3"))
    assert read == [make("1").name, make("3").name]


@virtual
async def test_of_several_loads_of_a_name_the_last_call_counts(make: Make) -> None:
    async with Toy() as engine:
        loads = [asyncio.ensure_future(engine.load_adapter("a", make(str(n)))) for n in range(5)]
        await asyncio.sleep(0)
        unload = asyncio.ensure_future(engine.unload_adapter("a"))
        last = asyncio.ensure_future(engine.load_adapter("a", make("9")))
        await asyncio.gather(*loads, unload, last)
        assert (await engine.generate(PROMPT, PARAMS, adapter="a")).token_ids == wanted(make("9"))
        assert [info.uid for info in engine.adapters()] == [6]
        await settled(engine)


# -- the life of the engine ----------------------------------------------------------------------------


@pytest.mark.parametrize("moment", [0, 1, 2, 3, 5])
@virtual
async def test_closing_ends_a_load_and_a_new_start_has_no_adapters(make: Make, moment: int) -> None:
    engine = Toy(max_adapters=1)
    for _ in range(2):
        await engine.start()
        assert engine.adapters() == []
        await engine.load_adapter("a", make("1"))
        streams = [engine.generate(PROMPT, PARAMS, adapter="a") for _ in range(2)]
        await engine.load_adapter("a", make("2"))
        streams.append(engine.generate(PROMPT, PARAMS, adapter="a"))
        load = asyncio.ensure_future(engine.load_adapter("a", make("3")))
        for _ in range(moment):
            await asyncio.sleep(STEP / 4)
        await engine.aclose()
        with pytest.raises(errors.EngineClosed):
            await load
        for stream in streams:
            with pytest.raises(errors.EngineClosed):
                await stream
        assert engine.adapters() == []
        with pytest.raises(errors.EngineClosed):
            await engine.load_adapter("a", make("1"))


@virtual
async def test_a_lost_device_ends_a_load(make: Make) -> None:
    async with Toy(max_adapters=1) as engine:
        await engine.load_adapter("a", make("1"))
        stream = engine.generate(PROMPT, PARAMS, adapter="a")
        await engine.load_adapter("a", make("2"))
        engine.generate(PROMPT, PARAMS, adapter="a")
        load = asyncio.ensure_future(engine.load_adapter("a", make("3")))
        await asyncio.sleep(STEP)
        engine.lose()
        with pytest.raises(errors.EngineFailed):
            await load
        with pytest.raises(errors.EngineFailed):
            await stream
        with pytest.raises(errors.EngineFailed):
            await engine.load_adapter("a", make("1"))


@virtual
async def test_a_config_has_adapters_from_the_start_on(make: Make, tmp_path: Path) -> None:
    async with Toy(adapters=f"a={make('1')}, b = {make('2')}") as engine:
        assert (await engine.generate(PROMPT, PARAMS, adapter="b")).token_ids == wanted(make("2"))
    for bad, message in (
        (f"a={tmp_path}/x", "adapters: 'a': x is no adapter"),
        (f"toy={make('1')}", "model"),
    ):
        engine = Toy(adapters=bad)
        with pytest.raises(errors.ConfigError, match=message):
            await engine.start()
        assert engine.closed


@pytest.mark.parametrize("bad", ["a", "=x", "a=", "a=x,a=y", "a=x,b", ",".join(f"{n}=x" for n in range(17))])
def test_adapters_of_a_config_are_names_and_paths(bad: str) -> None:
    with pytest.raises(errors.ConfigError, match=r"^adapters "):
        EngineConfig(adapters=bad)
    assert EngineConfig(adapters=" a = x=y , ").adapter_paths == {"a": "x=y"}


# -- checkpoints ---------------------------------------------------------------------------------------


@virtual
async def test_a_checkpoint_goes_on_with_the_same_adapter_only(make: Make, tmp_path: Path) -> None:
    async with Toy() as engine:
        await engine.load_adapter("a", make("1"))
        stream = engine.generate(PROMPT, PARAMS, adapter="a")
        await asyncio.sleep(5.5 * STEP)
        checkpoint = StreamCheckpoint.from_json(stream.checkpoint().to_json())
        assert (checkpoint.adapter, len(checkpoint.adapter_fingerprint)) == ("a", 16)
        assert (await engine.restore(checkpoint)).token_ids == wanted(make("1"))
        await stream
        await engine.load_adapter("a", make("2"))
        with pytest.raises(
            errors.InvalidRequest, match="checkpoint: adapter: 'a' was loaded here from other"
        ):
            engine.restore(checkpoint)
        await engine.unload_adapter("a")
        with pytest.raises(errors.InvalidRequest, match="of 'a', which is not loaded"):
            engine.restore(checkpoint)
        elsewhere = write_toy_adapter(tmp_path / "moved", "1")
        await engine.load_adapter("a", elsewhere)
        assert (await engine.restore(checkpoint)).token_ids == wanted(make("1"))


# -- without a loop ------------------------------------------------------------------------------------


def test_an_llm_has_adapters(make: Make) -> None:
    device = ToyDevice(num_pages=512, max_adapters=2)
    with make_llm(device=device, num_pages=512, max_adapters=1, adapters=f"a={make('1')}") as llm:
        key = llm.add_request(PROMPT, PARAMS, adapter="a")
        llm.step()
        assert llm.load_adapter("a", make("2")).uid == 2
        found = {}
        while llm.has_unfinished():
            found.update(llm.step())
        assert found[key].token_ids == wanted(make("1"))
        assert llm.generate(PROMPT, PARAMS, adapter="a", progress=False)[0].token_ids == wanted(make("2"))
        chunks = llm.stream(PROMPT, PARAMS, adapter="a")
        assert llm.adapters()[0].requests == 0, "nobody reads it"
        next(chunks)
        assert llm.adapters()[0].requests == 1
        llm.unload_adapter("a")
        with pytest.raises(errors.InvalidRequest, match="adapter"):
            llm.generate(PROMPT, PARAMS, adapter="a")
        chunks.close()
        llm.stats()
        llm.generate([1], PARAMS, progress=False)
        assert device.adapters.installed == {}


@virtual
async def test_a_fake_engine_takes_adapters() -> None:
    async with FakeEngine("hello") as engine:
        await engine.load_adapter("sql", "/anywhere")
        assert (await engine.generate("x", adapter="sql")).text == "hello"
        assert engine.requests[0].options.adapter == "sql"
