"""Sessions that are saved and loaded: the same tokens, whatever is wrong with the file or its engine."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from aioinfer import EngineConfig, SamplingParams, Session, errors
from aioinfer.engine import Engine
from aioinfer.tiers.archive import Archive, ArchiveWriter
from tests.engine.conftest import MakeEngine
from tests.engine.simulation import settle
from tests.engine.test_sessions import FIRST, SECOND, SHORT, held
from tests.tiers import PROGRAM, rest
from tests.toys import ToyDevice, toy_generate
from tests.toys.adapters import ToyAdapter, write_toy_adapter


def recorded(engine: Engine, **changes: Any) -> dict[str, Any]:
    """A header that this engine has written, but for some changes."""
    return {
        "kind": "session",
        "version": 1,
        "fingerprint": engine.info.fingerprint,
        "model": "toy",
        "numerics": engine.info.numerics,
        "token_ids": [1, 2, 3],
        "messages": [],
        "options": {},
        "adapter_fingerprint": "",
        **changes,
    }


def files(place: Path) -> list[Path]:
    return [*place.iterdir()]


async def saved(engine: Engine, path: Path, **options: Any) -> Session:
    """A session with one turn, and its file."""
    session = engine.session(**options)
    await session.generate(FIRST, SHORT)
    await session.save(path)
    return session


def changed(path: Path, header: dict[str, Any]) -> None:
    """Give the archive another header, and keep its pages."""
    archive = Archive(path)
    page, count = bytearray(64), 0
    writer = ArchiveWriter(path, {**archive.header, **header})
    for key in archive._index:
        if key[-1:] == b"p":
            count += archive.read([key[:-1]], [[memoryview(page)]])
            writer.put(key[:-1], [memoryview(page)])
    assert writer.finish() == count
    archive.close()


# -- there and back --------------------------------------------------------------------------------------


@pytest.mark.parametrize("snapshots", [None, 8])
async def test_a_loaded_session_goes_on_without_computing_its_past(
    make_engine: MakeEngine, tmp_path: Path, snapshots: int | None
) -> None:
    path = tmp_path / "one.session"

    def make() -> Engine:
        return make_engine(device=ToyDevice(snapshots=snapshots), state_snapshot_tokens=1)

    async with make() as engine:
        session = await saved(engine, path, cache_salt="mine")
        tokens = held(27) if snapshots is None else held(21)
        assert await session.save(path) == session.held_tokens == tokens
        before = session.token_ids
        await settle(engine)
    async with make() as engine:
        loaded = await engine.load_session(path)
        assert loaded.token_ids == before
        assert loaded.held_tokens >= tokens, "or where a state was taken now"
        assert loaded.id != session.id
        whole = (len(before) - 1) // 4 * 4
        assert engine.stats().prefill_tokens == whole + 1 - tokens, "a token, or what has no state"
        assert engine._serving().core.scheduler.memory.finder is None, "the file is looked into no more"
        results = await asyncio.gather(loaded.fork().generate(SECOND, SHORT), loaded.generate(SECOND, SHORT))
        for result in results:
            assert result.token_ids == toy_generate([*before, *SECOND], SHORT)
            assert result.usage.cached_tokens >= tokens
        other = await engine.generate([*before, *SECOND], SHORT)
        assert other.usage.cached_tokens == 0, "it has kept its salt"
        loaded.close()
        await settle(engine)


async def test_messages_and_options_are_saved(make_engine: MakeEngine, tmp_path: Path) -> None:
    path = tmp_path / "chat"
    async with make_engine(num_pages=256) as engine:
        session = engine.session(priority=3)
        await session.chat("hi", SHORT)
        await session.save(path)
        loaded = await engine.load_session(path, priority=4)
        assert loaded.messages == session.messages
        assert [each["role"] for each in loaded.messages] == ["user", "assistant"]
        assert loaded._options == {"priority": 4}
        one, other = await session.chat("more", SHORT), await loaded.chat("more", SHORT)
        assert one.result.token_ids == other.result.token_ids
        with pytest.raises(errors.InvalidRequest, match="is a chat"):
            loaded.generate([1])


async def test_an_empty_session_is_saved_too(make_engine: MakeEngine, tmp_path: Path) -> None:
    async with make_engine() as engine:
        assert await engine.session().save(tmp_path / "none") == 0
        loaded = await engine.load_session(tmp_path / "none")
        assert (loaded.num_tokens, loaded.held_tokens, loaded.messages) == (0, 0, [])


async def test_what_is_not_cached_any_more_is_computed_when_it_is_loaded(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    path = tmp_path / "flushed"
    async with make_engine() as engine:
        session = await saved(engine, path)
        engine.flush_cache()
        assert await session.save(path) == 0
        loaded = await engine.load_session(path)
        assert loaded.held_tokens == held(27)
        result = await loaded.generate(SECOND, SHORT)
        assert result.token_ids == toy_generate([*session.token_ids, *SECOND], SHORT)


async def test_a_turn_under_way_is_not_saved(make_engine: MakeEngine, tmp_path: Path) -> None:
    path = tmp_path / "amid"
    async with make_engine() as engine:
        session = await saved(engine, path)
        before = session.token_ids
        stream = session.generate(SECOND, SHORT)
        await session.save(path)
        await stream
        assert (await engine.load_session(path)).token_ids == before != session.token_ids


PROGRAM_TEXT = """
import asyncio, json, sys
from aioinfer import Engine, EngineConfig, SamplingParams
PARAMS = SamplingParams(temperature=0.9, seed=5, max_tokens=24, logprobs=2)
async def main():
    async with Engine(EngineConfig(deterministic=True, threads=1)) as engine:
        session = await engine.load_session(sys.argv[1])
        result = (await session.chat("Tell me more.", PARAMS)).result
        print(json.dumps([session.held_tokens, result.usage.cached_tokens, result.token_ids,
                          [each.logprob for each in result.logprobs]]))
asyncio.run(main())
"""


@pytest.mark.native
@rest(PROGRAM)
async def test_another_process_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """The bundled model: with a session, without one, and with one that was loaded elsewhere."""
    path = tmp_path / "story.session"
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=24, logprobs=2)
    async with Engine(EngineConfig(deterministic=True, threads=1)) as engine:
        session = engine.session()
        await session.chat("Once upon a time there was a small fox. Tell me about it. " * 4, params)
        assert await session.save(path) > 0
        own = (await session.chat("Tell me more.", params)).result
        messages = session.messages[:-1]
    async with Engine(EngineConfig(deterministic=True, threads=1, prefix_cache=False)) as engine:
        plain = (await engine.chat(messages, params)).result
    assert (own.token_ids, own.logprobs) == (plain.token_ids, plain.logprobs)
    command = [sys.executable, "-c", PROGRAM_TEXT, str(path)]
    printed = await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True, text=True)
    _, cached, ids, logprobs = json.loads(printed.stdout)
    assert cached > 0
    assert own.logprobs is not None
    assert (ids, logprobs) == (own.token_ids, [each.logprob for each in own.logprobs])


# -- other engines ---------------------------------------------------------------------------------------


async def test_a_session_of_an_adapter_needs_the_same_one(make_engine: MakeEngine, tmp_path: Path) -> None:
    path, one, other = tmp_path / "file", tmp_path / "one", tmp_path / "other"
    write_toy_adapter(one, "one")
    write_toy_adapter(other, "other")

    def make() -> Engine:
        config = EngineConfig(model="toy", max_adapters=2)
        return make_engine(device=ToyDevice(max_adapters=config.adapter_slots), max_adapters=2)

    async with make() as engine:
        await engine.load_adapter("a", one)
        session = await saved(engine, path, adapter="a")
        before = session.token_ids
    async with make() as engine:
        with pytest.raises(errors.InvalidRequest, match="its adapter 'a' is not loaded"):
            await engine.load_session(path)
        await engine.load_adapter("a", other)
        with pytest.raises(errors.InvalidRequest, match="its adapter 'a' is not loaded"):
            await engine.load_session(path)
        await engine.load_adapter("a", one)
        loaded = await engine.load_session(path)
        assert loaded.held_tokens == held(27)
        result = await loaded.generate(SECOND, SHORT)
        assert result.usage.cached_tokens == held(27)
        assert result.token_ids == toy_generate([*before, *SECOND], SHORT, adapter=ToyAdapter.read(one).key)
        assert engine.stats().sessions == 1


async def test_after_an_update_of_the_weights_the_tokens_alone_are_saved(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    async with make_engine() as engine:
        session = await saved(engine, path)
        await engine.update_weights({"weights": 1})
        await session.generate(SECOND, SHORT)
        assert await session.save(path) == 0
        before = session.token_ids
    async with make_engine() as engine:
        loaded = await engine.load_session(path)
        result = await loaded.generate([3], SHORT)
        assert result.token_ids == toy_generate([*before, 3], SHORT), "by the weights that are here"


@pytest.mark.parametrize(
    "settings", [{"prefix_cache": False}, {"page_size": 8}, {"max_held_share": 0.0}], ids=str
)
async def test_an_engine_that_cannot_use_the_pages_computes_them(
    make_engine: MakeEngine, tmp_path: Path, settings: dict[str, Any]
) -> None:
    path = tmp_path / "file"
    async with make_engine() as engine:
        before = (await saved(engine, path)).token_ids
    async with make_engine(**settings) as engine:
        loaded = await engine.load_session(path)
        result = await loaded.generate(SECOND, SHORT)
        assert result.token_ids == toy_generate([*before, *SECOND], SHORT)
        assert await loaded.save(path) >= 0
        await settle(engine)


async def test_pages_of_another_arithmetic_are_not_used(make_engine: MakeEngine, tmp_path: Path) -> None:
    path = tmp_path / "file"
    async with make_engine() as engine:
        before = (await saved(engine, path)).token_ids
        engine.flush_cache()
        changed(path, {"numerics": "of another processor"})
        loaded = await engine.load_session(path)
        assert (loaded.token_ids, loaded.held_tokens) == (before, 0)
        result = await loaded.generate(SECOND, SHORT)
        assert (result.usage.cached_tokens, result.token_ids) == (0, toy_generate([*before, *SECOND], SHORT))


# -- what is wrong with files ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ({"fingerprint": "x"}, "of the model 'toy' with other files"),
        ({"version": 2}, "no session that this release reads"),
        ({"kind": "pages"}, "no session that this release reads"),
        ({"token_ids": [1, "2"]}, "no session that this release reads"),
        ({"token_ids": [64]}, "64"),
        ({"token_ids": [-1]}, "-1 is not a token id"),
        ({"messages": [1]}, "no session that this release reads"),
        ({"more": 1}, "no session that this release reads"),
        ({"options": {"pooling": 1}}, "the unknown option 'pooling'"),
        ({"options": {"adapter": "x"}}, "its adapter 'x' is not loaded"),
    ],
    ids=str,
)
async def test_a_header_that_says_something_else_is_refused(
    make_engine: MakeEngine, tmp_path: Path, header: dict[str, Any], why: str
) -> None:
    path = tmp_path / "file"
    async with make_engine() as engine:
        ArchiveWriter(path, recorded(engine, **header)).finish()
        with pytest.raises(errors.InvalidRequest, match=why) as refused:
            await engine.load_session(path)
        assert refused.value.field == "path"
        assert engine.stats().sessions == 0


@pytest.mark.parametrize("options", [{"priority": "x"}, {"cache_salt": 3}, {"waiting_timeout": -1}], ids=str)
async def test_bad_options_in_a_file_are_refused(
    make_engine: MakeEngine, tmp_path: Path, options: dict[str, Any]
) -> None:
    path = tmp_path / "file"
    async with make_engine() as engine:
        ArchiveWriter(path, recorded(engine, options=options)).finish()
        with pytest.raises(errors.InvalidRequest):
            await engine.load_session(path)
        assert engine.stats().sessions == 0


async def test_damaged_files_are_refused_or_computed_again(make_engine: MakeEngine, tmp_path: Path) -> None:
    """One byte flipped at each of 60 places, and cut at each of 20."""
    path, broken = tmp_path / "file", tmp_path / "broken"
    async with make_engine() as engine:
        before = (await saved(engine, path)).token_ids
        data, refused = path.read_bytes(), 0
        wrong = [bytearray(data) for _ in range(60)]
        for at, copy in enumerate(wrong):
            copy[at * len(data) // 60] ^= 0x10
        for content in [*wrong, *(data[: at * len(data) // 20] for at in range(20))]:
            broken.write_bytes(content)
            engine.flush_cache()
            try:
                loaded = await engine.load_session(broken)
            except errors.InvalidRequest as error:
                assert error.field == "path"
                refused += 1
                continue
            assert loaded.token_ids == before
            result = await loaded.generate(SECOND, SHORT)
            assert result.token_ids == toy_generate([*before, *SECOND], SHORT)
            loaded.close()
        assert 20 < refused < 80
        assert engine.stats().failed_checks == 0


async def test_paths_that_are_none_are_refused(make_engine: MakeEngine, tmp_path: Path) -> None:
    async with make_engine() as engine:
        session = engine.session()
        for path in ("", "a\0b", None, 3, tmp_path / "not" / "there", tmp_path):
            for call in (engine.load_session, session.save):
                with pytest.raises(errors.InvalidRequest) as refused:
                    await call(path)  # type: ignore[arg-type, operator]
                assert refused.value.field == "path"
        assert files(tmp_path) == []
        assert engine.stats().sessions == 1


# -- cut short -------------------------------------------------------------------------------------------


async def test_a_cancelled_save_leaves_the_file_as_it_was(make_engine: MakeEngine, tmp_path: Path) -> None:
    path = tmp_path / "file"
    async with make_engine() as engine:
        session = await saved(engine, path)
        data = path.read_bytes()
        await session.generate(SECOND, SHORT)
        for turns in range(6):
            saving = asyncio.ensure_future(session.save(path))
            for _ in range(turns):
                await asyncio.sleep(0)
            saving.cancel()
            await asyncio.wait([saving])
            assert files(tmp_path) == [path]
            kept = Archive(path).header["token_ids"]
            assert kept == [*session.token_ids[: len(kept)]]
            path.write_bytes(data)
        assert await session.save(path) == held(36)
        session.close()
        await settle(engine)


@pytest.mark.parametrize("call", ["__init__", "_put", "finish"])
async def test_a_save_that_is_cancelled_while_a_thread_works_for_it_waits_for_that(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "file"
    async with make_engine() as engine:
        session = await saved(engine, path)
        data, may_go_on, begun = path.read_bytes(), threading.Event(), threading.Event()
        await session.generate(SECOND, SHORT)
        meant = getattr(ArchiveWriter, call)

        def late(*arguments: Any) -> Any:
            begun.set()
            assert may_go_on.wait(60), "nobody let it go on"
            return meant(*arguments)

        monkeypatch.setattr(ArchiveWriter, call, late)
        saving = asyncio.ensure_future(session.save(path))
        await asyncio.to_thread(begun.wait, 60)
        saving.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not saving.done()
        may_go_on.set()
        await asyncio.wait([saving])
        assert saving.cancelled()
        assert files(tmp_path) == [path]
        assert (path.read_bytes() == data) == (call != "finish")
        session.close()
        await settle(engine)


async def test_a_load_that_is_cancelled_leaves_nothing(make_engine: MakeEngine, tmp_path: Path) -> None:
    path = tmp_path / "file"
    async with make_engine() as engine:
        (await saved(engine, path)).close()
        for turns in range(12):
            engine.flush_cache()
            loading = asyncio.ensure_future(engine.load_session(path))
            for _ in range(turns):
                await asyncio.sleep(0)
            loading.cancel()
            await asyncio.wait([loading])
            if not loading.cancelled():
                loading.result().close()
            assert engine.stats().sessions == engine.stats().held_tokens == 0
        await settle(engine)


async def test_closing_amid_a_save_or_a_load_ends_it(make_engine: MakeEngine, tmp_path: Path) -> None:
    path = tmp_path / "file"
    for load in (False, True):
        engine = make_engine()
        await engine.start()
        session = await saved(engine, path)
        work = asyncio.ensure_future(engine.load_session(path) if load else session.save(path))
        await asyncio.sleep(0)
        await engine.aclose()
        (outcome,) = await asyncio.gather(work, return_exceptions=True)
        assert isinstance(outcome, (errors.EngineClosed, Session, int)), repr(outcome)
        with pytest.raises(errors.EngineClosed):
            await session.save(path)
        with pytest.raises(errors.EngineClosed):
            await engine.load_session(path)
        assert files(tmp_path) == [path]
